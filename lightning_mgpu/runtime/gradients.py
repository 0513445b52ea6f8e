"""Gradients of one owner: their norms, and clipping.

A norm is taken per parameter by its primary owner and combined on the lead as ``torch.nn.utils.clip_grad_norm_`` combines
them on one device, so a shared parameter counts once and the numbers are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

__all__ = ["clip", "norms", "total_norm"]


def norms(names: Iterable[str], parameter_of: Callable[[str], Tensor], norm_type: float = 2.0) -> dict[str, Tensor]:
    """Returns the norm of each gradient that is there, by name of the parameter."""
    found = {}
    for name in names:
        gradient = parameter_of(name).grad
        if gradient is not None:
            found[name] = torch.linalg.vector_norm(gradient.detach(), norm_type)
    return found


def total_norm(parts: Iterable[Tensor], device: torch.device, norm_type: float = 2.0) -> Tensor:
    """Combines the norms of single gradients, in the order of the parameters."""
    gathered = [part.to(device) for part in parts]
    if not gathered:
        return torch.tensor(0.0, device=device)
    total: Tensor = torch.linalg.vector_norm(torch.stack(gathered), norm_type)
    return total


def clip(names: Iterable[str], parameter_of: Callable[[str], Tensor], factor: float | None, bound: float | None) -> None:
    """Scales or clamps gradients in place."""
    for name in names:
        gradient = parameter_of(name).grad
        if gradient is None:
            continue
        if factor is not None:
            gradient.mul_(factor)
        if bound is not None:
            gradient.clamp_(-bound, bound)
