"""Sharded checkpoints: written by each process, read by torch's own tools, Lightning, and every layout of the pipeline."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.load import _load_distributed_checkpoint
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from lightning_mgpu.runtime.sharded_folder import by_name, by_number, read_sharded
from lightning_mgpu.strategies.checkpoint_io import PipelineCheckpointIO
from tests.checkpoints.runs import (
    Normalised,
    ResumableLoader,
    Run,
    SaveAt,
    Tied,
    assert_equal_runs,
    built,
    make_trainer,
    other_rows,
    run,
)
from tests.harness import repeatable
from tests.strategies.warm_workers import WarmWorkers

SHARDED = {"save_distributed_checkpoint": True}
CASES: dict[type[LightningModule], dict[str, Any]] = {
    Tied: {"num_microbatches": 4},
    Normalised: {"num_microbatches": 1},
}
NO_DIST = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Saved:
    """Keeps one run for each module and number of stages, with the folder and the file it saved after the third step."""

    def __init__(self, folder: Path, warm_workers: WarmWorkers) -> None:
        self.folder = folder
        self.warm_workers = warm_workers
        self.runs: dict[tuple[Any, ...], Run] = {}

    def path(self, module: type[LightningModule], layout: int, *, sharded: bool = True) -> Path:
        """Trains if nobody has, and returns the checkpoint."""
        path = self.folder / f"{module.__name__}-{layout}-{sharded}"
        if not path.exists():
            strategy = CASES[module] | {"save_distributed_checkpoint": sharded}
            self.runs[module, layout] = run(built(module), layout, self.warm_workers, SaveAt({3: path}), strategy=strategy)
        return path

    def run(self, module: type[LightningModule], layout: int) -> Run:
        self.path(module, layout)
        return self.runs[module, layout].since(3)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, warm_workers: WarmWorkers) -> Saved:
    return Saved(tmp_path_factory.mktemp("sharded"), warm_workers)


@pytest.mark.parametrize("module", CASES)
@pytest.mark.parametrize(("saved_on", "resumed_on"), list(itertools.product([2, 3], [0, 2, 3])))
def test_goes_on(
    module: type[LightningModule], saved_on: int, resumed_on: int, saved: Saved, warm_workers: WarmWorkers
) -> None:
    path = saved.path(module, saved_on)
    plugins = [PipelineCheckpointIO()] if resumed_on == 0 else []
    resumed = run(
        built(module), resumed_on, warm_workers, ckpt_path=path, weights_only=True, strategy=CASES[module], plugins=plugins
    )
    resumed.metrics = {}
    assert_equal_runs(saved.run(module, saved_on), resumed)
    if saved_on == resumed_on:
        assert_equal_runs(saved.run(module, saved_on), resumed, exact=True)


@pytest.mark.parametrize("module", CASES)
def test_holds_the_values_of_the_single_file_and_every_process_wrote_its_own(
    module: type[LightningModule], saved: Saved
) -> None:
    folder = saved.path(module, 3)
    assert sorted(child.name for child in folder.iterdir()) == [
        ".metadata", "__0_0.distcp", "__1_0.distcp", "__2_0.distcp", "meta.pt",
    ]  # fmt: skip
    one, many = torch.load(saved.path(module, 3, sharded=False), weights_only=True), read_sharded(folder)
    assert many.keys() == one.keys()
    assert list(many["state_dict"]) == list(one["state_dict"])
    assert many["state_dict"]._metadata == one["state_dict"]._metadata
    for name, value in one["state_dict"].items():
        assert torch.equal(many["state_dict"][name], value), name
    torch.testing.assert_close(many["optimizer_states"], one["optimizer_states"], rtol=0, atol=0)
    assert {k: v for k, v in many.items() if k not in ("state_dict", "optimizer_states")} == {
        k: v for k, v in one.items() if k not in ("state_dict", "optimizer_states")
    }
    sizes = [(folder / f"__{j}_0.distcp").stat().st_size for j in range(3)]
    assert max(sizes) < 0.7 * sum(sizes)


@NO_DIST
@pytest.mark.parametrize("module", CASES)
def test_torchs_own_tools_read_it(module: type[LightningModule], saved: Saved, tmp_path: Path) -> None:
    folder = saved.path(module, 2)
    expected = torch.load(saved.path(module, 2, sharded=False), weights_only=True)["state_dict"]
    loaded = {"state_dict": built(module).state_dict()}
    dcp.load(loaded, checkpoint_id=folder, no_dist=True)
    dcp_to_torch_save(folder, tmp_path / "x.pt")
    converted = torch.load(tmp_path / "x.pt", weights_only=True)
    for name, value in expected.items():
        assert torch.equal(loaded["state_dict"][name], value), name
        assert torch.equal(converted["state_dict"][name], value), name


@NO_DIST
@pytest.mark.parametrize("module", CASES)
def test_has_the_format_of_lightnings_model_parallel_strategy(module: type[LightningModule], saved: Saved) -> None:
    """Reads it as that strategy does, with torch's names for the optimizer's state."""
    folder, fresh = saved.path(module, 2), built(module)
    configured = fresh.configure_optimizers()
    optimizer = configured["optimizer"] if isinstance(configured, dict) else configured[0][0]
    state = {"optimizer_0": get_optimizer_state_dict(fresh, optimizer)}
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    set_optimizer_state_dict(fresh, optimizer, optim_state_dict=state["optimizer_0"])
    [expected] = torch.load(saved.path(module, 2, sharded=False), weights_only=True)["optimizer_states"]
    got = optimizer.state_dict()
    assert got["state"].keys() == expected["state"].keys()
    for number, values in expected["state"].items():
        torch.testing.assert_close(got["state"][number], values, rtol=0, atol=0)
    assert [group["lr"] for group in got["param_groups"]] == [group["lr"] for group in expected["param_groups"]]
    assert set(_load_distributed_checkpoint(folder)) >= {"state_dict", "optimizer_0", "loops", "callbacks", "lr_schedulers"}


def test_one_command_makes_it_a_file_for_any_device(saved: Saved, warm_workers: WarmWorkers, tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    command = [sys.executable, "-m", "lightning_mgpu.runtime.consolidate", saved.path(Normalised, 3), path]
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, env={**os.environ, "LIGHTNING_MGPU_ROLE": "worker"}
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"wrote {path}\n"
    again = subprocess.run(
        command, check=False, capture_output=True, text=True, env={**os.environ, "LIGHTNING_MGPU_ROLE": "worker"}
    )
    assert again.returncode == 1
    assert again.stderr == f"{path} is there already; name another file\n"
    resumed = run(built(Normalised), 0, warm_workers, ckpt_path=path, weights_only=True)
    resumed.metrics = {}
    assert_equal_runs(saved.run(Normalised, 3), resumed)


def test_is_the_same_before_the_first_call_and_after_fit(warm_workers: WarmWorkers, tmp_path: Path) -> None:
    """Nothing lives elsewhere then, so the lead writes all of it."""

    class AtStart(Callback):
        def on_train_start(self, trainer: Trainer, *_: Any) -> None:
            trainer.save_checkpoint(tmp_path / "start")

    module = built(Tied)
    start = {name: value.clone() for name, value in module.state_dict().items()}
    with repeatable(), warm_workers.lend(2) as workers:
        trainer = make_trainer(2, workers, AtStart(), strategy=SHARDED, limit_val_batches=0)
        trainer.fit(module, ResumableLoader(), other_rows())
        trainer.save_checkpoint(tmp_path / "end")
    for name, state in (("start", start), ("end", module.state_dict())):
        assert [child.name for child in (tmp_path / name).glob("*.distcp")] == ["__0_0.distcp"]
        read = read_sharded(tmp_path / name)["state_dict"]
        for key, value in state.items():
            assert torch.equal(read[key], value), key
    assert read_sharded(tmp_path / "end")["optimizer_states"][0]["state"]


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
def test_model_checkpoint_keeps_and_removes_folders(warm_workers: WarmWorkers, tmp_path: Path) -> None:
    callback = ModelCheckpoint(tmp_path / "all", monitor="val_loss", save_top_k=1, save_last=True, filename="{epoch}")
    with repeatable(), warm_workers.lend(2) as workers:
        module = built(Tied)
        trainer = make_trainer(2, workers, callback, strategy=SHARDED, max_epochs=4, enable_checkpointing=True)
        trainer.fit(module, ResumableLoader(), other_rows())
        best, last = Path(callback.best_model_path), Path(callback.last_model_path)
        assert sorted((tmp_path / "all").iterdir()) == sorted([best, last])
        [found] = trainer.test(module, other_rows(), ckpt_path="best", weights_only=True, verbose=False)
        assert callback.best_model_score is not None
        assert found["test_loss"] == pytest.approx(callback.best_model_score.item(), rel=1e-5)
        trainer.fit_loop.max_epochs = 5
        trainer.fit(module, ResumableLoader(), other_rows(), ckpt_path="last")
    assert trainer.global_step == 25


def test_a_file_and_a_folder_take_each_others_place(saved: Saved, warm_workers: WarmWorkers, tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    for is_folder in (True, False, True, True):
        strategy = {"save_distributed_checkpoint": is_folder}
        run(built(Tied), 2, warm_workers, SaveAt({1: path}), strategy=strategy, max_steps=1, max_epochs=-1)
        assert path.is_dir() == is_folder
        assert list(tmp_path.iterdir()) == [path]
    assert read_sharded(path)["global_step"] == 1


class Edits(Tied):
    """Replaces what is saved, as callbacks that average weights do, and leaves something out."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"]["fc2.weight"] = torch.zeros(8, 8)
        del checkpoint["state_dict"]["head.bias"]
        checkpoint["state_dict"]["more"] = {"list": [torch.ones(2)], "pair": (1, torch.ones(3))}
        del checkpoint["optimizer_states"]


