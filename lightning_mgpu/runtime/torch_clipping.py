"""``torch.nn.utils.clip_grad_norm_`` and ``clip_grad_value_`` for parameters whose gradients live on other stages."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_mgpu.runtime.patches import Patches
from lightning_mgpu.runtime.placeholder import is_hidden

if TYPE_CHECKING:
    from lightning_mgpu.runtime.lead import Lead

__all__ = ["put_clipping"]


def put_clipping(lead: Lead, patches: Patches) -> None:
    """Covers torch's functions where users call them, as in ``torch.nn.utils.clip_grad_norm_(self.parameters(), 1.0)``.

    They do what they always did unless one of the parameters lives elsewhere. Code that imported a function by its name calls
    that itself, which reads the first gradient that is elsewhere, and raises.
    """

    def norm(plain: Callable[..., Any]) -> Callable[..., Any]:
        def clip_grad_norm_(
            parameters: Tensor | Iterable[Tensor],
            max_norm: float,
            norm_type: float = 2.0,
            error_if_nonfinite: bool = False,
            foreach: bool | None = None,
        ) -> Any:
            listed = _listed(parameters)
            if not any(map(is_hidden, listed)):
                return plain(listed, max_norm, norm_type, error_if_nonfinite, foreach)
            return lead.optimizers.gradients.clip_norm(
                listed, float(max_norm), float(norm_type), error_if_nonfinite=error_if_nonfinite
            )

        return clip_grad_norm_

    def value(plain: Callable[..., Any]) -> Callable[..., Any]:
        def clip_grad_value_(parameters: Tensor | Iterable[Tensor], clip_value: float, foreach: bool | None = None) -> Any:
            listed = _listed(parameters)
            if not any(map(is_hidden, listed)):
                return plain(listed, clip_value, foreach)
            lead.optimizers.gradients.clip_value(listed, float(clip_value))
            return None

        return clip_grad_value_

    for module in (torch.nn.utils, torch.nn.utils.clip_grad):
        patches.put(module, "clip_grad_norm_", norm)
        patches.put(module, "clip_grad_value_", value)


def _listed(parameters: Tensor | Iterable[Tensor]) -> list[Any]:
    return [parameters] if isinstance(parameters, Tensor) else list(parameters)
