"""Trees of values: whatever a module takes or returns, taken apart into leaves and put together again.

Builds on ``torch.utils._pytree`` (lists, tuples, dicts, named tuples and the types libraries register there) and adds what
users put around tensors besides: dataclasses, and plain objects with tensors among their attributes.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

__all__ = ["Spec", "flatten", "map_tensors", "tensors_in", "unflatten"]

_ATOMS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, type, range, slice)
_MAX_DEPTH = 8


def _is_packed(obj: Any) -> bool:
    return isinstance(obj, PackedSequence)


@dataclasses.dataclass(frozen=True)
class _Opaque:
    """Stands for an object without its tensors: a template and the names of the attributes that were taken out."""

    template: Any
    names: tuple[str, ...]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Opaque) and type(self.template) is type(other.template) and self.names == other.names

    def __hash__(self) -> int:
        return hash((type(self.template), self.names))

    def build(self, values: Iterable[Any]) -> Any:
        if self.template is PackedSequence:  # its constructor looks into its parts, which may stand for tensors
            return tuple.__new__(PackedSequence, values)
        obj = copy.copy(self.template)
        for name, value in zip(self.names, values, strict=True):
            object.__setattr__(obj, name, value)
        return obj


@dataclasses.dataclass(frozen=True)
class Spec:
    """Says how leaves make up a tree: the pytree's own spec, and for each of its leaves an object's, or ``None``."""

    outer: pytree.TreeSpec
    inner: tuple[tuple[_Opaque, tuple[Spec, ...]] | None, ...]

    @property
    def num_leaves(self) -> int:
        return sum(1 if part is None else sum(s.num_leaves for s in part[1]) for part in self.inner)


def flatten(tree: Any) -> tuple[list[Any], Spec]:
    """Takes a tree apart.

    Args:
        tree: any nesting of lists, tuples, dicts, named tuples, dataclasses, registered pytree types and objects whose
            attributes hold tensors.

    Returns:
        The leaves in order, and the spec that `unflatten` needs to put them together again.
    """
    return _flatten(tree, 0, set())


def _flatten(tree: Any, depth: int, seen: set[int]) -> tuple[list[Any], Spec]:
    outer_leaves, outer = pytree.tree_flatten(tree, is_leaf=_is_packed)
    leaves: list[Any] = []
    inner: list[tuple[_Opaque, tuple[Spec, ...]] | None] = []
    for leaf in outer_leaves:
        names = () if isinstance(leaf, (Tensor, *_ATOMS)) else _tensor_attributes(leaf, depth, seen)
        if not names:
            leaves.append(leaf)
            inner.append(None)
            continue
        specs = []
        for name in names:
            part, spec = _flatten(getattr(leaf, name), depth + 1, seen | {id(leaf)})
            leaves.extend(part)
            specs.append(spec)
        template = PackedSequence if _is_packed(leaf) else leaf
        inner.append((_Opaque(template, names), tuple(specs)))
    return leaves, Spec(outer, tuple(inner))


def unflatten(leaves: Iterable[Any], spec: Spec) -> Any:
    """Puts a tree together from its leaves, the inverse of `flatten`; objects are copied, never changed."""
    rest = iter(leaves)
    return _unflatten(rest, spec)


def _unflatten(rest: Any, spec: Spec) -> Any:
    outer_leaves = []
    for part in spec.inner:
        if part is None:
            outer_leaves.append(next(rest))
        else:
            opaque, specs = part
            outer_leaves.append(opaque.build([_unflatten(rest, s) for s in specs]))
    return pytree.tree_unflatten(outer_leaves, spec.outer)


def _tensor_attributes(obj: Any, depth: int, seen: set[int]) -> tuple[str, ...]:
    """Lists the attributes of an object that holds tensors, all of them, so that the others count as leaves as well."""
    if depth >= _MAX_DEPTH or id(obj) in seen or isinstance(obj, (torch.nn.Module, torch.Generator, type)) or callable(obj):
        return ()
    if _is_packed(obj):
        return tuple(obj._fields)
    if dataclasses.is_dataclass(obj):
        names = [field.name for field in dataclasses.fields(obj) if hasattr(obj, field.name)]
        names += [name for name in getattr(obj, "__dict__", ()) if name not in names]
    else:
        names = list(getattr(obj, "__dict__", ()))
    inside = seen | {id(obj)}
    return tuple(names) if any(_holds_tensor(getattr(obj, name), depth + 1, inside) for name in names) else ()


def _holds_tensor(value: Any, depth: int, seen: set[int]) -> bool:
    if isinstance(value, Tensor):
        return True
    if isinstance(value, _ATOMS):
        return False
    return any(
        isinstance(leaf, Tensor) or (not isinstance(leaf, _ATOMS) and bool(_tensor_attributes(leaf, depth, seen)))
        for leaf in pytree.tree_leaves(value)
    )


def map_tensors(function: Callable[[Tensor], Any], tree: Any) -> Any:
    """Builds the same tree with ``function(tensor)`` in the place of each tensor."""
    leaves, spec = flatten(tree)
    return unflatten([function(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec)


def tensors_in(tree: Any) -> list[Tensor]:
    """Lists the tensors of a tree in order."""
    return [leaf for leaf in flatten(tree)[0] if isinstance(leaf, Tensor)]
