"""Gradients of one owner: their norms, clipping, and the division by a loss scale.

A norm is taken per parameter by its primary owner and combined on the lead as ``torch.nn.utils.clip_grad_norm_`` combines
them on one device, so a shared parameter counts once and the numbers are the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

__all__ = ["clip", "norms", "total_norm", "unscale"]


def norms(parameters: Iterable[Tensor], norm_type: float) -> list[tuple[Tensor, Tensor]]:
    """Returns the norm of each gradient that is there, with its parameter."""
    present = ((p, p.grad) for p in parameters)
    return [(p, torch.linalg.vector_norm(g.detach(), norm_type)) for p, g in present if g is not None]


def total_norm(parts: Sequence[Tensor], device: torch.device, norm_type: float, *, error_if_nonfinite: bool = False) -> Tensor:
    """Combines the norms of single gradients, in the order of the parameters; the norm of norms is the norm of all.

    Raises:
        RuntimeError: from torch, where ``error_if_nonfinite`` says so.
    """
    if not parts:
        return torch.tensor(0.0, device=device)
    total: Tensor = torch.linalg.vector_norm(torch.stack([part.to(device) for part in parts]), norm_type)
    if error_if_nonfinite:
        get_total_norm([total], norm_type, error_if_nonfinite=True)  # says so in torch's words
    return total


def clip(parameters: Iterable[Tensor], factor: float | None, bound: float | None) -> None:
    """Scales or clamps gradients in place."""
    with torch.no_grad():
        for gradient in (p.grad for p in parameters):
            if gradient is None:
                continue
            if factor is not None:
                gradient.mul_(factor)
            if bound is not None:
                gradient.clamp_(-bound, bound)


def unscale(part: Optimizer, inverse_scale: Tensor, found: Tensor, *, allow_half: bool) -> dict[torch.device, Tensor]:
    """Divides the gradients of a part by the scale of the loss, as torch's own scaler does.

    Returns:
        By device, a number above zero where a gradient is infinite or no number.

    Raises:
        ValueError: from torch, for gradients of half precision that are not allowed.
    """
    plain = torch.amp.GradScaler._unscale_grads_
    by_device: dict[torch.device, Tensor] = plain(None, part, inverse_scale, found, allow_half)  # type: ignore[arg-type]
    return by_device
