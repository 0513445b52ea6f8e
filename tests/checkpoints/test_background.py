"""Checkpoints that are written while training goes on are those of the moment they were asked for."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from typing_extensions import override

from lightning_mgpu.errors import StageError
from lightning_mgpu.runtime import replacing
from lightning_mgpu.runtime.background import Background, Snapshot
from lightning_mgpu.runtime.sharded_folder import read_sharded
from tests.checkpoints.runs import ResumableLoader, SaveAt, Tied, assert_equal_runs, built, make_trainer, other_rows, run
from tests.harness import repeatable
from tests.strategies.warm_workers import WarmWorkers

KINDS = [False, True]  # whether the checkpoint is sharded


class Gate:
    """Holds the last step of every writing back until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened = threading.Event()
        put = replacing._put

        def held_back(*paths: Path) -> None:
            assert self.opened.wait(60)
            put(*paths)

        monkeypatch.setattr(replacing, "_put", held_back)


class SaveAndGoOn(SaveAt):
    """Opens the gate some steps after it saved, when nothing may be there yet."""

    def __init__(self, gate: Gate, path: Path, step: int, opens_at: int) -> None:
        super().__init__({step: path})
        self.gate, self.path, self.opens_at = gate, path, opens_at

    @override
    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        super().on_train_batch_end(trainer)
        if trainer.global_step == self.opens_at:
            assert not self.path.exists()
            self.gate.opened.set()


@pytest.mark.parametrize("is_sharded", KINDS)
def test_is_that_of_the_moment(
    is_sharded: bool, warm_workers: WarmWorkers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x"
    callback = SaveAndGoOn(Gate(monkeypatch), path, 3, 7)
    strategy = {"async_save": True, "save_distributed_checkpoint": is_sharded}
    whole = run(built(Tied), 3, warm_workers, callback, strategy=strategy)
    assert [child.name for child in tmp_path.iterdir()] == ["x"]
    resumed = run(built(Tied), 3, warm_workers, ckpt_path=path, weights_only=True)
    resumed.metrics = {}
    assert_equal_runs(whole.since(3), resumed, exact=True)


@pytest.mark.parametrize("is_sharded", KINDS)
def test_is_there_when_fit_returns_and_when_it_is_saved_afterwards(
    is_sharded: bool, warm_workers: WarmWorkers, tmp_path: Path
) -> None:
    strategy = {"async_save": True, "save_distributed_checkpoint": is_sharded}
    callback = ModelCheckpoint(
        tmp_path / "all", every_n_train_steps=1, save_top_k=2, monitor="step_loss", mode="max", filename="{step}"
    )
    with repeatable(), warm_workers.lend(2) as workers:
        trainer = make_trainer(2, workers, callback, strategy=strategy, enable_checkpointing=True)
        module = built(Logs)
        trainer.fit(module, ResumableLoader(), other_rows())
        assert sorted((tmp_path / "all").iterdir()) == sorted(map(Path, callback.best_k_models))
        trainer.save_checkpoint(tmp_path / "end")
    read = read_sharded(tmp_path / "end") if is_sharded else torch.load(tmp_path / "end", weights_only=True)
    for name, value in module.state_dict().items():
        assert torch.equal(read["state_dict"][name], value), name


class Logs(Tied):
    @override
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        self.log("step_loss", output["loss"])
        return output


class SaveOver(Callback):
    """Saves at some steps, and after a step removes an earlier one."""

    def __init__(self, path: Path, other: Path) -> None:
        self.path, self.other = path, other

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if trainer.global_step == 1:
            trainer.save_checkpoint(self.path)
        if trainer.global_step == 4:
            trainer.save_checkpoint(self.other)
            trainer.strategy.remove_checkpoint(self.path)


@pytest.mark.parametrize("is_sharded", KINDS)
def test_an_error_is_raised_later_and_the_earlier_one_stays(
    is_sharded: bool, warm_workers: WarmWorkers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = replacing._put

    def fails(partial: Path, target: Path) -> None:
        if target.name == "b":
            raise OSError("disk full")
        put(partial, target)

    monkeypatch.setattr(replacing, "_put", fails)
    strategy = {"async_save": True, "save_distributed_checkpoint": is_sharded}
    with pytest.raises(OSError, match="disk full"):
        run(built(Tied), 2, warm_workers, SaveOver(tmp_path / "a", tmp_path / "b"), strategy=strategy)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_what_cannot_be_pickled_is_said_at_once(warm_workers: WarmWorkers, tmp_path: Path) -> None:
    class Save(Callback):
        def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
            pl_module.hparams["lock"] = threading.Lock()
            with pytest.raises(TypeError, match="cannot pickle"):
                trainer.save_checkpoint(tmp_path / "x")
            del pl_module.hparams["lock"]

    run(built(Tied), 2, warm_workers, Save(), strategy={"async_save": True})
    assert not list(tmp_path.iterdir())


def test_a_worker_that_ends_meanwhile(warm_workers: WarmWorkers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run fails with the worker, and the checkpoint that it did not finish is not there."""

    class EndAWorker(Callback):
        def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
            if trainer.global_step == 1:
                trainer.save_checkpoint(tmp_path / "a")
            if trainer.global_step == 3:
                with monkeypatch.context() as patched:
                    patched.setattr("lightning_mgpu.runtime.sharded.m.WriteShard", NoAnswer)
                    trainer.save_checkpoint(tmp_path / "b")

    strategy = {"async_save": True, "save_distributed_checkpoint": True}
    said = "a checkpoint was not written: CheckpointError: .*process 0: it ended meanwhile"
    with pytest.warns(UserWarning, match=said), pytest.raises(StageError, match="a worker does not know the message NoAnswer"):
        run(built(Tied), 2, warm_workers, EndAWorker(), strategy=strategy)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


class NoAnswer:
    """Is a message that no worker knows, so that it ends."""

    def __init__(self, plan: Any) -> None:
        self.plan = plan


def test_jobs_are_done_in_order_and_their_errors_raised() -> None:
    background, done = Background(), []

    def fail() -> None:
        raise ValueError("first")

    background.start(lambda: done.append(1))
    background.start(fail)
    background.start(lambda: done.append(2))
    background.start(lambda: done.append(3), if_all_went_well=True)
    with pytest.raises(ValueError, match="first"):
        background.wait()
    assert done == [1, 2]
    background.check()
    assert not background.is_busy
    background.start(lambda: done.append(4), if_all_went_well=True)
    background.wait()
    assert done == [1, 2, 4]


def test_a_snapshot_stays_as_it_was() -> None:
    weight, fresh = torch.ones(4, 4), torch.ones(2)
    state = {
        "a": weight.detach(),
        "tied": weight.detach(),
        "column": weight[:, 0],
        "fresh": fresh,
        "list": [1],
        "none": torch.empty(0),
    }
    snapshot = Snapshot(state, {id(fresh)})
    weight.zero_()
    state["list"].append(2)
    found = snapshot.open()
    assert torch.equal(found["a"], torch.ones(4, 4))
    assert found["a"] is found["tied"]
    assert torch.equal(found["column"], torch.ones(4))
    assert found["fresh"] is fresh
    assert found["list"] == [1]
    assert found["none"].shape == (0,)
