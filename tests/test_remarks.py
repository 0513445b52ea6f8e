"""Warnings point to the user's line."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn

from tests.partition.in_process import InProcess


class Routing(nn.Module):
    """Decides by its weights, so it runs as one piece."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return y * 2 if y.sum() > 0 else y


def test_a_warning_names_the_line_of_the_call() -> None:
    pipeline = InProcess(nn.Sequential(nn.Linear(4, 4), Routing(), nn.Linear(4, 4)), 2, 2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call(pipeline)
    found = [w for w in caught if "runs as one piece" in str(w.message)]
    assert len(found) == 1
    assert found[0].filename.endswith("in_process.py")  # stands for the user's code: the first line outside the package


def call(pipeline: InProcess) -> None:
    pipeline(torch.randn(4, 4))
