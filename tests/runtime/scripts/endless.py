"""Trains a small network for ever on the pipeline, and says which processes take part once it is under way.

Arguments: the number of stages, of loader processes, and the folder for a checkpoint on exceptions.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import psutil
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_mgpu import PipelineStrategy
from tests.zoo.steps import Mlp


class Endless(IterableDataset[tuple[Tensor, Tensor]]):
    """Makes up rows without an end."""

    def __iter__(self) -> Any:
        while True:
            yield torch.randn(8), torch.randn(4)


class Announce(Callback):
    """Prints the processes when a few steps are done."""

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == 3:
            pids = [child.pid for child in psutil.Process().children(recursive=True)]
            print(json.dumps({"workers": trainer.strategy.workers.pids, "all": [os.getpid(), *pids]}), flush=True)


def main(num_stages: int, num_loader_workers: int, folder: str) -> None:
    trainer = Trainer(
        strategy=PipelineStrategy(),
        accelerator="cpu",
        devices=num_stages,
        callbacks=[Announce(), OnExceptionCheckpoint(folder)],
        logger=False,
        enable_checkpointing=True,
        enable_progress_bar=False,
        enable_model_summary=False,
        max_epochs=1,
    )
    trainer.fit(Mlp(), DataLoader(Endless(), batch_size=8, num_workers=num_loader_workers))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
