"""The fill-drain schedule: all forwards, then all backwards.

Source: Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism" (2019), section
2.3. Everything here is a pure function of ``m`` microbatches and ``n`` stages; ``i`` is a microbatch, ``j`` a stage.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

__all__ = ["Action", "Tick", "actions", "backward_clock", "check", "forward_clock", "idle_share", "render"]

Tick: TypeAlias = list[tuple[int, int]]
"""What runs at the same time: pairs ``(i, j)``, microbatch ``i`` on stage ``j``."""


@dataclass(frozen=True)
class Action:
    """One microbatch's forward or backward, in the list of one stage."""

    kind: Literal["forward", "backward"]
    microbatch: int

    def __post_init__(self) -> None:
        if self.microbatch < 0:
            msg = f"there is no microbatch {self.microbatch}; they are counted from 0"
            raise ValueError(msg)

    def __str__(self) -> str:
        """Writes the action as a letter and the microbatch, such as ``F3``."""
        return f"{self.kind[0].upper()}{self.microbatch}"


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


def actions(stage: int, m: int, n: int) -> list[Action]:
    """Lists what one stage does in a training step, in order: its column of both clocks.

    With 3 microbatches this is ``F0 F1 F2 B0 B1 B2`` on every stage.

    Args:
        stage: index of the stage, below ``n``.
        m: number of microbatches.
        n: number of stages.

    Raises:
        ValueError: If there is no such stage, or either number is below 1.
    """
    _require_sizes(m, n)
    if not 0 <= stage < n:
        msg = f"there is no stage {stage} among {n} stages; they are counted from 0"
        raise ValueError(msg)
    forward = [Action("forward", i) for tick in forward_clock(m, n) for i, j in tick if j == stage]
    backward = [Action("backward", i) for tick in backward_clock(m, n) for i, j in tick if j == stage]
    return forward + backward


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


def check(actions_by_stage: Sequence[Sequence[Action]]) -> None:
    """Checks that stages which follow their lists, each waiting for what it needs, finish the step.

    Every stage must run forward once for every microbatch, after the stage before it; and backward once for every
    microbatch, or never at all in evaluation, after its own forward and after the stage behind it.

    Args:
        actions_by_stage: the ordered list of every stage, as from ``actions``.

    Raises:
        ValueError: If an action is missing, runs twice, or waits for one that can never have run.
    """
    _check_counts(actions_by_stage)
    n = len(actions_by_stage)
    done: set[tuple[int, Action]] = set()
    position = [0] * n
    moved = True
    while moved:
        moved = False
        for j, listed in enumerate(actions_by_stage):
            while position[j] < len(listed) and not _missing(listed[position[j]], j, n, done):
                done.add((j, listed[position[j]]))
                position[j] += 1
                moved = True
    for j, listed in enumerate(actions_by_stage):
        if position[j] < len(listed):
            action = listed[position[j]]
            (other, needed), *_ = _missing(action, j, n, done)
            msg = f"stage {j} can't run {action}: it needs {needed} of stage {other}, which can't have run by then"
            raise ValueError(msg)


def _num_stages(ticks: list[Tick]) -> int:
    num_stages = max((j + 1 for tick in ticks for _, j in tick), default=0)
    if not num_stages:
        msg = "nothing runs in this clock; give the clock of at least 1 microbatch and 1 stage"
        raise ValueError(msg)
    return num_stages


def _missing(action: Action, stage: int, n: int, done: set[tuple[int, Action]]) -> list[tuple[int, Action]]:
    """Lists what an action needs and is not done yet, as pairs of stage and action."""
    needs: list[tuple[int, Action]] = []
    if action.kind == "forward" and stage > 0:
        needs.append((stage - 1, action))
    if action.kind == "backward":
        needs.append((stage, Action("forward", action.microbatch)))
        if stage < n - 1:
            needs.append((stage + 1, action))
    return [need for need in needs if need not in done]


def _check_counts(actions_by_stage: Sequence[Sequence[Action]]) -> None:
    every = {action for listed in actions_by_stage for action in listed}
    m = max((action.microbatch + 1 for action in every), default=0)
    if not m:
        msg = f"the lists of {len(actions_by_stage)} stages have no action; list at least one forward"
        raise ValueError(msg)
    expected = [Action("forward", i) for i in range(m)]
    if any(action.kind == "backward" for action in every):
        expected += [Action("backward", i) for i in range(m)]
    for j, listed in enumerate(actions_by_stage):
        for action in expected:
            count = listed.count(action)
            if count != 1:
                msg = f"stage {j} runs {action} {count} times; each of {m} microbatches runs exactly once"
                raise ValueError(msg)


def _require_sizes(m: int, n: int) -> None:
    if m < 1 or n < 1:
        msg = f"{m} microbatches on {n} stages have no schedule; give at least 1 of each"
        raise ValueError(msg)
