"""The two smallest models worth cutting: one linear layer, and two in a row."""

from abc import ABC, abstractmethod

import lightning as L
import torch.nn.functional as F
from torch import Tensor, nn, optim
from typing_extensions import override


class _Regression(L.LightningModule, ABC):
    """Fits targets of shape ``(batch, num_targets)`` by the mean squared error; subclasses bring the layers."""

    def __init__(self, lr: float) -> None:
        super().__init__()
        self.lr = lr

    @abstractmethod
    @override
    def forward(self, x: Tensor) -> Tensor: ...

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        inputs, targets = batch
        loss = F.mse_loss(self(inputs), targets)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    @override
    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        inputs, targets = batch
        self.log("val_loss", F.mse_loss(self(inputs), targets), prog_bar=True)

    @override
    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        inputs, targets = batch
        self.log("test_loss", F.mse_loss(self(inputs), targets))

    @override
    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        inputs, _ = batch
        return self(inputs)

    @override
    def configure_optimizers(self) -> optim.Optimizer:
        return optim.SGD(self.parameters(), lr=self.lr)


class Linear(_Regression):
    """One linear layer, ``(batch, 10)`` to ``(batch, 2)``: nothing to cut, so one stage is the most it makes.

    Args:
        lr: The learning rate of SGD.
    """

    def __init__(self, lr: float = 0.01) -> None:
        super().__init__(lr)
        self.save_hyperparameters()
        self.fc = nn.Linear(10, 2)

    @override
    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x)


class TwoLayerLinear(_Regression):
    """Two linear layers, ``(batch, 10)`` to ``(batch, 2)`` to ``(batch, 1)``, with one place to cut: ``fc2``.

    Args:
        lr: The learning rate of SGD.
    """

    def __init__(self, lr: float = 0.01) -> None:
        super().__init__(lr)
        self.save_hyperparameters()
        self.fc1 = nn.Linear(10, 2)
        self.fc2 = nn.Linear(2, 1)

    @override
    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.fc1(x))
