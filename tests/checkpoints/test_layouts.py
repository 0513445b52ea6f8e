"""A checkpoint of any layout goes on under any other, as if nothing had happened, in the middle of an epoch too."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule

from tests.checkpoints.runs import ByHand, Normalised, Run, SaveAt, Tied, assert_equal_runs, built, run
from tests.strategies.warm_workers import WarmWorkers

LAYOUTS = [0, 2, 3]  # stages; 0 is one device without the pipeline
STEPS = [3, 5, 8]  # in the middle of the first epoch, at its end, in the middle of the second
CASES: dict[type[LightningModule], dict[str, Any]] = {
    Tied: {"num_microbatches": 4},
    Normalised: {"num_microbatches": 1},  # batch norm looks across the batch
}


class Uninterrupted:
    """Keeps one run for each module and layout, with the checkpoints it saved on its way."""

    def __init__(self, folder: Path, warm_workers: WarmWorkers) -> None:
        self.folder = folder
        self.warm_workers = warm_workers
        self.runs: dict[tuple[Any, ...], Run] = {}

    def path(self, module: type[LightningModule], layout: int, step: int) -> Path:
        return self.folder / f"{module.__name__}-{layout}-{step}.ckpt"

    def run(self, module: type[LightningModule], layout: int) -> Run:
        if (module, layout) not in self.runs:
            save = SaveAt({step: self.path(module, layout, step) for step in STEPS})
            made = run(built(module), layout, self.warm_workers, save, strategy=CASES[module])
            self.runs[module, layout] = made
        return self.runs[module, layout]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, warm_workers: WarmWorkers) -> Uninterrupted:
    return Uninterrupted(tmp_path_factory.mktemp("layouts"), warm_workers)


@pytest.mark.parametrize("module", CASES)
@pytest.mark.parametrize(("saved_on", "resumed_on"), list(itertools.product(LAYOUTS, LAYOUTS)))
@pytest.mark.parametrize("step", STEPS)
def test_goes_on(
    module: type[LightningModule],
    saved_on: int,
    resumed_on: int,
    step: int,
    uninterrupted: Uninterrupted,
    warm_workers: WarmWorkers,
) -> None:
    uninterrupted.run(module, saved_on)
    path = uninterrupted.path(module, saved_on, step)
    resumed = run(built(module), resumed_on, warm_workers, ckpt_path=path, weights_only=True, strategy=CASES[module])
    resumed.metrics = {}
    assert list(resumed.losses) == list(range(step + 1, 11))
    assert_equal_runs(uninterrupted.run(module, 0).since(step), resumed)
    if saved_on == resumed_on:
        assert_equal_runs(uninterrupted.run(module, saved_on).since(step), resumed, exact=True)


REPLICAS = {"num_microbatches": 2, "data_parallel_size": 2}
PAIRS = [  # devices, and options of the strategy
    pytest.param((0, {}), (4, REPLICAS), id="one device to 2x2"),
    pytest.param((4, REPLICAS), (0, {}), id="2x2 to one device"),
    pytest.param((4, REPLICAS), (4, REPLICAS), id="2x2 to 2x2"),
    pytest.param((3, {"num_microbatches": 4}), (2, REPLICAS), id="3x1 to 1x2"),
    pytest.param((2, REPLICAS), (3, {"num_microbatches": 4}), id="1x2 to 3x1"),
    pytest.param((4, REPLICAS | {"save_distributed_checkpoint": True}), (2, REPLICAS), id="2x2 in shards to 1x2"),
]


@pytest.mark.parametrize(("saved_on", "resumed_on"), PAIRS)
def test_goes_on_over_replicas(
    saved_on: tuple[int, dict[str, Any]],
    resumed_on: tuple[int, dict[str, Any]],
    uninterrupted: Uninterrupted,
    tmp_path: Path,
    warm_workers: WarmWorkers,
) -> None:
    (num_devices, options), path = saved_on, tmp_path / "saved.ckpt"
    whole = run(built(Tied), num_devices, warm_workers, SaveAt({3: path}), strategy=options)
    num_devices, options = resumed_on
    resumed = run(built(Tied), num_devices, warm_workers, ckpt_path=path, weights_only=True, strategy=options)
    resumed.metrics = {}
    assert list(resumed.losses) == list(range(4, 11))
    assert_equal_runs(uninterrupted.run(Tied, 0).since(3), resumed)
    assert_equal_runs(uninterrupted.run(Tied, 0).since(3), whole.since(3))


@pytest.mark.parametrize("module", CASES)
@pytest.mark.parametrize("layout", LAYOUTS[1:])
@pytest.mark.parametrize("step", STEPS)
def test_has_the_keys_and_values_of_one_device(
    module: type[LightningModule], layout: int, step: int, uninterrupted: Uninterrupted
) -> None:
    for each in (0, layout):
        uninterrupted.run(module, each)
    one, cut = (torch.load(uninterrupted.path(module, each, step), weights_only=True) for each in (0, layout))
    assert list(one) == list(cut)
    assert list(one["state_dict"]) == list(cut["state_dict"])
    assert type(one["state_dict"]) is type(cut["state_dict"])
    assert one["state_dict"]._metadata == cut["state_dict"]._metadata
    torch.testing.assert_close(dict(cut["state_dict"]), dict(one["state_dict"]), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(cut["optimizer_states"], one["optimizer_states"], rtol=1e-4, atol=1e-6)
    assert cut["lr_schedulers"] == one["lr_schedulers"]
    assert cut["loops"] == one["loops"]


@pytest.mark.parametrize("is_sharded", [False, True])
@pytest.mark.parametrize(("saved_on", "resumed_on"), [(0, 3), (2, 3), (3, 2), (3, 3)])
def test_several_optimizers(
    saved_on: int, resumed_on: int, is_sharded: bool, warm_workers: WarmWorkers, tmp_path: Path
) -> None:
    path, strategy = tmp_path / "x", {"save_distributed_checkpoint": is_sharded}
    whole = run(built(ByHand), saved_on, warm_workers, SaveAt({6: path}), strategy=strategy)
    resumed = run(built(ByHand), resumed_on, warm_workers, ckpt_path=path, weights_only=True)
    assert list(resumed.losses) == [8, 10, 12, 14, 16, 18, 20]
    assert [len(optimizer["state"]) for optimizer in resumed.optimizers] == [3, 4]
    resumed.metrics = {}
    assert_equal_runs(whole.since(6), resumed, exact=saved_on == resumed_on)


@pytest.mark.parametrize("is_sharded", [False, True])
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b"])
def test_other_schedules(
    schedule: str, is_sharded: bool, uninterrupted: Uninterrupted, warm_workers: WarmWorkers, tmp_path: Path
) -> None:
    """Two stages may share a process then."""
    path, strategy = tmp_path / "x", {"schedule": schedule, "num_microbatches": 4}
    sharded = {**strategy, "save_distributed_checkpoint": is_sharded}
    whole = run(built(Tied), 2, warm_workers, SaveAt({3: path}), strategy=sharded)
    assert_equal_runs(uninterrupted.run(Tied, 0), whole)
    resumed = run(built(Tied), 2, warm_workers, ckpt_path=path, weights_only=True, strategy=strategy)
    resumed.metrics = {}
    assert_equal_runs(whole.since(3), resumed, exact=True)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_tied_weight_is_one_in_the_file(layout: int, uninterrupted: Uninterrupted) -> None:
    uninterrupted.run(Tied, layout)
    state = torch.load(uninterrupted.path(Tied, layout, 3), weights_only=True)["state_dict"]
    assert state["fc1.weight"].data_ptr() == state["fc3.weight"].data_ptr()
