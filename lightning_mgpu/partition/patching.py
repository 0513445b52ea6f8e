"""Patches torch for the length of a recording, for the calling thread alone, and takes the patches off again."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from lightning_mgpu.partition.run import RecordingRun

__all__ = ["patched_calls", "unvalidated_distributions"]


@contextmanager
def patched_calls(run: RecordingRun) -> Iterator[None]:
    """Sends module calls and custom functions of the calling thread through the run."""
    thread = threading.get_ident()
    plain_call = nn.Module.__call__
    plain_apply = torch.autograd.Function.__dict__["apply"]

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != thread:
            return plain_call(module, *args, **kwargs)
        return run.module_call(module, plain_call, args, kwargs)

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        plain = plain_apply.__get__(None, cls)
        if threading.get_ident() != thread:
            return plain(*args, **kwargs)
        return run.function_apply(cls, plain, args, kwargs)

    nn.Module.__call__ = call  # type: ignore[method-assign]
    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment]
    try:
        yield
    finally:
        nn.Module.__call__ = plain_call  # type: ignore[method-assign]
        torch.autograd.Function.apply = plain_apply  # type: ignore[method-assign]


@contextmanager
def unvalidated_distributions() -> Iterator[None]:
    """Keeps torch.distributions from looking at their arguments, which may depend on weights, unless told to."""
    before = torch.distributions.Distribution._validate_args
    torch.distributions.Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        torch.distributions.Distribution.set_default_validate_args(before)
