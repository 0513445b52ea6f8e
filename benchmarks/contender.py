"""The driver's side of a variant: its processes, kept waiting between the rounds of a benchmark."""

import multiprocessing
import socket
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing.connection import Connection, wait
from pathlib import Path
from time import monotonic

from benchmarks.commands import Report
from benchmarks.gpt import Case
from benchmarks.process import child_environment, child_process, tail

ANSWER_TIMEOUT_S = 180.0


@dataclass(frozen=True)
class Variant:
    """A way of training the same model.

    Attributes:
        name: Its row in the table.
        command: A module of this package and its arguments.
        num_started: Processes that the driver starts, as ranks of one job if there are several.
        num_processes: Processes that compute; more than it starts where a strategy starts workers.
        num_threads: Threads of each process.
    """

    name: str
    command: tuple[str, ...]
    num_started: int = 1
    num_processes: int = 1
    num_threads: int = 1


@dataclass(frozen=True)
class Steps:
    """Some steps of one variant.

    Attributes:
        losses: The whole batch's loss at each step.
        durations_s: From the end of each step to the end of the next: one fewer than the losses.
    """

    losses: tuple[float, ...]
    durations_s: tuple[float, ...]


class Contender:
    """A variant whose processes are running."""

    def __init__(self, variant: Variant, connections: "list[Connection]", logs: list[Path]) -> None:
        """Keeps what `start` opened.

        Args:
            variant: What runs.
            connections: One to each process, by rank.
            logs: What each process writes.
        """
        self.variant = variant
        self._connections = connections
        self._logs = logs

    def run(self, num_steps: int) -> Steps:
        """Trains for some steps and returns their losses and durations.

        Raises:
            RuntimeError: If a process ends, is silent for too long, or uses another number of threads.
        """
        for rank, connection in enumerate(self._connections):
            try:
                connection.send(num_steps)
            except ConnectionError:
                raise RuntimeError(self._failure("has ended", rank)) from None
        reports = self._receive()
        for report in reports:
            if report.num_threads != self.variant.num_threads:
                message = f"{self.variant.name} ran {report.num_threads} threads, not {self.variant.num_threads}"
                raise RuntimeError(message)
        # Data-parallel ranks see equal parts of the batch each; of a pipeline only the last stage sees the loss.
        seen = [report.losses for report in reports if report.losses]
        losses = tuple(statistics.fmean(step) for step in zip(*seen, strict=True))
        durations_s = tuple(after - before for before, after in pairwise(reports[-1].ends_s))
        return Steps(losses, durations_s)

    def _receive(self) -> list[Report]:
        reports: dict[int, Report] = {}
        deadline = monotonic() + ANSWER_TIMEOUT_S
        while len(reports) < len(self._connections):
            waiting = {id(connection): rank for rank, connection in enumerate(self._connections) if rank not in reports}
            ready = wait(
                [self._connections[rank] for rank in waiting.values()],
                timeout=max(deadline - monotonic(), 0.0),
            )
            if not ready:
                raise RuntimeError(self._failure("is silent", min(waiting.values())))
            for connection in ready:
                rank = waiting[id(connection)]
                try:
                    reports[rank] = self._connections[rank].recv()
                except (EOFError, ConnectionError):
                    raise RuntimeError(self._failure("has ended", rank)) from None
        return [reports[rank] for rank in sorted(reports)]

    def _failure(self, what: str, rank: int) -> str:
        return f"process {rank} of {self.variant.name} {what}; it wrote:\n{tail(self._logs[rank])}"


@contextmanager
def start(variant: Variant, case: Case) -> Iterator[Contender]:
    """Starts a variant's processes, and ends them all with the block.

    Args:
        variant: What to run.
        case: The model and the batches.

    Raises:
        RuntimeError: If a process exits with an error after a block that had none.
    """
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder) / f"{rank}.log" for rank in range(variant.num_started)]
        with ExitStack() as stack:
            pipes = [multiprocessing.Pipe() for _ in logs]
            environments = _environments(variant)
            processes = []
            for rank, (_, theirs) in enumerate(pipes):
                module, *rest = variant.command
                control = (f"--control-fd={theirs.fileno()}", f"--rank={rank}")
                with theirs:
                    started = child_process(
                        (module, *control, *rest), logs[rank], environments[rank], pass_fds=(theirs.fileno(),)
                    )
                    processes.append(stack.enter_context(started))
            # Closed before the processes are waited for: a closed connection tells them to end.
            connections = [stack.enter_context(ours) for ours, _ in pipes]
            for connection in connections:
                connection.send(case)  # to a process that is still importing: the pipe holds it
            yield Contender(variant, connections, logs)
        for process, log in zip(processes, logs, strict=True):
            if process.returncode != 0:
                message = f"{variant.name} exited with {process.returncode}; it wrote:\n{tail(log)}"
                raise RuntimeError(message)


def _environments(variant: Variant) -> list[dict[str, str]]:
    """Returns the variables of each process; several ranks find each other as under ``torchrun``."""
    if variant.num_started == 1:
        return [child_environment(variant.num_threads, {})]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(variant.num_started),
    }
    return [
        child_environment(variant.num_threads, {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(variant.num_started)
    ]
