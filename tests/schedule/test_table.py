"""Tables of actions: what crosses between processes, and what can't run."""

from __future__ import annotations

import random

import pytest

from lightning_mgpu.schedule.gpipe import fill_drain
from lightning_mgpu.schedule.table import Action, Table, check, loop_homes, parse, v_homes


def table(*processes: str, homes: tuple[int, ...] | None = None) -> Table:
    lists = tuple(tuple(parse(word) for word in text.split()) for text in processes)
    return Table(lists, homes or loop_homes(len(processes)))


def test_actions_print_as_they_are_read() -> None:
    for text in ("0F0", "12B7", "3I10", "1W2"):
        assert str(parse(text)) == text
    with pytest.raises(ValueError, match=r"^'F3' is no action; write the stage, one of F, B, I, W and the microbatch"):
        parse("F3")
    with pytest.raises(ValueError, match=r"there is no microbatch -1 of stage 0"):
        Action("forward", 0, -1)


def test_homes_of_stages() -> None:
    assert loop_homes(3) == (0, 1, 2)
    assert loop_homes(2, 2) == (0, 1, 0, 1)
    assert v_homes(3) == (2, 1, 0, 0, 1, 2)


def test_check_passes_what_can_run() -> None:
    check(table("0F0 0F1 0B0 0F2 0B1 0B2", "1F0 1B0 1F1 1B1 1F2 1B2"))
    check(table("0F0 0F1", "1F0 1F1"))
    check(table("0F0 0B0", "1F0 1I0 1W0"))


def test_check_finds_a_deadlock() -> None:
    with pytest.raises(ValueError, match=r"^process 0 can't run 0B0: it needs 1B0, which can't have run by then"):
        check(table("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"))
    with pytest.raises(ValueError, match=r"^process 0 can't run 0B0: it needs 0F0"):
        check(table("0B0 0F0"))
    with pytest.raises(ValueError, match=r"^process 0 can't run 0W0: it needs 0I0"):
        check(table("0F0 0W0 0I0"))


def test_check_finds_a_missing_or_repeated_action() -> None:
    with pytest.raises(ValueError, match=r"^stage 1 runs 1F1 0 times; each of 2 runs once$"):
        check(table("0F0 0F1", "1F0"))
    with pytest.raises(ValueError, match=r"^stage 0 runs 0F0 2 times; each of 2 runs once"):
        check(table("0F0 0F0 0F1", "1F0 1F1"))
    with pytest.raises(ValueError, match=r"^stage 0 runs the backward of microbatch 1 0 times whole, 0 times for its inputs"):
        check(table("0F0 0F1 0B0"))
    with pytest.raises(ValueError, match=r"1 times whole, 1 times for its inputs and 0 times"):
        check(table("0F0 0B0 0I0"))
    with pytest.raises(ValueError, match=r"the lists of 2 processes have no action"):
        check(table("", ""))
    with pytest.raises(ValueError, match=r"^process 0 lists 1F0, but holds the stages \[0\]"):
        check(table("0F0 1F0", "1F0"))


@pytest.mark.parametrize("seed", range(20))
def test_check_finds_any_swap_that_breaks_a_dependency(seed: int) -> None:
    """Moving one backward of one stage before its forward can never run."""
    draw = random.Random(seed)
    m, n = draw.randint(1, 5), draw.randint(1, 4)
    whole = fill_drain(m, loop_homes(n))
    p = draw.randrange(n)
    broken = list(whole.processes[p])
    backward = Action("backward", p, draw.randrange(m))
    broken.remove(backward)
    broken.insert(draw.randint(0, broken.index(Action("forward", p, backward.microbatch))), backward)
    with pytest.raises(ValueError, match=r"can't have run by then"):
        check(Table((*whole.processes[:p], tuple(broken), *whole.processes[p + 1 :]), whole.homes))


def test_transfers_are_in_the_order_of_the_sender() -> None:
    both = table("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1")
    assert [(str(a), what) for a, what in both.transfers(0, 1)] == [("1F0", "activations"), ("1F1", "activations")]
    assert [(str(a), what) for a, what in both.transfers(1, 0)] == [("0B0", "gradients"), ("0B1", "gradients")]
    assert both.transfers(0, 0) == []


def test_transfers_mix_directions_where_stages_loop() -> None:
    """Process 0 holds stages 0 and 2: what it sends process 1 are activations of one and gradients of the other."""
    looped = table("0F0 2F0 2B0 0B0", "1F0 3F0 3B0 1B0", homes=loop_homes(2, 2))
    check(looped)
    assert [str(a) for a, _ in looped.transfers(0, 1)] == ["1F0", "3F0", "1B0"]
    assert [str(a) for a, _ in looped.transfers(1, 0)] == ["2F0", "2B0", "0B0"]


def test_nothing_crosses_at_the_turn_of_a_v() -> None:
    v = fill_drain(2, v_homes(2))
    check(v)
    assert [str(a) for a, _ in v.transfers(1, 0)] == ["1F0", "1F1", "2B0", "2B1"]
    assert [str(a) for a, _ in v.transfers(0, 1)] == ["3F0", "3F1", "0B0", "0B1"]
