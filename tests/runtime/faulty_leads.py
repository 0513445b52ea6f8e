"""Modules, loaders and callbacks that fail in the user's own process, once, in the third step of the first run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override

from tests.zoo.data import Loader
from tests.zoo.steps import AdamWMlp

TEXT = "the user's own mistake"
STEP = 2


class Once:
    """Raises the first time that it is asked to in the third step."""

    def __init__(self) -> None:
        self.done = False

    def __call__(self, step: int) -> None:
        if step == STEP and not self.done:
            self.done = True
            raise ValueError(TEXT)


class FailsBeforeCall(AdamWMlp):
    """Fails in its training step before the network is called."""

    def __init__(self) -> None:
        super().__init__()
        self.once = Once()

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        self.once(batch_idx)
        return super().training_step(batch, batch_idx)


class FailsAfterCall(FailsBeforeCall):
    """Fails in its training step with a loss that waits for its backward."""

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.mse_loss(self(x), y)
        self.once(batch_idx)
        return loss


class FailsInHook(FailsBeforeCall):
    """Fails between its backward and its optimizer's step."""

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return F.mse_loss(self(x), y)

    @override
    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        self.once(self.global_step)


class FailsInValidation(FailsInHook):
    """Fails in a validation step, between two epochs of training."""

    @override
    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        pass

    @override
    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", F.mse_loss(self(x), y))
        self.once(batch_idx if self.global_step else -1)


class FailsInCallback(Callback):
    """Fails when the third batch has been trained on."""

    def __init__(self) -> None:
        self.once = Once()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.once(batch_idx)


class Rows(Dataset[tuple[Tensor, Tensor]]):
    """Holds 32 rows; reading one of the third batch may fail, and a loader process always finds it in its first state."""

    def __init__(self, *, fails: bool) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(32, 8, generator=generator)
        self.y = torch.randn(32, 4, generator=generator)
        self.fails = fails

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if self.fails and index == STEP * 8:
            raise ValueError(TEXT)
        return self.x[index], self.y[index]


def loader(*, fails: bool = False, num_workers: int = 0) -> Loader:
    """Serves four batches of 8 rows."""
    return DataLoader(Rows(fails=fails), batch_size=8, num_workers=num_workers)


def no_callbacks() -> list[Callback]:
    return []


@dataclass(frozen=True)
class Mistake:
    """Is one way to fail outside the stages.

    Attributes:
        name: What fails.
        module: Builds the module.
        loader: Builds the loader of the run that fails.
        callbacks: Builds callbacks.
        num_steps: Optimizer steps before the failure.
        validates: Whether there is a loader to validate on.
        num_stages: The numbers of stages to try.
    """

    name: str
    module: Callable[[], LightningModule] = AdamWMlp
    loader: Callable[[], Loader] = loader
    callbacks: Callable[[], list[Callback]] = no_callbacks
    num_steps: int = STEP
    validates: bool = False
    num_stages: tuple[int, ...] = (2, 3)


MISTAKES = [
    Mistake("training_step before the call", FailsBeforeCall),
    Mistake("training_step after the call", FailsAfterCall),
    Mistake("hook after the backward", FailsInHook),
    Mistake("validation_step", FailsInValidation, num_steps=4, validates=True),
    Mistake("callback", callbacks=lambda: [FailsInCallback()], num_steps=3),
    Mistake("loader", loader=partial(loader, fails=True)),
    # torch takes five seconds to end such a process, on one device too
    Mistake("loader process", loader=partial(loader, fails=True, num_workers=1), num_stages=(2,)),
]
