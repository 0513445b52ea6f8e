"""The headline: ordinary modules cut into stages train to the numbers that one device gives."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from tests.harness import assert_same, run_on_one_device
from tests.strategies.warm_workers import WarmWorkers, run_on_stages
from tests.zoo import data
from tests.zoo.ambient import AutocastPart
from tests.zoo.case import Case
from tests.zoo.cases import GENERAL
from tests.zoo.steps import DropoutMlp
from tests.zoo.vision import BatchNormFirst

RUNS = [pytest.param(case, num_stages, id=f"{case.name}-{num_stages}") for case in GENERAL for num_stages in case.num_stages]


@pytest.mark.parametrize(("case", "num_stages"), RUNS)
def test_equals_one_device(case: Case, num_stages: int, warm_workers: WarmWorkers) -> None:
    ours = run_on_stages(case, num_stages, warm_workers)
    assert_same(run_on_one_device(case), ours, exact=case.exact)


def in_chunks(module: type[LightningModule], num_chunks: int) -> type[LightningModule]:
    """Makes a module that runs its forward chunk by chunk on one device, as microbatches run in a pipeline.

    Args:
        module: The class of the module, whose forward takes and returns one tensor.
        num_chunks: The number of chunks.

    Returns:
        The class of the chunked module.
    """

    class Chunked(module):  # type: ignore[valid-type, misc]
        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([super(Chunked, self).forward(part) for part in x.chunk(num_chunks)])

    return Chunked


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case(AutocastPart, data.vectors), id="gradients rounded to bfloat16"),
    ],
)
def test_equals_the_same_microbatches_on_one_device(case: Case, warm_workers: WarmWorkers) -> None:
    chunked = Case(in_chunks(case.module, 4), case.data)  # type: ignore[arg-type]
    assert_same(run_on_one_device(chunked), run_on_stages(case, 2, warm_workers))


@pytest.mark.filterwarnings("ignore:.* has batch norms")
def test_batch_norm_keeps_the_statistics_of_the_whole_batch(warm_workers: WarmWorkers) -> None:
    case = Case(BatchNormFirst, data.small_images)
    whole, ours = run_on_one_device(case), run_on_stages(case, 2, warm_workers)
    assert whole.buffers.keys() == ours.buffers.keys()
    for name, buffer in whole.buffers.items():
        torch.testing.assert_close(ours.buffers[name], buffer, msg=lambda text, name=name: f"{name}: {text}")  # type: ignore[misc]


@pytest.mark.filterwarnings("ignore:.* has batch norms")
def test_batch_norm_normalises_each_microbatch_by_itself(warm_workers: WarmWorkers) -> None:
    case = Case(BatchNormFirst, data.small_images)
    ours = run_on_stages(case, 2, warm_workers)
    chunked = run_on_one_device(Case(in_chunks(BatchNormFirst, 4), data.small_images))
    ours.buffers = chunked.buffers  # the chunks moved the statistics four times, the pipeline once
    assert_same(chunked, ours)


def test_dropout_repeats_for_a_seed(warm_workers: WarmWorkers) -> None:
    case = Case(DropoutMlp, data.vectors)
    first, second = (run_on_stages(case, 3, warm_workers) for _ in range(2))
    assert_same(first, second, exact=True)


def test_dropout_draws_a_mask_for_every_row_and_step(warm_workers: WarmWorkers) -> None:
    case = Case(partial(DropoutMlp, lr=0.0), data.same_vector)
    ours = run_on_stages(case, 3, warm_workers)
    scores = torch.cat([step["scores"] for step in ours.steps])
    assert len({tuple(row.tolist()) for row in scores}) == len(scores) == 24


def test_who_trains_a_batch_norm_on_microbatches_is_told_once(warm_workers: WarmWorkers) -> None:
    text = r"BatchNormFirst has batch norms \(norm\), which normalise each microbatch by itself; use num_microbatches=1 where"
    with pytest.warns(UserWarning, match=text) as told:
        run_on_stages(Case(BatchNormFirst, data.small_images), 2, warm_workers)
    assert len([w for w in told if "has batch norms" in str(w.message)]) == 1
    run_on_stages(Case(BatchNormFirst, data.small_images, num_microbatches=1), 2, warm_workers)
