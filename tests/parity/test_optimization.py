"""Accumulation, schedulers, the hooks around a step and manual optimization give the numbers of one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import BaseFinetuning, GradientAccumulationScheduler
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer
from torch.optim import lr_scheduler as schedulers
from typing_extensions import override

from lightning_mgpu.errors import PlacementError
from tests.harness import whole_parameters
from tests.parity.layouts import Layouts
from tests.parity.trained import Optimized, check, on_parameters, optimized
from tests.strategies.warm_workers import WarmWorkers, run_on_stages
from tests.zoo import data
from tests.zoo.case import Case
from tests.zoo.recipe import Classification
from tests.zoo.steps import Mlp

SGD = on_parameters(torch.optim.SGD, lr=0.1, momentum=0.9)


# -- accumulation ------------------------------------------------------------------------------------------------------


def test_accumulation_over_two_batches(warm_workers: WarmWorkers) -> None:
    case = optimized(SGD, trainer=lambda: {"accumulate_grad_batches": 2, "max_epochs": 2, "max_steps": -1})
    assert len(check(case, warm_workers).gradients) == 4  # three batches make two steps, the second of one batch


@pytest.mark.parametrize("num_stages", [2, 3])
def test_the_loader_ends_in_a_window(num_stages: int, warm_workers: WarmWorkers) -> None:
    case = Case(
        lambda: Optimized(SGD),
        lambda: data.vectors_in_batches_of(8, 8, 8, 8, 5),
        trainer=lambda: {"accumulate_grad_batches": 3, "max_epochs": 2, "max_steps": -1, "gradient_clip_val": 0.1},
    )
    assert len(check(case, warm_workers, num_stages).gradients) == 4


def test_a_schedule_of_accumulation(warm_workers: WarmWorkers) -> None:
    case = optimized(
        SGD,
        trainer=lambda: {
            "callbacks": [GradientAccumulationScheduler({0: 1, 1: 3, 2: 2})],
            "max_epochs": 3,
            "max_steps": -1,
        },
    )
    assert len(check(case, warm_workers).gradients) == 3 + 1 + 2


# -- schedulers --------------------------------------------------------------------------------------------------------


def in_groups(module: Any) -> Optimizer:
    """Gives each layer a group of its own."""
    return torch.optim.SGD(
        [
            {"params": module.fc2.parameters(), "lr": 0.05, "weight_decay": 0.1},
            {"params": module.fc1.parameters(), "momentum": 0.5},
            {"params": module.fc3.parameters(), "lr": 0.2, "nesterov": True},
        ],
        lr=0.1,
        momentum=0.9,
    )


SCHEDULERS = {
    "StepLR": ("epoch", lambda o: schedulers.StepLR(o, 1, gamma=0.5)),
    "LambdaLR": ("step", lambda o: schedulers.LambdaLR(o, [lambda s: 0.5**s, lambda s: 1.0, lambda s: 1 / (s + 1)])),
    "Cosine": ("step", lambda o: schedulers.CosineAnnealingLR(o, 4)),
    "OneCycle": ("step", lambda o: schedulers.OneCycleLR(o, [0.1, 0.2, 0.3], total_steps=7, cycle_momentum=True)),
    "Cyclic": ("step", lambda o: schedulers.CyclicLR(o, 0.01, 0.3, step_size_up=2, cycle_momentum=True)),
    "Sequential": (
        "step",
        lambda o: schedulers.SequentialLR(
            o, [schedulers.LinearLR(o, 0.1, total_iters=2), schedulers.ExponentialLR(o, 0.5)], milestones=[2]
        ),
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers(name: str, warm_workers: WarmWorkers) -> None:
    interval, make = SCHEDULERS[name]

    def configured(module: LightningModule) -> Any:
        optimizer = in_groups(module)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": make(optimizer), "interval": interval}}

    check(optimized(configured, trainer=lambda: {"max_epochs": 2, "max_steps": -1}), warm_workers)


def test_betas_cycle_too(warm_workers: WarmWorkers) -> None:
    def configured(module: LightningModule) -> Any:
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
        scheduler = schedulers.OneCycleLR(optimizer, 0.05, total_steps=7, cycle_momentum=True)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    check(optimized(configured, trainer=lambda: {"max_epochs": 2, "max_steps": -1}), warm_workers, 3)


def test_a_tensor_as_learning_rate_follows_its_scheduler(warm_workers: WarmWorkers) -> None:
    def configured(module: LightningModule) -> Any:
        optimizer = torch.optim.Adam(module.parameters(), lr=torch.tensor(0.05))
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedulers.ExponentialLR(optimizer, 0.5), "interval": "step"},
        }

    check(optimized(configured, trainer=lambda: {"max_steps": 4}), warm_workers)


class Plateau(Mlp):
    """Watches a loss that never falls by enough."""

    @override
    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val_loss", F.mse_loss(self(batch[0]), batch[1]))

    @override
    def configure_optimizers(self) -> OptimizerLRScheduler:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        plateau = schedulers.ReduceLROnPlateau(optimizer, patience=0, threshold=10.0, factor=0.1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"}}


def test_a_plateau_reduces_the_learning_rate(warm_workers: WarmWorkers) -> None:
    case = Case(Plateau, data.vector_splits, trainer=lambda: {"max_epochs": 4, "max_steps": -1})
    record = check(case, warm_workers)
    assert record.optimizers[0]["groups"][0]["lr"] < 0.05


class StepsItsScheduler(Optimized):
    """Steps its scheduler in its own way."""

    @override
    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        if self.trainer.global_step != 2:
            scheduler.step()


def test_the_hook_for_schedulers(warm_workers: WarmWorkers) -> None:
    def configured(module: LightningModule) -> Any:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        return [optimizer], [{"scheduler": schedulers.ExponentialLR(optimizer, 0.5), "interval": "step"}]

    check(Case(lambda: StepsItsScheduler(configured), data.vectors, trainer=lambda: {"max_steps": 5}), warm_workers)


# -- hooks around a step -----------------------------------------------------------------------------------------------


class WarmsUp(Optimized):
    """Sets its learning rate in the hook around each step, as many recipes do."""

    @override
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer.step(closure=optimizer_closure)
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / (1 + self.trainer.global_step)


class SkipsSteps(Optimized):
    """Runs the closure in every batch, and makes every second step."""

    @override
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if batch_idx % 2 == 0:
            optimizer.step(closure=optimizer_closure)
        else:
            optimizer_closure()


class KeepsGradients(Optimized):
    """Forgets gradients at every second step only, and then sets them to zero."""

    @override
    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Optimizer) -> None:
        if batch_idx % 2 == 0:
            optimizer.zero_grad(set_to_none=False)


class ChangesBeforeStep(Optimized):
    """Changes gradients and settings before a step."""

    @override
    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        optimizer.param_groups[0]["momentum"] = 0.5
        with whole_parameters(self.trainer.strategy):
            for number, parameter in enumerate(self.parameters()):
                assert parameter.grad is not None
                parameter.grad.mul_(number + 1)


@pytest.mark.parametrize("kind", [WarmsUp, SkipsSteps, KeepsGradients, ChangesBeforeStep])
def test_hooks_around_a_step(kind: type[Optimized], warm_workers: WarmWorkers) -> None:
    check(Case(lambda: kind(SGD), data.vectors, trainer=lambda: {"max_epochs": 2, "max_steps": 6}), warm_workers)


class SkipsItAll(Optimized):
    """Leaves out a batch, with its forward."""

    @override
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if batch_idx != 1:
            optimizer.step(closure=optimizer_closure)


def test_a_hook_that_leaves_the_closure_out_is_refused_as_on_one_device(layouts_of_any_kind: Layouts) -> None:
    def observe(make_trainer: Any) -> Any:
        with pytest.raises(Exception, match="closure hasn't been executed") as caught:
            make_trainer(max_steps=3).fit(SkipsItAll(SGD), data.vectors())
        return type(caught.value).__name__, str(caught.value)

    layouts_of_any_kind.same(observe)


# -- parameters that join later ----------------------------------------------------------------------------------------


class Thaws(BaseFinetuning):
    """Trains the last layer first, and the others from the second epoch on, at a tenth of its learning rate."""

    @override
    def freeze_before_training(self, pl_module: LightningModule) -> None:
        self.freeze([pl_module.fc1, pl_module.fc2])  # type: ignore[list-item]

    @override
    def finetune_function(self, pl_module: LightningModule, epoch: int, optimizer: Optimizer) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group([pl_module.fc1, pl_module.fc2], optimizer)  # type: ignore[list-item]


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
@pytest.mark.parametrize("num_stages", [2, 3])
def test_parameters_join_in_a_later_epoch(kind: Any, num_stages: int, warm_workers: WarmWorkers) -> None:
    def configured(module: LightningModule) -> Any:
        return kind([p for p in module.parameters() if p.requires_grad], lr=0.05)

    case = optimized(configured, trainer=lambda: {"callbacks": [Thaws()], "max_epochs": 3, "max_steps": -1})
    record = check(case, warm_workers, num_stages)
    assert len(record.optimizers[0]["groups"]) == 2


# -- by hand -----------------------------------------------------------------------------------------------------------


class ByHand(Classification):
    """Optimises by hand: clips by torch, makes a step every second batch, and steps its scheduler."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.words = nn.Embedding(20, 16)
        self.body = nn.Linear(16, 16)
        self.head = nn.Linear(16, 20)

    @override
    def forward(self, words: Tensor) -> Tensor:
        scores: Tensor = self.head(torch.tanh(self.body(self.words(words))))
        return scores

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        words, label = batch
        optimizer: Any = self.optimizers()
        loss = F.cross_entropy(self(words).flatten(0, 1), label.flatten())
        self.manual_backward(loss / 2)
        returned = {"loss": loss.detach()}
        if batch_idx % 2:
            returned["norm"] = torch.nn.utils.clip_grad_norm_(self.parameters(), 0.1)
            self.clip_gradients(optimizer, gradient_clip_val=0.01, gradient_clip_algorithm="value")
            optimizer.step()
            optimizer.zero_grad()
            scheduler: Any = self.lr_schedulers()
            scheduler.step()
        return returned

    @override
    def configure_optimizers(self) -> OptimizerLRScheduler:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        return [optimizer], [schedulers.ExponentialLR(optimizer, 0.5)]


