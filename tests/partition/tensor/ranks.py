"""All ranks of a tensor-parallel group in one process: threads that take turns, and meet in every collective."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_TIMEOUT_S = 60


class Ranks:
    """Runs the same function on every rank, one thread each, of which one runs at a time.

    Random numbers come from generators of the whole process, so every rank has its own state of them while its turn lasts.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.turn = threading.Lock()
        self.barrier = threading.Barrier(size, timeout=_TIMEOUT_S)
        self.slots: list[Any] = [None] * size
        self.num_collectives = [0] * size

    def run(self, function: Callable[[Member], Any]) -> list[Any]:
        """Calls ``function`` with each rank's membership, and returns the results by rank."""
        results: list[Any] = [None] * self.size
        errors: list[BaseException] = []
        start = torch.get_rng_state()

        def work(rank: int) -> None:
            with self.turn:
                torch.set_rng_state(start)
                try:
                    results[rank] = function(Member(rank, self.size, self))
                except BaseException as error:
                    errors.append(error)
                    self.barrier.abort()

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        causes = [e for e in errors if not isinstance(e, threading.BrokenBarrierError)]
        if errors:
            raise (causes or errors)[0]
        assert len(set(self.num_collectives)) == 1
        return results

    def exchange(self, rank: int, value: Any) -> list[Any]:
        """Waits for the others, and returns what all ranks have brought."""
        state = torch.get_rng_state()
        self.num_collectives[rank] += 1
        self.slots[rank] = value
        self.turn.release()
        try:
            self.barrier.wait()
            found = list(self.slots)
            self.barrier.wait()
        finally:
            self.turn.acquire()
        torch.set_rng_state(state)
        return found


@dataclass(frozen=True)
class Member:
    """Is one rank's group, as a runtime would hand it in."""

    rank: int
    size: int
    ranks: Ranks

    def all_reduce(self, tensor: Tensor) -> Tensor:
        kind, values = "all_reduce", self.ranks.exchange(self.rank, ("all_reduce", tensor))
        assert {name for name, _ in values} == {kind}, "ranks are in different collectives"
        assert len({t.shape for _, t in values}) == 1, "ranks add up values of different shapes"
        return torch.stack([t for _, t in values]).sum(0, dtype=tensor.dtype)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        kind, values = "all_gather", self.ranks.exchange(self.rank, ("all_gather", tensor))
        assert {name for name, _ in values} == {kind}, "ranks are in different collectives"
        assert len({t.shape for _, t in values}) == 1, "ranks gather values of different shapes"
        return [t.clone() for _, t in values]
