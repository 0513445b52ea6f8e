"""The schedules by name: each has an order that can run for every number of microbatches and processes."""

from __future__ import annotations

import inspect

import pytest

from lightning_mgpu.errors import PartitionError
from lightning_mgpu.schedule.catalog import SCHEDULES, Schedule, schedule_named
from lightning_mgpu.schedule.depth_first import one_forward_one_backward
from lightning_mgpu.schedule.gpipe import fill_drain
from lightning_mgpu.schedule.table import Table, check, loop_homes

EVERY = pytest.mark.parametrize("schedule", [pytest.param(s, id=name) for name, s in SCHEDULES.items()])


def held(table: Table, process: int) -> int:
    """Counts the most microbatches whose backward a process has still to run at one time, over its stages."""
    most = now = 0
    for action in table.processes[process]:
        now += (action.kind == "forward") - (action.kind in ("backward", "weight_backward"))
        most = max(most, now)
    return most


@EVERY
@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_can_run_with_any_number_of_microbatches(schedule: Schedule, n: int) -> None:
    for m in range(1, 14):
        for table in (schedule.table(m, n), schedule.forward_table(m, n)):
            check(table)
            assert table.homes == schedule.homes(n)
            assert len(table.homes) == n * schedule.stages_per_process
        both = [*schedule.forward_table(m, n), *schedule.backward_table(m, n)]
        check(Table(tuple((*f, *b) for f, b in zip(both[:n], both[n:], strict=True)), schedule.homes(n)))


@EVERY
def test_the_last_stage_is_on_the_lead(schedule: Schedule) -> None:
    for n in range(1, 5):
        assert schedule.homes(n)[-1] == n - 1
        assert set(schedule.homes(n)) == set(range(n))


@EVERY
def test_only_schedules_by_microbatch_mix_phases(schedule: Schedule) -> None:
    kinds = [action.kind for action in schedule.table(8, 2).processes[1]]
    first_backward = next(i for i, kind in enumerate(kinds) if kind != "forward")
    assert ("forward" in kinds[first_backward:]) == (schedule.scope == "microbatch")
    assert ("weight_backward" in kinds) == schedule.splits_backward


def test_1f1b_keeps_as_many_microbatches_as_stages_follow() -> None:
    for m, n in [(4, 2), (8, 4), (2, 4), (12, 3)]:
        table = one_forward_one_backward(m, n)
        assert [held(table, j) for j in range(n)] == [min(n - j, m) for j in range(n)]
        assert held(fill_drain(m, loop_homes(n)), 0) == m


def test_docstring_shows_the_table() -> None:
    drawn = [line.strip() for line in inspect.getdoc(one_forward_one_backward).splitlines()]  # type: ignore[union-attr]
    for line in str(one_forward_one_backward(4, 2)).splitlines():
        assert line in drawn


def test_numbers_without_an_order_say_why() -> None:
    dualpipe, interleaved = SCHEDULES["dualpipe_v"], SCHEDULES["interleaved_1f1b"]
    assert "at least as many microbatches as stages" in dualpipe.why_not(3, 2)
    assert dualpipe.why_not(4, 2) == ""
    assert "multiple of the number of rounds" in interleaved.why_not(5, 2)
    assert interleaved.num_microbatches(5, 2) == 4
    assert dualpipe.num_microbatches(3, 2) == 3  # none fits: it falls back to all forwards first
    assert dualpipe.table(3, 2) == fill_drain(3, dualpipe.homes(2))


def test_unknown_name() -> None:
    with pytest.raises(PartitionError, match=r"schedule='zb' is not known; use one of 'gpipe', 'looped_bfs', '1f1b'"):
        schedule_named("zb")
