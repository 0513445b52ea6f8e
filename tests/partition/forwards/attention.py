"""Attention by hand and by torch.nn, with masks of every kind."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.partition.forwards.case import forward, images, padded_words, ragged_sequences, sequences, words


@forward(words)
class CausalByHand(nn.Module):
    """Splits heads by view, masks the future by a buffer that it slices, and adds positions likewise."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 8)
        self.positions = nn.Parameter(torch.randn(1, 16, 8) / 8)
        self.qkv = nn.Linear(8, 24)
        self.out = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.words.weight
        self.register_buffer("future", torch.tril(torch.ones(16, 16)).view(1, 1, 16, 16), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        B, T = x.size()  # noqa: N806 - as the field writes it
        h = self.words(x) + self.positions[:, :T]
        q, k, v = self.qkv(self.norm(h)).split(8, dim=2)
        q, k, v = (t.view(B, T, 2, 4).transpose(1, 2) for t in (q, k, v))
        scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        scores = scores.masked_fill(self.future[:, :, :T, :T] == 0, float("-inf"))
        y = F.softmax(scores, dim=-1) @ v
        h = h + self.out(y.transpose(1, 2).contiguous().view(B, T, 8))
        return self.head(h)


@forward(padded_words)
class PaddingByHand(nn.Module):
    """Masks padding with the least number of the dtype, and averages what is no padding."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 8, padding_idx=0)
        self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        h = self.words(x)
        extended = (1.0 - mask[:, None, :].to(h.dtype)) * torch.finfo(h.dtype).min
        attention = torch.softmax(self.q(h) @ self.k(h).mT / 8**0.5 + extended, -1)
        h = torch.baddbmm(h, attention, self.v(h), beta=0.5)
        weights = mask.unsqueeze(-1).float()
        return self.head((h * weights).sum(1) / weights.sum(1).clamp(min=1e-9))


@forward(padded_words)
class PaddedEncoder(nn.Module):
    """torch.nn's encoder with a key padding mask."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=True, activation="gelu")
        self.encoder = nn.TransformerEncoder(layer, 3, norm=nn.LayerNorm(8), enable_nested_tensor=False)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        h = self.encoder(self.words(x), src_key_padding_mask=~mask)
        return self.head(h[:, 0])


@forward(padded_words)
class PostNormEncoder(nn.Module):
    """torch.nn's encoder with its defaults: nested tensors in evaluation, normalised behind."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 8)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), 2)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        h = self.encoder(self.words(x), src_key_padding_mask=mask.logical_not())
        return self.head(h.masked_fill(~mask[..., None], 0.0).sum(1))


def sources_and_targets(rows: int) -> tuple[Tensor, Tensor]:
    return torch.randint(1, 20, (rows, 7)), torch.randint(1, 20, (rows, 5))


@forward(sources_and_targets)
class WholeTransformer(nn.Module):
    """torch.nn.Transformer with a target mask, positions, and time before the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.source = nn.Embedding(20, 8)
        self.target = nn.Embedding(20, 8)
        self.transformer = nn.Transformer(8, 2, 2, 2, 16, dropout=0.0)
        self.head = nn.Linear(8, 20)
        position = torch.arange(16).unsqueeze(1)
        rate = torch.exp(torch.arange(0, 8, 2) * (-math.log(10000.0) / 8))
        pe = torch.zeros(16, 1, 8)
        pe[:, 0, 0::2] = torch.sin(position * rate)
        pe[:, 0, 1::2] = torch.cos(position * rate)
        self.register_buffer("pe", pe)

    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        s = self.source(src).transpose(0, 1) * math.sqrt(8)
        t = self.target(tgt).transpose(0, 1) * math.sqrt(8)
        mask = nn.Transformer.generate_square_subsequent_mask(t.size(0))
        h = self.transformer(s + self.pe[: s.size(0)], t + self.pe[: t.size(0)], tgt_mask=mask, src_key_padding_mask=src == 0)
        return self.head(h).transpose(0, 1)


@forward(ragged_sequences)
class CrossAttention(nn.Module):
    """Latents that are parameters look at the input through nn.MultiheadAttention, and return where they looked."""

    def __init__(self) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.randn(3, 8) / 3)
        self.project = nn.Linear(6, 8)
        self.look = nn.MultiheadAttention(8, 2, batch_first=True)
        self.think = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor | None]:
        padding = torch.arange(x.size(1), device=x.device)[None, :] >= lengths[:, None]
        memory = self.project(x)
        z = self.latents.expand(x.size(0), -1, -1)
        z2, where = self.look(z, memory, memory, key_padding_mask=padding)
        z = z + z2
        z = z + self.think(z, z, z, need_weights=False)[0]
        return self.head(z.mean(1)), where