@pytest.mark.parametrize("num_stages", [2, 3])
def test_by_hand(num_stages: int, warm_workers: WarmWorkers) -> None:
    case = Case(ByHand, data.sentences, trainer=lambda: {"max_epochs": 2, "max_steps": -1})
    assert len(check(case, warm_workers, num_stages).gradients) == 2


class TwoByHand(Mlp):
    """Trains two halves by optimizers of their own, toggled, one of them with a closure, through one forward."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        x, y = batch
        first, second = self.optimizers()  # type: ignore[attr-defined]
        losses = {}

        self.toggle_optimizer(first)
        loss = F.mse_loss(self(x), y)
        first.zero_grad()
        self.manual_backward(loss)
        first.step()
        self.untoggle_optimizer(first)

        def closure() -> Tensor:
            again = F.l1_loss(self(x), y)
            second.zero_grad()
            self.manual_backward(again)
            losses["again"] = again.detach()
            return again

        with second.toggle_model():
            second.step(closure=closure)
        return {"loss": loss.detach(), **losses}

    @override
    def configure_optimizers(self) -> OptimizerLRScheduler:
        return [
            torch.optim.Adam([*self.fc1.parameters(), *self.fc3.parameters()], lr=0.01),
            torch.optim.SGD([{"params": self.fc2.parameters()}, {"params": self.fc3.parameters(), "lr": 0.01}], lr=0.1),
        ]


@pytest.mark.parametrize("num_stages", [2, 3])
def test_two_optimizers_by_hand(num_stages: int, warm_workers: WarmWorkers) -> None:
    check(Case(TwoByHand, data.vectors, trainer=lambda: {"max_steps": 6}), warm_workers, num_stages)


class ClipsByImportedNameByHand(TwoByHand):
    @override
    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        clip_grad_norm_(self.fc1.parameters(), 0.05)


def test_clipping_in_part_is_refused_by_hand_too(warm_workers: WarmWorkers) -> None:
    case = Case(ClipsByImportedNameByHand, data.vectors)
    with pytest.raises(PlacementError, match=r"the gradient of parameter 'fc1.weight' lives on stage 0"):
        run_on_stages(case, 2, warm_workers)
