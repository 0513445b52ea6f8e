"""Two everyday training recipes that many modules of the zoo complete with their own ``forward``."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import override


class Regression(LightningModule):
    """Moves ``self(x)`` towards ``y`` by the mean squared error, with SGD and momentum."""

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.mse_loss(self(x), y)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    @override
    def configure_optimizers(self) -> OptimizerLRScheduler:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Classification(LightningModule):
    """Scores classes with ``self(x)`` and minimises the cross entropy, with SGD and momentum."""

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, label = batch
        scores: Tensor = self(x)
        loss = F.cross_entropy(scores.flatten(0, -2), label.flatten(), ignore_index=-100)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    @override
    def configure_optimizers(self) -> OptimizerLRScheduler:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
