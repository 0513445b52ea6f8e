"""The measured side of a benchmark: batches that arrive when the driver asks for steps.

Every variant, whether a plain loop or a Lightning loader, iterates over `CommandedBatches`. The iterator waits for a
number of steps, hands out as many batches, and takes the time whenever the loop comes back for the next one; so a step
is everything a loop does between two batches, measured alike for all.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from time import perf_counter

import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from benchmarks.gpt import Case, make_batch


@dataclass(frozen=True)
class Report:
    """What a process answers to one command.

    Attributes:
        losses: The loss of each step; empty in a process that sees none.
        ends_s: This process's clock at the end of each step.
        num_threads: Threads that torch used within an operation.
    """

    losses: tuple[float, ...]
    ends_s: tuple[float, ...]
    num_threads: int


class CommandedBatches(IterableDataset[tuple[Tensor, Tensor]]):
    """Yields batches on command, and reports how long the loop over them took.

    Attributes:
        losses: The loop appends each step's loss here before it asks for the next batch.
    """

    def __init__(self, connection: "Connection", case: Case, rows: slice = slice(None)) -> None:
        """Keeps the driver's connection.

        Args:
            connection: Receives numbers of steps, and sends a `Report` for each.
            case: The sizes of the batches.
            rows: The part of each batch that this process trains on.
        """
        self.losses: list[float] = []
        self._connection = connection
        self._case = case
        self._rows = rows

    def __len__(self) -> int:
        """Returns a bound never reached: Lightning looks a batch ahead in loaders without a length, and would wait."""
        return 2**31

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields tokens and targets, each ``(rows, sequence)``, until the driver hangs up."""
        first = 0
        while num_steps := self._receive():
            self.losses.clear()
            ends_s = []
            for index in range(first, first + num_steps):
                tokens, targets = make_batch(self._case, index)
                yield tokens[self._rows], targets[self._rows]
                ends_s.append(perf_counter())
            first += num_steps
            report = Report(tuple(self.losses), tuple(ends_s), torch.get_num_threads())
            self._connection.send(report)

    def _receive(self) -> int:
        try:
            num_steps: int = self._connection.recv()
        except (EOFError, ConnectionError):
            return 0
        return num_steps


def add_control(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that the driver gives to every process it starts."""
    parser.add_argument("--control-fd", type=int, required=True, help="the driver's connection")
    parser.add_argument("--rank", type=int, required=True, help="this process within its variant")


def connect(control_fd: int) -> tuple["Connection", Case]:
    """Returns the connection to the driver, and the case, which the driver sends first."""
    connection = Connection(control_fd)
    case: Case = connection.recv()
    return connection, case
