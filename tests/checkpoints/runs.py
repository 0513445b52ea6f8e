"""Modules with all that a checkpoint has to keep, data that goes on where it stopped, and runs under any number of stages."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import LinearLR, StepLR
from typing_extensions import override

from lightning_mgpu import PipelineStrategy
from tests.harness import difference, flatten, repeatable
from tests.strategies.warm_workers import WarmWorkers
from tests.zoo.data import Loader, rows

NUM_BATCHES = 5
NUM_EPOCHS = 2


class Tied(LightningModule):
    """Shares a weight between its first stage and its last, has a frozen layer, and two schedulers over SGD with momentum."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(8, 8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.fc2 = nn.Linear(8, 8)
        self.fc3 = nn.Linear(8, 8)
        self.fc3.weight = self.fc1.weight
        self.head = nn.Linear(8, 4)

    @override
    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.frozen(torch.tanh(self.fc1(x))))
        y: Tensor = self.head(torch.tanh(self.fc3(torch.tanh(self.fc2(x)))))
        return y

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Tensor]:
        x, y = batch
        loss = F.mse_loss(self(x), y)
        self.log("loss", loss, on_step=False, on_epoch=True)
        return {"loss": loss}

    @override
    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", F.mse_loss(self(x), y))

    @override
    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        x, y = batch
        self.log("test_loss", F.mse_loss(self(x), y))

    @override
    def configure_optimizers(self) -> Any:
        optimizer = SGD(self.parameters(), lr=0.1, momentum=0.9)
        by_step = {"scheduler": StepLR(optimizer, 2, gamma=0.7), "interval": "step", "name": "by step"}
        by_epoch = {"scheduler": LinearLR(optimizer, total_iters=3), "interval": "epoch", "name": "by epoch"}
        return [optimizer], [by_step, by_epoch]


class Normalised(Tied):
    """Has batch norms, whose running statistics are buffers, and AdamW with two groups of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm1d(8)
        self.norm2 = nn.BatchNorm1d(8)

    @override
    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.frozen(self.norm1(self.fc1(x))))
        y: Tensor = self.head(torch.tanh(self.fc3(self.norm2(self.fc2(x)))))
        return y

    @override
    def configure_optimizers(self) -> Any:
        decayed = [p for p in self.parameters() if p.ndim > 1 and p.requires_grad]
        others = [p for p in self.parameters() if p.ndim == 1 and p.requires_grad]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "lr": 3e-3}]
        optimizer = AdamW(groups, lr=1e-2, weight_decay=0.0, amsgrad=True)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": StepLR(optimizer, 3, gamma=0.5), "interval": "step"}}


class ByHand(Tied):
    """Steps two optimizers itself, each over parameters of several stages."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Tensor]:
        output = super().training_step(batch, batch_idx)
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(output["loss"])
        for optimizer in self.optimizers():
            optimizer.step()
        return output

    @override
    def configure_optimizers(self) -> Any:
        biases = [p for p in self.parameters() if p.ndim == 1]
        weights = [p for p in self.parameters() if p.ndim > 1]
        return [SGD(weights, lr=0.1, momentum=0.9), AdamW(biases, lr=1e-2)]


