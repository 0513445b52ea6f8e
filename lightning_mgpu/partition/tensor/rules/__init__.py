"""Rules: for each kind of call, what becomes of it where operands are split over the ranks.

A rule is a function of a `Call` that returns a `Rewrite`, or ``None`` for a call that stays as it is. A call without a rule,
or one whose rule raises, needs its operands whole: never wrong, only less saved.
"""

from __future__ import annotations

from collections.abc import Callable

from lightning_mgpu.partition.tensor.call import Call, Rewrite
from lightning_mgpu.partition.tensor.rules import contractions, elementwise, products, reductions, shapes
from lightning_mgpu.partition.tensor.rules.contractions import DECIDING

__all__ = ["DECIDING", "RULES"]

RULES: dict[str, Callable[[Call], Rewrite | None]] = {
    **elementwise.RULES,
    **products.RULES,
    **reductions.RULES,
    **shapes.RULES,
    **contractions.RULES,
}
