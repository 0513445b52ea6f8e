"""Worker processes as the lead sees them: started, spoken to, listened to, and ended with it.

The control connection is a pair of connected sockets that the worker inherits: nobody else can reach it, and it ends with
either process. The rendezvous file of the data plane lies in a folder only this user can enter.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import IO, Any, Self, TypeVar

import cloudpickle
import torch

from lightning_mgpu.errors import MgpuError, WorkerStartError
from lightning_mgpu.runtime import messages as m
from lightning_mgpu.runtime.dataplane import DataPlane
from lightning_mgpu.runtime.pack import Packed, unpack

__all__ = ["WorkerGone", "Workers", "threads_per_process"]

_END_WAIT_S = 5.0
_LOOK_S = 0.1
_MESSAGE = TypeVar("_MESSAGE")


class WorkerGone(Exception):  # noqa: N818 - the error is raised from it
    """Says that a worker ended, with its report where it left one."""

    def __init__(self, index: int, failure: m.Failure | None) -> None:
        super().__init__(f"worker {index} ended")
        self.index = index
        self.failure = failure


class _Process:
    """Is one worker process with the threads that listen to it."""

    def __init__(self, index: int, start: dict[str, Any], environment: dict[str, str], on_end: weakref.WeakMethod[Any]) -> None:
        self.index = index
        self.ended = threading.Event()
        ours, theirs = Pipe(duplex=True)
        self.connection: Connection = ours
        self.inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.written: queue.SimpleQueue[m.ShardWritten | None] = queue.SimpleQueue()
        self.failure: m.Failure | None = None
        self.gone = False
        self.output: deque[str] = deque(maxlen=200)
        os.set_inheritable(theirs.fileno(), True)
        self.popen = subprocess.Popen(
            [sys.executable, "-m", "lightning_mgpu.runtime.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=[theirs.fileno()],
            env=environment,
            process_group=0,  # Ctrl-C in a terminal reaches the lead alone
        )
        start = {**start, "index": index, "connection": theirs.fileno()}
        assert self.popen.stdin is not None
        assert self.popen.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self.popen.stdin.write(pickle.dumps(start))
            self.popen.stdin.close()
        theirs.close()
        self.threads = [
            threading.Thread(target=_listen, args=(ours, self.inbox, self.written, self.ended, on_end), daemon=True),
            threading.Thread(target=_forward_output, args=(self.popen.stdout, self.output), daemon=True),
        ]
        for thread in self.threads:
            thread.start()

    def how_it_ended(self) -> str:
        """Waits a little for the end of the process and says how it came."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.popen.wait(_END_WAIT_S)
        code = self.popen.returncode
        if code is None:
            return "hung up"
        if code < 0:
            name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
            return f"was killed by {name}" + (" (out of memory, perhaps)" if name == "SIGKILL" else "")
        return f"ended with exit code {code}"

    def next(self, timeout_s: float | None = None) -> Any:
        """Returns the next message, or raises `WorkerGone` when there won't be one, or `queue.Empty` in the end."""
        if self.gone:
            raise WorkerGone(self.index, self.failure)
        message = self.inbox.get(timeout=timeout_s)
        if isinstance(message, m.Failure):
            self.failure = message
            return self.next(timeout_s)
        if message is None:
            self.gone = True
            raise WorkerGone(self.index, self.failure)
        return message


def _listen(
    connection: Connection,
    inbox: queue.SimpleQueue[Any],
    written: queue.SimpleQueue[m.ShardWritten | None],
    ended: threading.Event,
    on_end: weakref.WeakMethod[Any],
) -> None:
    """Moves messages from the connection to the inboxes; a final None says that the worker ended."""
    while True:
        try:
            message = pickle.loads(connection.recv_bytes())
            (written if isinstance(message, m.ShardWritten) else inbox).put(message)
        except (EOFError, OSError):
            ended.set()
            inbox.put(None)
            written.put(None)
            tell = on_end()
            if tell is not None:
                tell()
            return


def _forward_output(stream: IO[bytes], kept: deque[str]) -> None:
    """Shows what a worker prints where the lead prints, and remembers the last lines."""
    with stream:
        for line in stream:
            text = line.decode(errors="replace")
            kept.append(text)
            with contextlib.suppress(Exception):
                sys.stderr.write(text)


