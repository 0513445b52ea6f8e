"""torch.nn's layers as the functions they call, so that one rule serves both.

A layer stays the call of a module in the lowered graph wherever its parameters are merely smaller; the function is called in
its place where something else differs, as a bias that is added later.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.modules import activation, pooling
from torch.nn.modules.batchnorm import SyncBatchNorm, _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from lightning_mgpu.partition.graph import Ref

__all__ = ["HOOKED", "AsFunction", "as_function"]

HOOKED = "a layer with hooks"

Refs = dict[str, Ref]


@dataclass(frozen=True)
class AsFunction:
    """Is what a layer computes, as a call of a function.

    Attributes:
        name: of the rule.
        function: what computes the same from the arguments below, or ``None`` where only the module does.
        args: positional arguments, with the module's parameters among them.
    """

    name: str
    function: Callable[..., Any] | None
    args: tuple[Any, ...]


def _linear(_m: Any, x: Any, own: Refs) -> AsFunction:
    return AsFunction("linear", F.linear, (x, own["weight"], own.get("bias")))


def _conv(m: Any, x: Any, own: Refs) -> AsFunction:
    name = {nn.Conv1d: "conv1d", nn.Conv2d: "conv2d", nn.Conv3d: "conv3d"}[type(m)]
    if m.padding_mode != "zeros":
        return AsFunction(f"conv with padding_mode={m.padding_mode!r}", None, (x,))
    more = (m.stride, m.padding, m.dilation, m.groups)
    return AsFunction(name, getattr(torch, name), (x, own["weight"], own.get("bias"), *more))


def _embedding(m: Any, x: Any, own: Refs) -> AsFunction:
    more = (m.padding_idx, m.max_norm, m.norm_type, m.scale_grad_by_freq, m.sparse)
    return AsFunction("embedding", F.embedding, (x, own["weight"], *more))


def _layer_norm(m: Any, x: Any, own: Refs) -> AsFunction:
    return AsFunction("layer_norm", F.layer_norm, (x, m.normalized_shape, own.get("weight"), own.get("bias"), m.eps))


def _rms_norm(m: Any, x: Any, own: Refs) -> AsFunction:
    return AsFunction("rms_norm", F.rms_norm, (x, m.normalized_shape, own.get("weight"), m.eps))


def _group_norm(m: Any, x: Any, own: Refs) -> AsFunction:
    return AsFunction("group_norm", F.group_norm, (x, m.num_groups, own.get("weight"), own.get("bias"), m.eps))


def _instance_norm(m: Any, x: Any, own: Refs) -> AsFunction:
    tensors = (own.get(name) for name in ("running_mean", "running_var", "weight", "bias"))
    momentum = 0.0 if m.momentum is None else m.momentum
    return AsFunction("instance_norm", F.instance_norm, (x, *tensors, m.training or not m.track_running_stats, momentum, m.eps))


def _prelu(_m: Any, x: Any, own: Refs) -> AsFunction:
    return AsFunction("prelu", F.prelu, (x, own["weight"]))


def _softmax(m: Any, x: Any, _own: Refs) -> AsFunction:
    return AsFunction("softmax", F.softmax, (x, m.dim)) if m.dim is not None else AsFunction("softmax of no dim", None, (x,))


def _elementwise(_m: Any, x: Any, _own: Refs) -> AsFunction:
    return AsFunction("relu", None, (x,))


def _dropout(m: Any, x: Any, _own: Refs) -> AsFunction:
    function = {
        nn.Dropout: F.dropout, nn.Dropout1d: F.dropout1d, nn.Dropout2d: F.dropout2d, nn.Dropout3d: F.dropout3d,
        nn.AlphaDropout: F.alpha_dropout, nn.FeatureAlphaDropout: F.feature_alpha_dropout,
    }[type(m)]  # fmt: skip
    return AsFunction(function.__name__, function, (x, m.p, m.training, m.inplace))


def _flatten(_m: Any, x: Any, _own: Refs) -> AsFunction:
    return AsFunction("flatten", torch.flatten, (x,))


def _spatial(m: Any, x: Any, _own: Refs) -> AsFunction:
    name = type(m).__name__
    return AsFunction("upsample" if "Upsampl" in name else f"pool{name[-2]}d", None, (x,))


_ELEMENTWISE = (
    nn.ReLU, nn.ReLU6, nn.GELU, nn.SiLU, nn.Mish, nn.ELU, nn.CELU, nn.SELU, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid,
    nn.LeakyReLU, nn.LogSigmoid, nn.Sigmoid, nn.Tanh, nn.Softplus, nn.Softshrink, nn.Hardshrink, nn.Softsign,
    nn.Tanhshrink, nn.Threshold, nn.Identity,
)  # fmt: skip
_POOLS = tuple(
    kind
    for name, kind in vars(pooling).items()
    if isinstance(kind, type) and issubclass(kind, nn.Module) and name[-2:] in ("1d", "2d", "3d") and name[0] != "_"
    and "Unpool" not in name and "Fractional" not in name
)  # fmt: skip

_LEAVES: dict[type[nn.Module], Callable[[Any, Any, Refs], AsFunction]] = {
    nn.Linear: _linear,
    nn.modules.linear.NonDynamicallyQuantizableLinear: _linear,
    **dict.fromkeys((nn.Conv1d, nn.Conv2d, nn.Conv3d), _conv),
    nn.Embedding: _embedding,
    nn.LayerNorm: _layer_norm,
    nn.RMSNorm: _rms_norm,
    nn.GroupNorm: _group_norm,
    activation.PReLU: _prelu,
    **dict.fromkeys((nn.Softmax, nn.LogSoftmax, nn.Softmin), _softmax),
    **dict.fromkeys(_ELEMENTWISE, _elementwise),
    **dict.fromkeys((nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout), _dropout),
    **dict.fromkeys((nn.Flatten, nn.Unflatten), _flatten),
    **dict.fromkeys((*_POOLS, nn.Upsample, nn.UpsamplingNearest2d, nn.UpsamplingBilinear2d), _spatial),
}


def as_function(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], own: Refs) -> AsFunction:
    """Returns what a layer computes.

    Args:
        module: the layer, a leaf of the recording.
        args: positional arguments of the call.
        kwargs: keyword arguments of the call.
        own: its parameters and buffers by attribute.

    Returns:
        The call of a function; of a name no rule has, where the layer has to stay whole.
    """
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:  # noqa: SLF001 - no public call lists them
        return AsFunction(HOOKED, None, args)
    given = (*args, *kwargs.values())
    if isinstance(module, _BatchNorm) and not isinstance(module, SyncBatchNorm) and len(given) == 1:
        return AsFunction("channel_norm", None, given)
    if isinstance(module, _InstanceNorm) and len(given) == 1:
        return _instance_norm(module, given[0], own)
    known = _LEAVES.get(type(module))
    if known is None or len(given) != 1:
        return AsFunction(type(module).__name__, None, args)
    return known(module, given[0], own)
