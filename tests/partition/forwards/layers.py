"""Layers of torch.nn and their functional forms, joined as users join them."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.partition.forwards.case import forward, images, labelled, pairs, sequences, vectors, words


@forward(vectors)
class FunctionalCalls(nn.Module):
    """Uses parameters of its own through torch.nn.functional alone."""

    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(16, 6) / 3)
        self.b1 = nn.Parameter(torch.zeros(16))
        self.gain = nn.Parameter(torch.ones(16))
        self.w2 = nn.Parameter(torch.randn(16, 16) / 4)
        self.w3 = nn.Parameter(torch.randn(16, 4) / 4)

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(F.linear(x, self.w1, self.b1), approximate="tanh")
        h = F.layer_norm(h, (16,), self.gain, None, 1e-5)
        h = F.silu(h @ self.w2.t()) + F.softplus(h, beta=2.0) - F.leaky_relu(h, 0.1)
        h = F.normalize(h, p=2.0, dim=-1) * F.hardtanh(h) + F.elu(h) * F.logsigmoid(h)
        return F.log_softmax(h.matmul(self.w3), dim=-1)


@forward(images)
class PixelShuffling(nn.Module):
    """Upsamples by rearranging channels, and downsamples again."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.PixelShuffle(2), nn.PReLU())
        self.mid = nn.Conv2d(4, 4, 3, padding=1)
        self.down = nn.Sequential(nn.PixelUnshuffle(2), nn.Conv2d(16, 3, 1))

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        h = h + torch.relu(self.mid(h))
        return x + self.down(h)


@forward(images)
class SpatialTransformer(nn.Module):
    """Samples its input on a grid that a small network computes."""

    def __init__(self) -> None:
        super().__init__()
        self.where = nn.Sequential(nn.Conv2d(3, 4, 3), nn.MaxPool2d(2), nn.ReLU(True), nn.Flatten(), nn.Linear(36, 6))
        self.what = nn.Conv2d(3, 4, 3)
        self.head = nn.Linear(4 * 36, 5)
        nn.init.zeros_(self.where[-1].weight)
        self.where[-1].bias.data.copy_(torch.tensor([1, 0, 0, 0, 1, 0], dtype=torch.float))

    def forward(self, x: Tensor) -> Tensor:
        theta = self.where(x).view(-1, 2, 3)
        grid = F.affine_grid(theta, list(x.size()), align_corners=False)
        x = F.grid_sample(x, grid, align_corners=False, padding_mode="border")
        return self.head(torch.relu(self.what(x)).flatten(1))


