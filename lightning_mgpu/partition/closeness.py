"""Closeness: when two tensors that were computed in different orders count as equal."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["close"]


def close(a: Tensor, b: Tensor, floor: float = 0.0) -> bool:
    """Says whether two tensors agree to the square root of their precision, relative to the largest element."""
    if a.shape != b.shape:
        return False
    if not (a.is_floating_point() or a.is_complex()):
        return bool(torch.equal(a, b))
    a, b = (t.detach() if t.layout == torch.strided else t.detach().to_dense() for t in (a, b))
    low = torch.is_autocast_enabled(a.device.type)
    dtype = torch.get_autocast_dtype(a.device.type) if low else a.dtype
    scale = max(float(b[b.isfinite()].abs().max()) if b.isfinite().any() else 0.0, floor)
    return bool(torch.allclose(a, b, rtol=0.0, atol=torch.finfo(dtype).eps ** 0.5 * scale + 1e-12, equal_nan=True))
