"""A module whose inside depends on its weights and so cannot be recorded."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from typing_extensions import override

from tests.zoo.recipe import Regression


class Experts(nn.Module):
    """Sends each row to the one expert its gate prefers, by Python loops over chosen rows."""

    def __init__(self, num_features: int, num_experts: int) -> None:
        super().__init__()
        self.gate = nn.Linear(num_features, num_experts)
        self.experts = nn.ModuleList(nn.Linear(num_features, num_features) for _ in range(num_experts))

    @override
    def forward(self, x: Tensor) -> Tensor:
        confidence, choice = self.gate(x).softmax(dim=-1).max(dim=-1)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            chosen = choice == index
            if chosen.any():
                out[chosen] = expert(x[chosen]) * confidence[chosen, None]
        return out


class MixtureOfExperts(Regression):
    """Stands a routing module between ordinary layers."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(8, 16)
        self.routing = Experts(16, 3)
        self.fc2 = nn.Linear(16, 16)
        self.head = nn.Linear(16, 4)

    @override
    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.fc1(x))
        h = h + self.routing(h)
        y: Tensor = self.head(torch.tanh(self.fc2(h)))
        return y
