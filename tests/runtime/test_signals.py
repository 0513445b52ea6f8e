"""The lead ends by a signal, and all its processes with it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import torch

from tests.runtime.observing import LIMIT_S

ROOT = Path(__file__).parents[2]
START_LIMIT_S = 90.0


@dataclass
class Run:
    """Is a script that trains under another Python.

    Attributes:
        lead: The process.
        workers: The worker processes.
        all: All of its processes, itself included.
    """

    lead: subprocess.Popen[str]
    workers: list[psutil.Process]
    all: list[psutil.Process]

    def ends(self) -> tuple[int, str]:
        """Waits for the end of all processes.

        Returns:
            The lead's exit code, and what it wrote on standard error.
        """
        deadline_s = time.monotonic() + LIMIT_S
        _, errors = self.lead.communicate(timeout=LIMIT_S)
        _, alive = psutil.wait_procs(self.all, timeout=deadline_s - time.monotonic())
        assert not alive, f"still running: {alive}"
        return self.lead.returncode, errors


@contextmanager
def training(folder: Path, *, num_stages: int = 2, num_loader_workers: int = 0) -> Iterator[Run]:
    """Starts a run in a process group of its own and waits until it is under way."""
    command = [sys.executable, "-W", "ignore", str(ROOT / "tests/runtime/scripts/endless.py")]
    lead = subprocess.Popen(
        [*command, str(num_stages), str(num_loader_workers), str(folder)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    run = Run(lead, [], [])
    try:
        assert lead.stdout is not None
        pids = json.loads(lead.stdout.readline() or "{}")
        assert pids, lead.communicate()[1]
        run.workers = [psutil.Process(pid) for pid in pids["workers"]]
        run.all = [psutil.Process(pid) for pid in pids["all"]]
        assert len(run.workers) == num_stages - 1
        assert len(run.all) >= num_stages + num_loader_workers
        yield run
    finally:
        for process in run.all:
            if process.is_running():
                process.kill()
        lead.kill()
        lead.communicate()


@pytest.mark.parametrize(
    ("num_stages", "num_loader_workers"), [pytest.param(3, 0, id="alone"), pytest.param(2, 1, id="with a loader process")]
)
def test_lead_is_killed(num_stages: int, num_loader_workers: int, tmp_path: Path) -> None:
    with training(tmp_path, num_stages=num_stages, num_loader_workers=num_loader_workers) as run:
        run.lead.kill()
        assert run.ends()[0] == -signal.SIGKILL


def interrupt(run: Run) -> None:
    run.lead.send_signal(signal.SIGINT)


def interrupt_group(run: Run) -> None:
    """Does what Ctrl-C in a terminal does."""
    os.killpg(run.lead.pid, signal.SIGINT)


@pytest.mark.parametrize(
    ("send", "num_stages", "num_loader_workers"),
    [(interrupt, 2, 0), (interrupt_group, 3, 0), (interrupt_group, 2, 1)],
)
def test_ctrl_c(send: Callable[[Run], None], num_stages: int, num_loader_workers: int, tmp_path: Path) -> None:
    with training(tmp_path, num_stages=num_stages, num_loader_workers=num_loader_workers) as run:
        send(run)
        code, errors = run.ends()
    assert code == 1, errors
    assert "Detected KeyboardInterrupt, attempting graceful shutdown" in errors
    if not num_loader_workers:  # a loader process of torch's prints the traceback of its own interrupt
        assert "Traceback" not in errors
    check_checkpoint(tmp_path)


def test_lead_is_asked_to_end(tmp_path: Path) -> None:
    with training(tmp_path, num_stages=3) as run:
        run.lead.terminate()
        code, errors = run.ends()
    assert "Received SIGTERM" in errors
    assert "Traceback" not in errors
    assert code == 0, errors  # Lightning's own, on one device as well
    check_checkpoint(tmp_path)


def check_checkpoint(folder: Path) -> None:
    """Checks that Lightning wrote its checkpoint on exceptions, with whole and finite values."""
    [path] = folder.glob("*.ckpt")
    saved = torch.load(path, weights_only=True)
    assert saved["state_dict"].keys() == {f"fc{i}.{kind}" for i in (1, 2, 3) for kind in ("weight", "bias")}
    assert all(value.isfinite().all() for value in saved["state_dict"].values())
    assert len(saved["optimizer_states"][0]["state"]) == 6
    assert saved["global_step"] > 0
