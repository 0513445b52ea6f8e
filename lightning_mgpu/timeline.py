"""Holds what every stage did and when, and derives the bubble from it.

The bubble is the share of the pipeline's time in which stages wait for each other: Huang et al., "GPipe: Efficient
Training of Giant Neural Networks using Pipeline Parallelism" (2019), section 2.3.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

__all__ = ["Event", "Kind", "Timeline", "ideal_bubble_share"]

Kind: TypeAlias = Literal["forward", "backward", "input_backward", "weight_backward", "optimizer", "transfer"]

_BACKWARD: frozenset[Kind] = frozenset({"backward", "input_backward", "weight_backward"})
_EMPTY = "the timeline is empty; record one with PipelineStrategy(timeline=True)"


@dataclass(frozen=True)
class Event:
    """One thing a stage did, from its start to its end.

    Times come from ``time.monotonic()``, which all processes of one host read from the same clock.

    Attributes:
        stage: index of the stage, counted from 0.
        kind: what the stage did.
        microbatch: index of the microbatch, or ``None`` where the work belongs to the whole batch.
        start_s: when it began.
        end_s: when it ended.
        call: number of the remote call it belongs to; a forward phase and its backward share one.
        replica: index of the copy of the pipeline, where there are several.
    """

    stage: int
    kind: Kind
    microbatch: int | None
    start_s: float
    end_s: float
    call: int
    replica: int = 0

    def __post_init__(self) -> None:
        if self.stage < 0:
            msg = f"an event can't belong to stage {self.stage}; stages are counted from 0"
            raise ValueError(msg)
        if not self.start_s <= self.end_s:
            msg = (
                f"a {self.kind} of stage {self.stage} can't end at {self.end_s} s after it began at {self.start_s} s; "
                f"take both times from time.monotonic() on one host"
            )
            raise ValueError(msg)


@dataclass(frozen=True)
class Timeline:
    """The events of all stages in the order of their start.

    Attributes:
        num_stages: number of stages, also those without an event.
        events: what the stages did, sorted by start.
        names: one description per stage for pictures, or empty.
        homes: the process of each stage, or empty where each has its own.
    """

    num_stages: int
    events: tuple[Event, ...] = ()
    names: tuple[str, ...] = ()
    homes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.homes and len(self.homes) != self.num_stages:
            msg = f"the processes of {len(self.homes)} stages were given for {self.num_stages} stages; give one each, or none"
            raise ValueError(msg)
        beyond = [event.stage for event in self.events if event.stage >= self.num_stages]
        if beyond:
            msg = f"an event belongs to stage {max(beyond)} of a timeline with {self.num_stages} stages"
            raise ValueError(msg)
        if self.names and len(self.names) != self.num_stages:
            msg = f"{len(self.names)} names were given for {self.num_stages} stages; give one each, or none"
            raise ValueError(msg)
        ordered = tuple(sorted(self.events, key=lambda event: (event.start_s, event.end_s, event.stage)))
        object.__setattr__(self, "events", ordered)

    @property
    def num_processes(self) -> int:
        """The number of processes that hold one copy of the stages."""
        return max(self.homes) + 1 if self.homes else self.num_stages

    @property
    def num_replicas(self) -> int:
        """The number of copies of the pipeline that the events tell of."""
        return max((event.replica for event in self.events), default=0) + 1

    def row_of(self, event: Event) -> int:
        """Returns the process of an event, counted over all replicas."""
        return event.replica * self.num_processes + self.process_of(event.stage)

    def process_of(self, stage: int) -> int:
        """Returns the process of a stage."""
        return self.homes[stage] if self.homes else stage

    def stages_of(self, process: int) -> list[int]:
        """Lists the stages of a process."""
        return [stage for stage in range(self.num_stages) if self.process_of(stage) == process]

    @classmethod
    def from_events(
        cls,
        events: Iterable[Event],
        *,
        num_stages: int | None = None,
        names: Sequence[str] = (),
        homes: Sequence[int] = (),
    ) -> Timeline:
        """Builds a timeline from events in any order.

        Args:
            events: what the stages did.
            num_stages: number of stages; without it, as many as the names or the events tell of.
            names: one description per stage, or none.
            homes: the process of each stage, or none where each has its own.
        """
        events = tuple(events)
        if num_stages is None:
            num_stages = len(names) or max((event.stage + 1 for event in events), default=0)
        return cls(num_stages, events, tuple(names), tuple(homes))

    def merge(self, *others: Timeline) -> Timeline:
        """Joins the events of this timeline and others, as when every process brings its own.

        The result has as many stages as the largest, and the names of the first that names all of them.
        """
        parts = (self, *others)
        num_stages = max(part.num_stages for part in parts)
        names = next((part.names for part in parts if len(part.names) == num_stages), ())
        homes = next((part.homes for part in parts if len(part.homes) == num_stages), ())
        return Timeline(num_stages, tuple(event for part in parts for event in part.events), names, homes)

    @property
    def calls(self) -> tuple[int, ...]:
        """The numbers of the remote calls that have events, ascending."""
        return tuple(sorted({event.call for event in self.events}))

    @property
    def num_microbatches(self) -> int:
        """The number of different microbatches the events tell of."""
        return len({event.microbatch for event in self.events if event.microbatch is not None})

    @property
    def span_s(self) -> float:
        """The seconds from the first start to the last end.

        Raises:
            ValueError: If the timeline is empty.
        """
        self._require_events()
        return max(event.end_s for event in self.events) - self.events[0].start_s

    def call(self, k: int) -> Timeline:
        """Returns the timeline of remote call number ``k``: a forward phase and, in training, its backward.

        Raises:
            ValueError: If the timeline is empty or has no event of that call.
        """
        self._require_events()
        events = tuple(event for event in self.events if event.call == k)
        if not events:
            calls = self.calls
            msg = f"the timeline has no call {k}; it has {len(calls)} between {calls[0]} and {calls[-1]} (see .calls)"
            raise ValueError(msg)
        return Timeline(self.num_stages, events, self.names, self.homes)

    def last_step(self) -> Timeline:
        """Returns the last call that ran forward and backward or, if none ran backward, the last that ran forward.

        A validation after the last training step is therefore passed over; ask for it with ``call``.

        Raises:
            ValueError: If no call ran forward.
        """
        self._require_events()
        kinds: dict[int, set[Kind]] = {}
        for event in self.events:
            kinds.setdefault(event.call, set()).add(event.kind)
        forward = [k for k, seen in kinds.items() if "forward" in seen]
        if not forward:
            msg = f"none of the {len(kinds)} calls in the timeline ran forward, so there is no step to look at"
            raise ValueError(msg)
        complete = [k for k in forward if kinds[k] & _BACKWARD]
        return self.call(max(complete or forward))

    def busy_s(self, stage: int) -> float:
        """Returns the seconds a stage spent computing: forward, backward or optimizer, not transfers.

        Time covered by two events at once counts once, in each replica.

        Raises:
            ValueError: If the timeline is empty or has no such stage.
        """
        self._require_events()
        if not 0 <= stage < self.num_stages:
            msg = f"the timeline has no stage {stage}; its {self.num_stages} stages are counted from 0"
            raise ValueError(msg)
        busy_s, until_s = 0.0, [float("-inf")] * self.num_replicas
        for event in self.events:
            if event.stage == stage and event.kind != "transfer" and event.end_s > until_s[event.replica]:
                busy_s += event.end_s - max(event.start_s, until_s[event.replica])
                until_s[event.replica] = event.end_s
        return busy_s

    def bubble_share(self) -> float:
        """Returns the share of all processes' time in the last step in which they ran neither forward nor backward.

        With ``n`` processes, those of all replicas, it is ``1 - (busy seconds of all stages) / (n * span)``, over the
        forwards and backwards of ``last_step()``. GPipe (Huang et al. 2019, section 2.3) gives the ideal of one replica,
        ``(n - 1) / (m + n - 1)`` for ``m`` microbatches, which assumes that all stages take the same time and that passing
        tensors on and the loss between the two phases take none: see ``ideal_bubble_share``.

        Raises:
            ValueError: If no call ran forward, or the last step took no time.
        """
        step = self.last_step()
        compute = Timeline(step.num_stages, tuple(e for e in step.events if e.kind == "forward" or e.kind in _BACKWARD))
        span_s = compute.span_s
        if span_s <= 0:
            msg = f"the {len(compute.events)} events of the last step took 0 s, so no share of it is a bubble"
            raise ValueError(msg)
        busy_s = sum(compute.busy_s(j) for j in range(compute.num_stages))
        return 1 - busy_s / (step.num_replicas * step.num_processes * span_s)

    def to_trace(self) -> dict[str, Any]:
        """Returns the events in the Trace Event format that Perfetto and ``chrome://tracing`` read.

        A pipeline is one process, and each replica another, with one row per stage. A stage with transfers has a second
        row for them, because they may overlap its computing and a row shows only events that nest. Times count from the
        first event.

        Raises:
            ValueError: If the timeline is empty.
        """
        self._require_events()
        return {"traceEvents": [*self._trace_rows(), *self._trace_slices()], "displayTimeUnit": "ms"}

    def save_trace(self, path: str | Path) -> Path:
        """Writes the trace as JSON, to be opened in https://ui.perfetto.dev or ``chrome://tracing``.

        Args:
            path: the file to write; missing folders are created.

        Returns:
            The path of the file.

        Raises:
            ValueError: If the timeline is empty.
        """
        trace = self.to_trace()
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(trace), encoding="utf-8")
        return path

    def _require_events(self) -> None:
        if not self.events:
            raise ValueError(_EMPTY)

    def _trace_rows(self) -> Iterator[dict[str, Any]]:
        with_transfers = {event.stage for event in self.events if event.kind == "transfer"}
        for replica in range(self.num_replicas):
            title = "pipeline" if self.num_replicas == 1 else f"pipeline, replica {replica}"
            yield {"ph": "M", "pid": replica, "name": "process_name", "args": {"name": title}}
            for j in range(self.num_stages):
                label = f"stage {j}: {self.names[j]}" if self.names else f"stage {j}"
                rows = [(_row(j, "forward"), label)]
                if j in with_transfers:
                    rows.append((_row(j, "transfer"), f"stage {j}: transfers"))
                for row, name in rows:
                    yield {"ph": "M", "pid": replica, "tid": row, "name": "thread_name", "args": {"name": name}}
                    yield {"ph": "M", "pid": replica, "tid": row, "name": "thread_sort_index", "args": {"sort_index": row}}

    def _trace_slices(self) -> Iterator[dict[str, Any]]:
        origin_s = self.events[0].start_s
        for event in self.events:
            yield {
                "ph": "X",
                "pid": event.replica,
                "tid": _row(event.stage, event.kind),
                "name": event.kind if event.microbatch is None else f"{event.kind} {event.microbatch}",
                "cat": event.kind,
                "ts": round((event.start_s - origin_s) * 1e6, 3),
                "dur": round((event.end_s - event.start_s) * 1e6, 3),
                "args": {"microbatch": event.microbatch, "call": event.call},
            }


def ideal_bubble_share(num_processes: int, num_microbatches: int, stages_per_process: int = 1) -> float:
    """Returns ``(n - 1) / (v m + n - 1)``: the bubble if every stage takes the same time, with ``v`` stages a process.

    Sources: GPipe (Huang et al. 2019, section 2.3); for several stages a process, Narayanan et al. 2021, "Efficient
    Large-Scale Language Model Training on GPU Clusters", section 2.2.

    Raises:
        ValueError: If either number is below 1.
    """
    if num_processes < 1 or num_microbatches < 1 or stages_per_process < 1:
        msg = f"{num_processes} stages and {num_microbatches} microbatches have no bubble; give at least 1 of each"
        raise ValueError(msg)
    return (num_processes - 1) / (stages_per_process * num_microbatches + num_processes - 1)


def _row(stage: int, kind: Kind) -> int:
    return 2 * stage + (kind == "transfer")
