"""What every test has: a check that it leaves the process as it found it, a seed, and a skip where there is no GPU."""

import gc
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist
from torch import nn

# Variables that libraries set for good, and mean to: they are put back after the test, but are no leak of ours.
_SET_BY_LIBRARIES = {
    "KMP_DUPLICATE_LIB_OK",  # scikit-learn, when it is imported
    "KMP_INIT_AT_FORK",  # scikit-learn, when it is imported
    "PL_GLOBAL_SEED",  # lightning.seed_everything
    "PL_SEED_WORKERS",  # lightning.seed_everything
    "PYTEST_CURRENT_TEST",
    "PYTORCH_NVML_BASED_CUDA_CHECK",  # lightning, when it is imported
}
_GRACE_S = 10.0  # for processes that have been told to end


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips what is marked ``gpu`` where there is no CUDA device."""
    if item.get_closest_marker("gpu") is not None and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


@pytest.fixture
def seed() -> int:
    """Seeds every generator that a model or its data may draw from."""
    number = 0
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)
    return number


class HeldProcesses:
    """The processes that fixtures of the session keep from test to test."""

    def __init__(self) -> None:
        self.held: set[psutil.Process] = set()

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Holds the child processes that its body starts."""
        before = set(_children())
        yield
        self.held.update(set(_children()) - before)


@pytest.fixture(scope="session")
def held_processes() -> HeldProcesses:
    """Where a fixture of the session tells of processes that it starts in the middle of a test and keeps."""
    return HeldProcesses()


@pytest.fixture(autouse=True)
def leaves_no_trace(held_processes: HeldProcesses) -> Iterator[None]:
    """Fails a test that leaves variables, processes or changed global state behind."""
    environment = dict(os.environ)
    state = _GlobalState.now()
    children = set(_children())
    yield
    leaks = [*_changes(environment, dict(os.environ)), *state.changes(), *_survivors(children | held_processes.held)]
    _restore(environment)
    if leaks:
        pytest.fail("the test left behind: " + "; ".join(leaks), pytrace=False)


@dataclass(frozen=True)
class _GlobalState:
    """What a run may change for its own time, and has to put back; generators are not among it."""

    num_threads: int
    default_dtype: torch.dtype
    default_device: torch.device
    deterministic: bool
    grad_enabled: bool
    inference_mode: bool
    autocast: bool
    num_function_modes: int
    process_group: bool
    module_call: Any
    excepthook: Any
    handlers: tuple[Any, ...]
    working_dir: Path

    @classmethod
    def now(cls) -> "_GlobalState":
        return cls(
            num_threads=torch.get_num_threads(),
            default_dtype=torch.get_default_dtype(),
            default_device=torch.get_default_device(),
            deterministic=torch.are_deterministic_algorithms_enabled(),
            grad_enabled=torch.is_grad_enabled(),
            inference_mode=torch.is_inference_mode_enabled(),
            autocast=torch.is_autocast_enabled("cpu"),
            num_function_modes=torch._C._len_torch_function_stack(),
            process_group=dist.is_available() and dist.is_initialized(),
            module_call=nn.Module.__call__,
            excepthook=sys.excepthook,
            handlers=tuple(signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)),
            working_dir=Path.cwd(),
        )

    def changes(self) -> list[str]:
        now = _GlobalState.now()
        return [
            f"{field.name} {getattr(now, field.name)} (was {getattr(self, field.name)})"
            for field in fields(self)
            if getattr(now, field.name) != getattr(self, field.name)
        ]


def _changes(before: dict[str, str], after: dict[str, str]) -> list[str]:
    names = sorted((before.keys() | after.keys()) - _SET_BY_LIBRARIES)
    return [
        f"environment variable {name}={after.get(name)!r} (was {before.get(name)!r})"
        for name in names
        if before.get(name) != after.get(name)
    ]


def _restore(environment: dict[str, str]) -> None:
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment)


def _children() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def _survivors(expected: set[psutil.Process]) -> list[str]:
    """Names the child processes that the test started and that do not end by themselves."""
    deadline_s = time.monotonic() + _GRACE_S
    while True:
        alive = [process for process in _children() if process not in expected]
        described = [text for text in map(_describe, alive) if text is not None]
        if not described or time.monotonic() > deadline_s:
            return described
        gc.collect()  # a Trainer that only a reference cycle holds still holds its workers
        time.sleep(0.05)


def _describe(process: psutil.Process) -> str | None:
    """Describes a running process; None for one that has ended or that multiprocessing keeps for the whole session."""
    try:
        command = " ".join(process.cmdline())
        ended = process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return None
    if ended or "multiprocessing.resource_tracker" in command:
        return None
    return f"process {process.pid} ({command})"
