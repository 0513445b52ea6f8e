"""Forwards that take and return containers of every kind, or hand on what they got."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tests.partition.forwards.case import forward, pairs, sequences, vectors


class Three(nn.Module):
    """Owns three layers that the forwards of this file join."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(6, 8)
        self.fc2 = nn.Linear(8, 8)
        self.fc3 = nn.Linear(8, 4)

    def scores(self, x: Tensor) -> Tensor:
        return self.fc3(torch.relu(self.fc2(torch.relu(self.fc1(x)))))


class Sample(NamedTuple):
    x: Tensor
    weight: Tensor | None
    name: str


@dataclass
class Result:
    scores: Tensor
    hidden: tuple[Tensor, ...]
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)
    loss: Tensor | None = None


def samples(rows: int) -> tuple[Sample, dict[str, list[Tensor]]]:
    return Sample(torch.randn(rows, 6), None, "a"), {"more": [torch.randn(rows, 6), torch.randn(rows, 1)]}  # type: ignore[return-value]


@forward(samples)
class NestedContainers(Three):
    """Takes a named tuple and a dict with a list, and returns a dataclass."""

    def forward(self, sample: Sample, more: list[Tensor]) -> Result:
        h = torch.relu(self.fc1(sample.x + more[0] * more[1]))
        g = torch.relu(self.fc2(h))
        return Result(self.fc3(g), (h, g), {"count": 3, "name": sample.name, "first": [g[:, 0], None]})


@forward(vectors)
class MixedDict(Three):
    """Returns numbers, strings, None, nested and empty containers beside tensors."""

    def forward(self, x: Tensor) -> OrderedDict[str, Any]:
        y = self.scores(x)
        rest: dict[str, Any] = {"rows": 3, "mode": "x", "ratio": 0.5, "nothing": None, "list": [], "nested": ({"y": y},)}
        return OrderedDict(y=y, again=y, flag=self.training, dtype=y.dtype, **rest)


@forward(pairs)
class HandsOn(Three):
    """Returns its inputs, views of them, and a constant beside what it computes."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Any, ...]:
        z = self.scores(x)
        return x, z, x[:, :2], y, y.view(-1), torch.ones(3), z.new_tensor([1.0, 2.0])


@forward(vectors)
class SharedMemory(Three):
    """Returns several views of one value, one of them twice."""

    def forward(self, x: Tensor) -> list[Tensor]:
        h = self.fc2(torch.relu(self.fc1(x)))
        a, b = h.chunk(2, dim=1)
        y = self.fc3(h)
        return [y, y[:, :2], y.view(-1, 2, 2), a, b, y, y.detach()]


def optional(rows: int) -> tuple[Any, ...]:
    given = bool(torch.randint(2, ()))
    mask, bias = torch.rand(rows, 8) > 0.5, torch.randn(8)
    return torch.randn(rows, 6), {"mask": mask if given else None, "bias": None if given else bias}


@forward(optional, rows=(8, 8, 8, 8))
class OptionalArguments(Three):
    """Takes arguments that are there or not, one with and one without the batch."""

    def forward(self, x: Tensor, mask: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        h = self.fc1(x)
        if mask is not None:
            h = h.masked_fill(mask, 0.0)
        if bias is not None:
            h = h + bias
        return self.fc3(torch.relu(self.fc2(h)))


def square(rows: int) -> tuple[Tensor, Tensor, Tensor, float]:
    return torch.randn(rows, 5, 6), torch.tril(torch.ones(5, 5)).bool(), torch.tensor(0.5), 2.0


@forward(square)
class ArgumentsOfManyShapes(Three):
    """Takes a mask of positions, which are as many as the rows of a batch once, a 0-d tensor and a number."""

    def forward(self, x: Tensor, mask: Tensor, scale: Tensor, power: float) -> Tensor:
        h = torch.relu(self.fc1(x)) * scale
        a = (h @ h.mT).masked_fill(~mask, float("-inf")).softmax(-1)
        return self.fc3(self.fc2(a @ h) ** power)


@forward(sequences)
class TimeFirst(Three):
    """Returns time before the batch, and rows and time in one dimension."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = torch.relu(self.fc1(x)).transpose(0, 1)
        g = torch.relu(self.fc2(h))
        y = self.fc3(g)
        return y, y.transpose(0, 1).reshape(-1, 4), y.permute(2, 1, 0)


def with_gradient(rows: int) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 6, requires_grad=True), torch.randn(8, requires_grad=True)


@forward(with_gradient)
class InputsWithGradient(Three):
    """Takes inputs that carry gradient, one of them for every row."""

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        h = torch.relu(self.fc1(x) + shift)
        return self.fc3(self.fc2(h) * shift.sigmoid()) + x[:, :4]


@forward(pairs)
class ArgumentsHandedThrough(Three):
    """Hands arguments on by stars, to methods and to a module of its own."""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(6, 6)

        def forward(self, *args: Tensor, **kwargs: Any) -> Tensor:
            return self.fc(sum(args)) * kwargs.get("scale", 1.0)

    def __init__(self) -> None:
        super().__init__()
        self.inner = self.Inner()

    def forward(self, *inputs: Tensor, **options: Any) -> Tensor:
        return self.scores(self.inner(*inputs, scale=0.5, **options))


@forward(pairs)
class StoresWhatItSaw(Three):
    """Stores tensors on itself and on a child, as for a callback to look at."""

    class Child(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            self.seen = x.detach()
            return x.tanh()

    def __init__(self) -> None:
        super().__init__()
        self.child = self.Child()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.hidden = torch.relu(self.fc1(x))
        self.all = {"x": x, "y": [y]}
        return self.fc3(self.child(self.fc2(self.hidden)))


def mostly_positions(rows: int) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(rows, 7, 6), torch.tril(torch.ones(7, 7)).bool(), torch.linspace(0, 1, 7)


@forward(mostly_positions)
class MoreTensorsOfPositions(Three):
    """Takes one tensor of the batch, and two of its positions."""

    def forward(self, x: Tensor, mask: Tensor, positions: Tensor) -> Tensor:
        h = torch.relu(self.fc1(x)) + positions[:, None]
        a = (h @ h.mT).masked_fill(~mask, float("-inf")).softmax(-1)
        return self.fc3(self.fc2(a @ h))
