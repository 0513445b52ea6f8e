"""Every rule by itself: a layer is split, one call works on its parts, and the result is put together."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.partition.tensor.lowered import Lowered

TOLERANCE = 1e-9


class Probe(nn.Module):
    """Runs functions on the parts of a layer's result, each by itself."""

    def __init__(self, functions, layer, **layers):
        super().__init__()
        self.a = layer
        self.weight = nn.Parameter(torch.randn(8, 8) / 3)
        self.gain = nn.Parameter(torch.randn(8))
        self.whole = nn.Parameter(torch.randn(2, 3, 8))
        self.turned, self.turned2 = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8, 8))
        for name, child in layers.items():
            self.add_module(name, child)
        self.functions = functions

    def forward(self, x):
        h = self.shaped(self.a(x))
        return {name: function(self, h.clone()) for name, function in self.functions.items()}

    def shaped(self, h):
        return h


class Heads(Probe):
    """Has the parts as heads, ``(batch, heads, length, width)``."""

    def shaped(self, h):
        return h.view(2, 3, 4, 2).transpose(1, 2)


def _run(probe, x, num_ranks=2, split=True):
    lowered = Lowered(probe, num_ranks, x, steering={"a": "column"}, gather_min=1 << 30)
    assert (lowered.plan.gathered == frozenset()) == split, lowered.plan.layers[0].reason
    lowered.compare(x, tolerance=TOLERANCE)
    return lowered


