"""Clipping by the Trainer and by the user, norms and states of all stages, as on one device."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer
from typing_extensions import override

from lightning_mgpu.errors import PlacementError
from tests.harness import whole_parameters
from tests.parity.layouts import Layouts
from tests.parity.trained import Optimized, check, on_parameters
from tests.strategies.warm_workers import WarmWorkers, run_on_stages
from tests.zoo import data
from tests.zoo.case import Case
from tests.zoo.reuse import TiedHead
from tests.zoo.steps import Mlp

SGD = on_parameters(torch.optim.SGD, lr=0.1, momentum=0.9)


# -- clipping by the Trainer -------------------------------------------------------------------------------------------


class NotesClipped(Callback):
    """Keeps the gradients that a step is made with."""

    def __init__(self) -> None:
        self.clipped: list[dict[str, Tensor]] = []

    @override
    def on_before_zero_grad(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        with whole_parameters(trainer.strategy):
            named = [(n, p.grad) for n, p in pl_module.named_parameters() if p.grad is not None]
            self.clipped.append({name: gradient.detach().clone() for name, gradient in named})


def observe_clipped(make_module: Any, make_data: Any, **trainer: Any) -> Any:
    """Says how to see what clipping makes of gradients and weights."""

    def observe(make_trainer: Any) -> Any:
        notes, module = NotesClipped(), make_module()
        make_trainer(max_steps=3, callbacks=[notes], **trainer).fit(module, make_data())
        return notes.clipped, dict(module.state_dict())

    return observe


@pytest.mark.parametrize("num_stages", [2, 3])
@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_clipping(algorithm: str, num_stages: int, layouts_of_any_kind: Layouts) -> None:
    options = {"gradient_clip_val": 0.05, "gradient_clip_algorithm": algorithm}
    clipped, _ = layouts_of_any_kind.same(observe_clipped(lambda: Optimized(SGD), data.vectors, **options), num_stages)
    gradients = torch.cat([g.flatten() for g in clipped[-1].values()])
    reached = gradients.norm() if algorithm == "norm" else gradients.abs().max()
    assert float(reached) == pytest.approx(0.05, rel=1e-4)


@pytest.mark.parametrize("num_stages", [2, 3])
def test_clipping_counts_a_shared_parameter_once(num_stages: int, layouts_of_any_kind: Layouts) -> None:
    observe = observe_clipped(TiedHead, data.sentences, gradient_clip_val=0.05)
    clipped, _ = layouts_of_any_kind.same(observe, num_stages)
    assert float(torch.cat([g.flatten() for g in clipped[-1].values()]).norm()) == pytest.approx(0.05, rel=1e-4)


def test_nothing_is_clipped_below_the_bound(layouts_of_any_kind: Layouts) -> None:
    layouts_of_any_kind.same(observe_clipped(lambda: Optimized(SGD), data.vectors, gradient_clip_val=1e3))


# -- clipping by the user ----------------------------------------------------------------------------------------------


class ClipsByHook(Optimized):
    """Clips the first steps by value and the later ones by norm."""

    @override
    def configure_gradient_clipping(
        self, optimizer: Optimizer, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        algorithm = "norm" if self.trainer.global_step else "value"
        self.clip_gradients(optimizer, gradient_clip_val=0.02, gradient_clip_algorithm=algorithm)


def test_the_hook_for_clipping(warm_workers: WarmWorkers) -> None:
    check(Case(lambda: ClipsByHook(SGD), data.vectors), warm_workers)


class ClipsByTorch(Optimized):
    """Clips by torch's own functions.

    Args:
        how: "norm", "value", or "norm of one" for the first layer alone.
        norm_type: which norm.
    """

    def __init__(self, how: str, norm_type: float = 2.0) -> None:
        super().__init__(SGD)
        self.how = how
        self.norm_type = norm_type
        self.norms: list[Tensor] = []

    @override
    def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
        if self.how == "norm":
            self.norms.append(torch.nn.utils.clip_grad_norm_(self.parameters(), 0.05, self.norm_type))
        elif self.how == "norm of one":
            self.norms.append(torch.nn.utils.clip_grad_norm_(self.fc1.weight, max_norm=0.01))
        else:
            torch.nn.utils.clip_grad_value_(self.parameters(), 0.01)


@pytest.mark.parametrize("num_stages", [2, 3])
@pytest.mark.parametrize(
    ("how", "norm_type"), [("norm", 2.0), ("norm", 1.0), ("norm", float("inf")), ("norm of one", 2.0), ("value", 0.0)]
)
def test_torchs_functions_clip_all_stages(how: str, norm_type: float, num_stages: int, layouts_of_any_kind: Layouts) -> None:
    def observe(make_trainer: Any) -> Any:
        module = ClipsByTorch(how, norm_type)
        make_trainer(max_steps=3).fit(module, data.vectors())
        return [norm.detach() for norm in module.norms], dict(module.state_dict())

    layouts_of_any_kind.same(observe, num_stages)


def test_torchs_functions_are_what_they_were_afterwards(layouts_of_any_kind: Layouts) -> None:
    before = torch.nn.utils.clip_grad_norm_, torch.nn.utils.clip_grad_value_
    with layouts_of_any_kind.lent() as make_trainer:
        make_trainer(max_steps=1).fit(ClipsByTorch("norm"), data.vectors())
    assert (torch.nn.utils.clip_grad_norm_, torch.nn.utils.clip_grad_value_) == before


class ClipsByImportedName(Optimized):
    @override
    def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
        clip_grad_norm_(self.parameters(), 0.05)


def test_a_function_by_its_imported_name_refuses_to_clip_in_part(layouts: Layouts) -> None:
    text = (
        r"the gradient of parameter 'fc1.weight' lives on stage 0; read it inside strategy.summon_parameters\(\), clip by "
        r"self.clip_gradients\(optimizer, ...\) or torch.nn.utils.clip_grad_norm_\(...\), called by its full name, or take the "
        r"norm from strategy.gradient_norm\(\)"
    )
    with layouts.lent() as make_trainer, pytest.raises(PlacementError, match=text):
        make_trainer(max_steps=1).fit(ClipsByImportedName(SGD), data.vectors())


class Infinite(Optimized):
    """Has an infinite gradient in its first layer, and stops where the norm shows it."""

    @override
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc3(torch.tanh(self.fc2(_Infinity.apply(self.fc1(x)))))  # type: ignore[no-untyped-call]
        return y

    @override
    def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.05, error_if_nonfinite=True)


class _Infinity(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * torch.inf


def test_a_norm_that_is_not_finite_is_an_error_where_asked_for(layouts_of_any_kind: Layouts) -> None:
    def observe(make_trainer: Any) -> Any:
        with pytest.raises(RuntimeError, match="non-finite") as caught:
            make_trainer(max_steps=1).fit(Infinite(SGD), data.vectors())
        return type(caught.value).__name__, str(caught.value)

    layouts_of_any_kind.same(observe)


# -- norms and states of all stages ------------------------------------------------------------------------------------


class AsksForNorms(Callback):
    """Compares the strategy's norms with those of the whole gradients, and notes them."""

    def __init__(self) -> None:
        self.norms: list[Tensor] = []

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        strategy: Any = trainer.strategy
        chosen = [*pl_module.parameters()][:2]
        for norm_type in (2.0, 1.0, float("inf")):
            found = [strategy.gradient_norm(norm_type=norm_type), strategy.gradient_norm(chosen, norm_type)]
            found.append(strategy.gradient_norm(chosen[0], norm_type))
            with strategy.summon_parameters():
                inside = strategy.gradient_norm(norm_type=norm_type)
                groups = (pl_module.parameters(), chosen, chosen[:1])
                expected = [nn.utils.get_total_norm([p.grad for p in group], norm_type) for group in groups]
            torch.testing.assert_close(torch.stack(found), torch.stack(expected), rtol=1e-6, atol=0)
            assert torch.equal(inside, found[0])
            self.norms += found


