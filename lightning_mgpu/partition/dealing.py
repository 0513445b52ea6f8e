"""The ways in which a batch may be dealt out: which dimension counts its rows, and which tensors have them.

Nothing says so but the shapes, so the likeliest way comes first; recording the forward on fewer rows decides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from lightning_mgpu.microbatch import batch_sizes_of

__all__ = ["doubtful", "ways_to_deal"]


def ways_to_deal(
    tensors: Sequence[Tensor], count: Callable[[int], int], replicated: set[int]
) -> Iterator[tuple[int, int, set[int]]]:
    """Yields the ways to deal a batch out, likeliest first, with half as many microbatches after each round.

    Args:
        tensors: the tensors among the arguments.
        count: how many microbatches are asked for, by rows of the batch.
        replicated: indices of the tensors that are known not to have the batch's rows.

    Yields:
        The rows of the batch, the number of microbatches, and the indices of the tensors that are split.
    """
    batch_sizes = batch_sizes_of(tensors)
    halvings = 0
    while any(count(batch_size) >> halvings > 1 for batch_size in batch_sizes):
        for batch_size in batch_sizes:
            fewer = count(batch_size) >> halvings
            if fewer > 1:
                yield from ((batch_size, fewer, split) for split in _splits(tensors, batch_size, replicated))
        halvings += 1


def doubtful(tensors: Sequence[Tensor], batch_size: int) -> set[int]:
    """Finds tensors that may have as many rows as the batch by chance: a mask of positions, one number per feature."""
    square = {i for i, t in enumerate(tensors) if t.ndim >= 2 and t.shape[0] == t.shape[1] == batch_size}
    return square | {i for i, t in enumerate(tensors) if t.shape == (batch_size,) and t.is_floating_point()}


def _splits(tensors: Sequence[Tensor], batch_size: int, replicated: set[int]) -> Iterator[set[int]]:
    """Yields the ways to choose the tensors that are split: all with the batch's first dimension, less known others.

    The doubtful ones are tried as split first, as replicated next: one at a time, those of the fewest dimensions and the
    latest first, then all of them.
    """
    split = {i for i, t in enumerate(tensors) if i not in replicated and t.ndim > 0 and t.shape[0] == batch_size}
    unsure = doubtful(tensors, batch_size) & split
    least_first = sorted(unsure, key=lambda i: (tensors[i].ndim, -i))
    others = [split - {i} for i in least_first] if len(unsure) > 1 else []
    ways = [split, *others, split - unsure]
    yield from (way for i, way in enumerate(ways) if way and way not in ways[:i])