FEATURES = {
    "relu": lambda m, h: F.relu(h),
    "relu in place": lambda m, h: F.relu(h, inplace=True),
    "sum with itself": lambda m, h: h + h * 2 - h / 3,
    "number first": lambda m, h: 1 - h + 2**h,
    "whole parameter": lambda m, h: h * m.gain + m.whole,
    "whole value of one feature": lambda m, h: h * m.whole[..., :1],
    "whole value first": lambda m, h: torch.where(m.whole > 0, m.gain, h),
    "in place": lambda m, h: h.clone().mul_(2).add_(m.gain).clamp_(min=-1),
    "masked": lambda m, h: h.masked_fill(m.whole > 0, 0.5),
    "clamped by tensors": lambda m, h: torch.clamp(h, min=-m.gain.abs(), max=m.gain.abs()),
    "lerp": lambda m, h: torch.lerp(h, m.whole, 0.3),
    "other dtype": lambda m, h: h.to(torch.float32).double(),
    "like another": lambda m, h: h.type_as(m.gain) + torch.zeros_like(h) + torch.ones_like(h),
    "new tensor": lambda m, h: h + h.new_ones(8),
    "detached": lambda m, h: h.detach() * h,
    "softmax": lambda m, h: h.softmax(1),
    "cumsum": lambda m, h: h.cumsum(dim=1) + torch.flip(h, [0]) + h.flip(0, 1) + h.roll(1, 1),
    "norm by another dimension": lambda m, h: F.normalize(h, dim=1),
    "sum of others": lambda m, h: h.sum(1) + h.mean(dim=1) + h.amax(1) + h.std(1),
    "sum kept": lambda m, h: h - h.mean(1, keepdim=True),
    "largest": lambda m, h: h.max(dim=1)[0],
    "sum over parts": lambda m, h: h.sum(-1) * 2,
    "mean over parts": lambda m, h: h.mean((1, 2)),
    "mean of all": lambda m, h: (h * m.gain).mean(),
    "transposed": lambda m, h: h.transpose(1, 2) * 2,
    "permuted": lambda m, h: h.permute(2, 0, 1) + h.movedim(2, 0) + h.movedim((0, 1), (1, 2)),
    "mT": lambda m, h: h.mT,
    "view with heads": lambda m, h: h.view(2, 3, 4, 2).softmax(-1),
    "view of all rows": lambda m, h: h.view(-1, 8) * m.gain,
    "flattened after": lambda m, h: h.transpose(1, 2).flatten(1) * 2,
    "flattened before": lambda m, h: h.flatten(1) * 2,
    "flattened and back": lambda m, h: h.reshape(-1).view(2, 3, 8),
    "unsqueezed": lambda m, h: h.unsqueeze(1).squeeze(1)[:, None][:, 0],
    "unflattened": lambda m, h: h.unflatten(-1, (2, 4)),
    "expanded": lambda m, h: h[:, None].expand(2, 5, 3, 8) * 2,
    "expanded like": lambda m, h: m.gain.expand_as(h) * h,
    "repeated": lambda m, h: h.repeat(1, 2, 1) + h.tile(1, 2, 1),
    "parts repeated": lambda m, h: h.repeat(1, 1, 2),
    "elements repeated": lambda m, h: h.repeat_interleave(2, dim=-1) + h.repeat_interleave(2, 2),
    "split in two": lambda m, h: [p * (i + 1) for i, p in enumerate(h.split(4, dim=-1))],
    "split unequally": lambda m, h: [p * (i + 1) for i, p in enumerate(torch.split(h, [2, 6], -1))],
    "chunks of rows": lambda m, h: [p * (i + 1) for i, p in enumerate(h.chunk(3, 1))],
    "gates": lambda m, h: torch.mul(*h.chunk(2, -1)),
    "sliced": lambda m, h: h[..., 4:] * h[..., :4],
    "narrowed": lambda m, h: h.narrow(-1, 2, 4),
    "rows": lambda m, h: h[:, 0] + h[:, 1:].sum(1) + h.select(1, 2),
    "rows by index": lambda m, h: h[:, torch.tensor([0, 2, 2])] + h.index_select(1, torch.tensor([1, 1, 0])),
    "rows by mask": lambda m, h: h[torch.tensor([[True, False, True], [False, False, True]])],
    "rows by number and index": lambda m, h: h[0, torch.tensor([0, 2])] + h[:, None, torch.tensor([1, 2])][:, 0].sum(0),
    "gathered rows": lambda m, h: h.gather(1, torch.tensor([0, 2, 1, 0, 1, 2, 0, 0]).expand(2, 3, 8)),
    "unbound": lambda m, h: torch.stack(h.unbind(1), 0),
    "groups unbound": lambda m, h: torch.mul(*h.view(2, 3, 2, 4).unbind(2)),
    "joined with whole": lambda m, h: torch.cat([h, m.whole], 1),
    "joined along parts": lambda m, h: torch.cat([h, m.whole, h * 2], -1),
    "joined with nothing": lambda m, h: torch.cat([torch.tensor([]), h], 1),
    "stacked": lambda m, h: torch.stack([h, m.whole], -1),
    "product with a weight": lambda m, h: h @ m.weight,
    "weight times": lambda m, h: m.weight @ h.mT,
    "outer product": lambda m, h: h.mT @ m.whole,
    "inner product": lambda m, h: h @ m.whole.mT,
    "einsum over parts": lambda m, h: torch.einsum("btf,fg->btg", h, m.weight),
    "einsum along parts": lambda m, h: torch.einsum("btf,bsf->btsf", h, m.whole),
    "gram": lambda m, h: h @ h.mT,
    "linear": lambda m, h: m.b(h),
    "linear by a transpose": lambda m, h: F.linear(h, m.turned.t()) + h @ m.turned.T + h @ m.turned2.permute(1, 0),
    "linear without bias": lambda m, h: F.linear(h, m.b.weight),
    "linear by a computed weight": lambda m, h: F.linear(h, m.weight * 2, m.gain),
    "conv1d over": lambda m, h: m.c(h.transpose(1, 2)),
    "channel norm": lambda m, h: m.bn(h.transpose(1, 2)),
    "padded": lambda m, h: F.pad(h, (0, 0, 1, 2)),
    "prelu": lambda m, h: m.prelu(h.transpose(1, 2)),
    "prelu of one": lambda m, h: m.prelu1(h),
    "dtype of whole": lambda m, h: m.whole.to(h.dtype) + h,
    "no gradient": lambda m, h: h * _without_gradient(h.mean(1, keepdim=True) * m.gain) + m.gain,
    "gradient later": lambda m, h: _without_gradient(h * m.gain) + h * m.gain,
}  # fmt: skip


