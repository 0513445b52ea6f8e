"""One fit of `benchmarks.activations`: reports the peak of the resident memory of the worker and of the lead."""

import argparse
import json
import os
from pathlib import Path
from typing import Any

import lightning
import torch
from torch.utils.data import DataLoader

from benchmarks.gpt import Case
from benchmarks.task import NUM_DEVICES, TRAINER_QUIET, Task, make_strategy

NUM_STEPS = 4
ROWS = 8


class Peaks(lightning.Callback):
    """Reads the peaks of all processes; what is resident before the second batch does not count."""

    def __init__(self) -> None:
        """Starts with nothing."""
        self.before: list[float] = []
        self.after: list[float] = []

    def on_train_batch_start(self, trainer: lightning.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Notes what is resident and starts the peaks over, once everything is in its place."""
        del pl_module, batch
        if batch_idx == 1:
            for pid in _processes(trainer):
                Path(f"/proc/{pid}/clear_refs").write_text("5", encoding="ascii")
            self.before = [_status_mib(pid, "VmRSS") for pid in _processes(trainer)]

    def on_train_end(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        """Notes the peaks."""
        del pl_module
        self.after = [_status_mib(pid, "VmHWM") for pid in _processes(trainer)]


def _processes(trainer: lightning.Trainer) -> list[int]:
    strategy: Any = trainer.strategy
    return [*strategy.workers.pids, os.getpid()]


def _status_mib(pid: int, key: str) -> float:
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{key}:"))


def main() -> None:
    """Fits and writes the report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--schedule", required=True)
    parser.add_argument("--num-microbatches", type=int, required=True)
    parser.add_argument("--report", type=Path, required=True)
    arguments = parser.parse_args()
    case = Case(batch_size=ROWS * arguments.num_microbatches, num_microbatches=arguments.num_microbatches)
    draw = torch.Generator().manual_seed(0)
    shape = (2, case.batch_size, case.sequence_length)
    batches = [tuple(torch.randint(case.vocabulary_size, shape, generator=draw)) for _ in range(NUM_STEPS)]
    peaks = Peaks()
    schedule, _, checkpointing = arguments.schedule.partition("+")
    options = {"schedule": schedule, "activation_checkpointing": bool(checkpointing)}
    trainer = lightning.Trainer(
        strategy=make_strategy("mgpu_pipeline", case, **options),
        accelerator="cpu",
        devices=NUM_DEVICES,
        max_epochs=1,
        callbacks=[peaks],
        **TRAINER_QUIET,
    )
    loader: DataLoader[Any] = DataLoader(batches, batch_size=None)  # type: ignore[arg-type]
    trainer.fit(Task(case), loader)
    growth = [after - before for before, after in zip(peaks.before, peaks.after, strict=True)]
    arguments.report.write_text(json.dumps(growth), encoding="utf-8")


if __name__ == "__main__":
    main()
