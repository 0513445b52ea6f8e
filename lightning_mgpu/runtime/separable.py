"""Whether an optimizer can be stepped in parts: each owner steps its own parameters, and none sees those of the others.

What an optimizer keeps on itself can be looked at. Whether its step looks from one parameter to another, as one that clips by
its own global norm, shows in a trial: a few small parameters in the place of the real ones, stepped together and apart.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_mgpu.errors import PlacementError
from lightning_mgpu.runtime.settings import own_attributes
from lightning_mgpu.runtime.steps import owned_part, step_part

__all__ = ["check_optimizer"]

_READS_ALL_GRADIENTS = ("LBFGS", "SAM", "ASAM", "ESAM", "Shampoo")
_MAX_DEPTH = 3
_MAX_GROUPS, _PER_GROUP, _EDGE = 8, 2, 4
_SCALES = (1.0, 100.0, 0.01)  # of the gradients of each trial step; what clips or normalises reacts to one of them
_REMEDY = "use devices=1, or an optimizer that steps each parameter by its own gradient, as Adam or SGD"


def check_optimizer(optimizer: Optimizer, num_stages: int) -> None:
    """Refuses optimizers that can't step on one stage's parameters alone.

    Args:
        optimizer: the user's optimizer, with its parameters on the lead.
        num_stages: number of stages.

    Raises:
        PlacementError: with the name of the optimizer and the remedy.
    """
    if num_stages == 1:
        return
    name = type(optimizer).__name__
    if not isinstance(optimizer, Optimizer):
        raise PlacementError(f"{name} is no torch.optim.Optimizer, so it can't be cut into {num_stages} stages; {_REMEDY}")
    if name in _READS_ALL_GRADIENTS or _needs_closure(optimizer):
        raise PlacementError(
            f"{name} needs all parameters and gradients in one process, but a pipeline of {num_stages} stages keeps them with "
            f"their stages; {_REMEDY}"
        )
    _check_attributes(optimizer, name)
    is_torchs = type(optimizer).__module__.startswith("torch.optim.")  # known to step each parameter by itself
    fault = None if is_torchs else _fault_in_trial(optimizer)
    if fault is not None:
        raise PlacementError(
            f"{name} {fault}, but a pipeline of {num_stages} stages steps the parameters of each stage apart; {_REMEDY}"
        )


def _needs_closure(optimizer: Optimizer) -> bool:
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


# -- what it keeps on itself -------------------------------------------------------------------------------------------


def _check_attributes(optimizer: Optimizer, name: str) -> None:
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for attribute, value in own_attributes(optimizer).items():
        for held in _inside(value):
            if isinstance(held, Optimizer):
                raise PlacementError(
                    f"{name} holds another optimizer ({type(held).__name__}) in its attribute {attribute!r}, and a wrapper "
                    f"can't be cut into stages; return {type(held).__name__} from configure_optimizers, or use devices=1"
                )
            if isinstance(held, nn.Module) or (isinstance(held, Tensor) and (id(held) in stepped or _is_parameter(held))):
                kind = "a module" if isinstance(held, nn.Module) else "parameters"
                raise PlacementError(
                    f"{name} holds {kind} in its attribute {attribute!r}, which can't follow them to their stages; keep what "
                    "belongs to a parameter in self.state[parameter], or use devices=1"
                )


def _is_parameter(tensor: Tensor) -> bool:
    return isinstance(tensor, nn.Parameter)


def _inside(value: Any, depth: int = 0) -> Iterator[Any]:
    """Yields a value and what it holds."""
    yield value
    if depth >= _MAX_DEPTH or isinstance(value, (str, bytes, Tensor, nn.Module, Optimizer, type)):
        return
    if isinstance(value, dict):
        parts: Sequence[Any] = (*value.keys(), *value.values())
    elif isinstance(value, (list, tuple, set, frozenset)):
        parts = tuple(value)
    else:
        parts = tuple(getattr(value, "__dict__", {}).values())
    for part in parts:
        yield from _inside(part, depth + 1)


# -- the trial ---------------------------------------------------------------------------------------------------------


def _fault_in_trial(optimizer: Optimizer) -> str | None:
    """Steps stand-ins together and in two halves, and says what goes wrong with the halves."""
    try:
        together = _trial(optimizer, halves=1, seed=0)
        if not _is_equal(together, _trial(optimizer, halves=1, seed=1)):
            return None  # it draws random numbers, and nothing can be told
    except Exception:  # it does not take stand-ins; the first real step will show whether it takes parameters
        return None
    try:
        apart = _trial(optimizer, halves=2, seed=0)
    except Exception as error:
        return f"fails without all its parameters ({type(error).__name__}: {error})"
    if not _is_equal(together, apart):
        return "steps a parameter by what it finds in the others"
    return None


def _is_equal(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    return all(
        torch.allclose(x.double(), y.double(), rtol=1e-2 if x.dtype.itemsize < 4 else 1e-5, atol=0, equal_nan=True)
        for x, y in zip(a, b, strict=True)
    )


def _trial(optimizer: Optimizer, *, halves: int, seed: int) -> list[Tensor]:
    """Steps stand-ins a few times.

    Args:
        optimizer: the optimizer, which is not changed.
        halves: number of parts the stand-ins are dealt out to.
        seed: of the numbers that a step draws; values and gradients of the stand-ins are always the same.

    Returns:
        The stand-ins.
    """
    generator = torch.Generator().manual_seed(0)
    groups = [_stand_ins(group["params"], generator) for group in optimizer.param_groups[:_MAX_GROUPS]]
    groups += [[] for _ in optimizer.param_groups[_MAX_GROUPS:]]
    everything = [p for group in groups for p in group]
    part_of = {id(p): number % halves for number, p in enumerate(everything)}
    parts = [_with_stand_ins(optimizer, groups, part_of, part) for part in range(halves)]
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)
        for scale in _SCALES:
            for number, parameter in enumerate(everything, start=1):
                gradient = torch.randn(parameter.shape, generator=generator) * scale * number
                parameter.grad = gradient.to(parameter.device, parameter.dtype)
            for part in parts:
                step_part(part, {})
    return [p.detach() for p in everything]


def _stand_ins(parameters: Sequence[Tensor], generator: torch.Generator) -> list[nn.Parameter]:
    """Makes small parameters in the likeness of some of a group's, of different shapes where there are any."""
    by_shape = {p.shape: p for p in parameters if not isinstance(p, nn.parameter.UninitializedParameter)}
    chosen = [*by_shape.values(), *parameters][:_PER_GROUP] if len(parameters) > 1 else list(parameters)
    made = []
    for p in chosen:
        value = torch.randn([min(edge, _EDGE) for edge in p.shape], generator=generator)
        made.append(nn.Parameter(value.to("cpu" if p.is_meta else p.device, p.dtype)))
    return made


def _with_stand_ins(
    optimizer: Optimizer, groups: Sequence[Sequence[nn.Parameter]], part_of: dict[int, int], part: int
) -> Optimizer:
    """Makes a fresh optimizer of the same class and settings for those stand-ins that are dealt to one part."""
    made = owned_part(optimizer, lambda _: False)
    for group, chosen in zip(made.param_groups, groups, strict=True):
        mine = [p for p in chosen if part_of[id(p)] == part]
        settings = {key: copy.deepcopy(value) for key, value in group.items() if key not in ("params", "param_names")}
        names = {"param_names": [str(id(p)) for p in mine]} if "param_names" in group else {}
        group.update({**settings, **names, "params": mine})
    vars(made).update({key: copy.deepcopy(value) for key, value in own_attributes(optimizer).items()})
    made.state = defaultdict(dict)
    return made
