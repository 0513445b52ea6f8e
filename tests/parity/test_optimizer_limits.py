"""Optimizers that no stage can step on its own, steps that fail, and what users do to optimizers in the middle of a run."""

from __future__ import annotations

import copy
from collections import defaultdict
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from typing_extensions import override

from lightning_mgpu import PipelineStrategy
from lightning_mgpu.errors import PlacementError, StageError
from tests.harness import assert_same, run_fit, run_on_one_device
from tests.parity import own_optimizers as own
from tests.parity.layouts import Layouts
from tests.parity.trained import Optimized, check, on_parameters, optimized
from tests.strategies.warm_workers import WarmWorkers, run_on_stages
from tests.zoo import data
from tests.zoo.steps import Mlp

# -- refused -----------------------------------------------------------------------------------------------------------

REFUSED = {
    "LBFGS": (
        on_parameters(torch.optim.LBFGS),
        "LBFGS needs all parameters and gradients in one process, but a pipeline of 2 stages keeps them with their stages",
    ),
    "parameters": (
        on_parameters(own.HoldsParameters),
        "HoldsParameters holds parameters in its attribute 'shadow', .* keep what belongs to a parameter in self.state",
    ),
    "module": (
        lambda module: own.HoldsModule(module.parameters(), module),
        "HoldsModule holds a module in its attribute 'module'",
    ),
    "wrapper": (
        lambda module: own.Lookahead(torch.optim.SGD(module.parameters(), lr=0.1)),
        r"Lookahead holds another optimizer \(SGD\) in its attribute 'inner', .*; return SGD from configure_optimizers",
    ),
    "own-norm": (
        on_parameters(own.OwnGlobalNorm),
        "OwnGlobalNorm steps a parameter by what it finds in the others, but a pipeline of 2 stages steps .*; use devices=1",
    ),
    "all-groups": (
        lambda module: own.NeedsAllGroups([{"params": [p]} for p in module.parameters()]),
        r"NeedsAllGroups fails without all its parameters \(IndexError: list index out of range\)",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_before_training(name: str, layouts: Layouts) -> None:
    make, text = REFUSED[name]
    module = Optimized(make)
    before = {key: value.clone() for key, value in module.state_dict().items()}
    with layouts.lent() as make_trainer, pytest.raises(PlacementError, match=text):
        make_trainer(max_steps=3).fit(module, data.vectors())
    assert all(torch.equal(value, before[key]) for key, value in module.state_dict().items())


@pytest.mark.parametrize("name", REFUSED)
def test_one_stage_takes_what_several_refuse(name: str) -> None:
    make, _ = REFUSED[name]
    refused = optimized(make)
    pipeline = PipelineStrategy(num_microbatches=1)
    ours = run_fit(refused.module, refused.data, strategy=pipeline, devices=1)
    assert_same(run_on_one_device(refused), ours)


# -- failures ----------------------------------------------------------------------------------------------------------


def test_an_error_in_a_step_of_a_worker_says_that_stages_may_be_apart(warm_workers: WarmWorkers) -> None:
    failing = optimized(on_parameters(own.FailsOnce, num_elements=8 * 16), strategy={"cuts": ["fc2"]})
    text = (
        r"stage 0 of 2 \(cpu\) failed \(optimizer step\): ArithmeticError: no step from here; other stages may have made the "
        "step, so the weights of the stages may be one step apart: load a checkpoint before going on"
    )
    with pytest.raises(StageError, match=text) as caught:
        run_on_stages(failing, 2, warm_workers)
    assert isinstance(caught.value.__cause__, ArithmeticError)


def test_an_error_in_the_leads_step_says_so_as_well(warm_workers: WarmWorkers) -> None:
    failing = optimized(on_parameters(own.FailsOnce, num_elements=16 * 4), strategy={"cuts": ["fc2"]})
    with pytest.raises(ArithmeticError, match="no step from here") as caught:
        run_on_stages(failing, 2, warm_workers)
    assert any("the weights of the stages may be one step apart" in note for note in caught.value.__notes__)


# -- state -------------------------------------------------------------------------------------------------------------


class ReadsState(Callback):
    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        len(trainer.optimizers[0].state)


def test_the_state_is_not_read_in_part(warm_workers: WarmWorkers) -> None:
    reading = optimized(on_parameters(torch.optim.Adam), trainer=lambda: {"callbacks": [ReadsState()]})
    text = r"the state of Adam lives on the stages of its parameters; read it with optimizer.state_dict\(\)"
    with pytest.raises(PlacementError, match=text):
        run_on_stages(reading, 2, warm_workers)


class BeginsAnew(Callback):
    """Forgets all momenta after the second batch."""

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == 1:
            trainer.optimizers[0].state = defaultdict(dict)


def test_a_new_state_is_begun_on_every_stage(warm_workers: WarmWorkers) -> None:
    anew = optimized(on_parameters(torch.optim.Adam), trainer=lambda: {"callbacks": [BeginsAnew()], "max_steps": 5})
    kept = optimized(on_parameters(torch.optim.Adam), trainer=lambda: {"max_steps": 5})
    one_device = run_on_one_device(anew)
    assert not torch.equal(one_device.weights["fc1.weight"], run_on_one_device(kept).weights["fc1.weight"])
    assert_same(one_device, run_on_stages(anew, 2, warm_workers))


class LoadsState(Callback):
    """Keeps the state of the first step and goes back to it after the second, as code that retries does."""

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        [optimizer] = trainer.optimizers
        if batch_idx == 0:
            self.kept = copy.deepcopy(optimizer.state_dict())
        if batch_idx == 1:
            optimizer.load_state_dict(self.kept)


def test_a_state_goes_back(warm_workers: WarmWorkers) -> None:
    check(
        optimized(on_parameters(torch.optim.Adam), trainer=lambda: {"callbacks": [LoadsState()], "max_steps": 5}), warm_workers
    )


# -- other optimizers --------------------------------------------------------------------------------------------------


class Swaps(Callback):
    """Goes over to another optimizer after the second batch, through the Trainer."""

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == 2:
            self.old = trainer.optimizers[0]
            trainer.optimizers = [torch.optim.RMSprop(pl_module.parameters(), lr=0.01)]


def test_another_optimizer_takes_over(warm_workers: WarmWorkers) -> None:
    check(optimized(on_parameters(torch.optim.Adam), trainer=lambda: {"callbacks": [Swaps()], "max_steps": 5}), warm_workers)


class StepsTheOld(Swaps):
    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 3:
            self.old.step()


def test_a_replaced_optimizer_says_so(warm_workers: WarmWorkers) -> None:
    old = optimized(on_parameters(torch.optim.Adam), trainer=lambda: {"callbacks": [StepsTheOld()], "max_steps": 5})
    with pytest.raises(PlacementError, match=r"Adam is none of the optimizers of the strategy; hand it over first, with"):
        run_on_stages(old, 2, warm_workers)


class SwapsToLbfgs(Callback):
    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        trainer.strategy.optimizers = [torch.optim.LBFGS(pl_module.parameters())]


def test_another_optimizer_is_checked(warm_workers: WarmWorkers) -> None:
    swapped = optimized(on_parameters(torch.optim.Adam), trainer=lambda: {"callbacks": [SwapsToLbfgs()]})
    with pytest.raises(PlacementError, match="LBFGS needs all parameters and gradients in one process"):
        run_on_stages(swapped, 2, warm_workers)


class ExtraParameter(Mlp):
    """Trains a parameter that no module holds, beside its own."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = [nn.Parameter(torch.ones(4))]

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return (self(x) * self.extra[0] - y).square().mean()

    @override
    def configure_optimizers(self) -> OptimizerLRScheduler:
        return torch.optim.SGD([*self.parameters(), *self.extra], lr=0.1, momentum=0.9)


def test_a_parameter_outside_the_module(layouts: Layouts) -> None:
    def observe(make_trainer: Any) -> Any:
        module = ExtraParameter()
        make_trainer(max_steps=3, gradient_clip_val=0.1).fit(module, data.vectors())
        return dict(module.state_dict()), module.extra[0].detach()

    layouts.same(observe)


class NoOptimizer(Mlp):
    @override
    def configure_optimizers(self) -> None:  # type: ignore[override]
        return None


@pytest.mark.filterwarnings("ignore:`LightningModule.configure_optimizers` returned `None`")
def test_no_optimizer(layouts: Layouts) -> None:
    def observe(make_trainer: Any) -> Any:
        module = NoOptimizer()
        make_trainer(max_epochs=1).fit(module, data.vectors())
        return dict(module.state_dict())

    layouts.same(observe)
