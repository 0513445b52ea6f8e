"""The lead's side of calls whose forwards all come before their backwards, and the workers' side of all calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from lightning_mgpu.partition.stage import Stage
from lightning_mgpu.runtime.dataplane import Receipt
from lightning_mgpu.runtime.engine import Given

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
    """Gives a worker's engine what the lead sends.

    Args:
        arguments: the arguments of each microbatch on their way, where stage 0 is here.
        given: asks which wanted tensors of a microbatch have a gradient; ``None`` where that is not known yet.
    """

    def __init__(self, arguments: Sequence[Sequence[Receipt]], given: Callable[[int, bool], Given | None]) -> None:
        self._arguments = arguments
        self._given = given

    def given(self, microbatch: int, *, wait: bool) -> Given | None:
        return self._given(microbatch, wait)

    def inputs(self, stage: Stage, microbatch: int) -> list[Tensor]:  # noqa: ARG002 - only stage 0 takes any here
        return [receipt.wait() for receipt in self._arguments[microbatch]]

    def made(self, microbatch: int, tensors: list[Tensor]) -> None:  # noqa: ARG002
        raise AssertionError("a worker has the last stage")

    def gradients(self, microbatch: int) -> Mapping[int, Tensor]:  # noqa: ARG002
        raise AssertionError("a worker has the last stage")


def summed(a: Mapping[int, Tensor], b: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """Adds up what two stages made for the same registers."""
    return {r: a[r] + b[r] if r in a and r in b else a[r] if r in a else b[r] for r in {**a, **b}}
