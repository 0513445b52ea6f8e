"""Takes objects apart for the way to another process: a pickle without tensors, and the tensors beside it.

The pickle goes over the control connection, the tensors over the data plane. Parameters, buffers and modules the receiver
already has are sent as names.
"""

from __future__ import annotations

import io
import marshal
import pickle
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import cloudpickle
import torch
from torch import Tensor, nn

from lightning_mgpu.errors import ShippingError

__all__ = ["Packed", "TensorHeader", "pack", "unpack"]


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """Is what a receiver must know of a tensor before it comes."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    on_host: bool


@dataclass
class Packed:
    """Is an object on its way.

    Attributes:
        payload: the pickle.
        headers: description of each tensor beside it.
        tensors: the tensors themselves; not part of what the control connection carries.
    """

    payload: bytes
    headers: tuple[TensorHeader, ...]
    tensors: list[Tensor] = field(default_factory=list)

    def header(self) -> Packed:
        """Returns the part for the control connection."""
        return Packed(self.payload, self.headers)


def _reduce_code(code: types.CodeType) -> tuple[Any, ...]:
    """Keeps a function's file and lines, which cloudpickle leaves out, so that a remote traceback names the user's line."""
    return marshal.loads, (marshal.dumps(code),)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    dispatch_table = cloudpickle.Pickler.dispatch_table.new_child({types.CodeType: _reduce_code})

    def __init__(self, file: io.BytesIO, names: Mapping[int, str], modules: Mapping[int, str]) -> None:
        super().__init__(file)
        self.names = names
        self.modules = modules
        self.tensors: list[Tensor] = []
        self.index: dict[int, int] = {}

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, Tensor):
            if id(obj) in self.names:
                return "name", self.names[id(obj)]
            if type(obj) not in (Tensor, nn.Parameter) or obj.layout != torch.strided or obj.is_quantized or obj.is_meta:
                return None
            if id(obj) not in self.index:
                self.index[id(obj)] = len(self.tensors)
                self.tensors.append(obj)
            return "tensor", self.index[id(obj)], isinstance(obj, nn.Parameter)
        if isinstance(obj, nn.Module) and id(obj) in self.modules:
            return "module", self.modules[id(obj)]
        return None


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensors: Sequence[Tensor], find: Callable[[str, str], Any]) -> None:
        super().__init__(file)
        self.tensors = tensors
        self.find = find
        self.parameters: dict[int, nn.Parameter] = {}

    def persistent_load(self, pid: Any) -> Any:
        kind, key, *more = pid
        if kind != "tensor":
            return self.find(kind, key)
        tensor = self.tensors[key]
        if not more[0]:
            return tensor
        if key not in self.parameters:
            self.parameters[key] = nn.Parameter(tensor, requires_grad=tensor.requires_grad)
        return self.parameters[key]


def pack(
    obj: Any, *, names: Mapping[int, str] | None = None, modules: Mapping[int, str] | None = None, what: str = "object"
) -> Packed:
    """Takes an object apart.

    Args:
        obj: anything that cloudpickle can pickle.
        names: name by ``id`` of the tensors the receiver has.
        modules: path by ``id`` of the modules the receiver has.
        what: names the object in errors.

    Returns:
        The parts.

    Raises:
        ShippingError: where something in it can't be pickled, with the way to it.
    """
    file = io.BytesIO()
    pickler = _Pickler(file, names or {}, modules or {})
    try:
        pickler.dump(obj)
    except Exception as error:  # pickling user objects may raise anything
        raise ShippingError(_unpicklable_text(obj, what, names or {}, modules or {}, error)) from error
    headers = tuple(TensorHeader(tuple(t.shape), t.dtype, t.requires_grad, t.device.type == "cpu") for t in pickler.tensors)
    return Packed(file.getvalue(), headers, pickler.tensors)


def unpack(packed: Packed, find: Callable[[str, str], Any]) -> Any:
    """Puts an object together from its parts.

    Args:
        packed: the parts, with the tensors.
        find: looks up ``("name", name)`` and ``("module", path)``.
    """
    return _Unpickler(io.BytesIO(packed.payload), packed.tensors, find).load()


def _unpicklable_text(obj: Any, what: str, names: Mapping[int, str], modules: Mapping[int, str], error: Exception) -> str:
    way = _way_to_fault(obj, names, modules)
    return (
        f"cannot send {what} to its stage, since {way or 'a part of it'} can't be pickled: {type(error).__name__}: {error}; "
        'create it when it is first used, leave it out in __getstate__, or keep the module on the lead with module="..."'
    )


def _pickles(obj: Any, names: Mapping[int, str], modules: Mapping[int, str]) -> bool:
    try:
        _Pickler(io.BytesIO(), names, modules).dump(obj)
    except Exception:
        return False
    return True


def _way_to_fault(obj: Any, names: Mapping[int, str], modules: Mapping[int, str], depth: int = 0) -> str:
    """Follows attributes and items down to the innermost part that can't be pickled."""
    if depth > 6:
        return ""
    if isinstance(obj, nn.Module):
        parts = [(f"attribute {key!r} of {type(obj).__name__}", value) for key, value in vars(obj).items()]
    elif isinstance(obj, dict):
        parts = [(f"{key!r}", value) for key, value in obj.items()]
    elif isinstance(obj, (list, tuple)):
        parts = [(f"item {i}", value) for i, value in enumerate(obj)]
    else:
        parts = [(f"attribute {key!r} of {type(obj).__name__}", value) for key, value in getattr(obj, "__dict__", {}).items()]
    for label, value in parts:
        if not _pickles(value, names, modules):
            inner = _way_to_fault(value, names, modules, depth + 1)
            return f"{inner} in {label}" if inner else label
    return ""
