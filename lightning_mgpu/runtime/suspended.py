"""Functions that stop in their middle and go on later, each in a thread of its own, of which only one runs at a time.

The user's step calls the pipelined module as an ordinary function, and has to wait there while other microbatches are worked
on. A thread keeps everything such a function has on its stack, and torch's grad mode and autocast apart.
"""

from __future__ import annotations

import contextvars
import queue
import threading
from collections.abc import Callable
from typing import Any

from lightning_mgpu.partition.ambient import Ambient

__all__ = ["Abandoned", "Suspended", "Threads"]


class Abandoned(BaseException):
    """Unwinds a function that is not to go on."""


class Threads:
    """Keeps threads for reuse, since each that computes has helpers of its own."""

    def __init__(self) -> None:
        self._idle: list[queue.SimpleQueue[Callable[[], None] | None]] = []

    def start(self, work: Callable[[], None]) -> None:
        """Runs ``work`` in an idle thread, or a new one."""
        if self._idle:
            self._idle.pop().put(work)
            return
        inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        inbox.put(work)
        threading.Thread(target=_serve, args=(inbox,), daemon=True, name="microbatch").start()

    def give_back(self, inbox: queue.SimpleQueue[Callable[[], None] | None]) -> None:
        """Takes a thread that has done its work."""
        self._idle.append(inbox)

    def close(self) -> None:
        """Ends the idle threads."""
        while self._idle:
            self._idle.pop().put(None)


_local = threading.local()


def _serve(inbox: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    _local.inbox = inbox
    while (work := inbox.get()) is not None:
        work()
        del work  # nothing is kept alive until the next one


class Suspended:
    """Runs a function up to its pauses.

    Args:
        threads: where it gets its thread.
        function: the function; it may call `pause`.

    Attributes:
        ended: whether it has returned or raised.
        result: what it returned.
        asked: what it last gave to `pause`.
    """

    def __init__(self, threads: Threads, function: Callable[[], Any]) -> None:
        self.ended = False
        self.result: Any = None
        self.asked: Any = None
        self._threads = threads
        self._function = function
        self._error: BaseException | None = None
        self._started = False
        self._to_it: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._back: queue.SimpleQueue[None] = queue.SimpleQueue()

    @staticmethod
    def current() -> Suspended | None:
        """Returns the one that runs in this thread."""
        return getattr(_local, "running", None)

    def start(self) -> None:
        """Runs the function until it pauses or ends, under the modes of the caller.

        Raises:
            BaseException: what the function raises.
        """
        self._started = True
        ambient, context = Ambient.current(), contextvars.copy_context()

        def work() -> None:
            inbox, _local.running = _local.inbox, self
            try:
                with ambient.applied():
                    self.result = context.run(self._function)
            except BaseException as error:  # raised by whoever waits
                self._error = error
            _local.running = None
            self.ended = True
            self._threads.give_back(inbox)
            self._back.put(None)

        self._threads.start(work)
        self._wait()

    def resume(self, value: Any) -> None:
        """Lets the pause return ``value``, and runs the function until it pauses again or ends.

        Raises:
            BaseException: what the function raises.
        """
        self._to_it.put(value)
        self._wait()

    def abandon(self) -> None:
        """Ends a function that pauses, by an exception where it does."""
        if self.ended or not self._started:
            return
        self._to_it.put(Abandoned())
        self._until_ended()

    def _until_ended(self) -> None:
        while not self.ended:
            self._back.get()
        self._error = None  # the reason why it is abandoned is what the user has to see

    def pause(self, value: Any) -> Any:
        """Gives ``value`` to whoever started or resumed, and waits for what they give back."""
        self.asked = value
        self._back.put(None)
        answer = self._to_it.get()
        if isinstance(answer, Abandoned):
            raise answer
        return answer

    def _wait(self) -> None:
        self._back.get()
        if self._error is not None:
            error, self._error = self._error, None
            raise error