@forward(ragged_sequences)
class FusedAttention(nn.Module):
    """scaled_dot_product_attention: causal, with a bool mask, and with grouped heads."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(6, 32)
        self.kv = nn.Linear(16, 16)
        self.head = nn.Linear(16, 2)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        B, T, _ = x.shape  # noqa: N806 - as the field writes it
        h = self.qkv(x)
        q = h[..., :16].reshape(B, T, 4, 4).permute(0, 2, 1, 3)
        k, v = h[..., 16:].unflatten(-1, (2, 2, 4)).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        k2, v2 = self.kv(y.transpose(1, 2).flatten(2)).view(B, T, 2, 2, 4).transpose(1, 3).chunk(2, dim=2)
        k2, v2 = (t.squeeze(2).repeat_interleave(2, dim=1) for t in (k2, v2))
        mask = (torch.arange(T) < lengths.unsqueeze(-1)).view(B, 1, 1, T)
        y = F.scaled_dot_product_attention(q, k2, v2, attn_mask=mask)
        return self.head(y.transpose(1, 2).reshape(B, T, -1))


@forward(words)
class RotaryPositions(nn.Module):
    """Turns queries and keys by angles: once in complex numbers, once by halves, with normalisation by root mean square."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 8)
        self.norm = nn.RMSNorm(8)
        self.q = nn.Linear(8, 8, bias=False)
        self.k = nn.Linear(8, 8, bias=False)
        self.head = nn.Linear(8, 8)
        self.register_buffer("freqs", torch.polar(torch.ones(16, 2), torch.outer(torch.arange(16.0), torch.tensor([1.0, 0.1]))))

    @staticmethod
    def rotate_half(x: Tensor) -> Tensor:
        a, b = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
        return torch.cat((-b, a), dim=-1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.words(x))
        q, k = (p(h).view(*h.shape[:2], 2, 4).transpose(1, 2) for p in (self.q, self.k))
        turned = torch.view_as_complex(q.float().reshape(*q.shape[:-1], -1, 2)) * self.freqs[: x.shape[1]]
        q = torch.view_as_real(turned).flatten(3).type_as(q)
        positions = torch.arange(x.shape[1], device=x.device).unsqueeze(0)
        angles = positions[..., None].float() * torch.tensor([1.0, 0.1, 1.0, 0.1])
        cos, sin = angles.cos().unsqueeze(1), angles.sin().unsqueeze(1)
        k = k * cos + self.rotate_half(k) * sin
        a = torch.softmax(q @ k.transpose(2, 3) / 2, dim=-1, dtype=torch.float32).to(q.dtype)
        return self.head((a @ q).transpose(1, 2).flatten(2) + h)


@forward(images)
class ShiftedWindows(nn.Module):
    """A Swin block in small: windows by view and permute, a shift by roll, a table of relative positions."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, 8, 2, stride=2)
        self.qkv = nn.Linear(8, 24)
        self.proj = nn.Linear(8, 8)
        self.table = nn.Parameter(torch.randn(9, 2) / 3)
        coords = torch.stack(torch.meshgrid(torch.arange(2), torch.arange(2), indexing="ij")).flatten(1)
        relative = (coords[:, :, None] - coords[:, None, :]).permute(1, 2, 0) + 1
        self.register_buffer("index", relative[..., 0] * 3 + relative[..., 1])
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x).permute(0, 2, 3, 1)
        B, H, W, C = h.shape  # noqa: N806 - as the field writes it
        h = torch.roll(h, shifts=(-1, -1), dims=(1, 2))
        windows = h.view(B, H // 2, 2, W // 2, 2, C).permute(0, 1, 3, 2, 4, 5).contiguous().view(-1, 4, C)
        q, k, v = self.qkv(windows).reshape(-1, 4, 3, 2, 4).permute(2, 0, 3, 1, 4)
        bias = self.table[self.index.view(-1)].view(4, 4, -1).permute(2, 0, 1)
        a = (q @ k.transpose(-2, -1) + bias.unsqueeze(0)).softmax(-1)
        windows = self.proj((a @ v).transpose(1, 2).reshape(-1, 4, C))
        h = windows.view(B, H // 2, W // 2, 2, 2, -1).permute(0, 1, 3, 2, 4, 5).contiguous().view(B, H, W, -1)
        h = torch.roll(h, shifts=(1, 1), dims=(1, 2))
        return self.head(h.mean((1, 2)))


@forward(images)
class VisionTransformer(nn.Module):
    """Patches by unfold, a class token by expand and by cat, positions by a slice."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Linear(48, 8)
        self.cls = nn.Parameter(torch.zeros(1, 1, 8))
        self.register_token = nn.Parameter(torch.randn(8))
        self.pos = nn.Embedding(6, 8)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"norm": nn.LayerNorm(8), "attn": nn.MultiheadAttention(8, 2, batch_first=True)}) for _ in range(2)
        )
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        patches = x.unfold(2, 4, 4).unfold(3, 4, 4).permute(0, 2, 3, 1, 4, 5).reshape(len(x), 4, -1)
        h = self.patch(patches)
        h = torch.cat((self.cls.expand(h.shape[0], -1, -1), self.register_token.repeat(h.shape[0], 1, 1), h), dim=1)
        h = h + self.pos(torch.arange(h.size(1)))
        for block in self.blocks:
            n = block["norm"](h)
            h = h + block["attn"](n, n, n, average_attn_weights=False)[0]
        return self.head(h[:, 0])


@forward(sequences)
class DecoderWithMemory(nn.Module):
    """torch.nn's decoder layers in a loop, each looking at what an encoder layer made, with queries by batch size."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(6, 8)
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, 0.0)
        self.queries = nn.Embedding(3, 8)
        self.layers = nn.ModuleList(nn.TransformerDecoderLayer(8, 2, 16, 0.0) for _ in range(2))
        self.boxes = nn.ModuleList(nn.Linear(8, 4) for _ in range(2))

    def forward(self, x: Tensor) -> list[dict[str, Tensor]]:
        memory = self.encoder(self.project(x).permute(1, 0, 2))
        h = self.queries.weight.unsqueeze(1).repeat(1, x.size(0), 1)
        outputs = []
        for layer, box in zip(self.layers, self.boxes, strict=True):
            h = layer(h, memory, tgt_is_causal=False)
            outputs.append({"boxes": box(h).sigmoid().transpose(0, 1)})
        return outputs
