"""Fits one step and writes how long that took, as `benchmarks.startup` asks it to in a fresh process."""

import argparse
from pathlib import Path
from time import perf_counter
from typing import Any

import lightning
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.gpt import Case, make_batch
from benchmarks.task import NUM_DEVICES, TRAINER_QUIET, Task, make_strategy


class FirstStepClock(lightning.Callback):
    """Reads the clock at the end of the first step.

    Attributes:
        end_s: That time; None until then.
    """

    def __init__(self) -> None:
        self.end_s: float | None = None

    def on_train_batch_end(self, *_: Any) -> None:
        """Notes the time once."""
        if self.end_s is None:
            self.end_s = perf_counter()


def main() -> None:
    """Times the call of ``fit`` up to the end of its first step; under ddp the first rank's time counts."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", choices=["auto", "ddp", "mgpu_pipeline"], required=True)
    parser.add_argument("--report", type=Path, required=True, help="file that receives the seconds")
    arguments = parser.parse_args()

    case = Case(batch_size=16)
    tokens, targets = make_batch(case, 0)
    dataset: TensorDataset = TensorDataset(tokens, targets)
    num_devices = 1 if arguments.strategy == "auto" else NUM_DEVICES
    # Under ddp each rank's loader makes the batches of one rank.
    num_rows = case.batch_size // (NUM_DEVICES if arguments.strategy == "ddp" else 1)
    loader: DataLoader[tuple[Tensor, ...]] = DataLoader(dataset, batch_size=num_rows)
    clock = FirstStepClock()
    trainer = lightning.Trainer(
        strategy=make_strategy(arguments.strategy, case),
        accelerator="cpu",
        devices=num_devices,
        max_steps=1,
        callbacks=[clock],
        **TRAINER_QUIET,
    )
    task = Task(case)

    start_s = perf_counter()
    trainer.fit(task, loader)
    if clock.end_s is None:
        message = "fit returned without a step"
        raise RuntimeError(message)
    if trainer.is_global_zero:
        arguments.report.write_text(str(clock.end_s - start_s))


if __name__ == "__main__":
    main()
