"""A gradient that reaches a parameter where it does not live is an error, never lost in silence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_mgpu import PipelineStrategy
from lightning_mgpu.errors import PlacementError
from tests.harness import run_fit
from tests.strategies.warm_workers import WarmWorkers
from tests.zoo import data


class Penalized(LightningModule):
    """Adds a term of its weights to the loss, as the message of a placeholder seems to advise."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(torch.tanh(self.first(x)))
        return y

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = (self(x) - y).square().mean()
        with self.trainer.strategy.summon_parameters():  # type: ignore[attr-defined]
            return loss + 0.1 * sum(p.square().sum() for p in self.parameters())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class PartFirst(Penalized):
    """Calls a part of the module before the module, which places it only then."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        hidden = self.first(x)
        return (self(x) - y).square().mean() + hidden.square().mean()


@pytest.mark.parametrize("module", [Penalized, PartFirst])
def test_is_an_error(module: type[LightningModule], warm_workers: WarmWorkers) -> None:
    text = r"^parameter 'first\.\w+' lives on stage 0, but the loss also depends on the value it had on the lead"
    with warm_workers.lend(2) as workers:
        strategy = PipelineStrategy(num_microbatches=4, workers=workers)
        with pytest.raises(PlacementError, match=text):
            run_fit(module, data.vectors, strategy=strategy, devices=2)
