"""Waits that Ctrl-C can end.

Python notices a signal only between two of its own instructions, never inside a wait of the process group's. So such a wait
is left to another thread, and this one waits for that thread by a lock, which a signal does interrupt. The way there and
back costs some ten microseconds.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from typing import Any

__all__ = ["Waiter"]


class Waiter:
    """Waits for works of a process group, in a thread that lives as long as this object."""

    def __init__(self) -> None:
        self._asked: queue.SimpleQueue[tuple[Sequence[Any], queue.SimpleQueue[BaseException | None]] | None]
        self._asked = queue.SimpleQueue()
        threading.Thread(target=_serve, args=(self._asked,), daemon=True, name="waiter").start()

    def wait(self, works: Sequence[Any]) -> None:
        """Waits for all works; raises what the first that fails raises."""
        answer: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._asked.put((works, answer))
        error = answer.get()
        if error is not None:
            raise error

    def __del__(self) -> None:
        self._asked.put(None)


def _serve(asked: queue.SimpleQueue[tuple[Sequence[Any], queue.SimpleQueue[BaseException | None]] | None]) -> None:
    while (request := asked.get()) is not None:
        works, answer = request
        try:
            for work in works:
                work.wait()
        except BaseException as error:  # raised by whoever asked
            answer.put(error)
        else:
            answer.put(None)
        del request, works, answer  # nothing is kept alive until the next wait
