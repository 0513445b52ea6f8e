"""What a timeline computes from events whose answer is known by hand."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_mgpu import timeline as module
from lightning_mgpu.timeline import Event, Timeline, ideal_bubble_share


def fill_drain(m: int, n: int, *, call: int = 0, start_s: float = 100.0) -> list[Event]:
    """Draws a step whose forwards take 1 s and whose backwards take 2 s, with nothing in between."""
    forwards = [Event(j, "forward", i, start_s + i + j, start_s + i + j + 1, call) for i in range(m) for j in range(n)]
    turn_s = start_s + m + n - 1
    backwards = [
        Event(j, "backward", i, turn_s + 2 * (i + n - 1 - j), turn_s + 2 * (i + n - 1 - j) + 2, call)
        for i in range(m)
        for j in range(n)
    ]
    return forwards + backwards


@pytest.mark.parametrize(("n", "m"), [(1, 4), (2, 4), (3, 2), (4, 8)])
def test_even_stages_have_the_ideal_bubble(n: int, m: int) -> None:
    timeline = Timeline.from_events(fill_drain(m, n))
    assert timeline.num_stages == n
    assert timeline.num_microbatches == m
    assert timeline.span_s == 3 * (m + n - 1)
    assert [timeline.busy_s(j) for j in range(n)] == [3 * m] * n
    assert timeline.bubble_share() == pytest.approx(ideal_bubble_share(n, m))


def test_ideal_bubble_share() -> None:
    assert ideal_bubble_share(4, 12) == 0.2
    assert ideal_bubble_share(1, 1) == 0
    with pytest.raises(ValueError, match="2 stages and 0 microbatches have no bubble; give at least 1 of each"):
        ideal_bubble_share(2, 0)


def test_uneven_stages_have_a_larger_bubble() -> None:
    events = [Event(0, "forward", 0, 0.0, 1.0, 0), Event(1, "forward", 0, 1.0, 4.0, 0)]
    assert Timeline.from_events(events).bubble_share() == 1 - 4 / 8


def test_bubble_leaves_out_optimizer_and_transfers() -> None:
    step = fill_drain(4, 2)
    others = [Event(0, "optimizer", None, 120.0, 150.0, 0), Event(1, "transfer", 0, 90.0, 101.0, 0)]
    timeline = Timeline.from_events(step + others)
    assert timeline.bubble_share() == pytest.approx(ideal_bubble_share(2, 4))
    assert timeline.busy_s(0) == 12 + 30
    assert timeline.busy_s(1) == 12
    assert timeline.span_s == 60


def test_time_covered_twice_counts_once() -> None:
    spans = [(0.0, 4.0), (1.0, 2.0), (3.0, 6.0), (8.0, 9.0)]
    timeline = Timeline.from_events([Event(0, "forward", i, *span, 0) for i, span in enumerate(spans)])
    assert timeline.busy_s(0) == 7


def test_last_step_passes_over_evaluation() -> None:
    evaluation = [Event(0, "forward", 0, 300.0, 301.0, 7), Event(1, "forward", 0, 301.0, 302.0, 7)]
    timeline = Timeline.from_events(
        evaluation + fill_drain(4, 2, call=3, start_s=200.0) + fill_drain(2, 2, call=1), names=["a", "b"]
    )
    assert timeline.calls == (1, 3, 7)
    assert timeline.last_step() == timeline.call(3)
    assert timeline.last_step().names == ("a", "b")
    assert timeline.bubble_share() == pytest.approx(ideal_bubble_share(2, 4))
    assert timeline.call(7).bubble_share() == 0.5
    assert timeline.call(7).last_step() == timeline.call(7)
    with pytest.raises(ValueError, match=r"the timeline has no call 2; it has 3 between 1 and 7"):
        timeline.call(2)


def test_merge_sorts_the_events_of_all_processes() -> None:
    events = fill_drain(4, 3)
    lead = Timeline.from_events([e for e in events if e.stage == 2], names=["conv1", "conv2", "fc"])
    workers = [Timeline.from_events([e for e in events if e.stage == j]) for j in range(2)]
    merged = workers[0].merge(workers[1], lead)
    assert merged == Timeline.from_events(reversed(events), names=["conv1", "conv2", "fc"])
    assert [e.start_s for e in merged.events] == sorted(e.start_s for e in events)
    assert Timeline(3).merge() == Timeline(3)


def test_immutable() -> None:
    timeline = Timeline.from_events(fill_drain(2, 2))
    with pytest.raises(dataclasses.FrozenInstanceError):
        timeline.num_stages = 3  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        timeline.events[0].stage = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    "ask",
    [
        lambda timeline: timeline.span_s,
        lambda timeline: timeline.busy_s(0),
        lambda timeline: timeline.call(0),
        lambda timeline: timeline.last_step(),
        lambda timeline: timeline.bubble_share(),
        lambda timeline: timeline.to_trace(),
    ],
)
def test_empty_timeline_names_the_remedy(ask) -> None:
    assert Timeline(2).calls == ()
    with pytest.raises(ValueError, match=r"the timeline is empty; record one with PipelineStrategy\(timeline=True\)"):
        ask(Timeline(2))


def test_empty_timeline_writes_no_trace(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the timeline is empty"):
        Timeline(2).save_trace(tmp_path / "trace.json")
    assert list(tmp_path.iterdir()) == []


def test_wrong_events() -> None:
    with pytest.raises(ValueError, match=r"a forward of stage 1 can't end at 1.0 s after it began at 2.0 s"):
        Event(1, "forward", 0, 2.0, 1.0, 0)
    with pytest.raises(ValueError, match=r"can't belong to stage -1"):
        Event(-1, "forward", 0, 0.0, 1.0, 0)
    event = Event(2, "forward", 0, 0.0, 1.0, 0)
    with pytest.raises(ValueError, match=r"belongs to stage 2 of a timeline with 2 stages"):
        Timeline.from_events([event], num_stages=2)
    with pytest.raises(ValueError, match=r"1 names were given for 3 stages; give one each, or none"):
        Timeline.from_events([event], num_stages=3, names=["conv"])
    with pytest.raises(ValueError, match=r"the timeline has no stage 3; its 3 stages are counted from 0"):
        Timeline.from_events([event]).busy_s(3)
    with pytest.raises(ValueError, match=r"none of the 1 calls in the timeline ran forward"):
        Timeline.from_events([Event(0, "optimizer", None, 0.0, 1.0, 0)]).bubble_share()
    with pytest.raises(ValueError, match=r"the 1 events of the last step took 0 s"):
        Timeline.from_events([Event(0, "forward", 0, 1.0, 1.0, 0)]).bubble_share()


def test_trace(tmp_path: Path) -> None:
    events = [
        Event(0, "forward", 3, 10.0, 10.5, 4),
        Event(0, "transfer", 3, 10.4, 10.75, 4),
        Event(1, "optimizer", None, 11.0, 11.25, 4),
    ]
    timeline = Timeline.from_events(events, names=["conv1", "fc1"])
    path = timeline.save_trace(tmp_path / "new" / "trace.json")
    trace = json.loads(path.read_text())
    assert trace == timeline.to_trace()
    rows = {e["tid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert [rows[tid] for tid in sorted(rows)] == ["stage 0: conv1", "stage 0: transfers", "stage 1: fc1"]
    slices = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert [(rows[e["tid"]], e["name"], e["ts"], e["dur"]) for e in slices] == [
        ("stage 0: conv1", "forward 3", 0.0, 500_000.0),
        ("stage 0: transfers", "transfer 3", 400_000.0, 350_000.0),
        ("stage 1: fc1", "optimizer", 1_000_000.0, 250_000.0),
    ]
    assert [e["args"]["microbatch"] for e in slices] == [3, 3, None]
    assert {e["pid"] for e in trace["traceEvents"]} == {0}


def test_trace_has_one_row_per_stage() -> None:
    trace = Timeline.from_events(fill_drain(2, 3), num_stages=4).to_trace()
    names = [e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"]
    assert names == ["stage 0", "stage 1", "stage 2", "stage 3"]


def test_needs_no_torch() -> None:
    """Workers and tools read timelines; the file alone must not bring torch with it, whatever the package does."""
    code = f"import runpy, sys; runpy.run_path({module.__file__!r}); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
