"""Trains a small network on two stages and prints its losses; waits in the middle until a second run is there as well.

Arguments: a folder, this run's name, and the other run's.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything

from lightning_mgpu import PipelineStrategy
from tests.zoo import data
from tests.zoo.steps import Mlp


class Meet(Callback):
    """Keeps losses, and waits after the second step for the other run to come as far."""

    def __init__(self, mine: Path, other: Path) -> None:
        self.mine = mine
        self.other = other
        self.losses: list[float] = []

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.losses.append(outputs["loss"].item())
        if batch_idx == 1:
            self.mine.touch()
            while not self.other.exists():
                time.sleep(0.01)


def main(folder: Path, mine: str, other: str) -> None:
    seed_everything(0, verbose=False)
    module, loader = Mlp(), data.vectors()
    meet = Meet(folder / mine, folder / other)
    trainer = Trainer(
        strategy=PipelineStrategy(num_microbatches=4),
        accelerator="cpu",
        devices=2,
        max_epochs=2,
        callbacks=[meet],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, loader)
    print(json.dumps({"losses": meet.losses, "pids": trainer.strategy.workers.pids}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
