"""The zoo and the harness themselves, on one device: what is compared must repeat, and a difference must show."""

from __future__ import annotations

import os
from functools import partial

import pytest
import torch
from torch.utils.data import DataLoader

from tests.harness import RunRecord, assert_same, flatten, run_fit, run_on_one_device
from tests.zoo import data
from tests.zoo.case import Case
from tests.zoo.cases import CONTAINERS, GENERAL
from tests.zoo.steps import AdamWMlp, Mlp, SkippedStep

EVERY_CASE = [pytest.param(case, id=case.name) for case in (*GENERAL, *CONTAINERS)]


def train(case: Case) -> RunRecord:
    """Trains a case anew on one device."""
    return run_fit(case.module, case.data, validate=case.validate, predict=case.predict, **case.trainer())


@pytest.mark.parametrize("case", EVERY_CASE)
def test_a_case_repeats_bit_by_bit(case: Case) -> None:
    assert_same(run_on_one_device(case), train(case), exact=True)


@pytest.mark.parametrize("case", EVERY_CASE)
def test_a_case_trains_what_is_not_frozen(case: Case) -> None:
    record = run_on_one_device(case)
    assert record.steps
    assert all(torch.isfinite(value).all() for name, value in flatten(record) if isinstance(value, torch.Tensor))
    trained = {name for step in record.gradients for name in step}
    assert trained
    assert {name.split(".")[0] for name in record.weights if name not in trained} == set(case.untrained)


def test_case_names_differ() -> None:
    names = [case.name for case in (*GENERAL, *CONTAINERS)]
    assert len(set(names)) == len(names)


def test_a_record_holds_what_one_can_observe() -> None:
    record = run_fit(AdamWMlp, data.vectors)
    names = ["fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias", "fc3.weight", "fc3.bias"]
    assert len(record.losses) == 3
    assert [list(step) for step in record.gradients] == [names] * 3
    assert list(record.weights) == names
    (optimizer,) = record.optimizers
    assert list(optimizer["state"]) == names
    assert optimizer["state"]["fc3.bias"].keys() == {"step", "exp_avg", "exp_avg_sq"}
    assert optimizer["groups"][0]["lr"] == 0.01
    assert {"train_loss_step", "train_loss_epoch"} < record.metrics[-1].keys()


def test_a_skipped_step_reports_nothing() -> None:
    record = run_fit(SkippedStep, data.vectors)
    assert [set(step) for step in record.steps] == [{"loss"}, set(), {"loss"}]


def test_rounding_passes_unless_bits_must_match() -> None:
    record, rounded = run_fit(Mlp, data.vectors), run_fit(Mlp, data.vectors)
    rounded.weights["fc2.weight"] *= 1 + 2e-7
    assert_same(record, rounded)
    with pytest.raises(AssertionError, match=r"1 of \d+ .*\n.weights\['fc2.weight'\]: not bit-equal, off by up to"):
        assert_same(record, rounded, exact=True)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda record: record.gradients[1].pop("fc1.bias"), r"\.gradients\[1\]\['fc1.bias'\]: is missing"),
        (lambda record: record.buffers.update(stray=torch.ones(1)), r"\.buffers\['stray'\]: is unexpected"),
        (lambda record: record.weights["fc3.bias"].add_(1e-4), r"\.weights\['fc3.bias'\]: Tensor-likes are not close"),
        (
            lambda record: record.weights.update({"fc3.bias": record.weights["fc3.bias"].double()}),
            r"\['fc3.bias'\]: torch.float64 \(4,\) is not torch.float32 \(4,\)",
        ),
        (
            lambda record: record.optimizers[0]["groups"][0].update(lr=0.2),
            r"\.optimizers\[0\]\['groups'\]\[0\]\['lr'\]: 0.2 is not 0.1",
        ),
        (lambda record: record.steps.pop(), r"\.steps\[2\]\['loss'\]: is missing"),
    ],
)
def test_a_difference_is_named(damage: object, message: str) -> None:
    record, damaged = run_fit(Mlp, data.vectors), run_fit(Mlp, data.vectors)
    assert callable(damage)
    damage(damaged)
    with pytest.raises(AssertionError, match=message):
        assert_same(record, damaged)


def without_one_row() -> DataLoader[object]:
    """Serves the 8, 8 and 8 rows of ``vectors_in_batches_of`` without the first."""
    batches = list(data.vectors_in_batches_of(8, 8, 8))
    batches[0] = [column[1:] for column in batches[0]]
    return data.prepared(batches)


def test_a_lost_row_shows() -> None:
    whole = run_fit(Mlp, partial(data.vectors_in_batches_of, 8, 8, 8))
    with pytest.raises(AssertionError, match=r"\.steps\[0\]\['loss'\]: Scalars are not close"):
        assert_same(whole, run_fit(Mlp, without_one_row))


def test_a_run_leaves_threads_seed_and_environment() -> None:
    torch.manual_seed(5)
    before = torch.get_num_threads(), torch.get_rng_state(), dict(os.environ)
    run_fit(Mlp, data.vectors)
    num_threads, random_state, environment = before
    assert torch.get_num_threads() == num_threads
    assert torch.equal(torch.get_rng_state(), random_state)
    assert dict(os.environ) == environment
