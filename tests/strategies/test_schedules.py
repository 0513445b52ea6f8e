"""Every schedule gives the gradients of accumulation over its microbatches, and those of one device on the whole batch."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from lightning_mgpu import PipelineStrategy
from lightning_mgpu.examples import DigitsDataModule
from tests.harness import RunRecord, assert_same, run_fit, run_on_one_device
from tests.strategies.accumulation import accumulating
from tests.strategies.test_equality import AdamWCNN
from tests.strategies.warm_workers import WarmWorkers
from tests.zoo.case import Case
from tests.zoo.cases import GENERAL

BY_MICROBATCH = ("1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipe_v")
OTHERS = BY_MICROBATCH[1:]

CASES = {case.name: case for case in (*GENERAL, Case(AdamWCNN, DigitsDataModule))}

# Several calls of the module in a step, or backwards of its own: refused.
REFUSED = {"Gan", "TwoChildren", "Siamese"}

# Here the same terms are added up in another order: what an earlier batch left is added last; a parameter of two stages, or
# of the step beside the module, gets its gradient in parts; a transposed activation arrives contiguous.
ROUNDED = {
    "AttentiveReader",
    "CalledTwice",
    "Gpt2",
    "Mlp-accumulated-and-clipped",
    "SequenceFirst",
    "T5",
    "TiedHead",
    "WeightPenalty",
}

DEEP = ("AdamWCNN", "CNN", "UNet", "ResidualNet", "EncoderDecoder", "Llama", "Vit")
DEEP_AND_REUSING = ("Gpt2", "T5")


def run(case: Case, schedule: str, num_devices: int, warm_workers: WarmWorkers, **trainer: Any) -> RunRecord:
    with warm_workers.lend(num_devices) as workers:
        strategy = PipelineStrategy(schedule=schedule, num_microbatches=case.num_microbatches, workers=workers, **case.strategy)
        return run_fit(case.module, case.data, strategy=strategy, devices=num_devices, **(case.trainer() | trainer))


def reference(case: Case, **trainer: Any) -> RunRecord:
    return run_fit(accumulating(case.module, case.num_microbatches), case.data, **(case.trainer() | trainer))


def numbers(record: RunRecord) -> RunRecord:
    """Keeps what training made, without what is logged and what the module counts for itself."""
    losses = [{"loss": step["loss"]} if "loss" in step else {} for step in record.steps]
    return RunRecord(losses, record.gradients, record.weights, {}, record.optimizers)


@pytest.mark.parametrize("name", sorted(CASES.keys() - REFUSED))
def test_1f1b_is_accumulation(name: str, warm_workers: WarmWorkers) -> None:
    found = numbers(run(CASES[name], "1f1b", 2, warm_workers))
    assert_same(numbers(reference(CASES[name])), found, exact=name not in ROUNDED)


@pytest.mark.parametrize("schedule", OTHERS)
@pytest.mark.parametrize("name", DEEP)
def test_other_schedules_are_accumulation(name: str, schedule: str, warm_workers: WarmWorkers) -> None:
    found = numbers(run(CASES[name], schedule, 2, warm_workers))
    assert_same(numbers(reference(CASES[name])), found, exact=name not in ROUNDED)


@pytest.mark.parametrize("schedule", OTHERS)
@pytest.mark.parametrize("name", DEEP_AND_REUSING)
def test_stages_share_parameters(name: str, schedule: str, warm_workers: WarmWorkers) -> None:
    assert_same(numbers(reference(CASES[name])), numbers(run(CASES[name], schedule, 2, warm_workers)))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zbv"])
@pytest.mark.parametrize("name", ["CNN", "ResidualNet", "Gpt2", "Codebook", "LayersAroundModel", "FrozenTeacher"])
def test_recomputed_activations_are_the_same(name: str, schedule: str, warm_workers: WarmWorkers) -> None:
    """Dropout draws the same masks again, batch norm counts its statistics once, a stage that changes buffers runs once."""
    case = CASES[name]
    if schedule == "zbv" and name not in (*DEEP, *DEEP_AND_REUSING):
        schedule = "gpipe"
    kept = run(case, schedule, 2, warm_workers)
    for value in (True, "all but last"):
        strategy = {**case.strategy, "activation_checkpointing": value}
        again = run(dataclasses.replace(case, strategy=strategy), schedule, 2, warm_workers)
        assert_same(kept, again, exact=name not in ROUNDED)


@pytest.mark.parametrize("name", [*DEEP, *DEEP_AND_REUSING])
def test_looped_bfs_sees_the_whole_batch(name: str, warm_workers: WarmWorkers) -> None:
    case = CASES[name]
    record = run(case, "looped_bfs", 2, warm_workers, validate=case.validate, predict=case.predict)
    assert_same(run_on_one_device(case), record)
