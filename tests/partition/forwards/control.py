"""Forwards that decide in Python, or do what only Python can do."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.partition.forwards.case import forward, images, pairs, ragged_sequences, sequences, vectors


class Three(nn.Module):
    """Owns three layers that the forwards of this file join."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(6, 8)
        self.fc2 = nn.Linear(8, 8)
        self.fc3 = nn.Linear(8, 4)


@forward(sequences)
class BranchesOnShapes(Three):
    """Branches on sizes, dtypes, ranks, and kinds."""

    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(x, Tensor)
        assert x.shape[1:] == (7, 6), f"got {x.shape}"
        if x.size(1) > 5 and x.dim() == 3 and not x.is_cuda and x.dtype == torch.float32:
            h = self.fc1(x[:, -5:])
        else:
            h = self.fc1(x)
        scale = 1.0 / math.sqrt(max(h.size(-1), 4)) if torch.is_tensor(h) and h.numel() else 0.0
        steps = list(range(0, h.shape[1], 2))
        h = torch.stack([h[:, t] for t in steps], dim=1) * scale
        return self.fc3(self.fc2(h)) if len(h) else h


@forward(ragged_sequences)
class BranchesOnNumbers(Three):
    """Branches on what a batch holds: any padding, the longest row, a first element, equal rows."""

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        h = self.fc1(x[:, : lengths.max()])
        if (lengths < x.size(1)).any():
            h = h * (torch.arange(h.size(1)) < lengths[:, None]).unsqueeze(-1)
        if lengths[0] == lengths.max().item() and x[0, 0, 0] > -100.0:
            h = torch.relu(self.fc2(h))
        if torch.equal(lengths, lengths.flip(0)) or not torch.isfinite(x).all():
            h = h * 0.5
        longest = max(lengths.tolist())
        return self.fc3(h.sum(1) / longest) + float(lengths.min())


@forward(vectors)
class PrintsAndTries(Three):
    """Formats hidden values, tries what may fail, and looks at what it has."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc1(x)
        text = f"{h.mean():.3f} {h.shape} {h!r}"
        try:
            h = h.view(-1, 3, 3)
        except RuntimeError:
            h = h * len(text[:1])
        if hasattr(self, "missing") or getattr(self, "other", None) is not None:
            h = h * 2
        names = [name for name, child in self.named_children() if isinstance(child, nn.Linear)]
        for name in names[1:]:
            h = getattr(self, name)(F.relu(h))
        return h


@forward(vectors)
class OperatorsOfPython(Three):
    """Computes by operators alone, from both sides, in place, and by properties."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = 2 * self.fc1(x) - 1
        h = (1 - h) / (1 + abs(h)) + h**2 - (-h) + 2**h % 3 + h / 2
        h += 1.0
        h *= 0.5
        h = h @ self.fc2.weight.T + self.fc2.bias
        flag = (h > 0) & ~(h >= 1) | (h != h) ^ (x[:, :1] <= 0)  # noqa: PLR0124 - a test for NaN
        y = self.fc3(torch.where(flag, h, h.sigmoid()))
        return y.mT.T if y.ndim == 2 else y, flag.sum(-1) + y.shape.numel() * 0


class Knob:
    """Is a setting kept outside the module."""

    def __init__(self) -> None:
        self.gain = 2.0
        self.layers = [1, 2]


@forward(vectors)
class Settings(Three):
    """Reads settings from objects, dicts and properties of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.knob = Knob()
        self.config = {"activation": "tanh", "depth": 2, "sizes": (8, 8)}

    @property
    def depth(self) -> int:
        return self.config["depth"]

    @property
    def first_weight(self) -> Tensor:
        return self.fc1.weight

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def forward(self, x: Tensor) -> Tensor:
        h = x.to(self.device) @ self.first_weight.t()
        for _ in range(self.depth):
            h = getattr(torch, self.config["activation"])(self.fc2(h)) * self.knob.gain
        return self.fc3(h) * len(self.knob.layers)


@forward(vectors)
class EulerSteps(Three):
    """Integrates a field of its own by Runge and Kutta, with an inner function."""

    def forward(self, x: Tensor) -> Tensor:
        def field(t: float, z: Tensor) -> Tensor:
            return self.fc2(torch.tanh(z)) * math.cos(t)

        z, dt = self.fc1(x), 0.25
        for i in range(3):
            t = i * dt
            k1 = field(t, z)
            k2 = field(t + dt / 2, z + dt / 2 * k1)
            z = z + dt * k2
        return self.fc3(z)


@forward(images)
class CascadeOfScales(nn.Module):
    """Works on a pyramid of scales, whose sizes it takes from tensors, top down with skips."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([nn.Conv2d(3, 4, 3, stride=2, padding=1), nn.Conv2d(4, 4, 3, stride=2, padding=1)])
        self.lateral = nn.ModuleList([nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)])
        self.heads = nn.ModuleDict({"small": nn.Conv2d(4, 2, 1), "large": nn.Conv2d(4, 2, 1)})

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        features = []
        for conv in self.down:
            x = F.relu(conv(x))
            features.append(x)
        top = self.lateral[1](features[-1])
        large = self.lateral[0](features[0]) + F.interpolate(top, size=features[0].shape[2:], mode="nearest")
        return {name: head(f).flatten(2) for (name, head), f in zip(self.heads.items(), (top, large), strict=True)}


def lists(rows: int) -> tuple[Any, ...]:
    return [torch.randn(rows, 6) for _ in range(3)], torch.tensor([0.2, 0.3, 0.5]), ["a", "b", "c"]


@forward(lists)
class ListOfInputs(Three):
    """Takes a list of tensors with a weight for each, and names."""

    def forward(self, xs: list[Tensor], weights: Tensor, names: list[str]) -> dict[str, Tensor]:
        hidden = torch.stack([torch.relu(self.fc1(x)) * w for x, w in zip(xs, weights, strict=True)])
        return dict(zip(names, self.fc3(self.fc2(hidden)).unbind(0), strict=True))


@forward(vectors)
class SqueezedRows(Three):
    """Squeezes dimensions that are one, of which the batch is none, and puts them back."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc1(x.unsqueeze(1)).squeeze(1)
        h = self.fc2(h[None]).squeeze(0)
        return self.fc3(h.view(x.size(0), 1, -1)).squeeze(dim=-2)


@forward(pairs)
class DoubledBatch(Three):
    """Runs both inputs as one batch of twice the rows, and parts the results."""

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        z = self.fc3(torch.relu(self.fc2(torch.relu(self.fc1(torch.cat([a, b]))))))
        za, zb = z.chunk(2)
        guided = za + 2.0 * (zb - za)
        return guided, z.view(2, -1, 4)[1]
