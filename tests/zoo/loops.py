"""Modules that use every loop of the Trainer."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics import MeanSquaredError
from typing_extensions import override

from tests.zoo.recipe import Regression


class EveryLoop(Regression):
    """Trains, validates with a metric object and predicts, in batches of which the last is smaller."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(8, 16)
        self.fc2 = nn.Linear(16, 16)
        self.fc3 = nn.Linear(16, 4)
        self.error = MeanSquaredError()

    @override
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc3(torch.tanh(self.fc2(torch.tanh(self.fc1(x)))))
        return y

    @override
    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        x, y = batch
        forecast = self(x)
        self.error(forecast, y)
        self.log("val_error", self.error)
        self.log_dict({"val_loss": F.l1_loss(forecast, y), "val_sign": (forecast.sign() == y.sign()).float().mean()})

    @override
    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        forecast: Tensor = self(batch[0])
        return forecast
