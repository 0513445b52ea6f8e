"""The user's optimizers on the lead: what they are asked to do, every owner does on its own parameters."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from lightning_mgpu.errors import PlacementError
from lightning_mgpu.runtime.patches import Patches

if TYPE_CHECKING:
    from lightning_mgpu.runtime.lead import Lead

__all__ = ["check_optimizer", "put_faces"]

_READS_ALL_GRADIENTS = ("LBFGS", "SAM", "ASAM", "ESAM", "Shampoo")


def check_optimizer(optimizer: Optimizer, num_stages: int) -> None:
    """Refuses optimizers that can't step on one stage's parameters alone.

    Raises:
        PlacementError: with the name of the optimizer and the remedy.
    """
    name = type(optimizer).__name__
    if num_stages > 1 and name in _READS_ALL_GRADIENTS:
        raise PlacementError(
            f"{name} needs all parameters and gradients in one process, but a pipeline of {num_stages} stages keeps them with "
            "their stages; use devices=1 or an optimizer that steps each parameter by its own gradient, as Adam or SGD"
        )


def put_faces(optimizers: Sequence[Optimizer], lead: Lead, patches: Patches) -> None:
    """Covers ``step``, ``zero_grad``, ``state_dict`` and ``load_state_dict`` of optimizers."""
    for index, optimizer in enumerate(optimizers):
        patches.put(optimizer, "step", _step(optimizer, index, lead))
        patches.put(optimizer, "zero_grad", _zero_grad(optimizer, lead))
        patches.put(optimizer, "state_dict", _state_dict(lead))
        patches.put(optimizer, "load_state_dict", _at_home(lead))


def _step(optimizer: Optimizer, index: int, lead: Lead) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def make(plain: Callable[..., Any]) -> Callable[..., Any]:
        def step(closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()  # may hold the first call of all, which places the parameters
            if not lead.placed:
                plain(**kwargs)
                return loss
            optimizer._opt_called = True  # type: ignore[attr-defined]
            hooks = torch_optimizer
            for hook in itertools.chain(
                hooks._global_optimizer_pre_hooks.values(), optimizer._optimizer_step_pre_hooks.values()
            ):
                hook(optimizer, (), kwargs)
            with lead.resumed():
                lead.optimizers.step(index, kwargs)
            for post_hook in itertools.chain(
                optimizer._optimizer_step_post_hooks.values(), hooks._global_optimizer_post_hooks.values()
            ):
                post_hook(optimizer, (), kwargs)
            return loss

        step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        return step

    return make


def _zero_grad(optimizer: Optimizer, lead: Lead) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def make(plain: Callable[..., Any]) -> Callable[..., Any]:
        def zero_grad(set_to_none: bool = True) -> None:
            if not lead.placed:
                plain(set_to_none=set_to_none)
                return
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            with lead.resumed():
                lead.optimizers.zero_grad(parameters, set_to_none=set_to_none)

        return zero_grad

    return make


def _state_dict(lead: Lead) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def make(plain: Callable[..., Any]) -> Callable[..., Any]:
        def state_dict() -> dict[str, Any]:
            return lead.optimizers.state_dict(plain)

        return state_dict

    return make


def _at_home(lead: Lead) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Runs a method while everything is on the lead; the next call places it again."""

    def make(plain: Callable[..., Any]) -> Callable[..., Any]:
        def method(*args: Any, **kwargs: Any) -> Any:
            lead.come_home()
            return plain(*args, **kwargs)

        return method

    return make
