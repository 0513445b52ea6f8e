"""Layouts: how a tensor is dealt out to the ranks of a tensor-parallel group, and put together again.

Parameters, their gradients and the parts of an optimizer's state that have their shape are all dealt alike, so one layout by
name serves checkpoints, norms and summaries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Layout", "local_shape", "shard", "unshard"]


@dataclass(frozen=True, slots=True)
class Layout:
    """Says along which dimension a tensor is cut, and into which parts.

    Each segment is dealt by itself, so that the rows of query, key and value in one fused weight reach every rank alike. Of a
    segment that does not divide, the first ranks get one element more, as ``torch.tensor_split`` does it.

    Attributes:
        dim: the dimension, counted from the first.
        segments: sizes of the parts along it, in order.
    """

    dim: int
    segments: tuple[int, ...]

    @property
    def width(self) -> int:
        """Size of the whole tensor along the dimension."""
        return sum(self.segments)

    def is_even(self, num_ranks: int) -> bool:
        """Says whether all of ``num_ranks`` ranks get the same number of elements."""
        return all(size % num_ranks == 0 for size in self.segments)

    def pieces(self, rank: int, num_ranks: int) -> list[tuple[int, int]]:
        """Lists the (start, length) of what a rank of ``num_ranks`` gets, in the whole tensor."""
        found, begin = [], 0
        for size in self.segments:
            start, length = _piece(size, rank, num_ranks)
            found.append((begin + start, length))
            begin += size
        return found

    def local_width(self, rank: int, num_ranks: int) -> int:
        """Returns the size along the dimension of what a rank of ``num_ranks`` gets."""
        return sum(_piece(size, rank, num_ranks)[1] for size in self.segments)

    def __str__(self) -> str:
        parts = f" in {len(self.segments)} segments" if len(self.segments) > 1 else ""
        return f"dim {self.dim}{parts}"


def _piece(size: int, rank: int, num_ranks: int) -> tuple[int, int]:
    each, more = divmod(size, num_ranks)
    return rank * each + min(rank, more), each + (rank < more)


def local_shape(shape: Sequence[int], layout: Layout | None, rank: int, num_ranks: int) -> tuple[int, ...]:
    """Returns the shape of what a rank of ``num_ranks`` gets of a tensor; all of it where there is no layout."""
    if layout is None:
        return tuple(shape)
    return (*shape[: layout.dim], layout.local_width(rank, num_ranks), *shape[layout.dim + 1 :])


def shard(tensor: Tensor, layout: Layout | None, rank: int, num_ranks: int) -> Tensor:
    """Takes a rank's part of a whole tensor.

    Args:
        tensor: the parameter, gradient or state, whole.
        layout: its layout, or ``None`` for a tensor that every rank has whole.
        rank: the rank.
        num_ranks: number of ranks.

    Returns:
        The part, which may share the tensor's memory.
    """
    if layout is None:
        return tensor
    _check_width(tensor.shape, layout)
    parts = [tensor.narrow(layout.dim, start, length) for start, length in layout.pieces(rank, num_ranks)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, layout.dim)


def unshard(shards: Sequence[Tensor], layout: Layout | None) -> Tensor:
    """Puts the parts of all ranks together, the inverse of `shard`.

    Args:
        shards: the part of each rank, in order.
        layout: the layout they were taken by.

    Returns:
        The whole tensor; the first of the ``shards`` where there is no layout.
    """
    if layout is None:
        return shards[0]
    num_ranks = len(shards)
    if num_ranks == 1:
        return shards[0]
    parts, begins = [], [0] * num_ranks
    for size in layout.segments:
        for rank, part in enumerate(shards):
            length = _piece(size, rank, num_ranks)[1]
            parts.append(part.narrow(layout.dim, begins[rank], length))
            begins[rank] += length
    return torch.cat(parts, layout.dim)


def _check_width(shape: Sequence[int], layout: Layout) -> None:
    if layout.dim >= len(shape) or shape[layout.dim] != layout.width:
        raise ValueError(
            f"a tensor of shape {tuple(shape)} has no dimension {layout.dim} of {layout.width} elements to deal out"
        )
