"""Values that are neither float nor differentiable and live long enough to cross a cut."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from tests.zoo.recipe import Classification, Regression


class IntegerAndBoolean(Regression):
    """Remembers where values were positive and which was largest, and uses both at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(8, 16)
        self.fc2 = nn.Linear(16, 16)
        self.fc3 = nn.Linear(16, 16)
        self.code = nn.Embedding(16, 16)
        self.fc4 = nn.Linear(16, 4)

    @override
    def forward(self, x: Tensor) -> Tensor:
        h = self.fc1(x)
        positive = h > 0
        largest = h.argmax(dim=-1)
        g = self.fc3(torch.tanh(self.fc2(torch.tanh(h))))
        g = torch.where(positive, g, -0.5 * g)
        y: Tensor = self.fc4(torch.tanh(g + self.code(largest)))
        return y


class LatePositions(Classification):
    """Counts positions from the integer input and needs them only in its last layers."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 16)
        self.fc1 = nn.Linear(16, 16)
        self.fc2 = nn.Linear(16, 16)
        self.position = nn.Embedding(7, 16)
        self.head = nn.Linear(16, 20)

    @override
    def forward(self, words: Tensor) -> Tensor:
        frequent = words < 10
        position = frequent.long().cumsum(dim=1)
        h = torch.tanh(self.fc2(torch.tanh(self.fc1(self.words(words)))))
        h = h + self.position(position) * frequent[..., None]
        scores: Tensor = self.head(h)
        return scores


class SameValueTwice(Regression):
    """Returns one value under two names and sends another to two places."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(8, 16)
        self.left = nn.Linear(16, 8)
        self.right = nn.Linear(16, 8)
        self.head = nn.Linear(16, 4)

    @override
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.fc1(x))
        both = torch.cat([self.left(h), torch.tanh(self.right(h))], dim=-1)
        y = self.head(both + h)
        return y, y

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, target = batch
        first, second = self(x)
        return F.mse_loss(first, target) + F.l1_loss(second, target)
