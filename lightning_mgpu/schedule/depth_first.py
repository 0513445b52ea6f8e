"""Schedules that begin backward before the last forward, so that no stage keeps more microbatches than it has to.

The order of 1F1B is written here. Those of several stages a process are taken from `torch.distributed.pipelining`, whose
schedule classes work them out when they are made; this file is the only one that knows them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from lightning_mgpu.schedule.table import Action, Table, loop_homes, parse, v_homes

__all__ = ["one_forward_one_backward", "torch_order"]


def one_forward_one_backward(m: int, n: int) -> Table:
    """Returns 1F1B: each stage runs as many forwards as stages follow it, then one forward and one backward in turn.

    Stage ``j`` keeps at most ``n - j`` microbatches, however many there are. With 4 microbatches and 2 stages::

        process 0: 0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3
        process 1: 1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3

    Source: PipeDream-Flush (Narayanan et al. 2021, "Memory-Efficient Pipeline-Parallel DNN Training", section 3.2).
    """
    return Table(tuple(tuple(_of_stage(j, m, n)) for j in range(n)), loop_homes(n))


def _of_stage(j: int, m: int, n: int) -> Iterator[Action]:
    warm_up = min(n - 1 - j, m)
    yield from (Action("forward", j, i) for i in range(warm_up))
    for i in range(m - warm_up):
        yield Action("forward", j, warm_up + i)
        yield Action("backward", j, i)
    yield from (Action("backward", j, i) for i in range(m - warm_up, m))


def torch_order(class_name: str, m: int, n: int, *, stages_per_process: int = 2, v: bool = False) -> Table:
    """Returns the order of one of torch's schedule classes of several stages a process.

    Args:
        class_name: the class in `torch.distributed.pipelining`.
        m: number of microbatches.
        n: number of processes.
        stages_per_process: stages each process holds.
        v: whether stages go there and back, rather than round and round.

    Raises:
        ValueError: where the class allows no such numbers; the text is torch's.
    """
    from torch.distributed import pipelining  # noqa: PLC0415 - costs a second that only these schedules need

    stages = [
        SimpleNamespace(
            num_stages=n * stages_per_process, group_size=n, group_rank=0, stage_index=index, is_first=index == 0,
            is_last=index == n * stages_per_process - 1, has_backward=True, submod=None,
        )
        for index in range(stages_per_process)
    ]  # fmt: skip
    with _quiet():
        made: Any = getattr(pipelining, class_name)(stages, m)
    processes = [[parse(str(a)) for listed in made.pipeline_order[rank] for a in _parts(listed)] for rank in range(n)]
    if v:  # torch counts the processes from the one that holds the last stage, we to it
        processes.reverse()
    homes = v_homes(n) if v else loop_homes(n, stages_per_process)
    return Table(tuple(map(tuple, processes)), homes)


def _parts(theirs: Any) -> tuple[Any, ...]:
    """Opens what one entry holds: nothing where the process waits, two actions where they may overlap."""
    return () if theirs is None else theirs.sub_actions or (theirs,)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps torch's remarks on schedules that it will not run from the user's log."""
    logger = logging.getLogger("torch.distributed.pipelining.schedules")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
