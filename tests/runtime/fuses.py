"""Ways to break, and layers that break on a marked row.

A marked row holds NaN, which every layer passes on, so whatever stands behind a layer can tell which microbatch it has.
Nothing here imports lightning, so that a worker that gets such a layer need not either.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

TEXT = "this row is marked"


class LockedError(Exception):
    """Can't be pickled, since it holds a lock."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


def do_nothing() -> None:
    """Lets marked rows pass."""


def raise_error() -> None:
    raise ValueError(TEXT)


def raise_os_error() -> None:
    raise FileNotFoundError(TEXT)


def raise_unpicklable() -> None:
    raise LockedError(TEXT)


def exit_with_3() -> None:
    os._exit(3)


def need_too_much_memory() -> None:
    """Asks for a gigabyte where this process may have a hundred megabytes more than it has."""
    import resource

    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0])
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 100 * 2**20, limits[1]))
    try:
        torch.ones(2**28)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def sleep_a_minute() -> None:
    time.sleep(60)


class Fuse(nn.Module):
    """Passes its input on, and breaks in the forward when it holds a marked row.

    Args:
        break_: What breaking is.
    """

    def __init__(self, break_: Callable[[], None]) -> None:
        super().__init__()
        self.break_ = break_

    @override
    def forward(self, x: Tensor) -> Tensor:
        if x.isnan().any():
            self.break_()
        return x * 1


class BackwardFuse(torch.autograd.Function):
    """Passes its input on, and breaks in the backward when it held a marked row."""

    @staticmethod
    @override
    def forward(ctx: Any, x: Tensor, break_: Callable[[], None]) -> Tensor:
        ctx.save_for_backward(x)
        ctx.break_ = break_
        return x * 1

    @staticmethod
    @override
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        if ctx.saved_tensors[0].isnan().any():
            ctx.break_()
        return gradient, None


class FaultySgd(torch.optim.SGD):
    """Breaks when it steps parameters of one shape for the third time.

    Args:
        params: The parameters.
        shape: The shape.
    """

    def __init__(self, params: Iterable[nn.Parameter], shape: tuple[int, ...]) -> None:
        super().__init__(params, lr=0.1)
        self.defaults["shape"] = shape

    @override
    def step(self, closure: Any = None) -> None:
        for parameter in (parameter for group in self.param_groups for parameter in group["params"]):
            state = self.state[parameter]
            state["num_steps"] = state.get("num_steps", 0) + 1
            if state["num_steps"] == 3 and parameter.shape == self.defaults["shape"]:
                raise_error()
        super().step(closure)


def line_of(text: str) -> str:
    """Finds a line of this file, in the form in which tracebacks name it."""
    lines = Path(__file__).read_text().splitlines()
    [number] = [number for number, line in enumerate(lines, start=1) if line.strip() == text]
    return f'{Path(__file__).name}", line {number}, in '
