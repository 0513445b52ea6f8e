"""Whether a checkpoint fits a module and its optimizers, found out before anything is changed."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_mgpu.errors import CheckpointError, counted
from lightning_mgpu.partition.names import Names

__all__ = ["check_module_state", "check_optimizer_states"]

_NUM_SHOWN = 3
_LIKE_PARAMETER = ("momentum_buffer", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "square_avg", "grad_avg", "acc_delta")


def check_module_state(module: nn.Module, state: Mapping[str, Any], *, strict: bool) -> None:
    """Refuses a state dict that ``module.load_state_dict`` would refuse when half of it is loaded.

    Args:
        module: the module, whole.
        state: the state dict.
        strict: whether the keys have to be the same.

    Raises:
        CheckpointError: with the keys and shapes that do not fit.
    """
    known = module.state_dict()
    missing = [key for key in known if key not in state] if strict else []
    unexpected = [key for key in state if key not in known] if strict else []
    shapes = [
        f"{key!r} ({tuple(state[key].shape)} in the checkpoint, {tuple(value.shape)} in the module)"
        for key, value in known.items()
        if isinstance(value, Tensor) and not _is_lazy(value) and isinstance(state.get(key), Tensor)
        and state[key].shape != value.shape
    ]  # fmt: skip
    if not (missing or unexpected or shapes):
        return
    try:
        with _weightless(module), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*copying from a non-meta parameter")
            module.load_state_dict(dict(state), strict=strict)  # hooks of the module may make it fit
    except RuntimeError as error:
        faults = [
            *_listed("missing key", [repr(key) for key in missing]),
            *_listed("unexpected key", [repr(key) for key in unexpected]),
            *_listed("other shape", shapes),
        ]
        remedy = "build the module as it was when it was saved"
        if not shapes:
            remedy += ", or set module.strict_loading = False to load what fits"
        raise CheckpointError(
            f"the checkpoint does not fit {type(module).__name__}, and nothing of it was loaded: {'; '.join(faults)}; {remedy}"
        ) from error


def _listed(noun: str, items: Sequence[str]) -> Iterator[str]:
    if items:
        shown = ", ".join(items[:_NUM_SHOWN]) + (", ..." if len(items) > _NUM_SHOWN else "")
        yield f"{counted(len(items), noun)}: {shown}"


def _is_lazy(tensor: Tensor) -> bool:
    return isinstance(tensor, (nn.parameter.UninitializedParameter, nn.parameter.UninitializedBuffer))


@contextmanager
def _weightless(module: nn.Module) -> Iterator[None]:
    """Gives a module tensors without memory for a block, so that what is loaded into them is lost."""
    kept: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for child in module.modules():
        if not isinstance(child, torch.jit.ScriptModule):
            kept += [(registry, dict(registry)) for registry in (child._parameters, child._buffers)]
    try:
        for registry, before in kept:
            registry.update({key: _on_meta(tensor) for key, tensor in before.items() if tensor is not None})
        yield
    finally:
        for registry, before in kept:
            registry.clear()
            registry.update(before)


def _on_meta(tensor: Tensor) -> Tensor:
    if _is_lazy(tensor):
        return tensor
    empty = torch.empty_like(tensor, device="meta")
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


# -- optimizers --------------------------------------------------------------------------------------------------------


def check_optimizer_states(module: nn.Module, optimizers: Sequence[Optimizer], states: Sequence[Mapping[str, Any]]) -> None:
    """Refuses states of optimizers that are not those of the module.

    Args:
        module: the module, for the names of its parameters.
        optimizers: what ``configure_optimizers`` made.
        states: what the checkpoint holds.

    Raises:
        CheckpointError: with the numbers that differ.
    """
    fault = None
    if len(optimizers) != len(states):
        fault = f"it holds the state of {counted(len(states), 'optimizer')}, and there are {len(optimizers)}"
    name_of = Names(module).name_of
    for index, (optimizer, state) in enumerate(zip(optimizers, states, strict=False)):
        if fault is None and (found := _fault_of(optimizer, state, name_of)) is not None:
            fault = f"{found} (optimizer {index}, {type(optimizer).__name__})"
    if fault is not None:
        raise CheckpointError(
            f"the checkpoint does not fit the optimizers: {fault}; configure the optimizers as they were when it was saved, or "
            "load the weights alone with module.load_state_dict(...) before trainer.fit(...)"
        )


def _fault_of(optimizer: Optimizer, state: Mapping[str, Any], name_of: Mapping[int, str]) -> str | None:
    saved, now = [[len(group["params"]) for group in groups] for groups in (state["param_groups"], optimizer.param_groups)]
    if len(saved) != len(now):
        return f"{counted(len(saved), 'parameter group')} in the checkpoint, {len(now)} in the optimizer"
    for number, (there, here) in enumerate(zip(saved, now, strict=True)):
        if there != here:
            return f"{counted(there, 'parameter')} in group {number} in the checkpoint, {here} in the optimizer"
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, parameter in zip(numbers, parameters, strict=True):
        for key in _LIKE_PARAMETER:
            made = state["state"].get(number, {}).get(key)
            if isinstance(made, Tensor) and made.shape != parameter.shape and not _is_lazy(parameter):
                name = name_of.get(id(parameter), f"parameter {number}")
                return (
                    f"{key} of {name!r} is {tuple(made.shape)} in the checkpoint, and the parameter is {tuple(parameter.shape)}"
                )
    return None
