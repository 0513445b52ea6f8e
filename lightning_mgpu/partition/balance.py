"""Chooses where to cut a sequence of graph nodes into stages, exactly, as a pure function of numbers.

The problem is the linear partition of a sequence into contiguous parts with the least largest part. Among the
partitions that reach it, the one that sends the fewest bytes between stages is taken, then the one that cuts earliest.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence, Sized
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from lightning_mgpu.errors import PartitionError

__all__ = ["partition"]

_Floats: TypeAlias = npt.NDArray[np.float64]
_Ints: TypeAlias = npt.NDArray[np.int64]

_TIE = 1e-9
"""Largest stages that differ by less than this share are equal, and the crossing bytes decide."""

_PRECISION = 1e-12
"""The share to which the least largest stage is searched; finer than a tie, coarser than the rounding of a sum."""


def partition(
    costs: Sequence[float],
    num_stages: int,
    *,
    crossing: Sequence[float],
    legal: Sequence[bool],
    allowed: Sequence[Collection[int] | None] | None = None,
    counts: Sequence[bool],
) -> tuple[int, ...]:
    """Cuts ``k`` nodes into contiguous stages so that the largest stage is as small as it can be.

    A cut at position ``p`` lies before node ``p``: stage 0 holds the nodes up to the first cut. Of all partitions, the
    result minimises in this order: the cost of the largest stage, the sum of the crossing bytes of its cuts, the first
    cut, the second, and so on.

    Without ``allowed`` every stage holds at least one layer, except a single stage, which holds whatever there is. With
    it stages may be empty: cuts may coincide and may be 0 or ``k``, where nothing is divided and a cut is always legal.

    Args:
        costs: cost of each node, such as FLOPs or seconds, at least 0.
        num_stages: number of stages.
        crossing: bytes alive across a cut at each position ``0..k-1`` or ``0..k``; a missing last one is 0. Positions
            0 and ``k`` matter for empty stages only.
        legal: whether the nodes may be cut at each position ``0..k-1`` or ``0..k``.
        allowed: the stages in which each node may lie, ``None`` for any; as after parameters have found their owners.
        counts: whether each node is a layer.

    Returns:
        The ``num_stages - 1`` positions of the cuts, ascending.

    Raises:
        PartitionError: If no partition meets the conditions.
        ValueError: If the sequences disagree in length, or a cost or a number of bytes is negative or not finite.
    """
    k = len(costs)
    _require_sizes(k, num_stages, {"counts": counts} if allowed is None else {"counts": counts, "allowed": allowed})
    _require_sizes(k, num_stages, {"crossing": crossing, "legal": legal}, longer=1)
    places = np.array(sorted({0, *(p for p in range(1, k) if legal[p]), k}), dtype=np.int64)
    sent = np.array([*crossing, 0.0][: k + 1], dtype=np.float64)[places]
    each = np.asarray(costs, dtype=np.float64)
    if not all(np.all(np.isfinite(numbers) & (numbers >= 0)) for numbers in (each, sent)):
        msg = "costs and crossing bytes must be finite and at least 0"
        raise ValueError(msg)

    if allowed is not None:
        _require_order(num_stages, allowed)
        nearest, farthest = np.arange(len(places)), _last_allowed(places, num_stages, allowed)
    elif num_stages == 1:
        return ()
    else:
        nearest, farthest = _first_with_layer(places, counts), np.full((num_stages, len(places)), len(places) - 1)
        _require_layers(nearest, num_stages, sum(map(bool, counts)))
    problem = _Problem(np.concatenate(([0.0], np.cumsum(each)))[places], sent, nearest, farthest)
    return tuple(int(places[b]) for b in problem.solve())


@dataclass(frozen=True)
class _Problem:
    """The partition in terms of places, the positions where a cut is legal, counted from 0.

    A stage that begins at place ``a`` may end at any place of a window; dynamic programming from the last stage to the
    first then needs the least value in each window.

    Attributes:
        before: cost of all nodes before each place, ``(places,)``.
        sent: bytes that cross a cut at each place, ``(places,)``.
        nearest: where a stage that begins at each place may end at the earliest, ``(places,)``.
        farthest: where each stage that begins at each place may end at the latest whatever it costs,
            ``(stages, places)``.
    """

    before: _Floats
    sent: _Floats
    nearest: _Ints
    farthest: _Ints

    def solve(self) -> list[int]:
        """Returns the places of the cuts, the best by largest stage, then by bytes, then by earliest places."""
        limit = self._least_largest() * (1 + _TIE)
        rest, ends = self._rest(limit), self._ends(limit)
        cuts, a = [], 0
        for j in range(len(ends) - 1):
            low, high = self.nearest[a], ends[j, a]
            a = int(low + np.argmin((self.sent + rest[j + 1])[low : high + 1]))  # argmin takes the earliest of equals
            cuts.append(a)
        return cuts

    def _least_largest(self) -> float:
        """Searches by halving the least cost that some partition keeps all stages within."""
        low, high = 0.0, float(self.before[-1])
        if not self._feasible(high):
            msg = (
                f"cannot cut the nodes into {len(self.farthest)} stages where cuts are legal and keep every node on a "
                f"stage it is allowed on; use fewer stages or other cuts"
            )
            raise PartitionError(msg)
        while high - low > _PRECISION * high:
            middle = (low + high) / 2
            if self._feasible(middle):
                high = middle
            else:
                low = middle
        return high

    def _feasible(self, limit: float) -> bool:
        """Tells whether some partition keeps all stages within a cost."""
        ends = self._ends(limit)
        fits = np.zeros(len(self.sent), dtype=bool)  # whether the stages behind can hold all nodes from a place on
        fits[-1] = True
        for j in reversed(range(len(ends))):
            num_before = np.concatenate(([0], np.cumsum(fits)))
            fits = num_before[ends[j] + 1] > num_before[self.nearest]
        return bool(fits[0])

    def _rest(self, limit: float) -> _Floats:
        """Returns the least bytes sent by stages ``j`` and later, none costing more, if ``j`` begins at a place.

        They are infinite where those stages can't hold the nodes left; the shape is ``(stages, places)``.
        """
        ends = self._ends(limit)
        rest = np.empty(ends.shape)
        after = np.full(len(self.sent), np.inf)
        after[-1] = 0.0
        for j in reversed(range(len(ends))):
            rest[j] = _window_minima(after, self.nearest, ends[j])
            after = self.sent + rest[j]
        return rest

    def _ends(self, limit: float) -> _Ints:
        """Returns where each stage that begins at each place ends at the latest, ``(stages, places)``."""
        affordable = np.searchsorted(self.before, self.before + limit, side="right") - 1
        return np.minimum(self.farthest, affordable)


def _window_minima(values: _Floats, low: _Ints, high: _Ints) -> _Floats:
    """Returns the least of ``values[low : high + 1]`` for each pair, infinite where that is empty.

    Two runs of a power of two cover any window; their minima are tabulated by doubling.
    """
    table = [values]
    while 2 ** len(table) <= len(values):
        half = 2 ** (len(table) - 1)
        doubled = table[-1].copy()
        np.minimum(table[-1][:-half], table[-1][half:], out=doubled[:-half])
        table.append(doubled)
    length = high - low + 1
    filled = length > 0
    level = np.frexp(np.where(filled, length, 1))[1] - 1
    minima = np.full(len(low), np.inf)
    runs, level, low, high = np.stack(table), level[filled], low[filled], high[filled]
    minima[filled] = np.minimum(runs[level, low], runs[level, high + 1 - 2**level])
    return minima


def _first_with_layer(places: _Ints, counts: Sequence[bool]) -> _Ints:
    """Returns the first place behind the next layer after each place, or the number of places if there is none."""
    layers = np.concatenate(([0], np.cumsum(np.asarray(counts, dtype=bool))))[places]
    return np.searchsorted(layers, layers + 1, side="left")


def _last_allowed(places: _Ints, num_stages: int, allowed: Sequence[Collection[int] | None]) -> _Ints:
    """Returns the last place up to which all nodes from each place on may lie in each stage, ``(stages, places)``."""
    k = len(allowed)
    last = np.empty((num_stages, len(places)), dtype=np.int64)
    for j in range(num_stages):
        barred = [p if stages is not None and j not in stages else k for p, stages in enumerate(allowed)]
        first_barred = np.minimum.accumulate([*barred, k][::-1])[::-1]
        last[j] = np.searchsorted(places, first_barred[places], side="right") - 1
    return last


def _require_sizes(k: int, num_stages: int, sequences: dict[str, Sized], *, longer: int = 0) -> None:
    if num_stages < 1:
        msg = f"cannot cut into {num_stages} stages; use at least 1"
        raise ValueError(msg)
    for name, sequence in sequences.items():
        if not k <= len(sequence) <= k + longer:
            msg = f"{name} has {len(sequence)} entries for {k} nodes; give one for each"
            raise ValueError(msg)


def _require_layers(nearest: _Ints, num_stages: int, num_layers: int) -> None:
    """Raises if there are too few layers, telling how many stages are possible at most."""
    most, a = 0, 0
    while nearest[a] < len(nearest):
        most, a = most + 1, int(nearest[a])
    if most < num_stages:
        at_most = max(most, 1)
        where = "" if most == num_layers else ", as not every place between them can be cut"
        msg = (
            f"cannot cut {_count(num_layers, 'layer')} into {_count(num_stages, 'stage')}{where}; "
            f"use at most {_count(at_most, 'stage')}"
        )
        raise PartitionError(msg)


def _require_order(num_stages: int, allowed: Sequence[Collection[int] | None]) -> None:
    """Raises if a node is allowed only on stages before one that an earlier node needs, naming both nodes."""
    stage, holder = 0, 0
    for p, stages in enumerate(allowed):
        fitting = range(num_stages) if stages is None else [j for j in stages if 0 <= j < num_stages]
        if not fitting:
            msg = f"node {p} is allowed on none of {_count(num_stages, 'stage')}; allow at least one"
            raise PartitionError(msg)
        if max(fitting) < stage:
            msg = (
                f"node {p} is allowed up to stage {max(fitting)}, but node {holder} before it from stage {stage} on; "
                f"use cuts that keep their order, or fewer stages"
            )
            raise PartitionError(msg)
        earliest = min(j for j in fitting if j >= stage)
        if earliest > stage:
            stage, holder = earliest, p


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
