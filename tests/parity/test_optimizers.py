"""Optimizers over stages: torch's, those of others, and the ones that no stage can step on its own."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from typing_extensions import override

from lightning_mgpu import PipelineStrategy, Workers
from lightning_mgpu.errors import ShippingError, StageError
from tests.harness import run_fit, run_on_one_device
from tests.parity import own_optimizers as own
from tests.parity.layouts import Layouts
from tests.parity.telling import Tells
from tests.parity.trained import Optimized, check, on_parameters, optimized
from tests.strategies.warm_workers import WarmWorkers, run_on_stages
from tests.zoo import data
from tests.zoo.case import Case
from tests.zoo.steps import Mlp

TORCHS = {
    "SGD": (torch.optim.SGD, {}),
    "SGD-momentum": (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.1, "weight_decay": 0.1}),
    "SGD-nesterov": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "SGD-foreach": (torch.optim.SGD, {"momentum": 0.9, "foreach": True}),
    "SGD-fused": (torch.optim.SGD, {"momentum": 0.9, "fused": True}),
    "SGD-maximize": (torch.optim.SGD, {"maximize": True}),
    "Adam": (torch.optim.Adam, {}),
    "Adam-amsgrad": (torch.optim.Adam, {"amsgrad": True, "weight_decay": 0.1}),
    "Adam-foreach": (torch.optim.Adam, {"foreach": True}),
    "Adam-fused": (torch.optim.Adam, {"fused": True}),
    "Adam-maximize": (torch.optim.Adam, {"maximize": True}),
    "Adam-tensor-lr": (torch.optim.Adam, {"lr": torch.tensor(0.01)}),
    "AdamW": (torch.optim.AdamW, {"weight_decay": 0.1}),
    "AdamW-foreach": (torch.optim.AdamW, {"foreach": True}),
    "AdamW-fused": (torch.optim.AdamW, {"fused": True}),
    "NAdam": (torch.optim.NAdam, {}),
    "RAdam": (torch.optim.RAdam, {}),
    "Adamax": (torch.optim.Adamax, {}),
    "Adadelta": (torch.optim.Adadelta, {}),
    "Adagrad": (torch.optim.Adagrad, {"initial_accumulator_value": 0.1}),
    "Adagrad-fused": (torch.optim.Adagrad, {"fused": True}),
    "RMSprop": (torch.optim.RMSprop, {"centered": True, "momentum": 0.5}),
    "RMSprop-foreach": (torch.optim.RMSprop, {"foreach": True}),
    "ASGD": (torch.optim.ASGD, {"t0": 1}),
    "Rprop": (torch.optim.Rprop, {}),
    "Adafactor": (torch.optim.Adafactor, {}),
}


@pytest.mark.parametrize("name", TORCHS)
def test_torchs_optimizers(name: str, warm_workers: WarmWorkers) -> None:
    kind, options = TORCHS[name]
    check(optimized(on_parameters(kind, **{"lr": 0.01, **options})), warm_workers)


def test_an_optimizer_over_three_stages(warm_workers: WarmWorkers) -> None:
    check(optimized(on_parameters(torch.optim.AdamW, lr=0.01, amsgrad=True)), warm_workers, 3)


def test_muon(warm_workers: WarmWorkers) -> None:
    check(optimized(lambda m: torch.optim.Muon([p for p in m.parameters() if p.ndim == 2], lr=0.01)), warm_workers)


@pytest.mark.parametrize("options", [{}, {"scale_parameter": False, "relative_step": False, "lr": 0.01}], ids=["own-lr", "lr"])
def test_adafactor_of_transformers(options: dict[str, Any], warm_workers: WarmWorkers) -> None:
    optimization = pytest.importorskip("transformers.optimization")
    check(optimized(on_parameters(optimization.Adafactor, **options)), warm_workers)


def test_what_torch_refuses_on_this_device_is_refused_by_the_same_words(warm_workers: WarmWorkers) -> None:
    capturable = optimized(on_parameters(torch.optim.Adam, capturable=True))
    text = "If capturable=True, params and state_steps must be on supported"
    with pytest.raises(AssertionError, match=text):
        run_on_one_device(capturable)
    with pytest.raises((AssertionError, StageError), match=text):
        run_on_stages(capturable, 2, warm_workers)


def test_named_parameters(warm_workers: WarmWorkers) -> None:
    check(optimized(lambda m: torch.optim.AdamW(m.named_parameters(), lr=0.01)), warm_workers)


class OfTelling(Mlp):
    """Keeps what a layer in the first stage tells of its process."""

    def __init__(self) -> None:
        super().__init__()
        self.fc2 = Tells()  # type: ignore[assignment]
        self.facts: list[int] = []

    @override
    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        h, facts = self.fc2(torch.tanh(self.fc1(x)))
        return self.fc3(h), facts

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        forecast, facts = self(x)
        self.facts = facts[0].tolist()
        return (forecast - y).square().mean()

    @override
    def configure_optimizers(self) -> OptimizerLRScheduler:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def test_a_step_does_not_make_a_worker_import_torchs_compiler() -> None:
    module = OfTelling()
    with Workers(devices=2) as workers:
        pipeline = PipelineStrategy(num_microbatches=2, workers=workers, cuts=["fc3"])
        run_fit(lambda: module, data.vectors, strategy=pipeline, devices=2)
        assert module.facts == [workers.pids[0], False]


# -- optimizers of others ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_stages", [2, 3])
def test_an_optimizer_keeps_its_own_attributes(num_stages: int, warm_workers: WarmWorkers) -> None:
    check(optimized(on_parameters(own.Lion, cautious=True)), warm_workers, num_stages)


def test_an_optimizer_may_pickle_in_its_own_way(warm_workers: WarmWorkers) -> None:
    check(optimized(on_parameters(own.OwnPickle)), warm_workers)


@pytest.mark.parametrize("num_stages", [2, 3])
def test_a_step_may_count_in_its_group(num_stages: int, warm_workers: WarmWorkers) -> None:
    def make(module: LightningModule) -> Optimizer:
        assert isinstance(module, Mlp)
        return own.GroupCounter([{"params": [*layer.parameters()]} for layer in (module.fc1, module.fc2, module.fc3)])

    counted = optimized(make, trainer=lambda: {"max_steps": 5})
    assert [group["k"] for group in run_on_one_device(counted).optimizers[0]["groups"]] == [5, 5, 5]
    check(counted, warm_workers, num_stages)


class ChangesAttributes(Callback):
    """Changes what the optimizer keeps on itself, in place and by another value, and takes one away."""

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        optimizer: Any = trainer.optimizers[0]
        if batch_idx == 1:
            optimizer.cautious = True
            optimizer.table["warm"][1] = 2.0
            optimizer.param_groups[0]["betas"] = (0.5, 0.9)


class SeesAttributes(Callback):
    """Notes what it sees of the optimizer after each step."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        optimizer: Any = trainer.optimizers[0]
        self.seen.append((optimizer.num_steps, optimizer.cautious, list(optimizer.table["warm"])))


