"""Which optimizers can be stepped in parts, found out on stand-ins that leave no trace."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_mgpu.errors import PlacementError
from lightning_mgpu.runtime.separable import check_optimizer


class Noisy(Optimizer):
    """Adds noise to each parameter."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.num_steps = 0

    @override
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        self.num_steps += 1
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(torch.randn_like(p), alpha=group["lr"])


class ByCount(Noisy):
    """Steps each parameter by how many came before it."""

    @override
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                self.num_steps += 1
                p.sub_(p.grad, alpha=group["lr"] / self.num_steps)


class Apart(Noisy):
    """Steps each parameter by its own gradient, and needs matrices of more than two rows."""

    @override
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                assert p.ndim == 2
                assert len(p) > 2
                p.sub_(p.grad.sign(), alpha=group["lr"])


class WantsClosure(Noisy):
    @override
    def step(self, closure: Callable[[], Any]) -> Any:  # type: ignore[override]
        return closure()


class OnlyLooksLikeOne:
    """Has what Lightning asks of an optimizer."""

    param_groups: list[Any]


def parameters() -> list[nn.Parameter]:
    """Makes a few matrices."""
    return [nn.Parameter(torch.randn(8, 5)), nn.Parameter(torch.randn(6, 7)), nn.Parameter(torch.randn(8, 5))]


@pytest.mark.parametrize("kind", [Noisy, Apart])
def test_accepted(kind: type[Noisy]) -> None:
    check_optimizer(kind(parameters()), 2)


def test_a_step_that_looks_from_one_parameter_to_the_next_is_found() -> None:
    text = "ByCount steps a parameter by what it finds in the others, but a pipeline of 3 stages steps .* apart; use devices=1"
    with pytest.raises(PlacementError, match=text):
        check_optimizer(ByCount(parameters()), 3)
    check_optimizer(ByCount(parameters()), 1)


def test_a_step_that_needs_a_closure_is_refused() -> None:
    with pytest.raises(PlacementError, match="WantsClosure needs all parameters and gradients in one process"):
        check_optimizer(WantsClosure(parameters()), 2)


def test_what_is_no_optimizer_of_torch_is_refused() -> None:
    with pytest.raises(PlacementError, match=r"OnlyLooksLikeOne is no torch.optim.Optimizer, so it can't be cut into 2 stages"):
        check_optimizer(OnlyLooksLikeOne(), 2)  # type: ignore[arg-type]


def test_the_trial_leaves_no_trace() -> None:
    optimizer = Apart(parameters())
    for p in optimizer.param_groups[0]["params"]:
        p.grad = torch.randn_like(p)
    before, generator = copy.deepcopy(optimizer.param_groups), torch.get_rng_state()
    check_optimizer(optimizer, 2)
    assert torch.equal(torch.get_rng_state(), generator)
    assert optimizer.num_steps == 0
    assert not optimizer.state
    for was, now in zip(before[0]["params"], optimizer.param_groups[0]["params"], strict=True):
        assert torch.equal(was, now)
