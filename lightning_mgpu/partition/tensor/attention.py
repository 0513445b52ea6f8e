"""``nn.MultiheadAttention`` written out in calls that can be split, for recordings that are to be lowered.

A recording takes the layer as one call, inside which nothing can be split. For tensor parallelism this forward stands in its
place: the same numbers up to rounding, with query, key and value as segments of one weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import handle_torch_function, has_torch_function

__all__ = ["opened_attention", "project"]


def opened_attention(module: nn.Module) -> Callable[..., Any] | None:
    """Returns the forward to record for a module, or ``None`` where its own is to be recorded.

    Attention that adds a row of its own to the keys stays one call.
    """
    if type(module) is not nn.MultiheadAttention or module.bias_k is not None or module.add_zero_attn:
        return None
    return partial(_attend, module)


def project(value: Tensor, weight: Tensor, bias: Tensor | None, part: int, num_parts: int) -> Tensor:
    """Applies one of several linear layers whose weights lie in one, as those of query, key and value do."""
    if has_torch_function((value, weight)):
        return handle_torch_function(project, (value, weight), value, weight, bias, part, num_parts)
    own_bias = None if bias is None else bias.chunk(num_parts)[part]
    return F.linear(value, weight.chunk(num_parts)[part], own_bias)


def _attend(  # noqa: PLR0913, PLR0917 - torch's own signature
    m: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    if is_causal and attn_mask is None:
        raise RuntimeError("Need attn_mask if specifying the is_causal hint.")  # torch's own words
    q, k, v = _projected(m, query, key, value)
    batched = query.dim() == 3
    if not batched:
        q, k, v = (t.unsqueeze(0) for t in (q, k, v))
    elif not m.batch_first:
        q, k, v = (t.transpose(0, 1) for t in (q, k, v))
    batch, length = q.shape[0], q.shape[1]
    q, k, v = (t.view(batch, -1, m.num_heads, m.head_dim).transpose(1, 2) for t in (q, k, v))
    mask = _mask(key_padding_mask, attn_mask, q)
    rate = m.dropout if m.training else 0.0
    weights = None
    if need_weights:
        scores = (q * (1.0 / math.sqrt(m.head_dim))) @ k.transpose(-2, -1)
        weights = F.softmax(scores if mask is None else scores + mask, dim=-1)
        weights = F.dropout(weights, rate) if rate > 0.0 else weights
        mixed = weights @ v
        weights = weights.mean(dim=1) if average_attn_weights else weights
    else:
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=rate)
    joined = mixed.transpose(1, 2).reshape(batch, length, m.embed_dim)
    joined = joined if not batched or m.batch_first else joined.transpose(0, 1)
    result = F.linear(joined, m.out_proj.weight, m.out_proj.bias)
    return (result, weights) if batched else (result.squeeze(0), None if weights is None else weights.squeeze(0))


def _projected(m: Any, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    if m.in_proj_weight is None:
        biases = m.in_proj_bias.chunk(3) if m.in_proj_bias is not None else (None, None, None)
        given = zip((query, key, value), (m.q_proj_weight, m.k_proj_weight, m.v_proj_weight), biases, strict=True)
        return tuple(F.linear(x, weight, bias) for x, weight, bias in given)  # type: ignore[return-value]
    if query is key and key is value:
        return F.linear(query, m.in_proj_weight, m.in_proj_bias).chunk(3, dim=-1)  # type: ignore[return-value]
    parts = enumerate((query, key, value))
    return tuple(project(x, m.in_proj_weight, m.in_proj_bias, i, 3) for i, x in parts)  # type: ignore[return-value]


def _mask(padding: Tensor | None, mask: Tensor | None, query: Tensor) -> Tensor | None:
    """Adds what masks positions up to ``(batch or 1, heads or 1, length, length)``."""
    batch, heads = query.shape[0], query.shape[1]
    parts = []
    if padding is not None:
        parts.append(_additive(padding, query.dtype).view(-1, 1, 1, padding.shape[-1]))
    if mask is not None:
        wide = _additive(mask, query.dtype)
        parts.append(wide.view(batch, heads, *mask.shape[-2:]) if mask.dim() == 3 else wide)
    return parts[0] + parts[1] if len(parts) == 2 else parts[0] if parts else None


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, float("-inf"))
