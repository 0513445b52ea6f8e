"""What the Gantt chart shows: read from the figure, not from pixels."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from lightning_mgpu.plots import gantt, save_gantt
from lightning_mgpu.schedule.gpipe import backward_clock, forward_clock
from lightning_mgpu.timeline import Event, Kind, Timeline


def fill_drain(m: int, n: int, *, call: int = 0, start_s: float = 50.0, scale: tuple[float, ...] = ()) -> list[Event]:
    """Draws a step from the tables: 10 ms a forward, 20 ms a backward, shortened by a factor per stage."""
    events = []
    phases: list[tuple[Kind, list[list[tuple[int, int]]], float]] = [
        ("forward", list(forward_clock(m, n)), 0.010),
        ("backward", list(backward_clock(m, n)), 0.020),
    ]
    for kind, clock, long_s in phases:
        for tick in clock:
            for i, j in tick:
                took_s = long_s * (scale[j] if scale else 1)
                events.append(Event(j, kind, i, start_s, start_s + took_s, call))
            start_s += long_s
    return events


def bars(figure: Figure) -> list[Rectangle]:
    fills = {fill for fill, _ in gantt._COLOURS.values()}
    patches = [patch for patch in figure.axes[0].patches if isinstance(patch, Rectangle)]
    return [patch for patch in patches if to_hex(patch.get_facecolor()).upper() in fills]


def test_writes_a_png(tmp_path: Path) -> None:
    path = save_gantt(Timeline.from_events(fill_drain(4, 2)), tmp_path / "new" / "gantt.png")
    assert path == tmp_path / "new" / "gantt.png"
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_places_every_event() -> None:
    events = fill_drain(4, 3)
    figure = gantt._draw(Timeline.from_events(events), None)
    drawn = sorted((round(bar.get_x()), round(bar.get_width()), bar.get_y() + bar.get_height() / 2) for bar in bars(figure))
    expected = sorted((round((e.start_s - 50) * 1e3), round((e.end_s - e.start_s) * 1e3), e.stage) for e in events)
    assert drawn == expected
    assert figure.axes[0].get_xlabel() == "time (ms)"
    left, right = figure.axes[0].get_xlim()
    assert (left, right) == (0, pytest.approx(180))


def test_stage_0_is_on_top_and_stages_have_names() -> None:
    timeline = Timeline.from_events(fill_drain(4, 2), names=["conv1", "a very long list of the names of many modules, " * 3])
    axes = gantt._draw(timeline, None).axes[0]
    first, second = (tick.get_text() for tick in axes.get_yticklabels())
    assert first == "stage 0\nconv1"
    assert second.startswith("stage 1\na very long list of")
    assert second.endswith("…")
    assert axes.transData.transform((0, 0))[1] > axes.transData.transform((0, 1))[1]


def test_title_tells_measured_and_ideal_bubble() -> None:
    even = Timeline.from_events(fill_drain(4, 2))
    assert gantt._draw(even, None).axes[0].get_title() == "2 stages, 4 microbatches: bubble 20% (ideal 20%)"
    uneven = Timeline.from_events(fill_drain(4, 2, scale=(1, 0.5)))
    assert gantt._draw(uneven, "CNN").axes[0].get_title() == "CNN: bubble 40% (ideal 20%)"
    single = Timeline.from_events(fill_drain(1, 1))
    assert gantt._draw(single, None).axes[0].get_title() == "1 stage, 1 microbatch: bubble 0% (ideal 0%)"
    lines = gantt._draw(even, "word " * 60).axes[0].get_title().splitlines()
    assert len(lines) > 2


@pytest.mark.parametrize(("m", "n"), [(4, 2), (16, 4), (40, 4)])
def test_numbers_lie_inside_their_bars(m: int, n: int) -> None:
    figure = gantt._draw(Timeline.from_events(fill_drain(m, n)), None)
    boxes = [bar.get_window_extent() for bar in bars(figure)]
    texts = figure.axes[0].texts
    assert texts
    for text in texts:
        extent = text.get_window_extent()
        assert any(box.x0 < extent.x0 and extent.x1 < box.x1 and box.y0 < extent.y0 and extent.y1 < box.y1 for box in boxes)


def test_numbers_too_wide_are_left_out() -> None:
    """The bars of stage 1 are a tenth as long: none of them is numbered, all of stage 0 are."""
    figure = gantt._draw(Timeline.from_events(fill_drain(16, 2, scale=(1, 0.1))), None)
    shown = sorted((text.get_position()[1], int(text.get_text())) for text in figure.axes[0].texts)
    assert shown == sorted([(0, i) for i in range(16)] * 2)
    assert gantt._draw(Timeline.from_events(fill_drain(300, 2)), None).axes[0].texts[:] == []


def test_legend_shows_only_what_is_drawn_and_covers_nothing() -> None:
    events = [*fill_drain(4, 2), Event(1, "optimizer", None, 50.2, 50.21, 0), Event(0, "transfer", 1, 50.01, 50.011, 0)]
    for given, words in (
        (events, ["forward", "backward", "optimizer", "transfer", "idle (bubble)"]),
        (fill_drain(4, 2)[:8], ["forward", "idle (bubble)"]),
    ):
        figure = gantt._draw(Timeline.from_events(given), None)
        legend = figure.legends[0]
        assert [text.get_text() for text in legend.get_texts()] == words
        assert not legend.get_window_extent().overlaps(figure.axes[0].get_window_extent())
        assert not legend.get_window_extent().overlaps(figure.axes[0].xaxis.label.get_window_extent())


def test_transfers_lie_beside_the_bars() -> None:
    transfer = Event(0, "transfer", 1, 50.005, 50.015, 0)
    figure = gantt._draw(Timeline.from_events([*fill_drain(4, 2), transfer]), None)
    boxes = {to_hex(bar.get_facecolor()).upper(): bar for bar in bars(figure) if round(bar.get_y()) == 0}
    strip, forward = (boxes[gantt._COLOURS[kind][0]] for kind in ("transfer", "forward"))
    assert strip.get_y() >= forward.get_y() + forward.get_height()


def test_draws_the_last_complete_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluation = [Event(0, "forward", 0, 99.0, 99.5, 9)]
    timeline = Timeline.from_events([*fill_drain(2, 2, call=1), *fill_drain(4, 2, call=2, start_s=60.0), *evaluation])
    drawn = []
    monkeypatch.setattr(gantt, "_draw", lambda step, title: drawn.append((step, title)) or Figure())
    save_gantt(timeline, tmp_path / "gantt.png", title="x")
    save_gantt(timeline.call(9), tmp_path / "gantt.png")
    assert drawn == [(timeline.call(2), "x"), (timeline.call(9), None)]


def test_empty_timeline_writes_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"the timeline is empty; record one with PipelineStrategy\(timeline=True\)"):
        save_gantt(Timeline(2), tmp_path / "new" / "gantt.png")
    assert list(tmp_path.iterdir()) == []


def test_leaves_pyplot_alone(tmp_path: Path) -> None:
    """No figure is left open, and the backend a notebook or script may still choose is not chosen for it."""
    before = plt.get_fignums(), mpl.get_backend(auto_select=False)
    save_gantt(Timeline.from_events(fill_drain(4, 2)), tmp_path / "gantt.png")
    assert (plt.get_fignums(), mpl.get_backend(auto_select=False)) == before
