"""Follows a split dimension through a change of shape.

``view`` merges and splits neighbouring dimensions; those that belong together form a group with the same number of elements
before and after.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["groups", "place"]

Range = tuple[int, int]


def groups(old: Sequence[int], new: Sequence[int]) -> list[tuple[Range, Range]]:
    """Pairs the dimensions of two shapes of the same number of elements, which is not 0.

    Args:
        old: the shape before.
        new: the shape after.

    Returns:
        (from, to) of dimensions before and after, as small as they can be, in order.
    """
    assert math.prod(old) == math.prod(new) != 0, f"{tuple(old)} and {tuple(new)} do not hold the same number of elements"
    found, i, j = [], 0, 0
    while i < len(old) or j < len(new):
        begin, p, q = (i, j), 1, 1
        if i < len(old):
            p, i = p * old[i], i + 1
        if j < len(new):
            q, j = q * new[j], j + 1
        while p != q:
            if p < q:
                p, i = p * old[i], i + 1
            else:
                q, j = q * new[j], j + 1
        found.append(((begin[0], i), (begin[1], j)))
    return found


def place(segments: Sequence[int], dims: Sequence[int], num_ranks: int) -> tuple[int, tuple[int, ...]] | None:
    """Finds the dimension that is dealt out when a dimension becomes several.

    ``(96,)`` into ``(4, 24)`` for two ranks deals out the 4 heads; ``(32, 32, 32)`` into ``(3, 2, 16)`` the 2 heads of each.

    Args:
        segments: the segments of the dimension.
        dims: what it becomes.
        num_ranks: number of ranks.

    Returns:
        The index among ``dims`` and the segments along it, or ``None`` where none divides.
    """
    if not dims:
        return None
    trailing = math.prod(dims[1:])
    if all(size % trailing == 0 for size in segments):
        scaled = tuple(size // trailing for size in segments)
        if all(size % num_ranks == 0 for size in scaled):
            return 0, scaled
    period, rest = divmod(len(segments), dims[0])
    if rest == 0 and sum(segments[:period]) == trailing and tuple(segments) == tuple(segments[:period]) * dims[0]:
        inner = place(segments[:period], dims[1:], num_ranks)
        return None if inner is None else (inner[0] + 1, inner[1])
    return None
