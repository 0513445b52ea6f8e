"""Where and how files are written: a plugin of the user's own, other filesystems, and a process killed meanwhile."""

from __future__ import annotations

import copy
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.pytorch.plugins import AsyncCheckpointIO

from lightning_mgpu import PipelineStrategy
from lightning_mgpu.strategies.checkpoint_io import PipelineCheckpointIO
from tests.checkpoints.runs import ResumableLoader, SaveAt, Tied, assert_equal_runs, built, make_trainer, other_rows, run
from tests.harness import repeatable
from tests.strategies.warm_workers import WarmWorkers

KILLED_WHILE_SAVING = """
import os, signal, sys
import torch
from lightning_mgpu.strategies.checkpoint_io import PipelineCheckpointIO

class Last(torch.nn.Module):
    def __reduce__(self):
        os.kill(os.getpid(), signal.SIGKILL)

PipelineCheckpointIO().save_checkpoint({"state_dict": {"w": torch.zeros(10_000)}, "last": Last()}, sys.argv[1])
"""
KILLED_WHILE_WRITING = """
import os, signal, sys
import torch
from lightning_mgpu.runtime import replacing
from lightning_mgpu.strategies.checkpoint_io import PipelineCheckpointIO

replacing._flush = lambda partial: os.kill(os.getpid(), signal.SIGKILL)
PipelineCheckpointIO().save_checkpoint({"state_dict": {"w": torch.zeros(10_000)}}, sys.argv[1])
"""


class Noted(CheckpointIO):
    """Keeps checkpoints in memory."""

    def __init__(self) -> None:
        self.kept: dict[str, Any] = {}
        self.removed: list[str] = []

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        self.kept[str(path)] = (copy.deepcopy(checkpoint), storage_options)

    def load_checkpoint(self, path: Any, map_location: Any | None = None, weights_only: bool | None = None) -> Any:
        return self.kept[str(path)][0]

    def remove_checkpoint(self, path: Any) -> None:
        self.removed.append(str(path))


@pytest.mark.parametrize("how", ["plugins", "checkpoint_io"])
def test_a_plugin_of_the_users_own(how: str, warm_workers: WarmWorkers) -> None:
    plugin = Noted()
    arguments = {"plugins": [plugin]} if how == "plugins" else {"strategy": {"checkpoint_io": plugin}}
    whole = run(built(Tied), 2, warm_workers, SaveAt({3: Path("nowhere")}), **arguments)
    resumed = run(built(Tied), 3, warm_workers, ckpt_path="nowhere", **arguments)
    resumed.metrics = {}
    assert_equal_runs(whole.since(3), resumed)
    assert list(plugin.kept) == ["nowhere"]
    with warm_workers.lend(2) as workers:
        trainer = make_trainer(2, workers, max_steps=1, **arguments)
        trainer.fit(built(Tied), ResumableLoader(), other_rows())
        trainer.save_checkpoint("elsewhere", storage_options={"a": 1})
        trainer.strategy.remove_checkpoint("nowhere")
    assert plugin.kept["elsewhere"][1] == {"a": 1}
    assert plugin.removed == ["nowhere"]


def test_which_plugin_is_used() -> None:
    assert type(PipelineStrategy().checkpoint_io) is PipelineCheckpointIO
    plain = TorchCheckpointIO()
    assert PipelineStrategy(checkpoint_io=plain).checkpoint_io is plain
    assert type(PipelineStrategy(checkpoint_io=AsyncCheckpointIO()).checkpoint_io.checkpoint_io) is PipelineCheckpointIO
    assert PipelineStrategy(checkpoint_io=AsyncCheckpointIO(plain)).checkpoint_io.checkpoint_io is plain


def test_lightnings_asynchronous_plugin(warm_workers: WarmWorkers, tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    whole = run(built(Tied), 2, warm_workers, SaveAt({3: path}), plugins=[AsyncCheckpointIO()])
    resumed = run(built(Tied), 2, warm_workers, ckpt_path=path)
    resumed.metrics = {}
    assert_equal_runs(whole.since(3), resumed, exact=True)


@pytest.fixture
def in_memory() -> Iterator[str]:
    """A folder of fsspec's filesystem in memory, which is emptied afterwards."""
    yield "memory://checkpoints"
    fsspec.filesystem("memory").rm("/checkpoints", recursive=True)


def test_another_filesystem(in_memory: str, warm_workers: WarmWorkers) -> None:
    path = f"{in_memory}/x.ckpt"
    with repeatable(), warm_workers.lend(2) as workers:
        module, trainer = built(Tied), make_trainer(2, workers)
        trainer.fit(module, ResumableLoader(), other_rows())
        trainer.save_checkpoint(path)
        expected = trainer.validate(module, other_rows(), verbose=False)
        found = trainer.validate(built(Tied), other_rows(), ckpt_path=path, weights_only=True, verbose=False)
        assert found == expected
        trainer.strategy.remove_checkpoint(path)
    assert not fsspec.filesystem("memory").exists("/checkpoints/x.ckpt")
    with fsspec.open(f"{in_memory}/left", "w") as file:
        file.write("something to remove")


def test_local_addresses(tmp_path: Path) -> None:
    plugin, content = PipelineCheckpointIO(), {"state_dict": {"w": torch.arange(3)}}
    for path in (f"file://{tmp_path}/a.ckpt", f"local://{tmp_path}/b.ckpt", str(tmp_path / "c.ckpt"), tmp_path / "below" / "d"):
        plugin.save_checkpoint(content, path)
        assert torch.equal(plugin.load_checkpoint(path, weights_only=True)["state_dict"]["w"], torch.arange(3))
        plugin.remove_checkpoint(path)
    assert [path.name for path in tmp_path.rglob("*")] == ["below"]
    with pytest.raises(TypeError, match="storage_options"):
        plugin.save_checkpoint(content, tmp_path / "x", storage_options={"a": 1})


@pytest.mark.parametrize("script", [KILLED_WHILE_SAVING, KILLED_WHILE_WRITING], ids=["saving", "writing"])
def test_the_old_one_stays_where_the_process_is_killed(script: str, tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    PipelineCheckpointIO().save_checkpoint({"state_dict": {"w": torch.ones(10_000)}}, path)
    written = path.read_bytes()
    killed = subprocess.run(
        [sys.executable, "-c", script, path], check=False, env={**os.environ, "LIGHTNING_MGPU_ROLE": "worker"}
    )
    assert killed.returncode == -signal.SIGKILL
    assert path.read_bytes() == written
    assert len(list(tmp_path.iterdir())) == 2, "it was killed before it wrote anything"
    PipelineCheckpointIO().save_checkpoint({"state_dict": {"w": torch.ones(10_000)}}, path)
    assert list(tmp_path.iterdir()) == [path]


def test_a_checkpoint_may_be_a_link(tmp_path: Path) -> None:
    """The link is replaced, as Lightning does, and what it points to stays."""
    (tmp_path / "a").write_text("old")
    (tmp_path / "last").symlink_to("a")
    PipelineCheckpointIO().save_checkpoint({"state_dict": {}}, tmp_path / "last")
    assert (tmp_path / "a").read_text() == "old"
    assert not (tmp_path / "last").is_symlink()
