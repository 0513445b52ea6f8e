"""The schedules a user can name."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from lightning_mgpu.errors import PartitionError
from lightning_mgpu.schedule.depth_first import one_forward_one_backward, torch_order
from lightning_mgpu.schedule.gpipe import fill_drain
from lightning_mgpu.schedule.table import Table, check, loop_homes, v_homes

__all__ = ["SCHEDULES", "Schedule", "schedule_named"]


@dataclass(frozen=True)
class Schedule:
    """Is a way to order the forwards and backwards of a training step.

    Attributes:
        name: what users call it.
        stages_per_process: stages each process holds.
        v: whether stages go there and back over the processes, rather than round and round.
        scope: what the user's ``training_step`` sees. Where all forwards come first it is the whole ``"batch"``. Other
            schedules need the loss of a microbatch before the last forward: then it is one ``"microbatch"`` at a time.
        splits_backward: whether gradients of weights are computed later than those of activations.
        order: makes the table for numbers of microbatches and processes.
    """

    name: str
    stages_per_process: int
    v: bool
    scope: Literal["batch", "microbatch"]
    splits_backward: bool
    order: Callable[[int, int], Table] | None = None

    def homes(self, num_processes: int) -> tuple[int, ...]:
        """Gives each stage its process."""
        return v_homes(num_processes) if self.v else loop_homes(num_processes, self.stages_per_process)

    def why_not(self, m: int, num_processes: int) -> str:
        """Says why the schedule has no order for these numbers; empty where it has one."""
        if self.order is None:
            return ""
        try:
            self.order(m, num_processes)
        except ValueError as error:
            return str(error)
        return ""

    def num_microbatches(self, wanted: int, num_processes: int) -> int:
        """Returns the largest number of microbatches up to ``wanted`` that the schedule has an order for, else ``wanted``."""
        fitting = (m for m in range(wanted, 0, -1) if not self.why_not(m, num_processes))
        return next(fitting, wanted)

    def table(self, m: int, num_processes: int) -> Table:
        """Returns the order of a step: the schedule's own, or all forwards first for a batch too small for it."""
        return _table(self, m, num_processes)

    def forward_table(self, m: int, num_processes: int) -> Table:
        """Returns the order of a forward by itself."""
        return fill_drain(m, self.homes(num_processes)).only("forward")

    def backward_table(self, m: int, num_processes: int) -> Table:
        """Returns the order of a backward by itself."""
        return fill_drain(m, self.homes(num_processes)).only("backward")


@functools.lru_cache(maxsize=256)
def _table(schedule: Schedule, m: int, num_processes: int) -> Table:
    own = schedule.order is not None and not schedule.why_not(m, num_processes)
    table = schedule.order(m, num_processes) if own and schedule.order else fill_drain(m, schedule.homes(num_processes))
    check(table)
    return table


def _of_torch(class_name: str, *, v: bool = False) -> Callable[[int, int], Table]:
    return functools.lru_cache(maxsize=256)(functools.partial(torch_order, class_name, v=v))


_ALL = (
    Schedule("gpipe", 1, False, "batch", False),
    Schedule("looped_bfs", 2, False, "batch", False),
    Schedule("1f1b", 1, False, "microbatch", False, one_forward_one_backward),
    Schedule("interleaved_1f1b", 2, False, "microbatch", False, _of_torch("ScheduleInterleaved1F1B")),
    Schedule("interleaved_zero_bubble", 2, False, "microbatch", True, _of_torch("ScheduleInterleavedZeroBubble")),
    Schedule("zbv", 2, True, "microbatch", True, _of_torch("ScheduleZBVZeroBubble", v=True)),
    Schedule("dualpipe_v", 2, True, "microbatch", True, _of_torch("ScheduleDualPipeV", v=True)),
)

SCHEDULES: Mapping[str, Schedule] = {schedule.name: schedule for schedule in _ALL}


def schedule_named(name: str) -> Schedule:
    """Finds a schedule.

    Raises:
        PartitionError: for a name that none has, with those that there are.
    """
    if name not in SCHEDULES:
        raise PartitionError(f"schedule={name!r} is not known; use one of {', '.join(map(repr, SCHEDULES))}")
    return SCHEDULES[name]
