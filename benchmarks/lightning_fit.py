"""The variants under Lightning's Trainer: our pipeline, and Lightning's own data parallelism."""

import argparse
from typing import Any

import lightning
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks.commands import CommandedBatches, add_control, connect
from benchmarks.task import NUM_DEVICES, TRAINER_QUIET, Task, make_strategy


class KeepLoss(lightning.Callback):
    """Notes each step's loss for the report."""

    def __init__(self, losses: list[float]) -> None:
        """Keeps the list that the losses are appended to."""
        self._losses = losses

    def on_train_batch_end(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, outputs: Any, *_: Any
    ) -> None:
        """Appends the loss that the step returned."""
        del trainer, pl_module
        self._losses.append(outputs["loss"].item())


def main() -> None:
    """Fits on command until the driver hangs up."""
    parser = argparse.ArgumentParser()
    add_control(parser)
    parser.add_argument("--strategy", choices=["mgpu_pipeline", "ddp"], required=True)
    parser.add_argument("--schedule", default="gpipe")
    arguments = parser.parse_args()
    connection, case = connect(arguments.control_fd)

    rows = slice(None)
    if arguments.strategy == "ddp":
        num_rows = case.batch_size // NUM_DEVICES
        rows = slice(arguments.rank * num_rows, (arguments.rank + 1) * num_rows)
    batches = CommandedBatches(connection, case, rows)
    loader: DataLoader[tuple[Tensor, Tensor]] = DataLoader(batches, batch_size=None)
    trainer = lightning.Trainer(
        strategy=make_strategy(arguments.strategy, case, schedule=arguments.schedule),
        accelerator="cpu",
        devices=NUM_DEVICES,
        max_epochs=1,
        callbacks=[KeepLoss(batches.losses)],
        **TRAINER_QUIET,
    )
    trainer.fit(Task(case), loader)


if __name__ == "__main__":
    main()
