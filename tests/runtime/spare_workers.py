"""Worker processes for tests that end them: each test finds them running, and leaves them running for the next one."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import suppress

import psutil
import pytest

from lightning_mgpu import Workers
from tests.conftest import HeldProcesses


class SpareWorkers:
    """Keeps one set of worker processes for each number of stages, and replaces those that a test has ended."""

    def __init__(self, held_processes: HeldProcesses) -> None:
        self._held_processes = held_processes
        self._workers: dict[int, Workers] = {}

    def running(self, num_stages: int) -> Workers:
        """Returns workers that have started, always the same object for a number of stages."""
        workers = self._workers.setdefault(num_stages, Workers(devices=num_stages))
        if not workers.alive:
            with self._held_processes.starting():
                workers.ready()
        return workers

    def close_all(self) -> None:
        """Ends all workers."""
        for workers in self._workers.values():
            workers.close()


@pytest.fixture(scope="session")
def spare_workers(held_processes: HeldProcesses) -> Iterator[SpareWorkers]:
    """Keeps worker processes for all tests that end some."""
    spare = SpareWorkers(held_processes)
    yield spare
    spare.close_all()


def processes_of(workers: Workers) -> list[psutil.Process]:
    """Returns the running processes."""
    return [psutil.Process(pid) for pid in workers.pids]


def kill(pids: Sequence[int]) -> None:
    """Kills workers and waits until they are dead, and only still to be asked how they ended."""
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    for pid in pids:
        with suppress(ChildProcessError):
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
