"""One fit of `benchmarks.parameters`: reports the peak of the resident memory of each process."""

import argparse
import json
import os
from pathlib import Path
from typing import Any

import lightning
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks.task import TRAINER_QUIET

NUM_STEPS = 2
ROWS = 8


def parameter_bytes(num_layers: int, width: int) -> int:
    """Returns the size of the model's parameters."""
    return 4 * num_layers * width * width


class Deep(lightning.LightningModule):
    """Is a stack of square layers, built on the meta device."""

    def __init__(self, num_layers: int, width: int) -> None:
        """Notes the sizes; the layers are built by the Trainer's own hook."""
        super().__init__()
        self.num_layers = num_layers
        self.width = width
        self.layers: nn.Sequential | None = None

    def configure_model(self) -> None:
        """Builds the layers without memory."""
        if self.layers is None:
            with torch.device("meta"):
                self.layers = nn.Sequential(*(nn.Linear(self.width, self.width, bias=False) for _ in range(self.num_layers)))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:  # noqa: ARG002
        """Returns the mean square of what the layers make of rows ``(batch, width)``."""
        assert self.layers is not None
        loss: Tensor = self.layers(batch).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Returns an optimizer without states."""
        return torch.optim.SGD(self.parameters(), lr=1e-4)


class Peaks(lightning.Callback):
    """Reads the peaks of all processes in the end."""

    def __init__(self) -> None:
        """Starts with nothing."""
        self.peaks: list[float] = []

    def on_train_end(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        """Notes the peaks."""
        del pl_module
        workers = getattr(trainer.strategy, "workers", None)
        pids = [*(workers.pids if workers is not None else ()), os.getpid()]
        self.peaks = [_peak_mib(pid) for pid in pids]


def _peak_mib(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM:"))


def main() -> None:
    """Fits and writes the report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--num-devices", type=int, required=True)
    parser.add_argument("--num-layers", type=int, required=True)
    parser.add_argument("--width", type=int, required=True)
    parser.add_argument("--report", type=Path, required=True)
    arguments = parser.parse_args()
    from lightning_mgpu import PipelineStrategy  # noqa: PLC0415  (measured with the rest)

    batches = torch.randn(NUM_STEPS, ROWS, arguments.width, generator=torch.Generator().manual_seed(0))
    peaks = Peaks()
    trainer = lightning.Trainer(
        strategy=PipelineStrategy(num_microbatches=4, balance="parameters"),
        accelerator="cpu",
        devices=arguments.num_devices,
        max_epochs=1,
        callbacks=[peaks],
        **TRAINER_QUIET,
    )
    loader: DataLoader[Any] = DataLoader(list(batches), batch_size=None)  # type: ignore[arg-type]
    trainer.fit(Deep(arguments.num_layers, arguments.width), loader)
    arguments.report.write_text(json.dumps(peaks.peaks), encoding="utf-8")


if __name__ == "__main__":
    main()
