"""Forwards that decide in Python: on the batch, on attributes, on the epoch, on the mode."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from tests.zoo.recipe import Classification, Regression


class MaskBranch(Classification):
    """Takes another way when any row of the batch is padded, though most microbatches have none."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 16)
        self.whole = nn.Linear(16, 16)
        self.partial = nn.Linear(16, 16)
        self.head = nn.Linear(16, 4)

    @override
    def forward(self, words: Tensor, mask: Tensor) -> Tensor:
        h = self.words(words)
        if mask.all():  # noqa: SIM108 - a branch as users write it
            h = torch.tanh(self.whole(h)).mean(dim=1)
        else:
            h = torch.tanh(self.partial(h) * mask[..., None]).mean(dim=1)
        scores: Tensor = self.head(h)
        return scores

    @override
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch["words"], batch["mask"]), batch["label"])


class LongestRow(Classification):
    """Trims the batch to its longest row, a length that a microbatch would judge differently."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 16)
        self.body = nn.Linear(16, 16)
        self.head = nn.Linear(16, 4)

    @override
    def forward(self, words: Tensor, lengths: Tensor) -> Tensor:
        longest = int(lengths.max())
        h = torch.tanh(self.body(self.words(words[:, :longest])))
        scores: Tensor = self.head(h.sum(dim=1)) / longest
        return scores

    @override
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch["words"], batch["lengths"]), batch["label"])


class GainSchedule(Callback):
    """Sets another gain on the module before each step."""

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        pl_module.gain = 0.5 + 0.25 * batch_idx  # type: ignore[assignment]


class CallbackKnob(Regression):
    """Reads a number in forward that a callback changes at every step."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = 1.0
        self.fc1 = nn.Linear(8, 16)
        self.fc2 = nn.Linear(16, 4)

    @override
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc2(torch.tanh(self.gain * self.fc1(x)))
        return y


class EpochBranch(Regression):
    """Uses one layer in the first epoch and another one afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(8, 16)
        self.early = nn.Linear(16, 16)
        self.late = nn.Linear(16, 16)
        self.fc2 = nn.Linear(16, 4)

    @override
    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.fc1(x))
        h = self.early(h) if self.current_epoch == 0 else self.late(h) / (1 + self.current_epoch)
        y: Tensor = self.fc2(torch.tanh(h))
        return y


class TrainingBranch(Regression):
    """Adds an auxiliary layer while training and leaves it out in validation."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(8, 16)
        self.auxiliary = nn.Linear(16, 16)
        self.fc2 = nn.Linear(16, 4)

    @override
    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.fc1(x))
        if self.training:
            h = h + 0.1 * self.auxiliary(h)
        y: Tensor = self.fc2(h)
        return y

    @override
    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", F.mse_loss(self(x), y))
