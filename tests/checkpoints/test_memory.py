"""How much memory the lead needs to save: what it gathers once, and nothing where every process writes its own."""

from __future__ import annotations

import ctypes
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.optim import SGD
from typing_extensions import override

from tests.checkpoints.runs import make_trainer
from tests.harness import repeatable
from tests.strategies.warm_workers import WarmWorkers
from tests.zoo.data import rows

NUM_LAYERS = 12
WIDTH = 1024
LAYER_BYTES = 4 * WIDTH * WIDTH
AWAY_BYTES = 2 * (NUM_LAYERS - 4) * LAYER_BYTES  # weights and momentum of two stages of three
OWN_BYTES = 2 * 4 * LAYER_BYTES


class Deep(LightningModule):
    """Is large enough for its parameters to outweigh everything else."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_LAYERS)))

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.layers(batch[0]).mean()
        return loss

    @override
    def configure_optimizers(self) -> Any:
        return SGD(self.parameters(), lr=0.1, momentum=0.9)


class Measure(Callback):
    """Saves a checkpoint twice, and measures how much more memory the second time takes at most."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.extra_bytes = 0

    @override
    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        trainer.save_checkpoint(self.path)  # makes what is made once, as threads and imports
        trainer.strategy._background.wait()
        ctypes.CDLL(None).malloc_trim(0)  # gives back what was freed, which would serve again unseen
        Path("/proc/self/clear_refs").write_text("5")  # forgets the peak of the past
        before_bytes = memory_bytes("VmRSS")
        trainer.save_checkpoint(self.path)
        trainer.strategy._background.wait()
        self.extra_bytes = memory_bytes("VmHWM") - before_bytes


def memory_bytes(what: str) -> int:
    found = re.search(rf"{what}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found[1])


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize(
    ("strategy", "most_bytes"),
    [
        ({}, AWAY_BYTES),
        ({"async_save": True}, AWAY_BYTES + OWN_BYTES),
        ({"save_distributed_checkpoint": True}, 0),
        ({"save_distributed_checkpoint": True, "async_save": True}, OWN_BYTES),
    ],
    ids=["file", "file in the background", "folder", "folder in the background"],
)
def test_holds_no_value_twice(strategy: dict[str, Any], most_bytes: int, warm_workers: WarmWorkers, tmp_path: Path) -> None:
    callback = Measure(tmp_path / "x")
    with repeatable(), warm_workers.lend(3) as workers:
        options = {"num_microbatches": 1, "self_check": False, "cuts": ["layers.4", "layers.8"], **strategy}
        trainer = make_trainer(3, workers, callback, strategy=options, max_steps=1, limit_val_batches=0)
        trainer.fit(Deep(), rows(torch.randn(4, WIDTH), batch_size=4))
    saved_bytes = sum(f.stat().st_size for f in [tmp_path / "x", *tmp_path.glob("x/*")] if f.is_file())
    assert saved_bytes > AWAY_BYTES + OWN_BYTES
    slack_bytes = 3 * LAYER_BYTES  # what the file is written through, a tensor at a time
    assert most_bytes - slack_bytes < callback.extra_bytes < most_bytes + slack_bytes
