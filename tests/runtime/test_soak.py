"""Three hundred steps: no process grows, and none collects threads or open files."""

from __future__ import annotations

import gc
import os
from typing import Any

import psutil
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from typing_extensions import override

from lightning_mgpu import PipelineStrategy
from tests.runtime.observing import make_trainer
from tests.runtime.spare_workers import SpareWorkers
from tests.zoo.data import rows
from tests.zoo.recipe import Regression

NUM_STEPS = 300
SETTLED = 100  # steps after which allocators have what they need
SLACK_MIB = 4.0  # a batch is 128 KiB, as is what crosses the cut: one of them kept by each step would be 25 MiB


class Wide(Regression):
    """Has activations as large as its batch."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(512, 512)
        self.fc2 = nn.Linear(512, 4)

    @override
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc2(torch.tanh(self.fc1(x)))
        return y


class Gauge(Callback):
    """Reads off what each process has, every hundred steps."""

    def __init__(self, pids: list[int]) -> None:
        self.processes = [psutil.Process(pid) for pid in [*pids, os.getpid()]]
        self.read: list[list[tuple[float, int, int]]] = []

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if trainer.global_step % SETTLED == 0:
            gc.collect()
            self.read.append([(p.memory_info().rss / 2**20, p.num_threads(), p.num_fds()) for p in self.processes])


@pytest.mark.parametrize("options", [{}, {"schedule": "1f1b"}, {"data_parallel_size": 2, "pipeline_parallel_size": 1}], ids=str)
def test_nothing_piles_up(options: dict[str, Any], spare_workers: SpareWorkers) -> None:
    workers = spare_workers.running(2)
    gauge = Gauge(workers.pids)
    strategy = PipelineStrategy(num_microbatches=2, workers=workers, **options)
    loader = rows(torch.randn(64 * 20, 512), torch.randn(64 * 20, 4), batch_size=64)
    make_trainer(strategy, devices=2, max_epochs=-1, max_steps=NUM_STEPS, callbacks=[gauge]).fit(Wide(), loader)
    early, *_, late = gauge.read
    assert len(gauge.read) == NUM_STEPS // SETTLED
    for (before_mib, threads, files), (after_mib, threads_later, files_later) in zip(early, late, strict=True):
        assert after_mib - before_mib < SLACK_MIB
        assert threads_later <= threads
        assert files_later <= files
