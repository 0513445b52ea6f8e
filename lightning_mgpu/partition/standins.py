"""Runs a module whose inside can't be recorded with its real weights on stand-in inputs, for the shapes of its results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    FakeTensor,
)

from lightning_mgpu import tree
from lightning_mgpu.partition.fakes import Swap

__all__ = ["on_stand_ins", "run_for_real"]


def run_for_real(swap: Swap, module: nn.Module, plain: Any, args: Any, kwargs: Any) -> tuple[Any, list[bool]]:
    """Runs a module with its real weights on stand-in inputs, for the shapes of what it returns.

    Returns:
        The result, and which of its buffers it changed.
    """
    with swap.real_weights(module):
        before = [(buffer, buffer._version) for buffer in module.buffers()]
        own = [p for p in module.parameters() if p.requires_grad]
        result = on_stand_ins(swap, partial(plain, module), args, kwargs, torch.randn, own)
        changed = [now is not was or now._version != v for now, (was, v) in zip(module.buffers(), before, strict=True)]
    return result, changed


def on_stand_ins(
    swap: Swap, function: Callable[..., Any], args: Any, kwargs: Any, draw: Callable[..., Tensor], own: Sequence[Tensor] = ()
) -> Any:
    """Calls a function with numbers drawn in the place of fake tensors, for the shapes of what it returns.

    Args:
        swap: knows the mode of the fakes.
        function: what to call.
        args: positional arguments.
        kwargs: keyword arguments.
        draw: makes a tensor of a shape.
        own: tensors the result depends on besides the arguments.

    Returns:
        The result, fake again, with a place in the autograd graph.
    """
    made: list[tuple[Tensor, Tensor, int]] = []

    def stand_in(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, FakeTensor):
            return tensor
        make = draw if tensor.is_floating_point() or tensor.is_complex() else torch.zeros
        drawn = make(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        drawn = drawn.requires_grad_().clone() if tensor.requires_grad else drawn
        made.append((tensor, drawn, drawn._version))
        return drawn

    sources = [t for t in tree.tensors_in((args, kwargs)) if t.requires_grad]

    def as_fake(tensor: Tensor) -> Tensor:
        with swap.mode:
            fake = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        linked: Tensor = _Opaque.apply(fake, *sources, *own) if tensor.requires_grad else fake  # type: ignore[no-untyped-call]
        return linked

    real_args, real_kwargs = tree.map_tensors(stand_in, (args, kwargs))
    result = function(*real_args, **real_kwargs)
    for fake, drawn, version in made:
        if drawn._version != version:
            with torch.no_grad():
                fake.zero_()  # so that the change in place is seen
    back = {id(drawn): fake for fake, drawn, _ in made}
    return tree.map_tensors(lambda t: back[id(t)] if id(t) in back else as_fake(t), result)


class _Opaque(torch.autograd.Function):
    """Stands in the autograd graph of a recording for a module whose inside was not recorded."""

    @staticmethod
    def forward(ctx: Any, result: Tensor, *sources: Tensor) -> Tensor:  # noqa: ARG004 - sources are only linked
        return result.view_as(result)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:  # noqa: ARG004 - torch's signature
        raise AssertionError("a recording is never differentiated")
