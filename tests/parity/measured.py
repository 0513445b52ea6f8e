"""A network that logs its losses, what a run leaves of it, and the data that tests of parity train it on."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

from tests.zoo.data import Loader
from tests.zoo.steps import Mlp


class Measured(Mlp):
    """Logs its losses, and takes its learning rate and batch size from where tuners look for them.

    Attributes:
        noted: What its steps saw, in order.
    """

    def __init__(self, lr: float = 0.1, batch_size: int = 8) -> None:
        super().__init__()
        self.lr = lr
        self.batch_size = batch_size
        self.noted: list[Any] = []

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        x, y = batch
        loss = F.mse_loss(self(x), y)
        self.noted.append(("train", self.trainer.current_epoch, batch_idx, loss.detach()))
        self.log("train_loss", loss, prog_bar=True)
        return loss

    @override
    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int, dataloader_idx: int = 0) -> Any:
        x, y = batch
        loss = F.mse_loss(self(x), y)
        self.noted.append((self.trainer.state.stage, batch_idx, dataloader_idx, loss.detach()))
        self.log("val_loss", loss, prog_bar=True)

    test_step = validation_step

    @override
    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        forecast: Tensor = self(batch[0])
        return forecast

    @override
    def configure_optimizers(self) -> OptimizerLRScheduler:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.SGD(trained, lr=self.lr, momentum=0.9)


class Backbone(Measured):
    """Puts a head on a backbone, as finetuning callbacks want it."""

    def __init__(self) -> None:
        super().__init__()
        del self.fc1, self.fc2, self.fc3
        self.backbone = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16))
        self.head = nn.Linear(16, 4)

    @override
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(torch.tanh(self.backbone(x)))
        return y


class Losses(Callback):
    """Keeps what every training step returned."""

    def __init__(self) -> None:
        self.kept: list[Any] = []

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *_: Any) -> None:
        self.kept.append(outputs["loss"].detach().clone() if outputs else None)


def table(num_rows: int, seed: int = 0) -> TensorDataset:
    """Makes so many pairs of an (8,) input and a (4,) target."""
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(num_rows, 8, generator=generator), torch.randn(num_rows, 4, generator=generator))


def loader(num_rows: int = 24, batch_size: int = 8, **kwargs: Any) -> Loader:
    """Serves so many rows."""
    return DataLoader(table(num_rows), batch_size=batch_size, **kwargs)


def left(module: LightningModule, trainer: Trainer) -> dict[str, Any]:
    """Collects what a run leaves: weights, buffers, optimizer settings, counters and metrics."""
    groups = [
        [{key: value for key, value in group.items() if key != "params"} | {"size": len(group["params"])} for group in groups]
        for groups in (optimizer.param_groups for optimizer in trainer.optimizers)
    ]
    return {
        "weights": {name: parameter.detach().clone() for name, parameter in module.named_parameters()},
        "buffers": {name: buffer.clone() for name, buffer in module.named_buffers()},
        "trained": [name for name, parameter in module.named_parameters() if parameter.requires_grad],
        "training": module.training,
        "groups": groups,
        "steps": trainer.global_step,
        "epochs": trainer.current_epoch,
        "metrics": dict(trainer.callback_metrics),
        "noted": list(getattr(module, "noted", [])),
    }