def _in_groups(functions, size=8, alone=("split unequally",)):
    names = [name for name in functions if name not in alone]
    groups = [names[i : i + size] for i in range(0, len(names), size)] + [[name] for name in alone if name in functions]
    return [pytest.param({name: functions[name] for name in group}, id=", ".join(group)) for group in groups]


def _without_gradient(value):
    with torch.no_grad():
        return value * 1.0


@pytest.mark.parametrize("functions", _in_groups(FEATURES))
def test_features_in_parts(functions, double):
    layers = {
        "b": nn.Linear(8, 5), "c": nn.Conv1d(8, 4, 3), "bn": nn.BatchNorm1d(8), "prelu": nn.PReLU(8), "prelu1": nn.PReLU(),
    }  # fmt: skip
    _run(Probe(functions, nn.Linear(6, 8), **layers), torch.randn(2, 3, 6))


HEADS = {
    "attention": lambda m, h: F.scaled_dot_product_attention(h, h * 2, h + 1),
    "attention to whole": lambda m, h: F.scaled_dot_product_attention(h, m.kv, m.kv * 2),
    "attention with a mask": lambda m, h: F.scaled_dot_product_attention(h, h, h, attn_mask=m.kv[:, :1, :, :1] > 0),
    "attention with a bias by head": lambda m, h: F.scaled_dot_product_attention(h, h, h, attn_mask=m.bias),
    "attention of whole groups": lambda m, h: F.scaled_dot_product_attention(h, m.kv[:, :2], m.kv[:, 2:], enable_gqa=True),
    "attention of one group": lambda m, h: F.scaled_dot_product_attention(
        h, m.kv[:, :1], m.kv[:, 3:], attn_mask=m.bias, enable_gqa=True
    ),
    "scores": lambda m, h: (h @ h.mul(2).transpose(-1, -2) / 3).softmax(-1) @ m.kv,
    "added to a product": lambda m, h: torch.baddbmm(m.kv[0] @ m.kv[0].mT, h[0], h[1].mT),
    "einsum": lambda m, h: torch.einsum("bhqd,bhkd->bhqk", h, m.kv) * 2,
    "einsum over heads": lambda m, h: torch.einsum("bhqd,ohd->bqo", h, m.proj),
    "norm of a head": lambda m, h: m.norm(h),
    "rms of a head": lambda m, h: m.rms(h),
    "linear in a head": lambda m, h: m.lin(h),
    "rotary": lambda m, h: torch.cat([-h[..., 1:], h[..., :1]], -1) * torch.randn(3, 2) .shape[0],
    "mean of heads": lambda m, h: h.mean(1),
    "merged": lambda m, h: h.transpose(1, 2).reshape(2, 3, 8),
    "merged with the batch": lambda m, h: h.reshape(8, 3, 2) * 2,
    "groups": lambda m, h: h[:, :, None].expand(2, 4, 2, 3, 2).reshape(2, 8, 3, 2),
    "triangle": lambda m, h: (h @ h.mul(1.5).mT).tril(),
    "pool of a length": lambda m, h: F.avg_pool2d(h, (2, 1)) + F.interpolate(h, size=(2, 2)),
}  # fmt: skip


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("functions", _in_groups(HEADS))
def test_heads_in_parts(functions, num_ranks, double):
    probe = Heads(functions, nn.Linear(6, 8), norm=nn.LayerNorm(2), rms=nn.RMSNorm(2), lin=nn.Linear(2, 3))
    probe.kv = nn.Parameter(torch.randn(2, 4, 3, 2))
    probe.bias = nn.Parameter(torch.randn(4, 3, 3))
    probe.proj = nn.Parameter(torch.randn(5, 4, 2))
    _run(probe, torch.randn(2, 3, 6), num_ranks)


