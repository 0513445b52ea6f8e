"""Parameters and modules used more than once, or outside any layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from tests.zoo.recipe import Classification, Regression


class TiedHead(Classification):
    """Shares one matrix between its embedding, which comes first, and its head, which comes last."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 16)
        self.body = nn.Linear(16, 16)
        self.head = nn.Linear(16, 20, bias=False)
        self.head.weight = self.words.weight

    @override
    def forward(self, words: Tensor) -> Tensor:
        scores: Tensor = self.head(torch.tanh(self.body(self.words(words))))
        return scores


class CalledTwice(Regression):
    """Calls one layer at the beginning and again at the end of its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(8, 8)
        self.middle = nn.Linear(8, 8)
        self.later = nn.Linear(8, 8)
        self.head = nn.Linear(8, 4)

    @override
    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.shared(x))
        h = torch.tanh(self.later(torch.tanh(self.middle(h))))
        y: Tensor = self.head(torch.tanh(self.shared(h)))
        return y


class Siamese(Regression):
    """Calls its whole network twice in a step, on two views of the same samples."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(8, 16)
        self.fc2 = nn.Linear(16, 6)

    @override
    def forward(self, x: Tensor) -> Tensor:
        z: Tensor = self.fc2(torch.tanh(self.fc1(x)))
        return z

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        left, right = batch
        return 1 - F.cosine_similarity(self(left), self(right)).mean()


class BareParameter(Regression):
    """Multiplies by one parameter of its own and adds another, outside any layer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.fc1 = nn.Linear(8, 16)
        self.fc2 = nn.Linear(16, 4)
        self.shift = nn.Parameter(torch.zeros(4))

    @override
    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.fc1(self.scale * x))
        y: Tensor = self.fc2(h) + self.shift
        return y


class FunctionalBuffer(Regression):
    """Uses buffers as plain tensors: one is saved with the weights, one is not."""

    mean: Tensor
    rotation: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.randn(8))
        self.fc1 = nn.Linear(8, 16)
        self.register_buffer("rotation", torch.randn(16, 16) / 4, persistent=False)
        self.fc2 = nn.Linear(16, 4)

    @override
    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.fc1(x - self.mean))
        y: Tensor = self.fc2(F.linear(h, self.rotation))
        return y
