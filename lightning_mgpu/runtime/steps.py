"""Optimizers of one owner: the user's optimizer with only the parameters that live here.

The user's own optimizer object stays on the lead as the face: its hyperparameters and schedulers count. What it is asked to
do, each owner does on its own parameters with the lead's current hyperparameters.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

__all__ = ["hyperparameters", "owned_part", "set_hyperparameters"]

_COVERED = ("step", "zero_grad", "state_dict", "load_state_dict")  # the face's own, no part of the optimizer


def owned_part(optimizer: Optimizer, owned: Callable[[Tensor], bool]) -> Optimizer:
    """Makes an optimizer of the same class for some of the parameters, sharing their state with the original.

    Args:
        optimizer: the original, which is not changed.
        owned: says whether a parameter belongs to the part.

    Returns:
        The part; its groups correspond to the original's one by one and may be empty.
    """
    part = copy.copy(optimizer)
    part.__dict__ = {k: v for k, v in optimizer.__dict__.items() if k not in _COVERED}
    part.param_groups = [{**group, "params": [p for p in group["params"] if owned(p)]} for group in optimizer.param_groups]
    part.state = defaultdict(dict, {p: s for p, s in optimizer.state.items() if owned(p)})
    for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        if hasattr(part, hooks):
            setattr(part, hooks, type(getattr(optimizer, hooks))())
    return part


def hyperparameters(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Returns each group without its parameters."""
    return [
        {key: value.detach().cpu() if isinstance(value, Tensor) else value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]


def set_hyperparameters(optimizer: Optimizer, groups: Sequence[Mapping[str, Any]]) -> None:
    """Takes over the lead's hyperparameters, group by group."""
    for group, values in zip(optimizer.param_groups, groups, strict=True):
        for key, value in values.items():
            known = group.get(key)
            if isinstance(known, Tensor) and isinstance(value, Tensor):
                with torch.no_grad():
                    known.copy_(value)
            else:
                group[key] = value
