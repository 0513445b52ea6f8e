"""The pipeline on CUDA devices, over NCCL where there are several; skipped where there are none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer, seed_everything

from lightning_mgpu import PipelineStrategy
from lightning_mgpu.errors import StageError
from lightning_mgpu.examples import CNN, DigitsDataModule
from lightning_mgpu.timeline import Timeline

pytestmark = pytest.mark.gpu

NUM_GPUS = torch.cuda.device_count()


def train(strategy: Any, devices: int) -> tuple[CNN, Trainer]:
    """Trains the documents' CNN for three steps."""
    seed_everything(0, verbose=False)
    module = CNN()
    trainer = Trainer(
        accelerator="gpu",
        devices=devices,
        strategy=strategy,
        max_steps=3,
        limit_val_batches=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DigitsDataModule())
    return module, trainer


def needs(num_gpus: int) -> pytest.MarkDecorator:
    """Skips a test where there are fewer GPUs."""
    return pytest.mark.skipif(num_gpus > NUM_GPUS, reason=f"needs {num_gpus} GPUs")


@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=needs(2)), pytest.param(4, marks=needs(4))])
def test_equals_one_gpu(devices: int) -> None:
    whole, _ = train("auto", 1)
    cut, trainer = train(PipelineStrategy(num_microbatches=4, timeline=True), devices)
    for (name, expected), (_, got) in zip(whole.named_parameters(), cut.named_parameters(), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")
    timeline: Timeline = trainer.strategy.timeline  # type: ignore[attr-defined]
    assert timeline.num_stages == devices


@needs(2)
def test_the_lead_has_the_first_gpu() -> None:
    _, trainer = train(PipelineStrategy(num_microbatches=4), 2)
    assert trainer.strategy.root_device == torch.device("cuda", 0)


@needs(2)
def test_a_killed_worker_is_noticed() -> None:
    class Kill(CNN):
        def on_train_batch_end(self, *_: Any) -> None:
            import os
            import signal

            os.kill(self.trainer.strategy.workers.pids[0], signal.SIGKILL)  # type: ignore[attr-defined]

    seed_everything(0, verbose=False)
    trainer = Trainer(accelerator="gpu", devices=2, strategy="mgpu_pipeline", max_steps=3, logger=False)
    with pytest.raises(StageError, match="killed by signal 9"):
        trainer.fit(Kill(), DigitsDataModule())
