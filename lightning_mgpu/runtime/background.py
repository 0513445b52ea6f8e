"""Writes checkpoints while training goes on: a snapshot is taken at once, and a thread writes it."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

__all__ = ["Background", "Snapshot"]


class Background:
    """Does one job after the other in a thread; the interpreter does not end before they are done."""

    def __init__(self) -> None:
        self._threads: ThreadPoolExecutor | None = None
        self._jobs: list[Future[None]] = []

    @property
    def is_busy(self) -> bool:
        """Whether a job is not done, or has raised what nobody has seen yet."""
        return any(not job.done() or job.exception() is not None for job in self._jobs)

    def start(self, job: Callable[[], None], *, if_all_went_well: bool = False) -> None:
        """Does a job after those before it; `check` first, for what they raised.

        Args:
            job: what to do.
            if_all_went_well: whether to leave it undone where one of those before it raised something.
        """
        before = list(self._jobs) if if_all_went_well else []

        def run() -> None:
            if all(earlier.exception() is None for earlier in before):
                job()

        if self._threads is None:
            self._threads = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._jobs.append(self._threads.submit(run))

    def check(self) -> None:
        """Raises what a job that is done has raised."""
        while self._jobs and self._jobs[0].done():
            self._jobs.pop(0).result()

    def wait(self) -> None:
        """Waits until all jobs are done.

        Raises:
            Exception: what one of them raised, the first one's.
        """
        jobs, self._jobs = self._jobs, []
        errors = [job.exception() for job in jobs]
        if self._threads is not None:
            self._threads.shutdown()
            self._threads = None
        for error in errors:
            if error is not None:
                raise error


class Snapshot:
    """Holds an object as it is now, whatever happens to it later: its pickle, and copies of its tensors.

    Args:
        obj: what pickle can pickle.
        fresh: tensors by ``id`` that nobody else changes, so that they need no copy.

    Raises:
        Exception: where a part can't be pickled.
    """

    def __init__(self, obj: Any, fresh: Collection[int] = ()) -> None:
        file = io.BytesIO()
        pickler = _Pickler(file, fresh)
        pickler.dump(obj)
        self._pickle = file.getvalue()
        self._tensors = pickler.copies

    def open(self) -> Any:
        """Builds the object."""
        return _Unpickler(io.BytesIO(self._pickle), self._tensors).load()


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, fresh: Collection[int]) -> None:
        super().__init__(file)
        self.fresh = fresh
        self.copies: list[Tensor] = []
        self.seen: dict[Any, tuple[int, Tensor]] = {}  # with the tensor, so that its memory and id stay its own

    def persistent_id(self, obj: Any) -> int | None:
        if type(obj) is not Tensor:  # a subclass knows how it is pickled
            return None
        key: Any = id(obj)
        if obj.layout == torch.strided and obj.numel():  # two views of one memory, as of a tied weight, stay one
            key = (obj.device, obj.data_ptr(), obj.dtype, obj.shape, obj.stride())
        if key not in self.seen:
            self.seen[key] = (len(self.copies), obj)
            self.copies.append(obj if id(obj) in self.fresh else obj.detach().clone())
        return self.seen[key][0]


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensors: list[Tensor]) -> None:
        super().__init__(file)
        self.tensors = tensors

    def persistent_load(self, pid: Any) -> Any:
        return self.tensors[pid]