CHANNELS = {
    "batch norm": lambda m, h: m.bn(h),
    "batch norm of no moving average": lambda m, h: m.bn_total(h),
    "batch norm as a function": lambda m, h: F.batch_norm(h, m.mean, m.var, m.gain, m.gain * 2, training=True),
    "group norm": lambda m, h: m.gn(h),
    "instance norm": lambda m, h: m.inorm(h),
    "instance norm as a function": lambda m, h: F.instance_norm(h, weight=m.gain, bias=m.gain),
    "pools": lambda m, h: m.pool(h) + F.avg_pool2d(h, 2) + F.adaptive_avg_pool2d(h, 3),
    "upsampled": lambda m, h: m.up(h) + F.interpolate(h, scale_factor=2, mode="bilinear"),
    "conv": lambda m, h: m.conv(h),
    "conv as a function": lambda m, h: F.conv2d(h, m.conv.weight, m.conv.bias, padding=1, stride=2),
    "flattened": lambda m, h: m.fc(h.flatten(1)),
    "flattened by a layer": lambda m, h: m.flat(h),
    "mean of an image": lambda m, h: h.mean((2, 3)),
    "tokens": lambda m, h: h.flatten(2).transpose(1, 2),
    "padded": lambda m, h: F.pad(h, (1, 1, 1, 1), mode="reflect"),
    "softmax layer": lambda m, h: m.soft(h),
}  # fmt: skip


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("functions", _in_groups(CHANNELS))
def test_channels_in_parts(functions, num_ranks, double):
    layers = {
        "bn": nn.BatchNorm2d(8), "bn_total": nn.BatchNorm2d(8, momentum=None), "gn": nn.GroupNorm(4, 8),
        "inorm": nn.InstanceNorm2d(8, affine=True, track_running_stats=True), "up": nn.Upsample(scale_factor=2),
        "pool": nn.MaxPool2d(2),
        "conv": nn.Conv2d(8, 5, 3), "fc": nn.Linear(8 * 36, 3), "flat": nn.Flatten(), "soft": nn.Softmax(-1),
    }  # fmt: skip
    probe = Probe(functions, nn.Conv2d(3, 8, 3), **layers)
    probe.register_buffer("mean", torch.randn(8))
    probe.register_buffer("var", torch.rand(8))
    _run(probe, torch.randn(2, 3, 8, 8), num_ranks)


WHOLE = {
    "softmax over parts": lambda m, h: h.softmax(-1),
    "norm by hand": lambda m, h: h * h.square().mean(-1, keepdim=True).rsqrt(),
    "norm over parts": lambda m, h: m.norm(h),
    "sorted": lambda m, h: h.sort(-1)[0],
    "flipped": lambda m, h: h.flip(-1),
    "flipped with others": lambda m, h: h.flip(0, 2),
    "channels dropped": lambda m, h: F.dropout1d(h, 0.0) + F.dropout1d(h.transpose(1, 2), 0.0).transpose(1, 2),
    "cumulated": lambda m, h: h.cumsum(-1),
    "one feature": lambda m, h: h[..., 3],
    "odd features": lambda m, h: h[..., 1::2],
    "three features": lambda m, h: h[..., :3],
    "no rule": lambda m, h: torch.cdist(h, m.whole),
    "triangle": lambda m, h: h.tril(),
    "set": lambda m, h: _set(h),
    "whole in place": lambda m, h: m.whole.clone().add_(h),
    "odd heads": lambda m, h: h.view(2, 3, 1, 8).view(2, 3, 8).unfold(-1, 2, 2),
    "depthwise": lambda m, h: m.depthwise(h.transpose(1, 2)),
    "groups": lambda m, h: m.gn(h.transpose(1, 2)),
    "shapes of parts": lambda m, h: h.view(torch.complex128),
    "rows of another": lambda m, h: m.whole[:, :, h.shape[-1] - 8 :] * h.detach().argmax(-1, keepdim=True),
    "lstm": lambda m, h: m.lstm(h)[0],
}  # fmt: skip


def _set(h):
    h = h.clone()
    h[:, 0] = 0
    return h


@pytest.mark.parametrize("name", WHOLE)
def test_what_needs_all_features_gets_them(name, double):
    layers = {
        "norm": nn.LayerNorm(8),
        "depthwise": nn.Conv1d(8, 8, 3, groups=8),
        "gn": nn.GroupNorm(1, 8),
        "lstm": nn.LSTM(8, 4),
    }
    _run(Probe({name: WHOLE[name]}, nn.Linear(6, 8), **layers), torch.randn(2, 3, 6), split=False)
