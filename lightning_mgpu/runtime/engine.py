"""The engine: runs this process's part of a table, action by action.

What crosses a cut follows from the table, so both sides agree on the order of what one process sends another. The arguments
of all microbatches go from the lead to the stages that take them before anything else, and the gradients of arguments come
back after everything else. A process receives what its next action needs while it works on this one.

Tables speak of positions in one pipeline; an engine knows which process stands at each position of its own replica.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from lightning_mgpu.partition.program import Store
from lightning_mgpu.partition.stage import Crossing, Stage, StageRun
from lightning_mgpu.runtime.dataplane import DataPlane, Receipt
from lightning_mgpu.schedule.table import Action, Table
from lightning_mgpu.timeline import Event

__all__ = ["Call", "Engine", "Exchange", "Given", "arguments_of"]

Given = frozenset[int]
"""Positions of the wanted tensors of one microbatch that have a gradient."""


@dataclass
class Call:
    """Is what one process keeps of a call until its backward.

    Attributes:
        number: tells calls apart.
        stages: for each microbatch of this replica the stages that are run here, by index.
        runs: what is kept of each stage.
        timed: whether to note when what is done.
        first: the batch's number of this replica's first microbatch.
    """

    number: int
    stages: Sequence[Mapping[int, Stage]]
    runs: Mapping[int, StageRun]
    timed: bool
    first: int = 0


class Exchange(Protocol):
    """Is what an engine asks of the lead's side of a call, or of the messages about it; microbatches are its replica's."""

    def given(self, microbatch: int, *, wait: bool) -> Given | None:
        """Says which wanted tensors of a microbatch have a gradient; ``None`` where that is not known and not waited for."""

    def inputs(self, stage: Stage, microbatch: int) -> list[Tensor] | None:
        """Returns the arguments a stage takes, ``None`` where they have to be received."""

    def made(self, microbatch: int, tensors: list[Tensor]) -> None:
        """Takes what the last stage made."""

    def gradients(self, microbatch: int) -> Mapping[int, Tensor]:
        """Returns the gradients of what the last stage made, by register."""


@dataclass
class _Way:
    """Is what comes from another position, in its order."""

    position: int
    source: int
    coming: deque[tuple[Action, str]]


@dataclass
class Engine:
    """Runs the stages of one process.

    Attributes:
        process: index of this process; the last one is the lead.
        row: the processes of this replica, by position.
        store: the modules and tensors of this process.
        plane: the way to the other processes, ``None`` where there is none.
        stage, microbatch, doing: what is being worked on, for error reports.
        events: when what was worked on, while a call is timed.
    """

    process: int
    row: Sequence[int]
    store: Store
    plane: DataPlane | None
    device: torch.device
    stage: int | None = None
    microbatch: int | None = None
    doing: str = "idle"
    replica: int = 0
    events: list[Event] = field(default_factory=list)

    @property
    def position(self) -> int:
        """The place of this process in its replica's pipeline."""
        return self.row.index(self.process)

    def run(
        self,
        call: Call,
        table: Table,
        exchange: Exchange,
        *,
        retain: bool = False,
        accumulate: bool = True,
    ) -> list[dict[int, Tensor]]:
        """Runs this process's list of a table.

        Args:
            call: the call.
            table: what every process runs.
            exchange: the lead's side of the call.
            retain: whether another backward of the call may follow.
            accumulate: whether parameters' gradients are added up.

        Returns:
            For each microbatch the gradients of the arguments that the stages here took directly, by register.
        """
        course = _Course(self, call, table, exchange, retain=retain, accumulate=accumulate)
        for action in table.processes[self.position]:
            self.stage, self.microbatch = action.stage, call.first + action.microbatch
            self.doing = action.kind.replace("_", " ")
            course.carry_out(action)
        self.flush()
        self.stage, self.microbatch, self.doing = None, None, "idle"
        return course.found

    # -- arguments -------------------------------------------------------------------------------------------------

    def receive_arguments(self, call: Call, source: int) -> list[dict[int, Receipt]]:
        """Starts to receive the arguments that stages here take from the lead, by register, for each microbatch."""
        taken = [arguments_of(stages) for stages in call.stages]
        return [dict(zip((c.register for c in each), self.receive(each, source), strict=True)) for each in taken]

    def return_gradients(self, call: Call, found: Sequence[Mapping[int, Tensor]], given: Sequence[Given], to: int) -> None:
        """Sends the gradients of those arguments back to the lead."""
        for stages, gradients, present in zip(call.stages, found, given, strict=True):
            self.send(self.filled(arguments_of(stages), gradients, present).values(), to)
        self.flush()

    # -- crossings -------------------------------------------------------------------------------------------------

    def send(self, tensors: Iterable[Tensor], to: int, **options: int) -> None:
        assert self.plane is not None
        for tensor in tensors:
            self.plane.send(tensor, to, **options)

    def receive(self, crossings: Sequence[Crossing], source: int) -> list[Receipt]:
        assert self.plane is not None
        return [self.plane.receive(c.shape, c.dtype, source) for c in crossings]

    def filled(self, crossings: Sequence[Crossing], made: Mapping[int, Tensor], given: Given) -> dict[int, Tensor]:
        """Returns the gradients of received tensors, zeros where autograd left one out."""
        return {
            c.register: made[c.register] if c.register in made else torch.zeros(c.shape, dtype=c.dtype, device=self.device)
            for c in crossings
            if c.has_gradient(given)
        }

    def receive_gradients(self, crossings: Sequence[Crossing], given: Given, source: int) -> dict[int, Receipt]:
        assert self.plane is not None
        asked = [c for c in crossings if c.has_gradient(given)]
        return {c.register: self.plane.receive(c.shape, c.dtype, source) for c in asked}

    def flush(self) -> None:
        """Waits until everything is sent."""
        if self.plane is not None:
            self.plane.flush()

    # -- time ------------------------------------------------------------------------------------------------------

    @contextmanager
    def timing(self, call: Call, action: Action) -> Iterator[None]:
        """Notes when an action is done, where the call is timed."""
        if not call.timed:
            yield
            return
        start_s = self._now_s()
        yield
        microbatch = call.first + action.microbatch
        self.events.append(
            Event(action.stage, action.kind, microbatch, start_s, self._now_s(), call.number, replica=self.replica)
        )

    def _now_s(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # a picture shows when work is done, not when it is asked for
        return time.monotonic()


class _Course:
    """Is one run of a table: what has arrived, and what is on its way."""

    def __init__(self, engine: Engine, call: Call, table: Table, exchange: Exchange, *, retain: bool, accumulate: bool) -> None:
        self.engine = engine
        self.call = call
        self.table = table
        self.exchange = exchange
        self.retain = retain
        self.accumulate = accumulate
        self.found: list[dict[int, Tensor]] = [{} for _ in call.stages]
        self._position = table.positions
        self._here: dict[Action, list[Tensor] | dict[int, Tensor]] = {}  # from a stage of this process
        self._arriving: dict[Action, list[Receipt] | dict[int, Receipt]] = {}
        self._ways = {
            position: _Way(position, source, deque(table.transfers(position, engine.position)))
            for position, source in enumerate(engine.row)
        }

    def carry_out(self, action: Action) -> None:
        """Runs one action, with what it needs, and passes on what it makes."""
        handlers: dict[str, Callable[[Action], None]] = {
            "forward": self._forward,
            "backward": self._backward,
            "input_backward": self._backward,
            "weight_backward": self._weights,
        }
        handlers[action.kind](action)

    # -- actions ---------------------------------------------------------------------------------------------------

    def _forward(self, action: Action) -> None:
        index, i = action.stage, action.microbatch
        stage = self.call.stages[i][index]
        received = self._take(action, index - 1) if index > 0 else []
        assert isinstance(received, list)
        direct = self.exchange.inputs(stage, i) if stage.inputs else []
        with self.engine.timing(self.call, action):
            results = self.call.runs[index].forward(stage, i, received, direct or [])
        if index == self.table.num_stages - 1:
            self.exchange.made(i, results)
        elif self._is_here(index + 1):
            self._here[Action("forward", index + 1, i)] = results
        else:
            self._send(results, Action("forward", index + 1, i))

    def _backward(self, action: Action) -> None:
        index, i = action.stage, action.microbatch
        last = index == self.table.num_stages - 1
        gradients = self.exchange.gradients(i) if last else self._take(action, index + 1)
        assert not isinstance(gradients, list)
        run, stage = self.call.runs[index], self.call.stages[i][index]
        with self.engine.timing(self.call, action):
            if action.kind == "backward":
                made = run.backward(i, gradients, retain=self.retain, accumulate=self.accumulate)
            else:
                made = run.backward_of_inputs(i, gradients)
        if index > 0:
            given = self.exchange.given(i, wait=True)
            assert given is not None
            waiting, filled = self._backward_of(index - 1, i), self.engine.filled(stage.receives, made, given)
            if self._is_here(index - 1):
                self._here[waiting] = filled
            else:
                self._send(filled.values(), waiting)
        for crossing in stage.inputs:
            if crossing.register in made:
                known, new = self.found[i].get(crossing.register), made[crossing.register]
                self.found[i][crossing.register] = new if known is None else known + new

    def _weights(self, action: Action) -> None:
        with self.engine.timing(self.call, action):
            self.call.runs[action.stage].backward_of_weights(action.microbatch)

    # -- what actions wait for -------------------------------------------------------------------------------------

    def _is_here(self, stage: int) -> bool:
        return self.table.homes[stage] == self.engine.position

    def _backward_of(self, stage: int, i: int) -> Action:
        """Returns the action that takes the gradient of one stage and microbatch, and sends that of the stage before."""
        whole = Action("backward", stage, i)
        return whole if whole in self._position else Action("input_backward", stage, i)

    def _send(self, tensors: Iterable[Tensor], waiting: Action) -> None:
        """Sends what an action of another process waits for."""
        self.engine.send(tensors, self.engine.row[self.table.homes[waiting.stage]], needed_at=self._position[waiting])

    def _take(self, action: Action, neighbour: int) -> list[Tensor] | dict[int, Tensor]:
        """Returns what an action waits for, and sees to it that what comes next from there is on its way."""
        if self._is_here(neighbour):
            return self._here.pop(action)
        way = self._ways[self.table.homes[neighbour]]
        while action not in self._arriving:
            self._post(way, wait=True)
        receipts = self._arriving.pop(action)
        if isinstance(receipts, list):
            arrived: list[Tensor] | dict[int, Tensor] = [receipt.wait() for receipt in receipts]
        else:
            arrived = {register: receipt.wait() for register, receipt in receipts.items()}
        for other in self._ways.values():
            self._post(other, wait=False)
        self._release(action, way.source)
        return arrived

    def _release(self, action: Action, source: int) -> None:
        """Lets go of what was sent to a process, as far as that must have had it to send what arrived."""
        forward = action.kind == "forward"
        i = action.microbatch
        maker = Action("forward", action.stage - 1, i) if forward else self._backward_of(action.stage + 1, i)
        assert self.engine.plane is not None
        self.engine.plane.release(source, self._position[maker])

    def _post(self, way: _Way, *, wait: bool) -> None:
        """Starts to receive what comes next from a process; without ``wait`` only where nothing is on its way already."""
        if not way.coming or (not wait and any(self._is_from(way.position, action) for action in self._arriving)):
            return
        action, what = way.coming[0]
        stage = self.call.stages[action.microbatch][action.stage]
        if what == "activations":
            self._arriving[action] = self.engine.receive(stage.receives, way.source)
        else:
            given = self.exchange.given(action.microbatch, wait=wait)
            if given is None:
                return
            self._arriving[action] = self.engine.receive_gradients(stage.sends, given, way.source)
        way.coming.popleft()

    def _is_from(self, position: int, action: Action) -> bool:
        neighbour = action.stage - 1 if action.kind == "forward" else action.stage + 1
        return self.table.homes[neighbour] == position


def arguments_of(stages: Mapping[int, Stage]) -> list[Crossing]:
    """Lists what some stages take from the caller directly, each argument once."""
    return list({c.register: c for index in sorted(stages) for c in stages[index].inputs}.values())