class Workers:
    """Holds all processes but the last, which is the lead's own.

    Several Trainers can use the same workers one after the other; without that each `PipelineStrategy` starts its own.

    Args:
        devices: number of processes, all on the CPU, or the device of each in the order the Trainer lists them: the first
            is the lead's.
        start_timeout_s: seconds to wait for the processes to start.

    Raises:
        WorkerStartError: from `start`, where a process can't be started; from `ready`, where it ends or does not answer, with
            its standard error.

    Example:
        >>> with Workers(devices=2) as workers:  # doctest: +SKIP
        ...     Trainer(strategy=PipelineStrategy(workers=workers), accelerator="cpu", devices=2).fit(model)
    """

    def __init__(self, devices: int | Sequence[str | torch.device], *, start_timeout_s: float = 300.0) -> None:
        listed = ["cpu"] * devices if isinstance(devices, int) else list(devices)
        if not listed:
            raise ValueError("workers need at least one device; use devices=1 or more")
        self.devices = tuple(torch.device(d) for d in (*listed[1:], listed[0]))
        self.start_timeout_s = start_timeout_s
        self.plane: DataPlane | None = None
        self._processes: list[_Process] = []
        self._folder: str | None = None
        self._finalizer: Any = None

    @property
    def num_processes(self) -> int:
        return len(self.devices)

    @property
    def indices(self) -> range:
        """The processes that are workers."""
        return range(self.num_processes - 1)

    @property
    def started(self) -> bool:
        return self._folder is not None

    @property
    def alive(self) -> bool:
        """Whether every process is running and spoken to."""
        return self.started and all(p.popen.poll() is None and not p.gone for p in self._processes)

    @property
    def pids(self) -> list[int]:
        return [p.popen.pid for p in self._processes]

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- start and end ---------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Starts the processes, and returns at once; `ready` waits for them. Does nothing while they run."""
        if self.started and self.alive:
            return
        self.close()
        self._folder = tempfile.mkdtemp(prefix="lightning_mgpu-")
        num_threads = threads_per_process(self.num_processes)
        environment = {**os.environ, "LIGHTNING_MGPU_ROLE": "worker"}
        package_root = str(Path(__file__).parents[2])
        environment["PYTHONPATH"] = os.pathsep.join([package_root, *filter(None, [os.environ.get("PYTHONPATH")])])
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            environment.pop(name, None)
        start = {
            "num_processes": self.num_processes,
            "store": str(Path(self._folder) / "rendezvous"),
            "path": [p or str(Path.cwd()) for p in sys.path],
            "parent": os.getpid(),
            "num_threads": num_threads,
            "flags": {
                "allow_tf32": torch.backends.cuda.matmul.allow_tf32,
                "benchmark": torch.backends.cudnn.benchmark,
                "deterministic": torch.backends.cudnn.deterministic,
            },
        }
        on_end = weakref.WeakMethod(self._release_waits)
        processes: list[_Process] = []
        self._finalizer = weakref.finalize(self, _end, processes, self._folder, os.getpid())
        for index in self.indices:
            try:
                processes.append(_Process(index, {**start, "device": str(self.devices[index])}, environment, on_end))
            except OSError as error:
                self.close()
                raise WorkerStartError(
                    f"worker {index} ({self.devices[index]}) cannot be started with {sys.executable!r}, which is "
                    f"sys.executable: {type(error).__name__}: {error}"
                ) from None
        self._processes = processes

    def ready(self) -> None:
        """Waits until the processes run and the data plane connects them."""
        self.start()
        if self.plane is not None or self.num_processes == 1:
            return
        deadline_s = time.monotonic() + self.start_timeout_s
        for process in self._processes:
            try:
                hello = process.next(max(0.0, deadline_s - time.monotonic()))
            except WorkerGone:
                raise self._start_error(process, f"{process.how_it_ended()} while it started") from None
            except queue.Empty:
                how = f"did not answer in {self.start_timeout_s:.0f} s while it started"
                raise self._start_error(process, how) from None
            if not isinstance(hello, m.Hello):
                raise MgpuError(f"worker {process.index} said {type(hello).__name__} instead of Hello")
        self.plane = self._connect(deadline_s)

    def _connect(self, deadline_s: float) -> DataPlane:
        """Joins the data plane, which waits for all processes, and gives up where one ends meanwhile."""
        assert self._folder is not None
        lead = self.num_processes - 1
        where = (str(Path(self._folder) / "rendezvous"), lead, self.num_processes, self.devices[lead])
        made: queue.SimpleQueue[DataPlane | Exception] = queue.SimpleQueue()
        threading.Thread(target=_put_plane, args=(made, *where), daemon=True, name="data plane").start()
        while True:
            try:
                plane = made.get(timeout=_LOOK_S)
            except queue.Empty:
                self._check_connected()
                if time.monotonic() > deadline_s:
                    how = f"was not connected in {self.start_timeout_s:.0f} s"
                    raise self._start_error(self._processes[0], how) from None
                continue
            self._check_connected()  # one may have ended just after it was connected
            if isinstance(plane, Exception):
                raise plane
            return plane

    def _check_connected(self) -> None:
        """Raises where a process ended: of several the one that was killed, since the others lost touch with that one."""
        ended = [(process, process.how_it_ended()) for process in self._processes if process.ended.is_set()]
        if ended:
            process, how = min(ended, key=lambda each: (each[0].popen.returncode or 0) >= 0)
            raise self._start_error(process, f"{how} while it was connected") from None

    def _start_error(self, process: _Process, how: str) -> WorkerStartError:
        """Ends all processes, and says which one did not start."""
        for each in self._processes:
            each.popen.kill()  # none has anything to lose yet, nor need it listen
        process.threads[1].join(_END_WAIT_S)
        text = "".join(process.output).strip() or "(no output)"
        self.close()
        return WorkerStartError(f"worker {process.index} ({self.devices[process.index]}) {how}; it printed:\n{text}")

    def _release_waits(self) -> None:
        """Ends waits for a process that is gone; on NCCL they would last for ever, on gloo they end by themselves."""
        if self.plane is not None:
            self.plane.abort()

    def check_alive(self) -> None:
        """Raises `WorkerGone` where a process ended meanwhile."""
        for process in self._processes:
            if process.ended.is_set():
                raise WorkerGone(process.index, process.failure)

    def close(self) -> None:
        """Ends the processes."""
        self.plane = None
        if self._finalizer is not None:
            self._finalizer()
            self._finalizer = None
        self._processes, self._folder = [], None

    # -- messages --------------------------------------------------------------------------------------------------

    def tell(self, index: int, message: Any, packed: Packed | None = None) -> None:
        """Sends a message, and the tensors that belong to it.

        Raises:
            WorkerGone: where the worker ended.
        """
        process = self._processes[index]
        try:
            process.connection.send_bytes(cloudpickle.dumps(message))
        except OSError:
            raise WorkerGone(index, process.failure) from None
        if packed is not None:
            assert self.plane is not None
            self.plane.send_packed(packed, index)

    def tell_all(self, message: Any) -> None:
        """Sends a message to every worker."""
        for index in self.indices:
            self.tell(index, message)

    def expect(self, index: int, kind: type[_MESSAGE], timeout_s: float | None = None) -> _MESSAGE:
        """Waits for a message of one class.

        Raises:
            WorkerGone: where the worker ended.
            MgpuError: where another message came.
        """
        message = self._processes[index].next(timeout_s)
        if not isinstance(message, kind):
            raise MgpuError(f"worker {index} said {type(message).__name__} where {kind.__name__} was expected")
        return message

    def collect(self, indices: Sequence[int], what: str, names: Sequence[Sequence[Any]]) -> list[Any]:
        """Asks some workers and returns their answers in order; ``names`` has one list for each."""
        assert self.plane is not None
        for index, wanted in zip(indices, names, strict=True):
            self.tell(index, m.Collect(what, tuple(wanted)))
        answers = []
        for index in indices:
            answer = self.expect(index, m.Answer)
            answers.append(unpack(self.plane.receive_packed(answer.packed, index), _no_names))
        return answers

    def writing(self, index: int) -> Callable[[], m.ShardWritten]:
        """Returns what waits, in any thread, until a worker has written its part of a checkpoint; others may speak to it.

        It raises `WorkerGone` where the worker ended.
        """
        process = self._processes[index]

        def wait() -> m.ShardWritten:
            message = process.written.get()
            if message is None:
                process.written.put(None)  # for whoever asks next
                raise WorkerGone(index, process.failure)
            return message

        return wait

    def settle(self) -> None:
        """Waits until every worker has done what it was told.

        Raises:
            WorkerGone: where a worker ended, as one does that fails.
        """
        self.tell_all(m.Sync())
        for index in self.indices:
            self.expect(index, m.Done)

    # -- after a failure -------------------------------------------------------------------------------------------

    def autopsy(self, wait_s: float) -> dict[int, m.Failure | None]:
        """Finds out which workers ended, waiting a little for reports on their way.

        Returns:
            The report of each worker that ended, by index; ``None`` for one that ended without.
        """
        deadline_s = time.monotonic() + wait_s
        dead: dict[int, m.Failure | None] = {}
        for process in self._processes:
            with contextlib.suppress(queue.Empty):
                try:
                    while True:
                        process.next(max(0.01, deadline_s - time.monotonic()))
                except WorkerGone as gone:
                    dead[process.index] = gone.failure
            if process.failure is not None:
                dead[process.index] = process.failure
        return dead

    def how_it_ended(self, index: int) -> str:
        """Says how a process that left no report ended."""
        return self._processes[index].how_it_ended()

    def surrender(self, timeout_s: float) -> dict[int, bytes | None]:
        """Takes everything home that workers still have, and ends them.

        Returns:
            The pickled state of each worker, by index; ``None`` for one that is lost.
        """
        states: dict[int, bytes | None] = {}
        for process in self._processes:
            with contextlib.suppress(WorkerGone):
                self.tell(process.index, m.Surrender())
        deadline_s = time.monotonic() + timeout_s
        for process in self._processes:
            state: bytes | None = None
            with contextlib.suppress(queue.Empty, WorkerGone):
                while state is None:
                    message = process.next(max(0.01, deadline_s - time.monotonic()))
                    state = message.pickled if isinstance(message, m.State) else None
            if state is None and process.failure is not None:
                state = process.failure.state
            states[process.index] = state
        self.close()
        return states


def _put_plane(made: queue.SimpleQueue[DataPlane | Exception], path: str, rank: int, size: int, device: torch.device) -> None:
    """Makes a data plane in a thread of its own, since nothing but the missing processes can end its wait for them."""
    try:
        made.put(DataPlane(path, rank, size, device, interruptible=True))
    except Exception as error:
        made.put(error)


def _no_names(kind: str, key: str) -> Any:
    raise MgpuError(f"an answer names the {kind} {key!r}")


def threads_per_process(num_processes: int) -> int | None:
    """Chooses how many threads each process computes with; ``None`` where the user decided."""
    if os.environ.get("OMP_NUM_THREADS"):
        return None
    return max(1, len(os.sched_getaffinity(0)) // num_processes) if hasattr(os, "sched_getaffinity") else None


def _end(processes: list[_Process], folder: str, lead: int) -> None:
    """Ends processes, in their lead alone: by closing their connection, and by force where that does not do."""
    if os.getpid() != lead:
        return  # a forked child, such as a loader's process, has copies of all this
    for process in processes:
        _shut(process.connection)
    deadline_s = time.monotonic() + _END_WAIT_S
    for process in processes:
        try:
            process.popen.wait(max(0.0, deadline_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.popen.kill()
            process.popen.wait()
        for thread in process.threads:
            if thread is not threading.current_thread():
                thread.join(_END_WAIT_S)
        with contextlib.suppress(OSError):
            process.connection.close()
    shutil.rmtree(folder, ignore_errors=True)


def _shut(connection: Connection) -> None:
    """Ends a connection for both sides, also while a thread reads from it or a forked child holds a copy."""
    with contextlib.suppress(OSError):
        duplicate = socket.socket(fileno=os.dup(connection.fileno()))
        try:
            duplicate.shutdown(socket.SHUT_RDWR)
        finally:
            duplicate.close()
