"""Records the forward of an ordinary module as a graph of calls.

A ``TorchFunctionMode`` notes every torch function, a patched ``nn.Module.__call__`` notes each leaf module as one call, and
reads of Python attributes are noted as guards. Weights are fake meanwhile, inputs are real: what depends on the batch alone
is computed, so that branches on a mask go the way they go on one device.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_mgpu.errors import MgpuError, RecordingError
from lightning_mgpu.partition.graph import (
    Guard,
)
from lightning_mgpu.partition.names import Names
from lightning_mgpu.partition.recording import Recording, Unrecordable
from lightning_mgpu.partition.run import Opened, RecordingRun

__all__ = ["Recorder"]

_lock = threading.RLock()


class Recorder:
    """Records forwards of modules below one root.

    Attributes:
        names: names below the root.
        promoted: paths of modules that are called as one leaf, with the reason; grows while recordings are made.
        opened: returns another forward to record in the place of a module's own, if there is one.
    """

    def __init__(self, names: Names, opened: Opened = lambda _: None) -> None:
        self.names = names
        self.opened = opened
        self.promoted: dict[str, str] = {}

    def record(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        answers: Sequence[Guard] | None = None,
        real: bool = False,
    ) -> Recording:
        """Runs ``module.forward`` once and returns what it called.

        Args:
            module: the module whose forward is recorded, at or below the root.
            args: positional arguments; tensors among them are copied, so that changes in place stay in the recording.
            kwargs: keyword arguments, likewise.
            answers: guards of the whole batch, in order; a microbatch's forward is answered with their values.
            real: with ``True``, weights are real and numbers are computed.

        Returns:
            The recording. Random states, buffers and attributes of the modules are as before.

        Raises:
            RecordingError: where a call can't be recorded and no module around it can become a leaf.
            StructureError: where the guards come in another order than in ``answers``.
        """
        with _lock:
            for _ in range(1 + len(self.names.module_at)):
                run = RecordingRun(self.names, self.promoted, module, answers, real=real, opened=self.opened)
                try:
                    return run.record(args, kwargs)
                except Unrecordable as stop:
                    root = self.names.path_of[id(module)]
                    if stop.path == root or stop.path in self.promoted:
                        raise RecordingError(_unrecordable_text(module, stop)) from None
                    self.promoted[stop.path] = f"{stop.reason} ({stop.line})"
                except MgpuError:
                    raise
                except Exception as error:
                    _end_at_users_line(error)
                    raise
        raise AssertionError("every restart promotes another module")


def _end_at_users_line(error: Exception) -> None:
    """Leaves out what torch's fake tensors and the recording did below the line of the forward that failed."""
    package = Path(__file__).parents[1]
    foreign = tuple(map(str, (Path(torch.__file__).parent, package / "partition", package / "runtime")))
    last, frame = None, error.__traceback__
    while frame is not None:
        if not frame.tb_frame.f_code.co_filename.startswith(foreign):
            last = frame
        frame = frame.tb_next
    if last is not None:
        last.tb_next = None


def _unrecordable_text(module: nn.Module, stop: Unrecordable) -> str:
    return (
        f"cannot record the forward of {type(module).__name__}: it {stop.reason} at {stop.line}, and no module of yours "
        "stands around this line that could run as one piece; move these lines into a submodule's forward, so that the "
        'submodule becomes one layer of a stage, or pipeline another module with module="..."'
    )
