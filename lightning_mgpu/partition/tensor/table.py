"""The plan as a table: what becomes of every layer, and why one is left whole."""

from __future__ import annotations

import re
from collections.abc import Sequence

from lightning_mgpu.partition.tensor.plan import Layer, TensorPlan

__all__ = ["table"]

_HEAD = ("layer", "kind", "role", "split", "elements", "per rank", "why")
_RIGHT = frozenset({"elements", "per rank"})


def table(plan: TensorPlan) -> str:
    """Writes the plan as a table, one line for all layers that differ in nothing but a number in their names.

    Args:
        plan: the plan.

    Returns:
        The lines, the last of which is the sum.
    """
    groups: dict[tuple[str, ...], list[Layer]] = {}
    for layer in plan.layers:
        groups.setdefault(_key(layer), []).append(layer)
    rows = [_row(layers) for layers in groups.values()]
    widths = [max(map(len, column)) for column in zip(_HEAD, *rows, strict=True)]
    lines = [_line(row, widths) for row in (_HEAD, *rows)]
    total, local = (sum(getattr(layer, name) for layer in plan.layers) for name in ("num_elements", "local_elements"))
    return "\n".join(
        [*lines, f"each of {plan.num_ranks} ranks holds {local:,} of {total:,} elements; {plan.share:.0%} are split"]
    )


def _key(layer: Layer) -> tuple[str, ...]:
    return _starred(layer.path), layer.kind, layer.role, str(layer.layout), str(layer.num_elements), _starred(layer.reason)


def _starred(text: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)", "*", text)


def _row(layers: Sequence[Layer]) -> tuple[str, ...]:
    first, count = layers[0], len(layers)
    path, reason = (first.path, first.reason) if count == 1 else (_starred(first.path), _starred(first.reason))
    name = path or "(the module)"
    return (
        name if count == 1 else f"{name} ({count})",
        first.kind,
        first.role,
        "" if first.layout is None else str(first.layout),
        f"{first.num_elements * count:,}",
        f"{first.local_elements * count:,}",
        reason,
    )


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    cells = [
        cell.rjust(width) if name in _RIGHT else cell.ljust(width) for name, cell, width in zip(_HEAD, row, widths, strict=True)
    ]
    return "  ".join(cells).rstrip()
