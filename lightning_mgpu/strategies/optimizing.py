"""Optimization as Lightning's own objects do it: what they would do with gradients of other stages is done there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_mgpu.runtime.faces import put_faces, put_scaler
from lightning_mgpu.runtime.lead import Lead
from lightning_mgpu.runtime.separable import check_optimizer
from lightning_mgpu.runtime.torch_clipping import put_clipping

__all__ = ["cover_gradients", "cover_wrappers", "gradient_norm", "replace_optimizers"]


def cover_wrappers(lead: Lead, wrappers: Iterable[LightningOptimizer], optimizers: Iterable[Optimizer]) -> None:
    """Lets Lightning's wrappers do what the optimizers in them do."""
    for wrapper, optimizer in zip(wrappers, optimizers, strict=True):
        for name in ("zero_grad", "state_dict", "load_state_dict"):
            lead.patches.put(wrapper, name, _instead(getattr(optimizer, name)))


def cover_gradients(lead: Lead, root: nn.Module, plugin: Precision) -> None:
    """Clips over all stages, by Lightning and by torch's functions, and gives loss scalers the gradients of all stages."""

    def by_norm(optimizer: Optimizer, clip_val: float) -> None:
        lead.optimizers.gradients.clip_norm(_parameters(optimizer), float(clip_val))

    def by_value(optimizer: Optimizer, clip_val: float) -> None:
        lead.optimizers.gradients.clip_value(_parameters(optimizer), float(clip_val))

    lead.patches.put(plugin, "clip_grad_by_norm", _instead(by_norm))
    lead.patches.put(plugin, "clip_grad_by_value", _instead(by_value))
    put_clipping(lead, lead.patches)
    scalers = [value for value in (getattr(plugin, "scaler", None), *vars(root).values()) if _is_scaler(value)]
    for scaler in {id(scaler): scaler for scaler in scalers}.values():
        put_scaler(scaler, lead, lead.patches)


def _is_scaler(value: Any) -> bool:
    return isinstance(value, torch.amp.GradScaler)


def replace_optimizers(lead: Lead, wrappers: Iterable[LightningOptimizer], optimizers: Sequence[Optimizer]) -> None:
    """Takes over other optimizers in the middle of a run; those before keep the state they have.

    Raises:
        PlacementError: for an optimizer that can't be cut into stages.
    """
    for optimizer in optimizers:
        check_optimizer(optimizer, lead.num_processes)
    lead.come_home()
    known = lead.optimizers.faces
    lead.optimizers.faces = list(optimizers)
    put_faces([o for o in optimizers if not any(o is face for face in known)], lead, lead.patches)
    cover_wrappers(lead, wrappers, optimizers)


def gradient_norm(lead: Lead | None, parameters: Iterable[Tensor], norm_type: float) -> Tensor:
    """Returns the norm of the gradients of some parameters together, wherever they are."""
    listed: list[Any] = list(parameters)
    if lead is not None:
        return lead.optimizers.gradients.norm(listed, norm_type)
    found: Tensor = nn.utils.get_total_norm([p.grad for p in listed if p.grad is not None], norm_type)
    return found


def _instead(method: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    return lambda _: method


def _parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]
