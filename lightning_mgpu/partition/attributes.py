"""Python values of modules that a forward reads: watched while it is recorded, compared before each call.

``self.current_epoch``, ``self.config.num_beams`` or ``self.scale = 0.5`` steer a forward without being tensors. A recording
is only valid while they are what they were, so every read is a guard.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_mgpu import tree

__all__ = ["AttributeGuards", "is_simple", "watched"]

_SIMPLE = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, enum.Enum)
_INTERNAL = frozenset(nn.Module().__dict__) | {"_compiled_call_impl", "trainer", "_trainer", "_fabric", "_log_hyperparams"}
_MAX_ITEMS = 256
_MISSING = object()


def is_simple(value: Any) -> bool:
    """Says whether a value is compared by ``==`` alone: numbers, strings, dtypes, enums, None."""
    return value is None or isinstance(value, _SIMPLE)


def _fingerprint(value: Any, depth: int = 0) -> Any:
    """Reduces a value to something that changes when the value does; ``_MISSING`` where nothing can be said."""
    if is_simple(value):
        return (type(value), value)
    if isinstance(value, Tensor):  # a parameter may be fake or live elsewhere, and changes without changing the forward
        return (id(value), 0 if value.is_inference() else value._version) if type(value) is Tensor else Tensor
    if depth > 2 or isinstance(value, (nn.Module, type)) or callable(value):
        return _MISSING
    if isinstance(value, (list, tuple, set, frozenset)) and len(value) <= _MAX_ITEMS:
        items = sorted(value, key=repr) if isinstance(value, (set, frozenset)) else value
        return (type(value), *(_fingerprint(item, depth + 1) for item in items))
    entries = value if isinstance(value, dict) else getattr(value, "__dict__", None)
    if isinstance(entries, dict) and 0 < len(entries) <= _MAX_ITEMS:
        return (type(value), *((key, _fingerprint(entries[key], depth + 1)) for key in list(entries)))
    return _MISSING


class AttributeGuards:
    """Holds the attributes a forward read, each with what it was.

    Attributes:
        seen: fingerprints by (module, attribute name).
    """

    def __init__(self) -> None:
        self.seen: dict[tuple[int, str], tuple[nn.Module, Any]] = {}

    def note(self, module: nn.Module, name: str, value: Any) -> None:
        """Takes down one read; only the first of each attribute counts."""
        key = (id(module), name)
        if key in self.seen or name in _INTERNAL or name == "training" or name.startswith("__"):
            return
        if name not in object.__getattribute__(module, "__dict__") and tree.tensors_in(value):
            return  # a property computes it from values that are noted themselves
        fingerprint = _fingerprint(value)
        if fingerprint is not _MISSING:
            self.seen[key] = (module, fingerprint)

    def changed(self) -> str | None:
        """Returns the name of an attribute that is no longer what it was, or ``None``."""
        known: dict[int, tuple[Any, Any]] = {}  # configurations are shared by many modules: look at each once
        for (_, name), (module, fingerprint) in self.seen.items():
            try:
                value = getattr(module, name)
            except AttributeError:
                return name
            if is_simple(value):
                now = (type(value), value)
            else:
                if id(value) not in known:
                    known[id(value)] = value, _fingerprint(value)  # held, so that its id stays its own
                now = known[id(value)][1]
            if now != fingerprint:
                return name
        return None

    def simple_values(self, module: nn.Module) -> dict[str, Any]:
        """Returns the simple attributes that were read from one module and stand in its ``__dict__``."""
        return {
            name: module.__dict__[name]
            for (owner, name) in self.seen
            if owner == id(module) and name in module.__dict__ and is_simple(module.__dict__[name])
        }


@contextmanager
def watched(note: Callable[[nn.Module, str, Any], None]) -> Iterator[None]:
    """Reports every attribute read from a module by the calling thread, for the length of the context."""
    thread = threading.get_ident()
    plain = object.__getattribute__

    def read(module: nn.Module, name: str) -> Any:
        value = plain(module, name)
        if threading.get_ident() == thread and not callable(value):
            note(module, name, value)
        return value

    nn.Module.__getattribute__ = read  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        del nn.Module.__getattribute__
