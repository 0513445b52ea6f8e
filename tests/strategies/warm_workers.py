"""Worker processes that stay alive between tests, and how to train a case of the zoo on them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from lightning_mgpu import PipelineStrategy, Workers
from tests.conftest import HeldProcesses
from tests.harness import RunRecord, run_fit
from tests.zoo.case import Case


class WarmWorkers:
    """Keeps one set of worker processes for each number of stages, so that most runs need to start none."""

    def __init__(self, held_processes: HeldProcesses) -> None:
        self._held_processes = held_processes
        self._stacks: dict[int, ExitStack] = {}
        self._workers: dict[int, Workers] = {}

    @contextmanager
    def lend(self, num_stages: int) -> Iterator[Workers]:
        """Lends the workers for a run; after a run that failed, the next one gets new ones.

        Args:
            num_stages: The number of stages, one of which stays in this process.

        Yields:
            The workers.
        """
        if num_stages not in self._workers:
            stack = self._stacks[num_stages] = ExitStack()
            with self._held_processes.starting():
                self._workers[num_stages] = stack.enter_context(Workers(devices=num_stages))
        try:
            yield self._workers[num_stages]
        except BaseException:
            self.close(num_stages)
            raise

    def close(self, num_stages: int) -> None:
        """Ends the workers for this number of stages."""
        del self._workers[num_stages]
        self._stacks.pop(num_stages).close()

    def close_all(self) -> None:
        """Ends all workers."""
        for num_stages in list(self._workers):
            self.close(num_stages)


@pytest.fixture(scope="session")
def warm_workers(held_processes: HeldProcesses) -> Iterator[WarmWorkers]:
    """Keeps worker processes for all tests that ask for them."""
    workers = WarmWorkers(held_processes)
    yield workers
    workers.close_all()


def run_on_stages(case: Case, num_devices: int, warm_workers: WarmWorkers, **strategy: Any) -> RunRecord:
    """Trains a case on so many devices: as many stages, unless ``strategy`` has other options."""
    options = {"num_microbatches": case.num_microbatches, **case.strategy, **strategy}
    with warm_workers.lend(num_devices) as workers:
        return run_fit(
            case.module,
            case.data,
            strategy=PipelineStrategy(workers=workers, **options),
            devices=num_devices,
            validate=case.validate,
            predict=case.predict,
            **case.trainer(),
        )
