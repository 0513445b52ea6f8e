"""Buffers that change in forward: by the same value every time, or further at every call."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from tests.zoo.recipe import Regression


class MirroredWeight(Regression):
    """Copies a weight into a buffer in each forward; doing so again changes nothing."""

    mirror: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(8, 16)
        self.register_buffer("mirror", torch.zeros(16, 8))
        self.fc2 = nn.Linear(16, 4)

    @override
    def forward(self, x: Tensor) -> Tensor:
        self.mirror.copy_(self.fc1.weight.detach().sign())
        h = torch.tanh(self.fc1(x) + F.linear(x, self.mirror))
        y: Tensor = self.fc2(h)
        return y


class ReboundBuffer(Regression):
    """Puts a new tensor in a buffer's place in each forward, as ``self.x = ...`` does."""

    norm: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(8, 16)
        self.register_buffer("norm", torch.ones(16, 1))
        self.fc2 = nn.Linear(16, 4)

    @override
    def forward(self, x: Tensor) -> Tensor:
        self.norm = self.fc1.weight.detach().norm(dim=1, keepdim=True)
        y: Tensor = self.fc2(torch.tanh(self.fc1(x) / self.norm.T))
        return y


class CallCounter(Regression):
    """Counts its calls in a buffer: once per batch, as on one device."""

    num_calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(8, 16)
        self.register_buffer("num_calls", torch.zeros((), dtype=torch.long))
        self.fc2 = nn.Linear(16, 4)

    @override
    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        y: Tensor = self.fc2(torch.tanh(self.fc1(x)))
        return y


class Codebook(Regression):
    """Quantises by the nearest code and moves the codes that were chosen, as EMA codebooks do."""

    codes: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(8, 6)
        self.register_buffer("codes", torch.randn(5, 6))
        self.fc2 = nn.Linear(6, 16)
        self.head = nn.Linear(16, 4)

    @override
    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.fc1(x))
        nearest = torch.cdist(h.detach(), self.codes).argmin(dim=-1)
        chosen = self.codes[nearest]
        if self.training:
            one_hot = F.one_hot(nearest, 5).to(h.dtype)
            num_chosen = one_hot.sum(dim=0).clamp(min=1)[:, None]
            centre = one_hot.T @ h.detach() / num_chosen
            used = one_hot.sum(dim=0)[:, None] > 0
            self.codes.lerp_(torch.where(used, centre, self.codes), 0.1)
        quantised = h + (chosen - h).detach()
        y: Tensor = self.head(torch.tanh(self.fc2(quantised)))
        return y
