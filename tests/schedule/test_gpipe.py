"""The fill-drain tables, compared as they print."""

from __future__ import annotations

import random
from textwrap import dedent

import pytest

from lightning_mgpu.schedule import gpipe
from lightning_mgpu.schedule.gpipe import Action
from lightning_mgpu.timeline import ideal_bubble_share

SIZES = [(1, 1), (1, 4), (4, 1), (2, 2), (3, 5), (8, 4)]


def parse(text: str) -> list[Action]:
    return [Action("forward" if word[0] == "F" else "backward", int(word[1:])) for word in text.split()]


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


def test_actions() -> None:
    for stage in range(2):
        assert [str(action) for action in gpipe.actions(stage, 3, 2)] == ["F0", "F1", "F2", "B0", "B1", "B2"]


@pytest.mark.parametrize(("m", "n"), SIZES)
def test_actions_pass_the_check(m: int, n: int) -> None:
    step = [gpipe.actions(j, m, n) for j in range(n)]
    gpipe.check(step)
    gpipe.check([[action for action in listed if action.kind == "forward"] for listed in step])


def test_check_passes_other_schedules() -> None:
    """1F1B on 2 stages: backward begins before the last forward."""
    gpipe.check([parse("F0 F1 B0 F2 B1 B2"), parse("F0 B0 F1 B1 F2 B2")])


def test_check_finds_a_deadlock() -> None:
    with pytest.raises(ValueError, match=r"^stage 0 can't run B0: it needs B0 of stage 1, which can't have run by then"):
        gpipe.check([parse("F0 B0 F1 B1"), parse("F0 F1 B0 B1")])
    with pytest.raises(ValueError, match=r"^stage 0 can't run B0: it needs F0 of stage 0"):
        gpipe.check([parse("B0 F0")])


def test_check_finds_a_missing_or_repeated_action() -> None:
    with pytest.raises(ValueError, match=r"^stage 1 runs F1 0 times; each of 2 microbatches runs exactly once$"):
        gpipe.check([parse("F0 F1"), parse("F0")])
    with pytest.raises(ValueError, match=r"^stage 0 runs F0 2 times; each of 2 microbatches"):
        gpipe.check([parse("F0 F0 F1"), parse("F0 F1")])
    with pytest.raises(ValueError, match=r"^stage 0 runs B1 0 times"):
        gpipe.check([parse("F0 F1 B0")])
    with pytest.raises(ValueError, match=r"the lists of 2 stages have no action"):
        gpipe.check([[], []])


@pytest.mark.parametrize("seed", range(20))
def test_check_finds_any_swap_that_breaks_a_dependency(seed: int) -> None:
    """Moving one backward of one stage before its forward can never run."""
    draw = random.Random(seed)
    m, n = draw.randint(1, 5), draw.randint(1, 4)
    step = [gpipe.actions(j, m, n) for j in range(n)]
    broken = step[draw.randrange(n)]
    backward = Action("backward", draw.randrange(m))
    broken.remove(backward)
    broken.insert(draw.randint(0, broken.index(Action("forward", backward.microbatch))), backward)
    with pytest.raises(ValueError, match=r"can't have run by then$"):
        gpipe.check(step)


def test_wrong_sizes() -> None:
    with pytest.raises(ValueError, match=r"0 microbatches on 2 stages have no schedule; give at least 1 of each"):
        list(gpipe.forward_clock(0, 2))
    with pytest.raises(ValueError, match=r"2 microbatches on 0 stages have no schedule"):
        list(gpipe.backward_clock(2, 0))
    with pytest.raises(ValueError, match=r"there is no stage 2 among 2 stages; they are counted from 0"):
        gpipe.actions(2, 1, 2)
    with pytest.raises(ValueError, match=r"there is no microbatch -1; they are counted from 0"):
        Action("forward", -1)
    with pytest.raises(ValueError, match=r"nothing runs in this clock"):
        gpipe.render([])
    with pytest.raises(ValueError, match=r"nothing runs in this clock"):
        gpipe.idle_share([[]])
    with pytest.raises(ValueError, match=r"stage 1 has microbatches 0 and 3 at tick 0; a stage runs one"):
        gpipe.render([[(0, 1), (3, 1)]])