def test_attributes_may_change_on_both_sides(layouts: Layouts) -> None:
    def observe(make_trainer: Any) -> Any:
        sees = SeesAttributes()
        module = Optimized(on_parameters(own.Lion))
        make_trainer(max_steps=4, callbacks=[ChangesAttributes(), sees]).fit(module, data.vectors())
        return sees.seen, dict(module.state_dict())

    seen, _ = layouts.same(observe)
    assert seen[-1] == (4, True, [0.5, 2.0])


class GivesAnOption(Optimized):
    """Gives each step an option."""

    @override
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer.step(closure=optimizer_closure, factor=0.5 + batch_idx)


def test_options_of_a_step_reach_every_stage(warm_workers: WarmWorkers) -> None:
    check(Case(lambda: GivesAnOption(on_parameters(own.StepOption)), data.vectors), warm_workers)


def test_an_attribute_that_cannot_be_sent_is_named(warm_workers: WarmWorkers) -> None:
    def make(module: LightningModule) -> Optimizer:
        optimizer: Any = own.Lion(module.parameters())
        optimizer.lock = threading.Lock()
        return optimizer  # type: ignore[no-any-return]

    text = "cannot send the optimizers to its stage, since 'lock' in item 1 in item 0 can't be pickled: TypeError: .*lock"
    with pytest.raises(ShippingError, match=text):
        run_on_stages(optimized(make), 2, warm_workers)


# -- hooks of steps ----------------------------------------------------------------------------------------------------


class HookedSteps(Callback):
    """Registers hooks around steps that tell what they get, and one that changes what the step is given."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        [optimizer] = trainer.optimizers
        closures: list[Any] = []

        def before(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
            self.seen.append(("before", type(optimizer).__name__, len(args), sorted(kwargs)))
            return args, {**kwargs, "factor": 0.5}

        def after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            closures.append(kwargs.get("closure"))
            self.seen.append(("after", type(optimizer).__name__, len(args), sorted(kwargs)))

        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(after)


def test_hooks_around_steps_run_once_and_change_what_is_given(layouts: Layouts) -> None:
    def observe(make_trainer: Any) -> Any:
        hooked = HookedSteps()
        module = Optimized(on_parameters(own.StepOption))
        make_trainer(max_steps=3, callbacks=[hooked]).fit(module, data.vectors())
        return hooked.seen, dict(module.state_dict())

    seen, _ = layouts.same(observe)
    assert len(seen) == 6


def test_hooks_of_all_optimizers_run_once(layouts: Layouts) -> None:
    def observe(make_trainer: Any) -> Any:
        seen: list[str] = []
        handle = register_optimizer_step_post_hook(lambda *_: seen.append("after"))
        try:
            make_trainer(max_steps=3).fit(Mlp(), data.vectors())
        finally:
            handle.remove()
        return seen

    assert layouts.same(observe) == ["after"] * 3
