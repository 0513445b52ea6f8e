"""Networks that log, and what keeps all that was logged."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import Logger
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import override

from tests.parity.layouts import MakeTrainer
from tests.zoo.data import vector_splits
from tests.zoo.steps import Mlp


class Sheet(Logger):
    """Keeps every row it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int | None, dict[str, float]]] = []
        self.hyperparameters: Any = None

    @property
    @override
    def name(self) -> str:
        return "sheet"

    @property
    @override
    def version(self) -> int:
        return 0

    @override
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append((step, dict(metrics)))

    @override
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        self.hyperparameters = dict(params)


class Bars(Callback):
    """Keeps what a progress bar would show, and what callbacks can read, after every batch."""

    def __init__(self) -> None:
        self.shown: list[dict[str, Any]] = []
        self.readable: list[dict[str, Tensor]] = []

    @override
    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.shown.append(dict(trainer.progress_bar_metrics))
        self.readable.append(dict(trainer.callback_metrics))

    on_validation_end = on_train_batch_end


class Noting(Mlp):
    """Lets a test say what its steps note of the loss."""

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.mse_loss(self(x), y)
        self.note(loss, "train")
        return loss

    @override
    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        x, y = batch
        self.note(F.mse_loss(self(x), y), "val")

    test_step = validation_step

    def note(self, loss: Tensor, stage: str) -> None:
        """Logs."""


class NotesInEveryWay(Noting):
    """Uses each option of ``self.log``."""

    @override
    def note(self, loss: Tensor, stage: str) -> None:
        self.log(f"{stage}_plain", loss)
        self.log(f"{stage}_bar", loss, prog_bar=True)
        self.log(f"{stage}_unlogged", loss, logger=False)
        self.log(f"{stage}_both", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log(f"{stage}_step", loss, on_step=True, on_epoch=False)
        self.log(f"{stage}_epoch", loss, on_step=False, on_epoch=True)
        for reduction in ("mean", "avg", "sum", "min", "max", torch.mean, torch.sum, max, min):
            named = reduction if isinstance(reduction, str) else f"{reduction.__name__}_function"
            self.log(f"{stage}_{named}", loss, on_step=False, on_epoch=True, reduce_fx=reduction)
        self.log(f"{stage}_synced", loss, on_step=False, on_epoch=True, sync_dist=True)
        self.log(f"{stage}_weighted", loss, on_step=False, on_epoch=True, batch_size=1 + self.global_step)
        self.log(f"{stage}_first_rank", loss, rank_zero_only=True)
        self.log(f"{stage}_differentiable", loss, enable_graph=True)
        self.log(f"{stage}_number", 1.5, on_step=False, on_epoch=True)
        self.log_dict({f"{stage}_a": loss, f"{stage}_b": loss.square()}, on_step=True, on_epoch=True)


def log(make: MakeTrainer, module: type[LightningModule], **kwargs: Any) -> dict[str, Any]:
    """Trains, validates and tests, and collects whatever was logged."""
    sheet, bars = Sheet(), Bars()
    trainer = make(
        **{"max_epochs": 2, "logger": sheet, "log_every_n_steps": 1, "callbacks": [bars], **kwargs},
    )
    made, data = module(), vector_splits()
    trainer.fit(made, data)
    validated = trainer.validate(made, data, verbose=False)
    tested = trainer.test(made, data.val_dataloader(), verbose=False)
    return {
        "rows": sheet.rows,
        "shown": bars.shown,
        "readable": bars.readable,
        "logged": dict(trainer.logged_metrics),
        "validated": validated,
        "tested": tested,
    }