@pytest.mark.parametrize("num_stages", [2, 3])
def test_gradient_norm(num_stages: int, layouts_of_any_kind: Layouts) -> None:
    asks = AsksForNorms()
    with layouts_of_any_kind.lent(num_stages) as make_trainer:
        trainer, module = make_trainer(max_steps=3, callbacks=[asks]), TiedHead()
        trainer.fit(module, data.sentences())
        whole = nn.utils.get_total_norm([p.grad for p in module.parameters() if p.grad is not None])
        assert torch.equal(trainer.strategy.gradient_norm(), whole)
    assert len(asks.norms) == 27
    assert all(norm.shape == () and norm > 0 for norm in asks.norms)


class LogsNorms(Mlp):
    """Logs the norm of each gradient by Lightning's own function.

    Args:
        summons: Whether it brings the gradients first.
    """

    def __init__(self, *, summons: bool) -> None:
        super().__init__()
        self.summons = summons

    @override
    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        with whole_parameters(self.trainer.strategy) if self.summons else nullcontext():
            norms = grad_norm(self, norm_type=2)
        self.log_dict(norms)


def test_norms_by_lightnings_function(warm_workers: WarmWorkers) -> None:
    record = check(Case(partial(LogsNorms, summons=True), data.vectors), warm_workers)
    assert "grad_2.0_norm/fc1.weight" in record.metrics[0]
    with pytest.raises(PlacementError, match=r"the gradient of parameter 'fc1.weight' lives on stage 0; .*gradient_norm\(\)"):
        run_on_stages(Case(partial(LogsNorms, summons=False), data.vectors), 2, warm_workers)


class AsksForState(Callback):
    def __init__(self) -> None:
        self.states: list[Any] = []

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        full = getattr(trainer.strategy, "full_state_dict", pl_module.state_dict)
        self.states.append({name: value.clone() for name, value in full().items()})


@pytest.mark.parametrize("num_stages", [2, 3])
def test_full_state_dict(num_stages: int, layouts_of_any_kind: Layouts) -> None:
    def observe(make_trainer: Any) -> Any:
        asks, module = AsksForState(), TiedHead()
        make_trainer(max_steps=3, callbacks=[asks]).fit(module, data.sentences())
        assert asks.states[-1].keys() == module.state_dict().keys()
        return asks.states

    layouts_of_any_kind.same(observe, num_stages)


def test_full_state_dict_is_a_copy(layouts_of_any_kind: Layouts) -> None:
    with layouts_of_any_kind.lent() as make_trainer:
        trainer, module = make_trainer(max_steps=1), Mlp()
        trainer.fit(module, data.vectors())
        state = trainer.strategy.full_state_dict()
        assert all(torch.equal(value, state[name]) for name, value in module.state_dict().items())
        state["fc3.weight"].zero_()
        assert bool(module.fc3.weight.any())
