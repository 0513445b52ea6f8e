"""The documents' models over several processes: bit for bit what one process makes of the same microbatches."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.optim import AdamW, Optimizer

from lightning_mgpu.examples import CNN, DigitsDataModule, Linear, RandomLinearDataModule, TwoLayerLinear
from lightning_mgpu.microbatch import sizes_of
from tests.harness import assert_same, run_fit, run_on_one_device
from tests.strategies.warm_workers import WarmWorkers, run_on_stages
from tests.zoo.case import Case


class InTurn(torch.autograd.Function):
    """Runs a forward on one microbatch after the other, and the backwards in the same order, in one process."""

    @staticmethod
    def forward(ctx: Any, _: Tensor, forward: Callable[[Tensor], Tensor], x: Tensor, num_microbatches: int) -> Tensor:
        sizes = sizes_of(len(x), min(num_microbatches, len(x)))
        with torch.enable_grad():
            ctx.results = [forward(part) for part in x.split(list(sizes))]
        ctx.sizes = sizes
        return torch.cat([result.detach() for result in ctx.results])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        for result, gradient in zip(ctx.results, gradients[0].split(list(ctx.sizes)), strict=True):
            torch.autograd.backward(result, gradient)
        return None, None, None, None


def in_turn(module: Callable[[], LightningModule], num_microbatches: int) -> Callable[[], LightningModule]:
    """Gives a module a forward that runs in microbatches, with nothing of the package in it."""

    def make() -> LightningModule:
        made = module()
        plain = made.forward
        anchor = torch.zeros((), requires_grad=True)

        def forward(x: Tensor) -> Tensor:
            if torch.is_grad_enabled():
                result: Tensor = InTurn.apply(anchor, plain, x, num_microbatches)
                return result
            return torch.cat([plain(part) for part in x.split(list(sizes_of(len(x), min(num_microbatches, len(x)))))])

        made.forward = forward  # type: ignore[method-assign]
        return made

    return make


class AdamWCNN(CNN):
    """Trains the documents' CNN with AdamW."""

    def configure_optimizers(self) -> Optimizer:
        return AdamW(self.parameters(), lr=1e-3)


class AdamWTwoLayerLinear(TwoLayerLinear):
    """Trains the documents' two-layer model with AdamW."""

    def configure_optimizers(self) -> Optimizer:
        return AdamW(self.parameters(), lr=1e-2)


MODELS = [
    Case(CNN, DigitsDataModule, num_stages=(2, 3, 4), validate=True, predict=True),
    Case(AdamWCNN, DigitsDataModule, num_stages=(2, 3, 4)),
    Case(TwoLayerLinear, partial(RandomLinearDataModule, num_targets=1), num_stages=(1, 2), validate=True, predict=True),
    Case(AdamWTwoLayerLinear, partial(RandomLinearDataModule, num_targets=1), num_stages=(2,)),
    Case(Linear, RandomLinearDataModule, num_stages=(1,), validate=True, predict=True),
]
ON_STAGES = [pytest.param(case, n, id=f"{case.name}-{n}") for case in MODELS for n in case.num_stages]


@pytest.mark.parametrize(("case", "num_stages"), ON_STAGES)
def test_equals_one_device_on_the_whole_batch(case: Case, num_stages: int, warm_workers: WarmWorkers) -> None:
    assert_same(run_on_one_device(case), run_on_stages(case, num_stages, warm_workers))


@pytest.mark.parametrize(("case", "num_stages"), ON_STAGES)
def test_equals_the_same_microbatches_in_one_process_bit_for_bit(
    case: Case, num_stages: int, warm_workers: WarmWorkers
) -> None:
    one_process = run_fit(
        in_turn(case.module, case.num_microbatches),
        case.data,
        strategy="auto",
        devices=1,
        validate=case.validate,
        predict=case.predict,
        **case.trainer(),
    )
    assert_same(one_process, run_on_stages(case, num_stages, warm_workers), exact=True)
