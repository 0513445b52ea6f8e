"""Watches the operators below one recorded call: their cost, random numbers, shapes that follow data."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

__all__ = ["OperatorWatch"]

_INDEX_OPERATORS = frozenset({"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"})


class OperatorWatch(TorchDispatchMode):
    """Notes facts about every operator that runs inside the context.

    Attributes:
        flops: floating-point operations, by torch's own formulas for matrix products, convolutions and attention.
        num_bytes: bytes of the results, as a measure of what memory-bound operators cost.
        random: whether any operator draws random numbers.
        dynamic: whether any operator's result takes its shape, or its Python value, from numbers in a tensor.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0.0
        self.num_bytes = 0
        self.random = False
        self.dynamic = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tags = func.tags
        if torch.Tag.nondeterministic_seeded in tags and not _draws_nothing(func, args):
            self.random = True
        if torch.Tag.data_dependent_output in tags:
            self.dynamic = True
        elif torch.Tag.dynamic_output_shape in tags:
            self.dynamic |= func._schema.name not in _INDEX_OPERATORS or _has_boolean_index(args)
        out = func(*args, **kwargs)
        formula = flop_registry.get(func._overloadpacket)
        if formula is not None:
            self.flops += formula(*args, **kwargs, out_val=out)
        for leaf in pytree.tree_leaves(out):
            if isinstance(leaf, Tensor):
                self.num_bytes += leaf.numel() * leaf.element_size()
        return out


def _has_boolean_index(args: tuple[Any, ...]) -> bool:
    indices = args[1] if len(args) > 1 else ()
    return any(isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in pytree.tree_leaves(indices))


def _draws_nothing(func: Any, args: tuple[Any, ...]) -> bool:
    """Says whether an operator that may draw random numbers draws none here, as attention without dropout."""
    name = func._schema.name
    if "scaled_dot_product" not in name:
        return False
    position = next((i for i, a in enumerate(func._schema.arguments) if a.name == "dropout_p"), None)
    return position is None or position >= len(args) or args[position] == 0.0
