"""Training a case on one device and on stages, and the network whose optimizer a test chooses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch.optim import Optimizer
from typing_extensions import override

from tests.harness import RunRecord, assert_same, run_on_one_device
from tests.strategies.warm_workers import WarmWorkers, run_on_stages
from tests.zoo import data
from tests.zoo.case import Case
from tests.zoo.steps import Mlp

MakeOptimizer: TypeAlias = Callable[[LightningModule], Any]


class Optimized(Mlp):
    """Is trained by whatever optimizer it is given.

    Args:
        make: Makes the optimizer of a module, and its schedulers.
    """

    def __init__(self, make: MakeOptimizer) -> None:
        super().__init__()
        self.make = [make]

    @override
    def configure_optimizers(self) -> OptimizerLRScheduler:
        made: OptimizerLRScheduler = self.make[0](self)
        return made


def on_parameters(kind: Callable[..., Optimizer], **options: Any) -> MakeOptimizer:
    """Says how to make an optimizer of all parameters."""
    return lambda module: kind(module.parameters(), **options)


def optimized(make: MakeOptimizer, **kwargs: Any) -> Case:
    """Makes a case of the plain network with an optimizer."""
    return Case(lambda: Optimized(make), data.vectors, **kwargs)


def check(case: Case, warm_workers: WarmWorkers, num_stages: int = 2) -> RunRecord:
    """Trains a case on one device and on stages, and compares everything by name.

    Returns:
        The record of one device.
    """
    expected = run_on_one_device(case)
    assert_same(expected, run_on_stages(case, num_stages, warm_workers), exact=case.exact)
    return expected
