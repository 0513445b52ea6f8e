"""What an optimizer holds beside parameters and their state: the values of its groups, and attributes of its own.

The user changes them on the lead (a scheduler, a callback, a loss scaler), a step may change them on every owner (a counter).
So owners are told what changed since they last heard, and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import cloudpickle
import torch
from torch import Tensor
from torch.optim import Optimizer

__all__ = ["COVERED", "Changes", "Settings", "apply", "group_values", "own_attributes"]

_OF_PARAMETERS = frozenset({"params", "param_names"})  # one item for each parameter of the group
COVERED = frozenset({"step", "zero_grad", "state_dict", "load_state_dict"})  # the pipeline's, or a scheduler's
_TORCHS = frozenset({
    "defaults", "state", "param_groups", "_zero_grad_profile_name", "_warned_capturable_if_run_uncaptured", "_opt_called",
})  # fmt: skip
_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device)


@dataclass(frozen=True)
class Changes:
    """Is what changed on the lead.

    Attributes:
        groups: changed values by key, for each group.
        attributes: changed attributes by name.
        gone: names of attributes that are there no more.
    """

    groups: tuple[Mapping[str, Any], ...]
    attributes: Mapping[str, Any]
    gone: tuple[str, ...] = ()

    def on_host(self) -> Changes:
        """Returns the same with tensors on the CPU, for the way to another process."""
        groups = tuple({key: _on_host(value) for key, value in group.items()} for group in self.groups)
        return Changes(groups, {name: _on_host(value) for name, value in self.attributes.items()}, self.gone)


class Settings:
    """Remembers what the owners of an optimizer know of it.

    Args:
        optimizer: the user's optimizer, as it was sent.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._groups = [_prints(group_values(group)) for group in optimizer.param_groups]
        self._attributes = _prints(own_attributes(optimizer))

    def take_changes(self, optimizer: Optimizer) -> Changes:
        """Returns what the user changed since the owners last heard, and takes it for heard."""
        groups = tuple(
            _take_changed(known, group_values(group)) for known, group in zip(self._groups, optimizer.param_groups, strict=True)
        )
        now = own_attributes(optimizer)
        gone = tuple(name for name in self._attributes if name not in now)
        for name in gone:
            del self._attributes[name]
        return Changes(groups, _take_changed(self._attributes, now), gone)

    def take_group(self, optimizer: Optimizer, index: int, values: Mapping[str, Any]) -> None:
        """Gives a group of the user's optimizer what a step made of it, unless the user changed that meanwhile."""
        group = optimizer.param_groups[index]
        _put(group, self._groups[index], values)

    def take_attributes(self, optimizer: Optimizer, values: Mapping[str, Any]) -> None:
        """Gives the user's optimizer the attributes that a step made, unless the user changed them meanwhile."""
        _put(vars(optimizer), self._attributes, values)


def group_values(group: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what a group says of all its parameters."""
    return {key: value for key, value in group.items() if key not in _OF_PARAMETERS}


def own_attributes(optimizer: Optimizer) -> dict[str, Any]:
    """Returns what a subclass keeps on itself, or of it what its ``__getstate__`` gives to a copy."""
    found: Any = vars(optimizer)
    if type(optimizer).__getstate__ is not Optimizer.__getstate__:
        found = optimizer.__getstate__()
        if not isinstance(found, dict):
            return {}
    return {name: value for name, value in found.items() if not _is_torchs(name)}


def _is_torchs(name: str) -> bool:
    return name in _TORCHS or name in COVERED or (name.startswith("_optimizer_") and name.endswith("_hooks"))


def apply(optimizer: Optimizer, changes: Changes) -> None:
    """Changes an owner's part as the lead's optimizer was changed."""
    for group, values in zip(optimizer.param_groups, changes.groups, strict=True):
        for key, value in values.items():
            known = group.get(key)
            if isinstance(known, Tensor) and isinstance(value, Tensor) and known.shape == value.shape:
                with torch.no_grad():
                    known.copy_(value)
            else:
                group[key] = value
    for name in changes.gone:
        vars(optimizer).pop(name, None)
    vars(optimizer).update(changes.attributes)


# -- telling whether a value changed -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Pickled:
    """Is the print of a value that can change in place."""

    content: bytes


def _prints(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _print(value) for key, value in values.items()}


def _print(value: Any) -> Any:
    """Returns something that stays as it is and tells whether the value is another one by now."""
    if value is None or isinstance(value, _PLAIN):
        return value
    if isinstance(value, tuple) and all(item is None or isinstance(item, _PLAIN) for item in value):
        return value
    if type(value) is Tensor:
        return value.detach().clone()
    try:
        return _Pickled(cloudpickle.dumps(value))
    except Exception:  # what can't be pickled can't be sent either, and the attempt to send it says so
        return value


def _is_same(known: Any, now: Any) -> bool:
    if type(known) is not type(now):
        return False
    if isinstance(known, Tensor):
        return known.shape == now.shape and known.dtype == now.dtype and known.device == now.device and torch.equal(known, now)
    return bool(known == now)


def _take_changed(known: dict[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    prints = _prints(now)
    changed = {key: now[key] for key in now if key not in known or not _is_same(known[key], prints[key])}
    known.update({key: prints[key] for key in changed})
    return changed


def _put(target: dict[str, Any], known: dict[str, Any], values: Mapping[str, Any]) -> None:
    for key, value in values.items():
        made = _print(value)
        untouched = _is_same(known[key], _print(target[key])) if key in known and key in target else key not in target
        if untouched and not (key in known and _is_same(known[key], made)):
            target[key] = value
            known[key] = made


def _on_host(value: Any) -> Any:
    return value.detach().cpu() if type(value) is Tensor else value
