"""The lead's side of calls whose forwards all come before their backwards, and the workers' side of all calls.

Both count the microbatches of their own replica.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from lightning_mgpu.partition.stage import Stage
from lightning_mgpu.runtime.dataplane import Receipt
from lightning_mgpu.runtime.engine import Call, Engine, Given

__all__ = ["BatchExchange", "WorkerExchange", "summed"]


@dataclass
class BatchExchange:
    """Gives the lead's engine what it needs for a forward or a backward of all microbatches.

    Attributes:
        arguments: the arguments of each microbatch, by register.
        present: for each microbatch the wanted tensors that have a gradient.
        seeds: the gradients of the wanted tensors of each microbatch, by register.
        results: what the last stage made for each microbatch.
    """

    arguments: Sequence[Mapping[int, Tensor]] = ()
    present: Sequence[Given] = ()
    seeds: Sequence[Mapping[int, Tensor]] = ()
    results: list[list[Tensor]] = field(default_factory=list)

    def given(self, microbatch: int, *, wait: bool) -> Given:  # noqa: ARG002 - it is known from the start
        return self.present[microbatch]

    def inputs(self, stage: Stage, microbatch: int) -> list[Tensor]:
        return [self.arguments[microbatch][c.register] for c in stage.inputs]

    def made(self, microbatch: int, tensors: list[Tensor]) -> None:  # noqa: ARG002 - they come in order
        self.results.append(tensors)

    def gradients(self, microbatch: int) -> Mapping[int, Tensor]:
        return self.seeds[microbatch]


class WorkerExchange:
    """Gives a worker's engine what the lead sends, and the lead what this replica's last stage makes.

    Args:
        engine: the worker's engine.
        call: the call.
        arguments: the arguments of each microbatch that stages here take, on their way, by register.
        given: asks which wanted tensors of a microbatch have a gradient; ``None`` where that is not known yet.
        lead: the lead's process.
    """

    def __init__(
        self,
        engine: Engine,
        call: Call,
        arguments: Sequence[Mapping[int, Receipt]],
        given: Callable[[int, bool], Given | None],
        lead: int,
    ) -> None:
        self._engine = engine
        self._call = call
        self._arguments = arguments
        self._given = given
        self._lead = lead

    def given(self, microbatch: int, *, wait: bool) -> Given | None:
        return self._given(microbatch, wait)

    def inputs(self, stage: Stage, microbatch: int) -> list[Tensor]:
        return [self._arguments[microbatch][c.register].wait() for c in stage.inputs]

    def made(self, microbatch: int, tensors: list[Tensor]) -> None:  # noqa: ARG002 - they come in order
        self._engine.send(tensors, self._lead)

    def gradients(self, microbatch: int) -> Mapping[int, Tensor]:
        given = self._given(microbatch, True)
        assert given is not None
        stages = self._call.stages[microbatch]
        asked = [crossing for position, crossing in enumerate(stages[max(stages)].sends) if position in given]
        receipts = self._engine.receive(asked, self._lead)
        return {crossing.register: receipt.wait() for crossing, receipt in zip(asked, receipts, strict=True)}


def summed(a: Mapping[int, Tensor], b: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """Adds up what two stages made for the same registers."""
    return {r: a[r] + b[r] if r in a and r in b else a[r] if r in a else b[r] for r in {**a, **b}}
