"""Modules that come close to what is refused, and train to the numbers of one device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
from lightning.pytorch import LightningModule

from tests.harness import assert_same, run_on_one_device
from tests.strategies import hooked, refused
from tests.strategies.warm_workers import WarmWorkers, run_on_stages
from tests.zoo import data
from tests.zoo.case import Case


@pytest.mark.parametrize(
    "module",
    [
        hooked.HookedLayers,
        hooked.HookedContainers,
        hooked.HookStoresOnTheModule,
        hooked.HookedLayerGradients,
        refused.InputThroughNumpy,
        refused.TensorFromNumpy,
        refused.StoresAValue,
        refused.SaliencyMap,
    ],
)
def test_equals_one_device(module: Callable[[], LightningModule], warm_workers: WarmWorkers) -> None:
    case = Case(module, data.vectors)
    assert_same(run_on_one_device(case), run_on_stages(case, 2, warm_workers))


@pytest.mark.parametrize(
    "module", [refused.EarlyMean, refused.SoftmaxOverRows, refused.FlippedRows, refused.SumOverEarlierRows]
)
def test_a_forward_that_looks_across_the_batch_in_one_microbatch(
    module: Callable[[], LightningModule], warm_workers: WarmWorkers
) -> None:
    case = Case(module, data.vectors, num_microbatches=1, exact=True)
    assert_same(run_on_one_device(case), run_on_stages(case, 2, warm_workers), exact=True)


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_backward_hooks_on_containers(warm_workers: WarmWorkers) -> None:
    case = Case(hooked.HookedContainerGradients, data.vectors, strategy={"cuts": ["second"]})
    assert_same(run_on_one_device(case), run_on_stages(case, 2, warm_workers))


def test_a_gradient_changed_after_the_backward_is_as_good_as_a_hook(warm_workers: WarmWorkers) -> None:
    hook, callback = (Case(module, data.vectors) for module in (hooked.HookedParameter, hooked.DoublesAfterBackward))
    assert_same(run_on_one_device(hook), run_on_stages(callback, 2, warm_workers))


def test_two_backwards_that_share_a_graph(warm_workers: WarmWorkers) -> None:
    case = Case(partial(refused.TwoBackwards, retain=True), data.vectors)
    assert_same(run_on_one_device(case), run_on_stages(case, 2, warm_workers))


def test_a_part_that_travels_with_a_function_in_it(warm_workers: WarmWorkers) -> None:
    case = Case(partial(refused.WithOnePiece, lambda: lambda number: number + 1), data.vectors, strategy={"cuts": ["fc2"]})
    assert_same(run_on_one_device(case), run_on_stages(case, 2, warm_workers))