@forward(words)
class BagOfWords(nn.Module):
    """Averages words of each row in one call."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(20, 8, mode="mean", padding_idx=0)
        self.fc = nn.Linear(8, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.fc(self.bag(x))))


def bags(rows: int) -> tuple[Tensor, Tensor]:
    lengths = torch.randint(1, 4, (rows,))
    offsets = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)[:-1]])
    return torch.randint(1, 20, (int(lengths.sum()),)), offsets


@forward(bags, refused={4: r"bag \(.*\) looks across the whole batch in the middle of BagWithOffsets"})
class BagWithOffsets(nn.Module):
    """Takes all words in one row, and where each bag begins."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(20, 8, mode="sum")
        self.fc = nn.Linear(8, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
        return self.head(torch.tanh(self.fc(self.bag(x, offsets))))


@forward(images)
class TransposedConvolutions(nn.Module):
    """An autoencoder with transposed convolutions of a given output size, and interpolation."""

    def __init__(self) -> None:
        super().__init__()
        self.enc = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.enc2 = nn.Conv2d(8, 8, 3, stride=2, padding=1, padding_mode="circular")
        self.dec = nn.ConvTranspose2d(8, 8, 3, stride=2, padding=1)
        self.dec2 = nn.ConvTranspose2d(8, 3, 4, stride=2, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        a = F.relu(self.enc(x), inplace=True)
        b = F.relu_(self.enc2(a))
        c = self.dec(b, output_size=a.shape)
        c = c + F.interpolate(b, size=a.shape[-2:], mode="bilinear", align_corners=False)
        return torch.sigmoid(self.dec2(c)) + F.interpolate(F.avg_pool2d(x, 2), scale_factor=2, mode="nearest")


@forward(images)
class PoolingWithIndices(nn.Module):
    """Keeps where the maxima were, to put them back there; an adaptive pool and unfold beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.pool = nn.MaxPool2d(2, return_indices=True)
        self.unpool = nn.MaxUnpool2d(2)
        self.back = nn.Conv2d(4, 3, 3, padding=1)
        self.head = nn.Linear(3 * 9 + 3 * 4, 5)

    def forward(self, x: Tensor) -> Tensor:
        h, where = self.pool(self.conv(x))
        h = self.back(self.unpool(torch.tanh(h), where, output_size=x.size()[2:]))
        patches = F.unfold(h, 3, stride=3).mean(-1)
        return self.head(torch.cat([patches, F.adaptive_avg_pool2d(h, (2, 2)).flatten(1)], dim=1))


@forward(pairs)
class TwoTowers(nn.Module):
    """Compares two inputs by bilinear form, cosine, distance, and einsum."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(6, 8)
        self.right = nn.Linear(6, 8)
        self.form = nn.Bilinear(8, 8, 3)
        self.cosine = nn.CosineSimilarity(dim=1, eps=1e-6)
        self.kernel = nn.Parameter(torch.randn(8, 2, 8) / 8)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        a, b = self.left(a).tanh(), self.right(b).sigmoid()
        scores = torch.einsum("bi,ikj,bj->bk", a, self.kernel, b)
        more = [self.form(a, b), self.cosine(a, b).unsqueeze(1), nn.PairwiseDistance()(a, b)[:, None], scores]
        return torch.cat(more, dim=1)


@forward(sequences)
class CausalConvolutions(nn.Module):
    """A WaveNet in small: dilated causal convolutions with gates and skips over the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Conv1d(6, 8, 1)
        self.gates = nn.ModuleList(nn.Conv1d(8, 16, 2, dilation=2**i) for i in range(3))
        self.skips = nn.ModuleList([nn.Conv1d(8, 8, 1) for _ in range(3)])
        self.out = nn.Sequential(nn.ReLU(), nn.Conv1d(8, 4, 1))

    def forward(self, x: Tensor) -> Tensor:
        h = self.inp(x.transpose(1, 2))
        total = 0
        for gate, skip in zip(self.gates, self.skips, strict=True):
            padded = F.pad(h, (gate.dilation[0], 0))
            a, b = gate(padded).chunk(2, dim=1)
            z = torch.tanh(a) * torch.sigmoid(b)
            s = skip(z)
            total = total + s
            h = h + s
        return self.out(total)


@forward(images)
class MixerBlocks(nn.Module):
    """An MLP-Mixer in small, with pieces of networks kept in lambdas and partials."""

    def __init__(self) -> None:
        super().__init__()
        make = partial(nn.Linear, bias=False)
        self.patch = nn.Conv2d(3, 8, 4, stride=4)
        self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(4))
        self.tokens = nn.ModuleList(nn.Sequential(make(4, 8), nn.GELU(), make(8, 4)) for _ in range(2))
        self.channels = nn.ModuleList(nn.Sequential(make(8, 8), nn.Hardswish(), make(8, 8)) for _ in range(2))
        self.pool = lambda t: t.mean(dim=1)
        self.act = F.mish

    def forward(self, x: Tensor) -> Tensor:
        h = self.patch(x).flatten(2).transpose(1, 2)
        for i in range(2):
            h = h + self.tokens[i](self.norms[2 * i](h).transpose(1, 2)).transpose(1, 2)
            h = h + self.act(self.channels[i](self.norms[2 * i + 1](h)))
        return self.pool(h)


@forward(vectors)
class LayersMadeInForward(nn.Module):
    """Makes activations and losses where it needs them, and calls layers by their ``forward``."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
        self.last = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.net[:2](x)
        h = nn.Softplus()(h)
        for layer in reversed(list(self.net[2:4])):
            h = layer(h)
        h = nn.functional.relu(self.net[-1].forward(h))
        return nn.LogSoftmax(dim=-1)(self.last.forward(h))


@forward(images)
class DenseAndExcited(nn.Module):
    """Concatenates all features before each layer, weighs channels, and adds depthwise and grouped convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(3 + 4 * i, 4, 3, padding=1) for i in range(3))
        self.squeeze = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(15, 4, 1), nn.SiLU(), nn.Conv2d(4, 15, 1), nn.Sigmoid())
        self.depthwise = nn.Conv2d(15, 15, 3, padding="same", groups=15)
        self.head = nn.Linear(15, 4)

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for layer in self.layers:
            features.append(F.relu(layer(torch.cat(features, 1))))
        h = torch.cat(features, dim=1)
        h = h * self.squeeze(h)
        h = F.relu6(self.depthwise(h), inplace=True)
        return self.head(h.mean([2, 3]))


@forward(labelled)
class RadialAndFourier(nn.Module):
    """Expands its input in waves and distances to trained centres."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("waves", torch.randn(6, 8))
        self.centres = nn.Parameter(torch.randn(10, 16))
        self.width = nn.Parameter(torch.zeros(10))
        self.classes = nn.Embedding(4, 10)
        self.head = nn.Linear(10, 2)

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        angles = 2 * math.pi * x @ self.waves
        h = torch.cat([angles.sin(), angles.cos()], -1)
        distances = torch.cdist(h, self.centres)
        rbf = torch.exp(-(distances**2) / (2 * self.width.exp() ** 2))
        return self.head(rbf * self.classes(label))


@forward(sequences)
class PointCloud(nn.Module):
    """A PointNet in small: aligns points by a learnt matrix, and keeps the largest features."""

    def __init__(self) -> None:
        super().__init__()
        self.align = nn.Sequential(nn.Conv1d(6, 8, 1), nn.ReLU())
        self.matrix = nn.Linear(8, 36)
        self.points = nn.Conv1d(6, 16, 1)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        points = x.transpose(2, 1)
        t = torch.max(self.align(points), 2, keepdim=True)[0].view(-1, 8)
        identity = torch.eye(6).flatten().view(1, 36).repeat(x.size(0), 1)
        matrix = (self.matrix(t) + identity).view(-1, 6, 6)
        moved = torch.bmm(points.transpose(1, 2), matrix).transpose(1, 2)
        features, _ = self.points(moved).max(dim=-1)
        return self.head(features), matrix
