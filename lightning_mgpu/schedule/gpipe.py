"""The fill-drain schedule: all forwards, then all backwards.

Source: Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism" (2019), section
2.3. Everything here is a pure function of ``m`` microbatches and ``n`` stages; ``i`` is a microbatch, ``j`` a stage.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

from lightning_mgpu.schedule.table import Action, Table

__all__ = ["Tick", "backward_clock", "fill_drain", "forward_clock", "idle_share", "render"]

Tick: TypeAlias = list[tuple[int, int]]
"""What runs at the same time: pairs ``(i, j)``, microbatch ``i`` on stage ``j``."""


def forward_clock(m: int, n: int) -> Iterator[Tick]:
    """Yields, for each tick of the forward phase, the pairs ``(i, j)`` that run in it.

    Microbatch ``i`` reaches stage ``j`` at tick ``i + j``. With 4 microbatches and 3 stages::

        tick     0  1  2  3  4  5
        stage 0  0  1  2  3  .  .
        stage 1  .  0  1  2  3  .
        stage 2  .  .  0  1  2  3

    Raises:
        ValueError: If either number is below 1.
    """
    _require_sizes(m, n)
    for tick in range(m + n - 1):
        yield [(tick - j, j) for j in range(n) if 0 <= tick - j < m]


def backward_clock(m: int, n: int) -> Iterator[Tick]:
    """Yields, for each tick of the backward phase, the pairs ``(i, j)`` that run in it.

    The gradient enters at the last stage and the microbatches keep their order, so microbatch ``i`` reaches stage
    ``j`` at tick ``i + n - 1 - j``. With 4 microbatches and 3 stages::

        tick     0  1  2  3  4  5
        stage 0  .  .  0  1  2  3
        stage 1  .  0  1  2  3  .
        stage 2  0  1  2  3  .  .

    Raises:
        ValueError: If either number is below 1.
    """
    for tick in forward_clock(m, n):
        yield [(i, n - 1 - j) for i, j in tick]


def fill_drain(m: int, homes: Sequence[int]) -> Table:
    """Returns the table of the schedule, for any number of stages a process.

    A process runs its earliest stage on all microbatches, then its next one, and goes back the same way. With one stage a
    process that is GPipe: ``0F0 0F1 0F2 0B0 0B1 0B2`` for stage 0 and 3 microbatches. With several it is the looping
    pipeline, breadth first, whose bubble is smaller by their number (Lamy-Poirier 2023, "Breadth-First Pipeline
    Parallelism", section 4).

    Args:
        m: number of microbatches.
        homes: the process of each stage.

    Raises:
        ValueError: If either number is below 1.
    """
    _require_sizes(m, len(homes))
    processes = []
    for process in range(max(homes) + 1):
        stages = [stage for stage, home in enumerate(homes) if home == process]
        forward = [Action("forward", stage, i) for stage in stages for i in range(m)]
        backward = [Action("backward", stage, i) for stage in reversed(stages) for i in range(m)]
        processes.append((*forward, *backward))
    return Table(tuple(processes), tuple(homes))


def render(table: Iterable[Tick]) -> str:
    """Draws a clock as text: a row per stage, a column per tick, the microbatch in the cell, a dot for idle.

    Raises:
        ValueError: If the clock has no tick, or gives a stage two microbatches in one.
    """
    ticks = list(table)
    num_stages = _num_stages(ticks)
    cells = [["."] * len(ticks) for _ in range(num_stages)]
    for column, tick in enumerate(ticks):
        for i, j in tick:
            if cells[j][column] != ".":
                msg = f"stage {j} has microbatches {cells[j][column]} and {i} at tick {column}; a stage runs one"
                raise ValueError(msg)
            cells[j][column] = str(i)
    rows = [("tick", [str(column) for column in range(len(ticks))])]
    rows += [(f"stage {j}", row) for j, row in enumerate(cells)]
    head = max(len(name) for name, _ in rows)
    width = max(len(cell) for _, row in rows for cell in row)
    return "\n".join(f"{name:<{head}}" + "".join(f"  {cell:>{width}}" for cell in row) for name, row in rows)


def idle_share(table: Iterable[Tick]) -> float:
    """Counts the share of a clock's cells in which a stage idles: the bubble if every stage takes the same time.

    Raises:
        ValueError: If the clock has no tick.
    """
    ticks = list(table)
    num_stages = _num_stages(ticks)
    return 1 - sum(len(tick) for tick in ticks) / (num_stages * len(ticks))


def _num_stages(ticks: list[Tick]) -> int:
    num_stages = max((j + 1 for tick in ticks for _, j in tick), default=0)
    if not num_stages:
        msg = "nothing runs in this clock; give the clock of at least 1 microbatch and 1 stage"
        raise ValueError(msg)
    return num_stages


def _require_sizes(m: int, n: int) -> None:
    if m < 1 or n < 1:
        msg = f"{m} microbatches on {n} stages have no schedule; give at least 1 of each"
        raise ValueError(msg)
