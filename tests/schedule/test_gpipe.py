"""The fill-drain tables, compared as they print."""

from __future__ import annotations

from textwrap import dedent

import pytest

from lightning_mgpu.schedule import gpipe
from lightning_mgpu.schedule.table import check, loop_homes
from lightning_mgpu.timeline import ideal_bubble_share

SIZES = [(1, 1), (1, 4), (4, 1), (2, 2), (3, 5), (8, 4)]


def test_forward_clock() -> None:
    expected = """\
        tick     0  1  2  3  4  5
        stage 0  0  1  2  3  .  .
        stage 1  .  0  1  2  3  .
        stage 2  .  .  0  1  2  3"""
    assert gpipe.render(gpipe.forward_clock(4, 3)) == dedent(expected)


def test_backward_clock() -> None:
    expected = """\
        tick     0  1  2  3  4  5
        stage 0  .  .  0  1  2  3
        stage 1  .  0  1  2  3  .
        stage 2  0  1  2  3  .  ."""
    assert gpipe.render(gpipe.backward_clock(4, 3)) == dedent(expected)


def test_docstrings_show_the_tables() -> None:
    for clock in (gpipe.forward_clock, gpipe.backward_clock):
        drawn = [line.strip() for line in (clock.__doc__ or "").splitlines()]
        for line in gpipe.render(clock(4, 3)).splitlines():
            assert line in drawn


def test_more_stages_than_microbatches() -> None:
    expected = """\
        tick     0  1  2  3
        stage 0  0  .  .  .
        stage 1  .  0  .  .
        stage 2  .  .  0  .
        stage 3  .  .  .  0"""
    assert gpipe.render(gpipe.forward_clock(1, 4)) == dedent(expected)


def test_columns_widen_for_two_digits() -> None:
    first, *_, last = gpipe.render(gpipe.forward_clock(11, 11)).splitlines()
    assert first.startswith("tick       0   1   2")
    assert last.startswith("stage 10   .   .   .")
    assert last.endswith("  10")


@pytest.mark.parametrize(("m", "n"), SIZES)
def test_every_pair_once(m: int, n: int) -> None:
    for clock in (gpipe.forward_clock, gpipe.backward_clock):
        pairs = [pair for tick in clock(m, n) for pair in tick]
        assert sorted(pairs) == [(i, j) for i in range(m) for j in range(n)]


@pytest.mark.parametrize(("m", "n"), SIZES)
def test_idle_share_is_the_ideal_bubble(m: int, n: int) -> None:
    assert gpipe.idle_share(gpipe.forward_clock(m, n)) == pytest.approx(ideal_bubble_share(n, m))
    assert gpipe.idle_share(gpipe.backward_clock(m, n)) == pytest.approx(ideal_bubble_share(n, m))


def test_fill_drain() -> None:
    for stage, listed in enumerate(gpipe.fill_drain(3, (0, 1))):
        assert " ".join(map(str, listed)) == f"{stage}F0 {stage}F1 {stage}F2 {stage}B0 {stage}B1 {stage}B2"


def test_fill_drain_of_several_stages_a_process() -> None:
    assert str(gpipe.fill_drain(2, (0, 1, 0, 1))).splitlines() == [
        "process 0: 0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1",
        "process 1: 1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1",
    ]


@pytest.mark.parametrize(("m", "n"), SIZES)
def test_fill_drain_follows_both_clocks(m: int, n: int) -> None:
    step = gpipe.fill_drain(m, loop_homes(n))
    check(step)
    check(step.only("forward"))
    for j, listed in enumerate(step):
        clocks = [i for clock in (gpipe.forward_clock, gpipe.backward_clock) for t in clock(m, n) for i, k in t if k == j]
        assert [action.microbatch for action in listed] == clocks


def test_wrong_sizes() -> None:
    with pytest.raises(ValueError, match=r"0 microbatches on 2 stages have no schedule; give at least 1 of each"):
        list(gpipe.forward_clock(0, 2))
    with pytest.raises(ValueError, match=r"2 microbatches on 0 stages have no schedule"):
        list(gpipe.backward_clock(2, 0))
    with pytest.raises(ValueError, match=r"0 microbatches on 2 stages have no schedule"):
        gpipe.fill_drain(0, (0, 1))
    with pytest.raises(ValueError, match=r"nothing runs in this clock"):
        gpipe.render([])
    with pytest.raises(ValueError, match=r"nothing runs in this clock"):
        gpipe.idle_share([[]])
    with pytest.raises(ValueError, match=r"stage 1 has microbatches 0 and 3 at tick 0; a stage runs one"):
        gpipe.render([[(0, 1), (3, 1)]])
