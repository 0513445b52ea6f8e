"""Draws the timeline of one step as a Gantt chart: stages down, time across, gaps are the bubble.

Stages of one process share a row, the later ones in a lighter colour.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patches import Patch, Rectangle
from matplotlib.text import Text
from matplotlib.ticker import MaxNLocator

from lightning_mgpu.timeline import Event, Kind, Timeline, ideal_bubble_share

__all__ = ["save_gantt"]

_COLOURS: dict[Kind, tuple[str, str]] = {  # fill and ink; the fills stay apart in colour blindness (Okabe, Ito 2008)
    "forward": ("#0072B2", "white"),
    "backward": ("#E69F00", "black"),
    "input_backward": ("#E69F00", "black"),
    "weight_backward": ("#F0E442", "black"),
    "optimizer": ("#009E73", "white"),
    "transfer": ("#555555", "white"),
}
_IDLE = "#E8E8E8"
_LATER = 0.6  # opacity of the second stage of a process, and those after it
_BAR, _STRIP = 0.74, 0.1  # heights in lanes: of what a stage computes, and of transfers below it
_FONT_SIZES = (10.0, 9.0, 8.0, 7.0, 6.0)
_DPI = 150
_WIDE_ENOUGH = 4.0  # pixels: of a bar that can spare its outline, and beside a number in its bar


def save_gantt(timeline: Timeline, path: str | Path, *, title: str | None = None) -> Path:
    """Draws the last complete call of a timeline, forward and backward, as a PNG.

    To draw another call, such as one of a validation, pass ``timeline.call(k)``.

    Args:
        timeline: the timeline of a run.
        path: the file to write; missing folders are created.
        title: what stands before the bubble share; without it, the numbers of stages and microbatches.

    Returns:
        The path of the file.

    Raises:
        ValueError: If the timeline is empty, no call ran forward, or the call took no time.
    """
    figure = _draw(timeline.last_step(), title)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png", dpi=_DPI)
    return path


def _draw(step: Timeline, title: str | None) -> Figure:
    rows = range(step.num_replicas * step.num_processes)
    num_bars = max(sum(step.row_of(event) == row for event in step.events) for row in rows)
    width = min(7 + 0.15 * num_bars, 16)
    figure = Figure(figsize=(width, 1.6 + 0.6 * len(rows)), dpi=_DPI)
    figure.set_layout_engine(ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.06))
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    span_ms = step.span_s * 1e3
    for row in rows:
        axes.add_patch(Rectangle((0, row - _BAR / 2), span_ms, _BAR, facecolor=_IDLE, edgecolor="none", zorder=1))
    bars = [(_draw_event(axes, event, step), event) for event in step.events]
    _scale_axes(axes, step, span_ms)
    copies = f"{step.num_replicas} replicas of " if step.num_replicas > 1 else ""
    heading = title or f"{copies}{_count(step.num_stages, 'stage')}, {_count(step.num_microbatches, 'microbatch')}"
    axes.set_title(textwrap.fill(f"{heading}: {_bubble(step)}", int(width * 9)), fontsize=11)
    figure.legend(handles=_legend(step), loc="outside lower center", ncols=5, frameon=False, fontsize=9)
    _finish_bars(figure, axes, bars)
    return figure


def _draw_event(axes: Axes, event: Event, step: Timeline) -> Rectangle:
    start_ms, length_ms = (event.start_s - step.events[0].start_s) * 1e3, (event.end_s - event.start_s) * 1e3
    fill, _ = _COLOURS[event.kind]
    row = step.row_of(event)
    if event.kind == "transfer":
        bottom, height, zorder = row + _BAR / 2, _STRIP, 2
    else:
        bottom, height, zorder = row - _BAR / 2, _BAR, 3
    bar = Rectangle((start_ms, bottom), length_ms, height, facecolor=fill, zorder=zorder)
    if event.stage != step.stages_of(step.process_of(event.stage))[0]:
        bar.set_alpha(_LATER)
    axes.add_patch(bar)
    return bar


def _scale_axes(axes: Axes, step: Timeline, span_ms: float) -> None:
    axes.set_xlim(0, span_ms)
    rows = range(step.num_replicas * step.num_processes)
    axes.set_ylim(len(rows) - 0.45, -0.55)  # downwards: stage 0 on top
    axes.set_yticks(rows, [_row_label(step, row) for row in rows], fontsize=9)
    axes.tick_params(axis="y", length=0)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8))
    axes.set_xlabel("time (ms)", fontsize=9)
    axes.tick_params(axis="x", labelsize=9)
    axes.spines[["top", "left", "right"]].set_visible(False)


def _row_label(step: Timeline, row: int) -> str:
    replica, process = divmod(row, step.num_processes)
    stages = step.stages_of(process)
    lines = [f"stage{'s' * (len(stages) > 1)} {', '.join(map(str, stages))}"]
    if step.num_replicas > 1:
        lines[0] = f"replica {replica}, {lines[0]}"
    if step.names:
        lines += textwrap.wrap(", ".join(step.names[stage] for stage in stages), 26, max_lines=2, placeholder=" …")
    return "\n".join(lines)


def _bubble(step: Timeline) -> str:
    if any(event.kind == "weight_backward" for event in step.events):
        return f"bubble {step.bubble_share():.0%}"  # its ideal depends on how long each part of a backward takes
    per_process = step.num_stages // step.num_processes
    ideal = ideal_bubble_share(step.num_processes, max(step.num_microbatches // step.num_replicas, 1), per_process)
    return f"bubble {step.bubble_share():.0%} (ideal {ideal:.0%})"


def _legend(step: Timeline) -> list[Patch]:
    seen = {event.kind for event in step.events}
    patches = [Patch(facecolor=fill, label=kind.replace("_", " ")) for kind, (fill, _) in _COLOURS.items() if kind in seen]
    return [*patches, Patch(facecolor=_IDLE, label="idle (bubble)")]


def _finish_bars(figure: Figure, axes: Axes, bars: Iterable[tuple[Rectangle, Event]]) -> None:
    """Separates bars and numbers them as far as their width in pixels allows, once the layout is final."""
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    groups: dict[tuple[int, Kind], list[tuple[Text, float]]] = {}
    for bar, event in bars:
        width = bar.get_window_extent().width
        fill, ink = _COLOURS[event.kind]
        if width > _WIDE_ENOUGH:
            bar.set(edgecolor="white", linewidth=0.6)
        else:
            bar.set(edgecolor=fill, linewidth=0.4)  # an outline in white would hide it
        if event.microbatch is not None and event.kind != "transfer":
            x, y = bar.get_x() + bar.get_width() / 2, bar.get_y() + bar.get_height() / 2
            text = axes.text(x, y, str(event.microbatch), color=ink, ha="center", va="center", zorder=4)
            groups.setdefault((round(bar.get_y() + _BAR / 2), event.kind), []).append((text, width))
    for labels in groups.values():
        _fit(labels)


def _fit(labels: list[tuple[Text, float]]) -> None:
    """Sets all labels of a row in the largest size in which all fit, and removes what is too wide for the smallest.

    If that would be many, all are removed: a row numbered only up to 9 would read as one of 10 microbatches.

    Args:
        labels: each label with the width of its bar in pixels.
    """
    for size in _FONT_SIZES:
        for text, _ in labels:
            text.set_fontsize(size)
        overflowing = [text for text, width in labels if text.get_window_extent().width + _WIDE_ENOUGH > width]
        if not overflowing:
            return
    for text in overflowing if len(overflowing) <= len(labels) / 10 else [text for text, _ in labels]:
        text.remove()


def _count(number: int, noun: str) -> str:
    plural = noun if number == 1 else f"{noun}s" if noun != "microbatch" else f"{noun}es"
    return f"{number} {plural}"