class ResumableLoader:
    """Serves batches, and goes on where it stopped."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.batches = [
            (torch.randn(8, 8, generator=generator), torch.randn(8, 4, generator=generator)) for _ in range(NUM_BATCHES)
        ]
        self.position = 0

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        self.position %= len(self.batches)
        while self.position < len(self.batches):
            self.position += 1
            yield self.batches[self.position - 1]

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def other_rows() -> Loader:
    """Serves 14 rows to validate and test with, the last 6 in a batch."""
    generator = torch.Generator().manual_seed(1)
    return rows(torch.randn(14, 8, generator=generator), torch.randn(14, 4, generator=generator))


@dataclass
class Run:
    """Is what a user could observe of a run from some step on.

    Attributes:
        losses, rates: the loss and the learning rates of each step, by its number.
        state: the module's parameters and buffers in the end.
        optimizers: the state of its optimizers in the end.
        metrics: what was logged.
        progress: epoch and step in the end.
    """

    losses: dict[int, Tensor] = field(default_factory=dict)
    rates: dict[int, list[float]] = field(default_factory=dict)
    state: dict[str, Tensor] = field(default_factory=dict)
    optimizers: list[dict[str, Any]] = field(default_factory=list)
    metrics: dict[str, Tensor] = field(default_factory=dict)
    progress: tuple[int, int] = (0, 0)

    def since(self, step: int) -> Run:
        """Returns what is left of it for a run that began after a step; what is logged over epochs is left out."""
        later = copy.copy(self)
        later.losses = {number: loss for number, loss in self.losses.items() if number > step}
        later.rates = {number: rates for number, rates in self.rates.items() if number > step}
        later.metrics = {}
        return later


class Recorder(Callback):
    def __init__(self, run: Run) -> None:
        self.run = run

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *_: Any) -> None:
        self.run.losses[trainer.global_step] = outputs["loss"].detach().clone()
        self.run.rates[trainer.global_step] = [group["lr"] for group in trainer.optimizers[0].param_groups]

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.run.optimizers = [copy.deepcopy(optimizer.state_dict()) for optimizer in trainer.optimizers]


class SaveAt(Callback):
    """Saves a checkpoint after some steps."""

    def __init__(self, paths: dict[int, Path]) -> None:
        self.paths = paths

    @override
    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step in self.paths:
            trainer.save_checkpoint(self.paths[trainer.global_step])


def built(module: type[LightningModule]) -> Any:
    """Builds a module with the same initial weights each time."""
    with repeatable():
        return module()


def make_trainer(
    num_stages: int, workers: Any, *callbacks: Callback, strategy: dict[str, Any] | None = None, **kwargs: Any
) -> Trainer:
    """Makes a Trainer for so many stages, 0 for one device without the pipeline.

    Args:
        num_stages: The number of stages.
        workers: The workers for them.
        *callbacks: Callbacks of the Trainer.
        strategy: Arguments of the pipeline.
        **kwargs: Further arguments of the Trainer.
    """
    defaults: dict[str, Any] = {"max_epochs": NUM_EPOCHS, "enable_checkpointing": False, "logger": False}
    return Trainer(
        accelerator="cpu",
        devices=max(num_stages, 1),
        strategy="auto" if num_stages == 0 else PipelineStrategy(workers=workers, **(strategy or {})),
        callbacks=[*callbacks],
        enable_progress_bar=False,
        enable_model_summary=False,
        **{**defaults, **kwargs},
    )


def lent(warm_workers: WarmWorkers, num_stages: int) -> Any:
    """Lends workers where any are needed."""
    return nullcontext() if num_stages == 0 else warm_workers.lend(num_stages)


def run(
    module: LightningModule,
    num_stages: int,
    warm_workers: WarmWorkers,
    *callbacks: Callback,
    ckpt_path: Path | str | None = None,
    weights_only: bool | None = None,
    strategy: dict[str, Any] | None = None,
    **kwargs: Any,
) -> Run:
    """Trains on so many stages, 0 for one device without the pipeline, and records it."""
    found = Run()
    with repeatable(), lent(warm_workers, num_stages) as workers:
        trainer = make_trainer(num_stages, workers, Recorder(found), *callbacks, strategy=strategy, **kwargs)
        trainer.fit(module, ResumableLoader(), other_rows(), ckpt_path=ckpt_path, weights_only=weights_only)
        found.state = {name: value.clone() for name, value in module.state_dict().items()}
        found.metrics = dict(trainer.callback_metrics)
        found.progress = (trainer.current_epoch, trainer.global_step)
    return found


def assert_equal_runs(expected: Run, actual: Run, *, exact: bool = False) -> None:
    """Compares two runs value by value, by name."""
    ours, theirs = dict(flatten(actual)), dict(flatten(expected))
    assert ours.keys() == theirs.keys()
    faults = {name: difference(value, ours[name], exact=exact) for name, value in theirs.items()}
    assert not {name: fault for name, fault in faults.items() if fault is not None}
