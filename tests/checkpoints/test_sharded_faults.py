"""What goes wrong with sharded checkpoints is said, and neither the run nor an earlier checkpoint is lost."""

from __future__ import annotations

import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer

from lightning_mgpu.errors import CheckpointError
from lightning_mgpu.runtime import messages as m
from lightning_mgpu.runtime import sharded
from lightning_mgpu.runtime.sharded_folder import read_sharded
from tests.checkpoints.runs import ResumableLoader, SaveAt, Tied, built, make_trainer, other_rows, run
from tests.strategies.warm_workers import WarmWorkers

SHARDED = {"save_distributed_checkpoint": True}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, warm_workers: WarmWorkers) -> Path:
    """Saves a checkpoint of two stages."""
    path = tmp_path_factory.mktemp("sharded") / "x"
    run(built(Tied), 2, warm_workers, SaveAt({1: path}), strategy=SHARDED, max_steps=1, max_epochs=-1)
    return path


def test_a_worker_that_cannot_write_is_named_and_the_old_one_stays(
    warm_workers: WarmWorkers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.ckpt"

    class SaveTwice(Callback):
        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            if trainer.global_step == 1:
                trainer.save_checkpoint(path)
                before = {child.name: child.read_bytes() for child in path.iterdir()}
                with monkeypatch.context() as patched:
                    patched.setattr(sharded, "_told_to_write", into_no_folder)
                    with pytest.raises(CheckpointError) as caught:
                        trainer.save_checkpoint(path)
                self.said = str(caught.value)
                assert {child.name: child.read_bytes() for child in path.iterdir()} == before

    callback = SaveTwice()
    made = run(built(Tied), 2, warm_workers, callback, strategy=SHARDED)
    assert callback.said.startswith("the sharded checkpoint was not written: process 0: FileNotFoundError: ")
    assert callback.said.endswith("; what was there before is still there")
    assert list(tmp_path.iterdir()) == [path]
    assert made.progress == (2, 10)  # the run goes on


def into_no_folder(lead: Any, plans: Any) -> Any:
    """Tells workers to write where they can't."""
    waits = [lead.workers.writing(process) for process in range(len(plans))]
    for process, plan in enumerate(plans):
        plan.storage_data.prefix = "no such folder/"
        lead.workers.tell(process, m.WriteShard(plan))
    return waits


class ReadsValues(Tied):
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {k: v.half() for k, v in super().state_dict(*args, **kwargs).items()}


class NumbersItsState(Tied):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"]["extra"] = {0: torch.zeros(1)}


class DropsAnOptimizer(Tied):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["optimizer_states"] *= 2


@pytest.mark.parametrize(
    ("module", "says"),
    [
        (
            ReadsValues,
            "since making it reads their values (parameter 'fc1.bias' lives on stage 0",
        ),
        (NumbersItsState, "state_dict.extra has the key 0 of type int, and a sharded checkpoint keeps strings only"),
        (DropsAnOptimizer, "optimizer_states has 2 entries for 1 optimizers, so a hook has changed it"),
    ],
)
def test_what_no_folder_keeps(module: type[Tied], says: str, warm_workers: WarmWorkers, tmp_path: Path) -> None:
    class Save(Callback):
        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            with pytest.raises(CheckpointError) as caught:
                trainer.save_checkpoint(tmp_path / "x")
            assert says in str(caught.value)
            assert str(caught.value).endswith("use save_distributed_checkpoint=False")

    assert run(built(module), 2, warm_workers, Save(), strategy=SHARDED).progress == (2, 10)
    assert not list(tmp_path.iterdir())


def test_what_lies_elsewhere_is_not_for_folders(warm_workers: WarmWorkers) -> None:
    with warm_workers.lend(2) as workers:
        trainer = make_trainer(2, workers, strategy=SHARDED, max_steps=1)
        trainer.fit(built(Tied), ResumableLoader(), other_rows())
        with pytest.raises(CheckpointError, match="writes folders on a local disk, and 'memory://x' is elsewhere; use a local"):
            trainer.save_checkpoint("memory://x")
        with pytest.raises(TypeError, match="storage_options=1 is not possible with save_distributed_checkpoint=True"):
            trainer.save_checkpoint("x", storage_options=1)


@pytest.mark.parametrize("lost", ["__0_0.distcp", ".metadata", "meta.pt"])
@pytest.mark.parametrize("how", ["missing", "cut short"])
def test_a_folder_that_lost_a_part(lost: str, how: str, saved: Path, tmp_path: Path) -> None:
    folder = tmp_path / "x"
    shutil.copytree(saved, folder)
    if how == "missing":
        (folder / lost).unlink()
    else:
        content = (folder / lost).read_bytes()
        (folder / lost).write_bytes(content[: len(content) // 2])
    with pytest.raises(CheckpointError) as caught:
        read_sharded(folder)
    said = str(caught.value)
    if how == "missing" and lost != "__0_0.distcp":
        assert f"'{folder}' is a folder, but no sharded checkpoint: it lacks {lost} and holds " in said
    else:
        assert said.startswith(f"the sharded checkpoint '{folder}' can't be read: ")
        assert said.endswith("; a file of it is missing or was cut short; use another checkpoint")


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("true",)


def test_metadata_is_no_way_to_run_code(saved: Path, tmp_path: Path) -> None:
    folder = tmp_path / "x"
    shutil.copytree(saved, folder)
    (folder / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(CheckpointError, match=r"\.metadata: holds \w+\.system, which no metadata does"):
        read_sharded(folder)
