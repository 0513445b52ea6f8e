"""Fill and drain: the gpipe schedule as one process sees it (GPipe, Huang et al. 2019, section 2.3).

Every stage runs the forwards of microbatches 0..m-1, later their backwards in the same order. What crosses a cut goes one way
in each phase: activations up in the forward, gradients down in the backward. The arguments of all microbatches go from the
lead to stage 0 before anything else, and the gradients of arguments come back after everything else, so that no pair of
processes ever waits for each other.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_mgpu.partition.program import Store
from lightning_mgpu.partition.stage import Crossing, Stage, StageRun
from lightning_mgpu.runtime.dataplane import DataPlane, Receipt
from lightning_mgpu.timeline import Event, Kind

__all__ = ["CallState", "Engine"]

Stages = Mapping[int, Stage]


@dataclass
class CallState:
    """Is what one stage keeps of a call until its backward."""

    number: int
    stages: Stages
    sizes: tuple[int, ...]
    run: StageRun
    timed: bool


@dataclass
class Engine:
    """Runs one stage of a pipeline.

    Attributes:
        stage: index of the stage.
        num_stages: number of stages.
        store: the modules and tensors of this process.
        plane: the way to the other stages, ``None`` for a single stage.
        microbatch, doing: what is being worked on, for error reports.
        events: when what was worked on, while a call is timed.
    """

    stage: int
    num_stages: int
    store: Store
    plane: DataPlane | None
    device: torch.device
    microbatch: int | None = None
    doing: str = "idle"
    events: list[Event] = field(default_factory=list)

    @property
    def is_last(self) -> bool:
        return self.stage == self.num_stages - 1

    # -- forward ---------------------------------------------------------------------------------------------------

    def forward(
        self,
        call: CallState,
        inputs: Sequence[Mapping[int, Tensor]] | None = None,
        first: Sequence[Sequence[Crossing]] = (),
    ) -> list[list[Tensor]]:
        """Runs the forwards of a call.

        Args:
            call: the call.
            inputs: the arguments of each microbatch by register on the lead, ``None`` on workers.
            first: on the lead, which of them stage 0 takes, for each microbatch.

        Returns:
            On the lead what the last stage made for each microbatch, elsewhere nothing.
        """
        self.doing = "forward"
        if inputs is not None and self.num_stages > 1:
            self._deal_out(inputs, first)
        arriving = self._arriving(call)
        made: list[list[Tensor]] = []
        for i, rows in enumerate(call.sizes):
            self.microbatch = i
            stage = call.stages[rows]
            received, direct = next(arriving)
            if inputs is not None:
                direct = [inputs[i][c.register] for c in stage.inputs]
            with self._timed(call, "forward", i):
                results = call.run.forward(stage, i, received, direct)
            if self.is_last:
                made.append(results)
            else:
                self._send(results, self.stage + 1)
        self._end()
        return made

    def _deal_out(self, inputs: Sequence[Mapping[int, Tensor]], first: Sequence[Sequence[Crossing]]) -> None:
        """Sends the arguments of all microbatches to stage 0, in one go."""
        for part, crossings in zip(inputs, first, strict=True):
            self._send([part[c.register] for c in crossings], 0)

    def _arriving(self, call: CallState) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
        """Yields what each microbatch needs from elsewhere, receiving the next one while this one is worked on."""
        if self.plane is None or (self.stage == 0 and self.is_last):
            yield from (([], []) for _ in call.sizes)
            return
        if self.stage == 0:
            direct = [self._receive(call.stages[rows].inputs, self.num_stages - 1) for rows in call.sizes]
            yield from (([], [r.wait() for r in receipts]) for receipts in direct)
            return
        waiting = self._receive(call.stages[call.sizes[0]].receives, self.stage - 1)
        for i in range(len(call.sizes)):
            here = [receipt.wait() for receipt in waiting]
            if i + 1 < len(call.sizes):
                waiting = self._receive(call.stages[call.sizes[i + 1]].receives, self.stage - 1)
            yield here, []

    # -- backward --------------------------------------------------------------------------------------------------

    def backward(
        self,
        call: CallState,
        given: Sequence[frozenset[int]],
        gradients: Sequence[Mapping[int, Tensor]] | None,
        *,
        retain: bool,
        accumulate: bool,
        input_gradients: bool,
    ) -> list[dict[int, Tensor]]:
        """Runs the backwards of a call.

        Args:
            call: the call.
            given: for each microbatch the positions of the wanted tensors that have a gradient.
            gradients: those gradients by register on the lead, ``None`` on workers.
            retain: whether another backward of the call may follow.
            accumulate: whether parameters' gradients are added up.
            input_gradients: whether the caller wants the gradients of arguments.

        Returns:
            The gradients of this stage's own arguments for each microbatch, by register.
        """
        self.doing = "backward"
        arriving = self._arriving_gradients(call, given)
        found: list[dict[int, Tensor]] = []
        for i, rows in enumerate(call.sizes):
            self.microbatch = i
            stage = call.stages[rows]
            arrived = gradients[i] if gradients is not None else next(arriving)
            with self._timed(call, "backward", i):
                made = call.run.backward(i, arrived, retain=retain, accumulate=accumulate)
            if self.stage > 0:
                self._send_gradients(stage.receives, made, given[i], self.stage - 1)
            found.append({c.register: made[c.register] for c in stage.inputs if c.register in made})
        if self.stage == 0 and not self.is_last and input_gradients:
            for i, rows in enumerate(call.sizes):
                self._send_gradients(call.stages[rows].inputs, found[i], given[i], self.num_stages - 1)
        self._end()
        return found

    def _arriving_gradients(self, call: CallState, given: Sequence[frozenset[int]]) -> Iterator[dict[int, Tensor]]:
        if self.is_last:
            return
        receipts = self._receive_gradients(call.stages[call.sizes[0]].sends, given[0], self.stage + 1)
        for i in range(len(call.sizes)):
            here = {register: receipt.wait() for register, receipt in receipts.items()}
            if i + 1 < len(call.sizes):
                receipts = self._receive_gradients(call.stages[call.sizes[i + 1]].sends, given[i + 1], self.stage + 1)
            yield here

    def receive_input_gradients(
        self, first: Sequence[Sequence[Crossing]], given: Sequence[frozenset[int]]
    ) -> list[dict[int, Tensor]]:
        """Receives on the lead the gradients of the arguments that went to stage 0.

        Args:
            first: what stage 0 took for each microbatch.
            given: for each microbatch the wanted tensors that have a gradient.
        """
        receipts = [self._receive_gradients(c, g, 0) for c, g in zip(first, given, strict=True)]
        return [{register: receipt.wait() for register, receipt in r.items()} for r in receipts]

    # -- crossings -------------------------------------------------------------------------------------------------

    def _send(self, tensors: Sequence[Tensor], to: int) -> None:
        assert self.plane is not None
        for tensor in tensors:
            self.plane.send(tensor, to)

    def _receive(self, crossings: Sequence[Crossing], source: int) -> list[Receipt]:
        assert self.plane is not None
        return [self.plane.receive(c.shape, c.dtype, source) for c in crossings]

    def _send_gradients(
        self, crossings: Sequence[Crossing], made: Mapping[int, Tensor], given: frozenset[int], to: int
    ) -> None:
        assert self.plane is not None
        for crossing in crossings:
            if crossing.has_gradient(given):
                gradient = made.get(crossing.register)
                if gradient is None:
                    gradient = torch.zeros(crossing.shape, dtype=crossing.dtype, device=self.device)
                self.plane.send(gradient, to)

    def _receive_gradients(self, crossings: Sequence[Crossing], given: frozenset[int], source: int) -> dict[int, Receipt]:
        assert self.plane is not None
        asked = [c for c in crossings if c.has_gradient(given)]
        return {c.register: self.plane.receive(c.shape, c.dtype, source) for c in asked}

    def _end(self) -> None:
        if self.plane is not None:
            self.plane.flush()
        self.microbatch, self.doing = None, "idle"

    @contextmanager
    def _timed(self, call: CallState, kind: Kind, microbatch: int) -> Iterator[None]:
        if not call.timed:
            yield
            return
        start_s = self._now_s()
        yield
        self.events.append(Event(self.stage, kind, microbatch, start_s, self._now_s(), call.number))

    def _now_s(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # a picture shows when work is done, not when it is asked for
        return time.monotonic()
