"""Optimizers written outside torch, each with something of its own that has to reach every stage, or that can't."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

Closure = Callable[[], Any] | None


def evaluated(closure: Closure) -> Any:
    """Returns the loss that a step is given a closure for."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


class Lion(Optimizer):
    """Follows the sign of an averaged gradient (Chen et al. 2023); keeps settings and a counter on itself."""

    def __init__(self, params: Iterable[Any], lr: float = 0.01, *, cautious: bool = False) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99), "weight_decay": 0.1})
        self.cautious = cautious
        self.decay = lambda value, rate: value * rate
        self.table = {"warm": [0.5, 1.0]}
        self.num_steps = 0

    @override
    @torch.no_grad()
    def step(self, closure: Closure = None) -> Any:
        loss = evaluated(closure)
        warm = self.table["warm"][min(self.num_steps, 1)]
        self.num_steps += 1
        for group in self.param_groups:
            first, second = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                update = (mean * first + p.grad * (1 - first)).sign()
                if self.cautious:
                    update *= update.sign() == p.grad.sign()
                p.copy_(self.decay(p, 1 - group["lr"] * group["weight_decay"]))
                p.sub_(update, alpha=group["lr"] * warm)
                mean.lerp_(p.grad, 1 - second)
        return loss


class GroupCounter(Optimizer):
    """Counts its steps in the group, as many do, and warms up by the count."""

    def __init__(self, params: Iterable[Any], lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "k": 0})

    @override
    @torch.no_grad()
    def step(self, closure: Closure = None) -> Any:
        loss = evaluated(closure)
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["k"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"] * min(1.0, group["k"] / 3))
        return loss


class OwnPickle(GroupCounter):
    """Holds a lock, which its own pickle leaves out, beside a factor, which it keeps."""

    def __init__(self, params: Iterable[Any], lr: float = 0.1) -> None:
        super().__init__(params, lr)
        self.lock = threading.Lock()
        self.factor = 0.5

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "factor": self.factor}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.lock = threading.Lock()

    @override
    @torch.no_grad()
    def step(self, closure: Closure = None) -> Any:
        loss = evaluated(closure)
        with self.lock:
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p.sub_(p.grad, alpha=group["lr"] * self.factor)
        return loss


class StepOption(GroupCounter):
    """Takes an option of its own in each step."""

    @override
    @torch.no_grad()
    def step(self, closure: Closure = None, *, factor: float = 1.0) -> Any:  # type: ignore[override]
        loss = evaluated(closure)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"] * factor)
        return loss


# -- what no stage can step on its own ---------------------------------------------------------------------------------


class HoldsParameters(GroupCounter):
    def __init__(self, params: Iterable[Any], lr: float = 0.1) -> None:
        super().__init__(params, lr)
        self.shadow = {"all": [p for group in self.param_groups for p in group["params"]]}


class HoldsModule(GroupCounter):
    def __init__(self, params: Iterable[Any], module: nn.Module) -> None:
        super().__init__(params)
        self.module = module


class Lookahead(Optimizer):
    """Wraps another optimizer, whose groups and state it shows as its own."""

    def __init__(self, inner: Optimizer) -> None:
        super().__init__([p for group in inner.param_groups for p in group["params"]], {})
        self.inner = inner
        self.param_groups = inner.param_groups

    @override
    def step(self, closure: Closure = None) -> Any:
        return self.inner.step(closure)


class OwnGlobalNorm(GroupCounter):
    """Divides by the norm of all gradients."""

    @override
    @torch.no_grad()
    def step(self, closure: Closure = None) -> Any:
        loss = evaluated(closure)
        gradients: list[Tensor] = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        scale = nn.utils.get_total_norm(gradients).clamp(min=1)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad / scale, alpha=group["lr"])
        return loss


class NeedsAllGroups(GroupCounter):
    """Looks at the first parameter of each group."""

    @override
    @torch.no_grad()
    def step(self, closure: Closure = None) -> Any:
        loss = evaluated(closure)
        for group in self.param_groups:
            device = group["params"][0].device
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad.to(device), alpha=group["lr"])
        return loss


class FailsOnce(GroupCounter):
    """Raises at its third step where it steps the parameter that has so many elements.

    Args:
        params: parameters.
        num_elements: of the parameter that is to blame.
    """

    def __init__(self, params: Iterable[Any], num_elements: int) -> None:
        super().__init__(params)
        self.num_elements = num_elements
        self.num_steps = 0

    @override
    def step(self, closure: Closure = None) -> Any:
        self.num_steps += 1
        for group in self.param_groups:
            for p in group["params"]:
                if self.num_steps == 3 and p.numel() == self.num_elements:
                    raise ArithmeticError("no step from here")
        return super().step()
