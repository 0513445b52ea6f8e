"""A layer that tells which process it runs in; it imports torch alone, so that its process need not import more."""

import os
import sys

import torch
from torch import Tensor, nn


class Tells(nn.Module):
    """Looks at its numbers, so that it is sent to its stage as one piece, and returns facts beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(16, 16)

    def forward(self, h: Tensor) -> tuple[Tensor, Tensor]:
        if h.isnan().any():
            raise ValueError("not a number")
        facts = torch.tensor([os.getpid(), "torch._dynamo" in sys.modules])
        return torch.tanh(self.fc(h)), facts.repeat(len(h), 1)
