"""The variants under Lightning's Trainer: our pipeline, and Lightning's own data parallelism."""

import argparse
import tempfile
from typing import Any

import lightning
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from benchmarks.commands import CommandedBatches, add_control, connect
from benchmarks.gpt import Case
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
    parser.add_argument("--with-features", action="store_true", help="a metric, clipping, a logger and checkpoints as well")
    arguments = parser.parse_args()
    connection, case = connect(arguments.control_fd)

    rows = slice(None)
    if arguments.strategy == "ddp":
        num_rows = case.batch_size // NUM_DEVICES
        rows = slice(arguments.rank * num_rows, (arguments.rank + 1) * num_rows)
    batches = CommandedBatches(connection, case, rows)
    loader: DataLoader[tuple[Tensor, Tensor]] = DataLoader(batches, batch_size=None)
    with tempfile.TemporaryDirectory() as folder:
        callbacks: list[lightning.Callback] = [KeepLoss(batches.losses)]
        options = TRAINER_QUIET | (_features(folder, callbacks) if arguments.with_features else {})
        trainer = lightning.Trainer(
            strategy=make_strategy(arguments.strategy, case, schedule=arguments.schedule),
            accelerator="cpu",
            devices=NUM_DEVICES,
            max_epochs=1,
            callbacks=callbacks,
            **options,
        )
        trainer.fit((TaskWithMetric if arguments.with_features else Task)(case), loader)


class TaskWithMetric(Task):
    """Keeps the mean of its losses in a metric as well."""

    def __init__(self, case: Case) -> None:
        """Builds the model and the metric."""
        super().__init__(case)
        self.mean_loss = MeanMetric()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Returns the loss, and shows it to the metric."""
        loss = super().training_step(batch, batch_idx)
        self.mean_loss(loss.detach())
        self.log("mean_loss", self.mean_loss, on_step=True)
        return loss


def _features(folder: str, callbacks: list[lightning.Callback]) -> dict[str, Any]:
    """Switches on what people use: clipping so high that it changes nothing, a logger at every step, a checkpoint every six."""
    callbacks.append(ModelCheckpoint(folder, every_n_train_steps=6, save_top_k=1))
    return {
        "gradient_clip_val": 1e6,
        "logger": CSVLogger(folder),
        "log_every_n_steps": 1,
        "enable_checkpointing": True,
    }


if __name__ == "__main__":
    main()
