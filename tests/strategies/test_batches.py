"""Batches that do not divide, shrink and grow, or hold more than tensors with a row for each sample."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from tests.harness import assert_same, run_on_one_device
from tests.strategies.warm_workers import WarmWorkers, run_on_stages
from tests.zoo import data
from tests.zoo.case import Case
from tests.zoo.cases import CONTAINERS
from tests.zoo.loops import EveryLoop
from tests.zoo.steps import Mlp


def in_batches_of(*num_rows: int, num_microbatches: int = 4) -> Case:
    """Trains the plainest network on one batch for each number of rows."""
    return Case(
        Mlp,
        partial(data.vectors_in_batches_of, *num_rows),
        num_microbatches=num_microbatches,
        trainer=lambda: {"max_steps": len(num_rows)},
    )


@pytest.mark.parametrize(
    "num_rows",
    [
        pytest.param((10, 10, 10), id="10 rows in 4 microbatches"),
        pytest.param((9, 9), id="9 rows in 4 microbatches"),
        pytest.param((3, 3, 3), id="fewer rows than microbatches"),
        pytest.param((8, 8, 6), id="a smaller last batch"),
        pytest.param((8, 3, 8, 5, 12, 1, 8), id="shrinking and growing"),
    ],
)
@pytest.mark.parametrize("num_stages", [2, 3])
def test_any_number_of_rows(num_rows: tuple[int, ...], num_stages: int, warm_workers: WarmWorkers) -> None:
    case = in_batches_of(*num_rows)
    assert_same(run_on_one_device(case), run_on_stages(case, num_stages, warm_workers))


@pytest.mark.parametrize("num_microbatches", [1, 2, 3, 8, 16])
def test_any_number_of_microbatches(num_microbatches: int, warm_workers: WarmWorkers) -> None:
    case = in_batches_of(8, 8, 8, num_microbatches=num_microbatches)
    assert_same(run_on_one_device(case), run_on_stages(case, 2, warm_workers), exact=num_microbatches == 1)


def test_a_single_row_is_bit_equal(warm_workers: WarmWorkers) -> None:
    case = in_batches_of(1, 1, 1)
    assert_same(run_on_one_device(case), run_on_stages(case, 2, warm_workers), exact=True)


def test_each_loop_takes_its_smaller_last_batch_once_and_in_order(warm_workers: WarmWorkers) -> None:
    case = Case(EveryLoop, data.vector_splits, trainer=lambda: {"max_steps": 6}, validate=True, predict=True)
    whole, ours = run_on_one_device(case), run_on_stages(case, 2, warm_workers)
    assert [len(prediction) for prediction in ours.predictions] == [8, 8, 6]
    torch.testing.assert_close(torch.cat(ours.predictions), torch.cat(whole.predictions))
    assert ours.validation.keys() == {"val_error", "val_loss", "val_sign"}
    assert_same(whole, ours)


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in CONTAINERS])
def test_any_container(case: Case, warm_workers: WarmWorkers) -> None:
    assert_same(run_on_one_device(case), run_on_stages(case, 2, warm_workers))
