"""A worker that cannot start: the user sees why, nothing is left behind, and the next try may succeed."""

from __future__ import annotations

import gc
import os
import signal
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from lightning_mgpu import PipelineStrategy, Workers
from lightning_mgpu.errors import WorkerStartError
from lightning_mgpu.runtime.dataplane import DataPlane
from tests.harness import repeatable
from tests.runtime.faults import batches
from tests.runtime.observing import Witness, make_trainer, promptly
from tests.zoo.steps import Mlp

earlier: set[psutil.Process] = set()


@pytest.fixture(autouse=True)
def remember_processes() -> None:
    """Remembers the processes that were there before, such as workers that other tests keep."""
    earlier.clear()
    earlier.update(psutil.Process().children())


def new_processes() -> list[psutil.Process]:
    """Lists the child processes that the test has started and that are still there."""
    return [process for process in psutil.Process().children() if process not in earlier]


@pytest.fixture(autouse=True)
def temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Has the workers' folders made where the test can see that they are removed."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    gc.collect()
    assert list(folder.glob("lightning_mgpu-*")) == []


def break_torch(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts a package named torch that cannot be imported before the real one, for processes that start from now on."""
    package = folder / "broken" / "torch"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('libtorch.so is from another planet')\n")
    monkeypatch.setenv("PYTHONPATH", str(package.parent))


def use_interpreter(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Lets processes be started with a shell script in the place of Python."""
    interpreter = folder / "python"
    interpreter.write_text(f"#!/bin/sh\n{script}\n")
    interpreter.chmod(interpreter.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(sys, "executable", str(interpreter))


def test_what_the_worker_printed_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, witness = Mlp(), Witness()
    trainer = make_trainer(PipelineStrategy(), devices=3, callbacks=[witness])
    with monkeypatch.context() as broken:
        break_torch(tmp_path, broken)
        with pytest.raises(WorkerStartError) as caught, promptly(witness):
            trainer.fit(module, batches(marked=False))
        assert new_processes() == []
    first, *_, last = str(caught.value).splitlines()
    assert first == "worker 0 (cpu) ended with exit code 1 while it started; it printed:"
    assert last == "ImportError: libtorch.so is from another planet"
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__
    assert witness.exceptions == [caught.value]
    trainer.fit(module, batches(marked=False))
    assert trainer.global_step == 4


def test_an_interpreter_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(sys, "executable", "/nowhere/python")
        workers = Workers(devices=3)
        with pytest.raises(WorkerStartError) as caught:
            workers.start()
        assert str(caught.value) == (
            "worker 0 (cpu) cannot be started with '/nowhere/python', which is sys.executable: "
            "FileNotFoundError: [Errno 2] No such file or directory: '/nowhere/python'"
        )
        assert not workers.started
    with workers:
        workers.ready()
        assert workers.alive


def test_a_worker_that_ends_in_silence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_interpreter(tmp_path, monkeypatch, "exit 7")
    with pytest.raises(WorkerStartError) as caught:
        make_trainer(PipelineStrategy(), devices=2).fit(Mlp(), batches(marked=False))
    assert str(caught.value) == ("worker 0 (cpu) ended with exit code 7 while it started; it printed:\n(no output)")


def test_a_worker_that_never_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_interpreter(tmp_path, monkeypatch, "echo waiting for a licence; exec sleep 60")
    witness = Witness()
    trainer = make_trainer(PipelineStrategy(start_timeout_s=1), devices=3, callbacks=[witness])
    with pytest.raises(WorkerStartError) as caught, promptly(witness):
        trainer.fit(Mlp(), batches(marked=False))
    assert str(caught.value) == ("worker 0 (cpu) did not answer in 1 s while it started; it printed:\nwaiting for a licence")
    assert new_processes() == []


def test_one_of_two_workers_that_cannot_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = f'mkdir "{tmp_path}/taken" 2> /dev/null && exec "{sys.executable}" "$@"\necho there is room for one only\nexit 1'
    use_interpreter(tmp_path, monkeypatch, script)
    workers = Workers(devices=3)
    with pytest.raises(WorkerStartError, match=r"worker [01] .*exit code 1.*\nthere is room for one only"):
        workers.ready()
    assert new_processes() == []
    assert not workers.started


def test_a_worker_that_dies_while_it_is_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    workers = Workers(devices=3)

    def kill_and_connect(*args: Any, **kwargs: Any) -> DataPlane:
        os.kill(workers.pids[1], signal.SIGKILL)
        assert workers._processes[1].ended.wait(10)  # as the lead notices it, however late it connects
        return DataPlane(*args, **kwargs)

    monkeypatch.setattr("lightning_mgpu.runtime.workers.DataPlane", kill_and_connect)
    with pytest.raises(WorkerStartError) as caught:
        workers.ready()
    assert str(caught.value) == (
        "worker 1 (cpu) was killed by SIGKILL (out of memory, perhaps) while it was connected; it printed:\n(no output)"
    )
    assert new_processes() == []


def ended(index: int, returncode: int, how: str) -> Any:
    """Stands for a process that has ended."""
    done = threading.Event()
    done.set()
    popen = SimpleNamespace(returncode=returncode, kill=lambda: None)
    thread = SimpleNamespace(join=lambda _: None)
    return SimpleNamespace(
        index=index, ended=done, popen=popen, how_it_ended=lambda: how, output=[f"I am {index}"], threads=[thread, thread]
    )


def test_of_several_workers_that_end_the_one_that_was_killed_is_named() -> None:
    """The others end since they lost touch with it, and may be noticed first."""
    workers = Workers(devices=4)
    workers._processes = [ended(0, 1, "ended with exit code 1"), ended(1, -9, "was killed"), ended(2, 1, "ended as well")]
    with pytest.raises(WorkerStartError, match=r"worker 1 \(cpu\) was killed while it was connected; it printed:\nI am 1"):
        workers._check_connected()


def test_workers_that_nobody_used_end_at_once() -> None:
    workers = Workers(devices=2)
    workers.start()
    workers._processes[0].next()  # it says hello, and waits to be connected
    start_s = time.monotonic()
    workers.close()
    assert time.monotonic() - start_s < 2


def test_workers_outlive_the_thread_that_started_them() -> None:
    workers = Workers(devices=2)
    thread = threading.Thread(target=workers.ready)
    thread.start()
    thread.join()
    with workers, repeatable():
        pids = workers.pids
        trainer = make_trainer(PipelineStrategy(workers=workers), devices=2)
        trainer.fit(Mlp(), batches(marked=False))
        assert trainer.global_step == 4
        assert workers.pids == pids
