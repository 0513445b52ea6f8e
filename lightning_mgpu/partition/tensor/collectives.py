"""Calls of a lowered forward that talk to the other ranks of its tensor-parallel group, or depend on the rank.

A lowered graph names them without a group, so that it is a plain value that can be pickled; `joined` puts the group of the
process in. ``Copy`` and ``Reduce`` are the conjugate operators *f* and *g* of Megatron-LM (Shoeybi et al. 2019, section 3),
``Slice`` and ``Gather`` are their likes for values that are dealt out. The backward of each is its conjugate's forward, so
gradients of gradients are right as well.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_mgpu.partition.program import Program
from lightning_mgpu.partition.tensor.layout import Layout, shard, unshard

__all__ = [
    "Collective",
    "Copy",
    "Forked",
    "Gather",
    "Group",
    "GroupedAttention",
    "Reduce",
    "Slice",
    "VocabularyEmbedding",
    "add_bias",
    "joined",
]

_NOTHING = Layout(0, ())


class Group(Protocol):
    """Is the ranks that share every layer; what a runtime hands in."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Returns the sum of all ranks' tensors, the same bits everywhere; the argument is left as it is."""

    def all_gather(self, tensor: Tensor) -> Sequence[Tensor]:
        """Returns the tensors of all ranks, which have one shape, by rank."""


@dataclass(frozen=True)
class Collective(ABC):
    """Is the base class of the calls that need a group."""

    group: Group | None = None

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    @property
    def __name__(self) -> str:
        return type(self).__qualname__

    def of(self, group: Group) -> Self:
        """Returns the same call within a group."""
        return replace(self, group=group)

    @property
    def own_group(self) -> Group:
        if self.group is None:
            raise RuntimeError(f"{type(self).__qualname__} has no group to talk to; put one in with joined(program, group)")
        return self.group


def joined(program: Program, group: Group) -> Program:
    """Puts a group into all calls of a program that need one, in place."""
    for step in program.steps:
        if isinstance(step.target, Collective):
            step.target = step.target.of(group)
    return program


@dataclass(frozen=True)
class Copy(Collective):
    """Hands a whole value to calls on parts: each rank's gradient is a share, and they are added up."""

    def __call__(self, value: Tensor) -> Tensor:
        return _Copy.apply(value, self.own_group)  # type: ignore[no-any-return, no-untyped-call]


@dataclass(frozen=True)
class Reduce(Collective):
    """Adds up what each rank has of a sum."""

    def __call__(self, value: Tensor) -> Tensor:
        return _Reduce.apply(value, self.own_group)  # type: ignore[no-any-return, no-untyped-call]


@dataclass(frozen=True)
class Slice(Collective):
    """Takes a rank's part of a whole value."""

    layout: Layout = _NOTHING

    def __call__(self, value: Tensor) -> Tensor:
        return _Slice.apply(value, self.own_group, self.layout)  # type: ignore[no-any-return, no-untyped-call]


@dataclass(frozen=True)
class Gather(Collective):
    """Puts the parts of all ranks together."""

    layout: Layout = _NOTHING

    def __call__(self, value: Tensor) -> Tensor:
        return _Gather.apply(value, self.own_group, self.layout)  # type: ignore[no-any-return, no-untyped-call]


@dataclass(frozen=True)
class VocabularyEmbedding(Collective):
    """Looks up the words whose rows a rank has, and makes zeros of the others; the sum over ranks is the embedding.

    Attributes:
        num_rows: rows of the whole weight.
        padding_idx: row of the whole weight that gets no gradient.
    """

    num_rows: int = 0
    padding_idx: int | None = None

    def __call__(self, words: Tensor, weight: Tensor) -> Tensor:
        group = self.own_group
        ((first, length),) = Layout(0, (self.num_rows,)).pieces(group.rank, group.size)
        own = words - first
        elsewhere = (own < 0) | (own >= length)
        padding = None if self.padding_idx is None else self.padding_idx % self.num_rows - first
        padding = padding if padding is not None and 0 <= padding < length else None
        found = F.embedding(own.masked_fill(elsewhere, 0), weight, padding)
        return found.masked_fill(elsewhere.unsqueeze(-1), 0)


@dataclass(frozen=True)
class GroupedAttention(Collective):
    """Attends with a rank's own heads to keys and values of fewer heads, which it has whole: it takes those of its groups.

    Attributes:
        dim: the dimension of the heads.
        num_heads: heads of queries, over all ranks.
        num_groups: heads of keys and values.
    """

    dim: int = 1
    num_heads: int = 1
    num_groups: int = 1

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        group = self.own_group
        each = self.num_heads // group.size
        heads = torch.arange(group.rank * each, (group.rank + 1) * each, device=key.device)
        groups = heads // (self.num_heads // self.num_groups)
        key, value = key.index_select(self.dim, groups), value.index_select(self.dim, groups)
        return F.scaled_dot_product_attention(query, key, value, *args, **kwargs)


@dataclass(frozen=True)
class Forked(Collective):
    """Makes a call that draws random numbers for a part: each rank its own, from a fork of the stream they share.

    The shared stream moves on by the same number everywhere, so that draws for whole values stay equal on all ranks.
    """

    function: Callable[..., Any] = torch.nn.functional.dropout

    @property
    def __name__(self) -> str:
        return f"forked {getattr(self.function, '__name__', self.function)}"

    def of(self, group: Group) -> Self:
        inner = self.function.of(group) if isinstance(self.function, Collective) else self.function
        return replace(self, group=group, function=inner)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        seed = int(torch.randint(2**62, ()))
        devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
        with torch.random.fork_rng(devices):
            torch.default_generator.manual_seed(seed ^ self.own_group.rank)
            if devices:
                torch.cuda.manual_seed(seed ^ self.own_group.rank)
            return self.function(*args, **kwargs)


def add_bias(value: Tensor, bias: Tensor, dim: int) -> Tensor:
    """Adds a bias along a dimension, counted from the last, in the value's own dtype."""
    return value + bias.to(value.dtype).reshape(-1, *[1] * (-1 - dim))


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _Reduce.apply(gradient, ctx.group), None  # type: ignore[no-untyped-call]


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return group.all_reduce(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _Copy.apply(gradient, ctx.group), None  # type: ignore[no-untyped-call]


class _Slice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, group: Group, layout: Layout) -> Tensor:
        ctx.group, ctx.layout = group, layout
        return shard(value, layout, group.rank, group.size)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _Gather.apply(gradient, ctx.group, ctx.layout), None, None  # type: ignore[no-untyped-call]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, group: Group, layout: Layout) -> Tensor:
        ctx.group, ctx.layout = group, layout
        if layout.is_even(group.size):
            return unshard(group.all_gather(value.contiguous()), layout)
        whole = value.new_zeros((*value.shape[: layout.dim], layout.width, *value.shape[layout.dim + 1 :]))
        begin = 0
        for start, length in layout.pieces(group.rank, group.size):
            whole.narrow(layout.dim, start, length).copy_(value.narrow(layout.dim, begin, length))
            begin += length
        return group.all_reduce(whole)  # parts of several shapes can't be gathered

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _Slice.apply(gradient, ctx.group, ctx.layout), None, None  # type: ignore[no-untyped-call]
