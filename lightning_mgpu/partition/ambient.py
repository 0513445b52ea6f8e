"""Ambient state: the modes of torch that surround a call and change what it computes.

A recorded node is replayed under the modes it was recorded under, so that a frozen teacher inside ``torch.no_grad()`` stays
frozen and an ``autocast`` part of a forward keeps its dtype.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

__all__ = ["Ambient"]


def _device_types() -> tuple[str, ...]:
    return ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)


@dataclass(frozen=True)
class Ambient:
    """Holds grad mode, inference mode, autocast (per device type: enabled, dtype) and the default dtype as plain values."""

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    autocast_cache: bool
    default_dtype: torch.dtype

    @classmethod
    def current(cls) -> Ambient:
        """Reads the modes of the calling thread."""
        return cls(
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            tuple((d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in _device_types()),
            torch.is_autocast_cache_enabled(),
            torch.get_default_dtype(),
        )

    def without_inference(self) -> Ambient:
        """Returns the same modes with inference mode as plain ``no_grad``."""
        return replace(self, inference=False)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Puts the modes in force, and the earlier ones back at the end."""
        before = Ambient.current()
        if self.inference != before.inference:
            with torch.inference_mode(self.inference), self._plain(Ambient.current()):
                yield
        else:
            with self._plain(before):
                yield

    @contextmanager
    def _plain(self, before: Ambient) -> Iterator[None]:
        try:
            self._set()
            yield
        finally:
            before._set()
            if any(enabled for _, enabled, _ in self.autocast):
                torch.clear_autocast_cache()

    def _set(self) -> None:
        torch.set_grad_enabled(self.grad)
        for device_type, enabled, dtype in self.autocast:
            torch.set_autocast_enabled(device_type, enabled)
            torch.set_autocast_dtype(device_type, dtype)
        torch.set_autocast_cache_enabled(self.autocast_cache)
        if self.default_dtype != torch.get_default_dtype():
            torch.set_default_dtype(self.default_dtype)
