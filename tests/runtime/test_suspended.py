"""Functions that stop in their middle: one runs at a time, with its own modes of torch, and errors reach who waits."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import pytest
import torch

from lightning_mgpu.runtime.suspended import Abandoned, Suspended, Threads

colour: ContextVar[str] = ContextVar("colour", default="none")


@pytest.fixture
def threads() -> Iterator[Threads]:
    made = Threads()
    yield made
    made.close()


def pause(value: Any) -> Any:
    current = Suspended.current()
    assert current is not None
    return current.pause(value)


def test_runs_in_turns(threads: Threads) -> None:
    log: list[str] = []

    def work(name: str) -> str:
        log.append(f"{name} begins")
        answer = pause(f"{name} asks")
        log.append(f"{name} got {answer}")
        return name.upper()

    first, second = (Suspended(threads, lambda n=n: work(n)) for n in "ab")
    first.start()
    second.start()
    assert (first.asked, second.asked) == ("a asks", "b asks")
    second.resume(2)
    first.resume(1)
    assert log == ["a begins", "b begins", "b got 2", "a got 1"]
    assert (first.ended, first.result, second.result) == (True, "A", "B")
    assert Suspended.current() is None


def test_modes_of_torch_stay_apart(threads: Threads) -> None:
    def work() -> tuple[bool, bool]:
        inside = torch.is_grad_enabled()
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            pause(None)
            return inside, torch.is_autocast_enabled("cpu") and not torch.is_grad_enabled()

    one = Suspended(threads, work)
    with torch.enable_grad():
        one.start()
        assert torch.is_grad_enabled()
        assert not torch.is_autocast_enabled("cpu")
    one.resume(None)
    assert one.result == (True, True)


def test_takes_over_grad_mode_and_context(threads: Threads) -> None:
    token = colour.set("red")
    with torch.no_grad():
        one = Suspended(threads, lambda: (torch.is_grad_enabled(), colour.get()))
        one.start()
    colour.reset(token)
    assert one.result == (False, "red")


def test_errors_reach_who_waits(threads: Threads) -> None:
    def early() -> None:
        raise ValueError("early")

    def late() -> None:
        pause(None)
        raise KeyError("late")

    with pytest.raises(ValueError, match="early"):
        Suspended(threads, early).start()
    one = Suspended(threads, late)
    one.start()
    with pytest.raises(KeyError, match="late"):
        one.resume(None)
    assert one.ended


def test_abandoned_functions_unwind(threads: Threads) -> None:
    log: list[str] = []

    def work() -> None:
        try:
            pause(None)
        except Exception:  # what user code often writes: it must not hold this up
            log.append("caught")
        finally:
            log.append("unwound")

    one = Suspended(threads, work)
    one.start()
    one.abandon()
    assert one.ended
    assert log == ["unwound"]
    one.abandon()  # again does nothing
    Suspended(threads, work).abandon()  # nor before it has begun
    assert log == ["unwound"]
    assert issubclass(Abandoned, BaseException)
    assert not issubclass(Abandoned, Exception)


def test_threads_are_reused_and_end() -> None:
    threads, before = Threads(), set(threading.enumerate())
    seen: set[threading.Thread] = set()
    for _ in range(5):
        ones = [Suspended(threads, lambda: (seen.add(threading.current_thread()), pause(None))) for _ in range(3)]
        for one in ones:
            one.start()
        for one in ones:
            one.resume(None)
    assert len(seen) == 3
    threads.close()
    for thread in seen:
        thread.join(5)
    assert set(threading.enumerate()) == before