def test_hooks_may_edit_it(warm_workers: WarmWorkers, tmp_path: Path) -> None:
    module = built(Edits)
    run(module, 3, warm_workers, SaveAt({10: tmp_path / "x"}), strategy=SHARDED)
    saved = read_sharded(tmp_path / "x")
    assert not saved["state_dict"]["fc2.weight"].any()
    assert "head.bias" not in saved["state_dict"]
    assert "optimizer_states" not in saved
    more = saved["state_dict"]["more"]
    assert torch.equal(more["list"][0], torch.ones(2))
    assert more["pair"][0] == 1
    assert torch.equal(more["pair"][1], torch.ones(3))
    for name in ("fc1.weight", "fc2.bias", "head.weight"):
        assert torch.equal(saved["state_dict"][name], module.state_dict()[name]), name


def test_numbers_and_names_of_parameters() -> None:
    state = {"state": {0: "a", 2: "c", "step": 1}, "param_groups": [{"lr": 1, "params": [0]}, {"lr": 2, "params": [1, 2]}]}
    named = by_name(state, [["x"], ["y", "z"]])
    assert named == {
        "state": {"x": "a", "z": "c", "step": 1},
        "param_groups": [{"lr": 1, "params": ["x"]}, {"lr": 2, "params": ["y", "z"]}],
    }
    assert by_number(named) == state


class AsksForOptimizerState(Callback):
    """Asks for the state of an optimizer between two steps, as a plugin of a user's may."""

    def __init__(self) -> None:
        self.states: list[dict[str, Any]] = []

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        state = trainer.strategy.optimizer_state(trainer.optimizers[0])["state"]
        weights = trainer.strategy.lightning_module_state_dict()
        shown = {name: float(weight.sum()) for name, weight in weights.items()}
        self.states.append({"optimizer": {number: sorted(each) for number, each in state.items()}, "names": list(shown)})


def test_who_asks_for_a_state_gets_it_whole(warm_workers: WarmWorkers) -> None:
    asked = {}
    for layout in (0, 2):
        asks = AsksForOptimizerState()
        run(built(Tied), layout, warm_workers, asks, strategy=SHARDED if layout else None)
        asked[layout] = asks.states
    assert asked[0] == asked[2]
    assert asked[0][-1]
