"""What a module is made of: the modules, parameters, buffers and hooks that its plans were made for."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import nn

__all__ = ["Structure"]

_REGISTRIES = "_modules _parameters _forward_hooks _forward_pre_hooks _backward_hooks _backward_pre_hooks".split()


class Structure:
    """Remembers what a module is made of.

    What its tensors hold may change, and which objects are its buffers, since a forward may do either.

    Args:
        root: the module.
    """

    def __init__(self, root: nn.Module) -> None:
        modules = [module for module in root.modules() if not isinstance(module, torch.jit.ScriptModule)]
        registries: list[Mapping[Any, Any]] = [getattr(module, name) for module in modules for name in _REGISTRIES]
        buffers: list[Mapping[str, Any]] = [module._buffers for module in modules]
        self._empty = [each for each in (*registries, *buffers) if not each]
        self._filled = [each for each in registries if each]
        self._buffers = [each for each in buffers if each]
        self._names = [*chain.from_iterable(self._filled), *chain.from_iterable(self._buffers)]
        self._values = _values(self._filled)
        self._held = _values(self._buffers)
        self._kinds = list(map(_kind, self._held))

    def holds(self) -> bool:
        """Says whether the module is still made of the same objects under the same names, and of buffers of the same kind."""
        if any(self._empty) or [*chain.from_iterable(self._filled), *chain.from_iterable(self._buffers)] != self._names:
            return False
        held = _values(self._buffers)
        if not all(map(is_, held, self._held)):
            if list(map(_kind, held)) != self._kinds:
                return False
            self._held = held
        return all(map(is_, _values(self._filled), self._values))


def _values(registries: list[Mapping[Any, Any]]) -> list[Any]:
    return [*chain.from_iterable([each.values() for each in registries])]


def _kind(buffer: Any) -> Any:
    return None if buffer is None else (buffer.shape, buffer.dtype)
