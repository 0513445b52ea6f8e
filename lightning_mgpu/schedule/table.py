"""Tables: for every process what it runs in which order, for one call or one training step.

A table is a pure value: it says nothing of tensors, and is checked before anything runs. What a process receives from another
follows from the other's list, so both sides of every transfer agree on its order without a word.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

__all__ = ["Action", "Kind", "Table", "check", "loop_homes", "parse", "v_homes"]

Kind: TypeAlias = Literal["forward", "backward", "input_backward", "weight_backward"]

_LETTERS: dict[Kind, str] = {"forward": "F", "backward": "B", "input_backward": "I", "weight_backward": "W"}
_KINDS = {letter: kind for kind, letter in _LETTERS.items()}


@dataclass(frozen=True, slots=True)
class Action:
    """One microbatch's forward or backward on one stage.

    A backward may come in two parts: the gradients of what the stage received, which the stage before waits for, and those
    of its weights, which nobody waits for (Qi et al. 2023, "Zero Bubble Pipeline Parallelism", section 2).
    """

    kind: Kind
    stage: int
    microbatch: int

    def __post_init__(self) -> None:
        if self.microbatch < 0 or self.stage < 0:
            msg = f"there is no microbatch {self.microbatch} of stage {self.stage}; they are counted from 0"
            raise ValueError(msg)

    def __str__(self) -> str:
        """Writes the action as the stage, a letter and the microbatch, such as ``1F3``."""
        return f"{self.stage}{_LETTERS[self.kind]}{self.microbatch}"

    @property
    def sends_gradient(self) -> bool:
        """Whether the stage before gets its gradient from this action."""
        return self.kind in ("backward", "input_backward")


def parse(text: str) -> Action:
    """Reads an action as it prints.

    Raises:
        ValueError: If the text is none.
    """
    for letter, kind in _KINDS.items():
        stage, found, microbatch = text.partition(letter)
        if found and stage.isdigit() and microbatch.isdigit():
            return Action(kind, int(stage), int(microbatch))
    msg = f"{text!r} is no action; write the stage, one of {', '.join(_KINDS)} and the microbatch, such as 1F3"
    raise ValueError(msg)


def loop_homes(num_processes: int, stages_per_process: int = 1) -> tuple[int, ...]:
    """Gives each stage its process, round and round: the last stage is on the last process.

    Source: Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters", section 2.2.
    """
    return tuple(stage % num_processes for stage in range(num_processes * stages_per_process))


def v_homes(num_processes: int) -> tuple[int, ...]:
    """Gives each process two stages, there and back: the first and the last stage are both on the last process.

    Source: Qi et al. 2023, section 6, which counts the processes the other way round.
    """
    there = tuple(range(num_processes))[::-1]
    return there + there[::-1]


@dataclass(frozen=True)
class Table:
    """Says what every process runs, in order.

    Attributes:
        processes: the actions of each process.
        homes: the process of each stage.
    """

    processes: tuple[tuple[Action, ...], ...]
    homes: tuple[int, ...]

    @property
    def num_stages(self) -> int:
        return len(self.homes)

    def __iter__(self) -> Iterator[tuple[Action, ...]]:
        return iter(self.processes)

    @functools.cached_property
    def positions(self) -> dict[Action, int]:
        """Where each action stands in the list of its process."""
        return {action: position for listed in self.processes for position, action in enumerate(listed)}

    def only(self, *kinds: Kind) -> Table:
        """Returns the table of some kinds of actions alone."""
        return Table(tuple(tuple(a for a in listed if a.kind in kinds) for listed in self.processes), self.homes)

    def transfers(self, source: int, to: int) -> list[tuple[Action, Literal["activations", "gradients"]]]:
        """Lists what one process sends another, in the order it does.

        Returns:
            The actions that wait for it, with what they wait for.
        """
        found: list[tuple[Action, Literal["activations", "gradients"]]] = []
        if source == to:
            return found
        backward = {(a.stage, a.microbatch): a for a in self.processes[to] if a.sends_gradient}
        for action in self.processes[source]:
            after, before = action.stage + 1, action.stage - 1
            if action.kind == "forward" and after < self.num_stages and self.homes[after] == to:
                found.append((Action("forward", after, action.microbatch), "activations"))
            if action.sends_gradient and before >= 0 and self.homes[before] == to:
                found.append((backward[before, action.microbatch], "gradients"))
        return found

    def __str__(self) -> str:
        """Draws the table: a line per process."""
        return "\n".join(f"process {p}: {' '.join(map(str, listed))}" for p, listed in enumerate(self.processes))


def check(table: Table) -> None:
    """Checks that processes which follow their lists, each waiting for what it needs, finish the step.

    Every stage must run forward once for every microbatch, after the stage before it; and backward once for every
    microbatch, whole or in its two parts, or never at all in evaluation, after its own forward and after the stage behind it.

    Raises:
        ValueError: If an action is missing, runs twice, lies on the wrong process, or waits for one that can never have run.
    """
    _check_counts(table)
    done: set[Action] = set()
    position = [0] * len(table.processes)
    moved = True
    while moved:
        moved = False
        for p, listed in enumerate(table.processes):
            while position[p] < len(listed) and not _missing(listed[position[p]], table, done):
                done.add(listed[position[p]])
                position[p] += 1
                moved = True
    for p, listed in enumerate(table.processes):
        if position[p] < len(listed):
            action = listed[position[p]]
            needed, *_ = _missing(action, table, done)
            msg = f"process {p} can't run {action}: it needs {needed}, which can't have run by then"
            raise ValueError(msg)


def _missing(action: Action, table: Table, done: set[Action]) -> list[Action]:
    """Lists what an action needs and is not done yet."""
    stage, i = action.stage, action.microbatch
    if action.kind == "forward":
        needs = [Action("forward", stage - 1, i)] if stage > 0 else []
    elif action.kind == "weight_backward":
        needs = [Action("input_backward", stage, i)]
    else:
        needs = [Action("forward", stage, i)]
        if stage < table.num_stages - 1:
            whole, part = Action("backward", stage + 1, i), Action("input_backward", stage + 1, i)
            if whole not in done and part not in done:
                needs.append(whole)
    return [need for need in needs if need not in done]


def _check_counts(table: Table) -> None:
    every: Sequence[Action] = [action for listed in table.processes for action in listed]
    m = max((action.microbatch + 1 for action in every), default=0)
    if not m:
        msg = f"the lists of {len(table.processes)} processes have no action; list at least one forward"
        raise ValueError(msg)
    for p, listed in enumerate(table.processes):
        for action in listed:
            if action.stage >= table.num_stages or table.homes[action.stage] != p:
                msg = f"process {p} lists {action}, but holds the stages {[s for s, h in enumerate(table.homes) if h == p]}"
                raise ValueError(msg)
    trains = any(action.kind != "forward" for action in every)
    for stage in range(table.num_stages):
        for i in range(m):
            count = {kind: every.count(Action(kind, stage, i)) for kind in _LETTERS}
            if count["forward"] != 1:
                msg = f"stage {stage} runs {Action('forward', stage, i)} {count['forward']} times; each of {m} runs once"
                raise ValueError(msg)
            parts = (count["input_backward"], count["weight_backward"])
            if (count["backward"], *parts) not in ({(1, 0, 0), (0, 1, 1)} if trains else {(0, 0, 0)}):
                msg = (
                    f"stage {stage} runs the backward of microbatch {i} {count['backward']} times whole, {parts[0]} times for "
                    f"its inputs and {parts[1]} times for its weights; each of {m} runs once, whole or in both parts"
                )
                raise ValueError(msg)
