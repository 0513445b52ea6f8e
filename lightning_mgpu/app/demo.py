"""Trains a model on real handwritten digits, whole and cut in two, and compares the numbers: ``make demo``.

Microbatches add the same numbers up in another order, and training makes any rounding grow. A third training shows how
much: whole again, from first weights that are one rounding error off.
"""

import logging
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import Strategy
from rich.console import Console
from rich.table import Table
from typing_extensions import override

from lightning_mgpu import PipelineStrategy
from lightning_mgpu.examples import CNN, DigitsDataModule
from lightning_mgpu.plots import save_gantt

SEED = 0
NUM_EPOCHS = 30  # where the validation accuracy levels off
NUDGE = torch.finfo(torch.float32).eps
OUTPUT_DIR = Path("demo_output")


@dataclass(frozen=True)
class Run:
    """What one training shows of itself.

    Attributes:
        num_epochs: The number of passes over the training split.
        losses: The logged training loss of every step.
        test_accuracy: The share of the test digits that the trained model names right.
        fit_s: How long ``fit`` took, in seconds, the start of other processes included.
    """

    num_epochs: int
    losses: tuple[float, ...]
    test_accuracy: float
    fit_s: float


class StepLosses(L.Callback):
    """Keeps the training loss that was logged in every step."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    @override
    def on_train_batch_end(self, trainer: L.Trainer, *args: Any, **kwargs: Any) -> None:
        self.losses.append(trainer.callback_metrics["train_loss"].item())


def run(strategy: Strategy | str, *, devices: int, num_epochs: int, checkpoint: Path, nudge: float = 0.0) -> Run:
    """Trains the CNN from the seed and tests it.

    Args:
        strategy: The strategy to train with.
        devices: The number of CPU processes that it is given.
        num_epochs: The number of passes over the training split.
        checkpoint: The file to save the trained model to.
        nudge: The share by which the weights of the first layer are made larger before the training.

    Returns:
        What the training showed.
    """
    L.seed_everything(SEED, verbose=False)
    model, digits, step_losses = CNN(), DigitsDataModule(), StepLosses()
    with torch.no_grad():
        model.conv1.weight.mul_(1 + nudge)
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=devices,
        max_epochs=num_epochs,
        callbacks=[step_losses],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    start_s = time.perf_counter()
    trainer.fit(model, datamodule=digits)
    fit_s = time.perf_counter() - start_s
    trainer.save_checkpoint(checkpoint)
    [metrics] = trainer.test(model, datamodule=digits, verbose=False)
    return Run(num_epochs, tuple(step_losses.losses), metrics["test_acc"], fit_s)


def largest_difference(first: Run, second: Run, *, num_steps: int | None = None) -> float:
    """Finds the step whose training losses differ most.

    Args:
        first: A training.
        second: Another of as many steps.
        num_steps: The number of steps to look at, from the first; all by default.

    Returns:
        By how much they differ.
    """
    pairs = list(zip(first.losses, second.losses, strict=True))
    return max(abs(a - b) for a, b in pairs[:num_steps])


def comparison(single: Run, pipeline: Run, nudged: Run) -> Table:
    """Lays the trainings out side by side."""
    num_steps = len(single.losses)
    runs = (single, pipeline, nudged)
    table = Table(title=f"A CNN on 1,197 handwritten digits, {num_steps} steps, seed {SEED}")
    table.add_column()
    for heading in ("one device", "two stages on\ntwo processes", f"one device, first\nweights {NUDGE:.0e} off"):
        table.add_column(heading, justify="right")
    table.add_row("test accuracy", *(f"{run.test_accuracy:.4f}" for run in runs))
    table.add_row("final train loss", *(f"{run.losses[-1]:.6f}" for run in runs))
    table.add_row("seconds of fit", *(f"{run.fit_s:.1f}" for run in runs))
    table.add_section()
    table.add_row("largest difference of a step's loss from one device")
    for steps in (num_steps // single.num_epochs, num_steps):
        differences = (largest_difference(single, run, num_steps=steps) for run in (pipeline, nudged))
        table.add_row(f"  within {steps} steps", "", *(f"{difference:.1e}" for difference in differences))
    return table


def main() -> None:
    """Runs the trainings and says what came of them and where it lies."""
    console = Console()
    OUTPUT_DIR.mkdir(exist_ok=True)
    checkpoint = OUTPUT_DIR / "pipeline.ckpt"
    strategy = PipelineStrategy(timeline=True)
    train = partial(run, num_epochs=NUM_EPOCHS)
    with _quiet_lightning():
        console.print(f"Training for {NUM_EPOCHS} epochs on one device ...")
        single = train("auto", devices=1, checkpoint=OUTPUT_DIR / "single.ckpt")
        console.print("The same, cut into two stages on two processes ...")
        pipeline = train(strategy, devices=2, checkpoint=checkpoint)
        console.print("On one device again, from weights that are one rounding error off ...")
        nudged = train("auto", devices=1, checkpoint=OUTPUT_DIR / "nudged.ckpt", nudge=NUDGE)
    picture, trace = OUTPUT_DIR / "timeline.png", OUTPUT_DIR / "trace.json"
    save_gantt(strategy.timeline, picture)
    strategy.timeline.save_trace(trace)

    console.print(comparison(single, pipeline, nudged))
    console.print("The last column shows what training makes of rounding alone.", soft_wrap=True)
    console.print("Cutting a model this small gains no time; it shows that the numbers stay.", soft_wrap=True)
    for what, path in (("checkpoint", checkpoint), ("timeline", picture), ("trace", trace)):
        console.print(f"{what + ':':12}{path}", soft_wrap=True)


@contextmanager
def _quiet_lightning() -> Iterator[None]:
    """Keeps Lightning's notices about itself out of the demonstration."""
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*does not have many workers")  # 1,197 digits need none
            warnings.filterwarnings("ignore", message=".*LeafSpec.* is deprecated")  # of torch, for Lightning to heed
            yield
    finally:
        logger.setLevel(level)


if __name__ == "__main__":
    main()
