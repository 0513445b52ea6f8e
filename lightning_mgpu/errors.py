"""Errors a user of the package can meet, all below one base class.

Errors about a wrong argument or a model that can't be cut are ``ValueError`` as well, errors about a run that broke are
``RuntimeError`` as well, so that code which catches the builtin ones keeps working.
"""

from __future__ import annotations

__all__ = [
    "CheckpointError",
    "MgpuError",
    "PartitionError",
    "PlacementError",
    "RecordingError",
    "SelfCheckError",
    "ShippingError",
    "StageError",
    "WorkerStartError",
    "counted",
]


def counted(number: int, noun: str) -> str:
    """Writes a number with its noun, as in ``1 layer`` and ``2 layers``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


class MgpuError(Exception):
    """Is the base class of every error raised by this package."""


class RecordingError(MgpuError, ValueError):
    """Says that a module's forward can't be recorded as a graph, with the user's line and the remedy."""


class PartitionError(MgpuError, ValueError):
    """Says that a recorded forward can't be cut as asked."""


class SelfCheckError(MgpuError, ValueError):
    """Says that the cut stages don't compute what the module computes, naming the first node that differs."""


class ShippingError(MgpuError, ValueError):
    """Says that a module or optimizer can't be sent to another process, naming the attribute."""


class PlacementError(MgpuError, RuntimeError):
    """Says that a parameter was read on the lead while its value lives on another stage."""


class WorkerStartError(MgpuError, RuntimeError):
    """Says that a worker process did not start, with its standard error."""


class CheckpointError(MgpuError, ValueError, RuntimeError):
    """Says that a checkpoint can't be read, does not fit, or can't be written, with the keys or numbers and the remedy.

    It is both kinds of builtin error, since Lightning and torch raise either in its place.
    """


class StageError(MgpuError, RuntimeError):
    """Says which stage failed in which microbatch; the worker's traceback is its ``__cause__``.

    Attributes:
        stage: index of the stage that failed, counted from 0.
        microbatch: index of the microbatch, or ``None`` outside a microbatch.
    """

    def __init__(self, message: str, *, stage: int, microbatch: int | None = None) -> None:
        super().__init__(message)
        self.stage = stage
        self.microbatch = microbatch
