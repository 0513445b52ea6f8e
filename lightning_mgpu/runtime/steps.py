"""Optimizers of one owner: the user's optimizer with only the parameters that live here.

The user's own optimizer object stays on the lead as the face: its hyperparameters and schedulers count. What it is asked to
do, each owner does on its own parameters with the lead's current hyperparameters.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from lightning_mgpu.runtime.settings import COVERED, group_values, own_attributes

__all__ = ["PartState", "has_parameters", "owned_part", "part_state", "received", "shipped", "step_part"]


def owned_part(optimizer: Optimizer, owned: Callable[[Tensor], bool]) -> Optimizer:
    """Makes an optimizer of the same class for some of the parameters, sharing their state with the original.

    Args:
        optimizer: the original, which is not changed.
        owned: says whether a parameter belongs to the part.

    Returns:
        The part; its groups correspond to the original's one by one and may be empty.
    """
    part = type(optimizer).__new__(type(optimizer))
    part.__dict__ = {k: v for k, v in optimizer.__dict__.items() if k not in COVERED}
    part.param_groups = [_owned_group(group, owned) for group in optimizer.param_groups]
    part.state = defaultdict(dict, {p: s for p, s in optimizer.state.items() if owned(p)})
    for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        if hasattr(part, hooks):
            setattr(part, hooks, type(getattr(optimizer, hooks))())
    return part


def _owned_group(group: Mapping[str, Any], owned: Callable[[Tensor], bool]) -> dict[str, Any]:
    kept = [owned(p) for p in group["params"]]
    part = {**group, "params": [p for p, keep in zip(group["params"], kept, strict=True) if keep]}
    if "param_names" in group:
        part["param_names"] = [n for n, keep in zip(group["param_names"], kept, strict=True) if keep]
    return part


def has_parameters(optimizer: Optimizer) -> bool:
    """Says whether an optimizer has anything to step."""
    return any(group["params"] for group in optimizer.param_groups)


# -- on the way to its owner -------------------------------------------------------------------------------------------


def shipped(part: Optimizer) -> tuple[Optimizer, dict[str, Any]]:
    """Returns what to send of a part: torch's own pickle of it leaves out what a subclass keeps on itself."""
    plain = type(part).__getstate__ is Optimizer.__getstate__
    return part, own_attributes(part) if plain else {}


def received(sent: tuple[Optimizer, Mapping[str, Any]]) -> Optimizer:
    """Puts a part together again."""
    part, attributes = sent
    vars(part).update(attributes)
    return part


# -- a step ------------------------------------------------------------------------------------------------------------


def step_part(part: Optimizer, kwargs: Mapping[str, Any]) -> None:
    """Steps a part by the method of its class, without what torch wraps around that.

    Hooks of the step are the lead's, and torch's switch of the grad mode would import its compiler first, which takes a second
    in each process.

    Args:
        part: the optimizer of one owner; nothing is done where that owner has none of its parameters.
        kwargs: what the user's step was given beside the closure.
    """
    if not has_parameters(part):
        return
    function: Any = type(part).step
    grad = torch.is_grad_enabled()
    while hasattr(function, "__wrapped__") and getattr(function, "__globals__", None) is vars(torch_optimizer):
        if not getattr(function, "hooked", False):
            grad = bool(part.defaults.get("differentiable", False))
        function = function.__wrapped__
    with torch.set_grad_enabled(grad):
        function(part, **kwargs)


# -- on the way home ---------------------------------------------------------------------------------------------------


@dataclass
class PartState:
    """Is what an owner's steps made.

    Attributes:
        state: the state of each parameter, by name.
        groups: the values of each group that this owner has parameters of, else ``None``.
        attributes: what the optimizer keeps on itself, or ``None`` where this owner has no parameters of it.
    """

    state: Mapping[str, Any]
    groups: Sequence[Mapping[str, Any] | None]
    attributes: Mapping[str, Any] | None


def part_state(part: Optimizer, name_of: Callable[[Tensor], str | None]) -> PartState:
    """Takes down what the steps of a part made.

    Args:
        part: the optimizer of one owner.
        name_of: names a parameter.
    """
    named = ((name_of(p), state) for p, state in part.state.items())
    return PartState(
        {name: state for name, state in named if name is not None},
        [group_values(group) if group["params"] else None for group in part.param_groups],
        own_attributes(part) if has_parameters(part) else None,
    )
