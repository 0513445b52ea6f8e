"""Defines a layer and its exception in the script itself, and tells what arrives when a worker raises it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lightning_mgpu.errors import StageError
from tests.runtime.faults import batches
from tests.runtime.observing import make_trainer
from tests.zoo.steps import Mlp


class MarkedError(Exception):
    """Carries what its ``str`` doesn't tell."""

    def __init__(self, num_marked: int) -> None:
        super().__init__(num_marked)
        self.num_marked = num_marked

    def __str__(self) -> str:
        return f"{self.num_marked} rows are marked"


class Gate(nn.Module):
    """Raises on marked rows."""

    def forward(self, x: Tensor) -> Tensor:
        num_marked = int(x.isnan().any(dim=1).sum())
        if num_marked:
            raise MarkedError(num_marked)
        return x * 1


class GatedMlp(Mlp):
    """Has the gate behind its first layer."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = Gate()

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.fc2(self.gate(torch.tanh(self.fc1(x)))))
        y: Tensor = self.fc3(h)
        return y


def main() -> None:
    from lightning_mgpu import PipelineStrategy

    strategy: Any = PipelineStrategy(num_microbatches=4, cuts=["fc2"])
    try:
        make_trainer(strategy, devices=2).fit(GatedMlp(), batches(marked=True))
    except StageError as error:
        cause = error.__cause__
        assert isinstance(cause, MarkedError)  # the script's own class, not a copy of it
        print(f"{cause.num_marked} | {error} | {error.stage} | {error.microbatch}")
        raise


if __name__ == "__main__":
    main()
