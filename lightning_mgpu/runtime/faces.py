"""The user's optimizers on the lead: what they are asked to do, every owner does on its own parameters."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from lightning_mgpu.runtime.patches import Patches
from lightning_mgpu.runtime.steps import step_part

if TYPE_CHECKING:
    from lightning_mgpu.runtime.lead import Lead

__all__ = ["put_faces", "put_scaler"]

_Make = Callable[[Callable[..., Any]], Callable[..., Any]]


def put_faces(optimizers: Sequence[Optimizer], lead: Lead, patches: Patches) -> None:
    """Covers ``step``, ``zero_grad``, ``state_dict`` and ``load_state_dict`` of optimizers."""
    for optimizer in optimizers:
        patches.put(optimizer, "step", _step(optimizer, lead))
        patches.put(optimizer, "zero_grad", _zero_grad(optimizer, lead))
        patches.put(optimizer, "state_dict", _state_dict(optimizer, lead))
        patches.put(optimizer, "load_state_dict", _at_home(lead))


def _step(optimizer: Optimizer, lead: Lead) -> _Make:
    def make(plain: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any, **kwargs: Any) -> Any:
            if lead.num_processes == 1:
                return plain(*args, **kwargs)
            optimizer._opt_called = True  # type: ignore[attr-defined]
            args, kwargs = _before(optimizer, (optimizer, *args), kwargs)
            closure = args[1] if len(args) > 1 else kwargs.get("closure")
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()  # may hold the first call of all, which places the parameters
            options = {key: value for key, value in kwargs.items() if key != "closure"}
            now = lead.latest  # another one, where the closure found the module changed
            if now.placed:
                with now.resumed():
                    now.optimizers.step(optimizer, options)
            else:
                step_part(optimizer, options)
            for hook in itertools.chain(
                optimizer._optimizer_step_post_hooks.values(), torch_optimizer._global_optimizer_post_hooks.values()
            ):
                hook(optimizer, args, kwargs)
            return loss

        step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        return step

    return make


def _before(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Runs the hooks before a step, which may change what it is given.

    Raises:
        RuntimeError: for a hook that returns something else.
    """
    for hook in itertools.chain(
        torch_optimizer._global_optimizer_pre_hooks.values(), optimizer._optimizer_step_pre_hooks.values()
    ):
        changed: Any = hook(optimizer, args, kwargs)
        if changed is None:
            continue
        if not isinstance(changed, tuple) or len(changed) != 2:
            name = type(optimizer).__name__
            raise RuntimeError(f"a hook before the step of {name} returned {changed}; return None or (args, kwargs)")
        args, kwargs = changed
    return args, kwargs


def _zero_grad(optimizer: Optimizer, lead: Lead) -> _Make:
    def make(plain: Callable[..., Any]) -> Callable[..., Any]:
        def zero_grad(set_to_none: bool = True) -> None:
            if not lead.placed:
                plain(set_to_none=set_to_none)
                return
            with lead.resumed():
                lead.optimizers.gradients.zero(_parameters((optimizer,)), set_to_none=set_to_none)

        return zero_grad

    return make


def _parameters(optimizers: Iterable[Optimizer]) -> list[Any]:
    return [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]


def _state_dict(optimizer: Optimizer, lead: Lead) -> _Make:
    def make(plain: Callable[..., Any]) -> Callable[..., Any]:
        def state_dict() -> dict[str, Any]:
            return lead.optimizers.state_dict(optimizer, plain)

        return state_dict

    return make


def _at_home(lead: Lead) -> _Make:
    """Runs a method while everything is on the lead; the next call places it again."""

    def make(plain: Callable[..., Any]) -> Callable[..., Any]:
        def method(*args: Any, **kwargs: Any) -> Any:
            lead.come_home()
            return plain(*args, **kwargs)

        return method

    return make


def put_scaler(scaler: torch.amp.GradScaler, lead: Lead, patches: Patches) -> None:
    """Lets a loss scaler divide and check the gradients of all stages, so that there is one scale and one decision."""

    def make(plain: Callable[..., Any]) -> Callable[..., Any]:
        def unscale(optimizer: Any, inverse_scale: Tensor, found: Tensor, allow_fp16: bool) -> dict[torch.device, Tensor]:
            index = lead.optimizers.index_of(optimizer)
            if not lead.placed or index is None:
                by_device: dict[torch.device, Tensor] = plain(optimizer, inverse_scale, found, allow_fp16)
                return by_device
            with lead.resumed():
                return lead.optimizers.unscale(lead.optimizers.faces[index], inverse_scale, found, allow_half=allow_fp16)

        return unscale

    patches.put(scaler, "_unscale_grads_", make)
