"""Rules of calls that rearrange elements: views, transposes, parts, joins."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from lightning_mgpu.partition.graph import Ref
from lightning_mgpu.partition.tensor.call import Call, Rewrite
from lightning_mgpu.partition.tensor.layout import Layout
from lightning_mgpu.partition.tensor.regroup import groups, place
from lightning_mgpu.partition.tensor.sharded import NeedsCutsError, NoRuleError, Sharded

__all__ = ["RULES"]

Rule = Callable[[Call], Rewrite | None]
_MAX_SEGMENTS = 256


# -- views ----------------------------------------------------------------------------------------------------------------


def _local(shape: Sequence[int], state: Sharded, num_ranks: int) -> tuple[int, ...]:
    """Returns the sizes that every rank's part has, to be written into a call."""
    if not state.layout.is_even(num_ranks):
        raise NoRuleError(f"names sizes, and {state.width} does not divide by {num_ranks}")
    return (*shape[: state.dim], state.width // num_ranks, *shape[state.dim + 1 :])


def _reshape(call: Call) -> Rewrite:
    state, new = call.only_first(), call.result()
    if "dtype" in call.kwargs or any(isinstance(arg, torch.dtype) for arg in call.args):
        raise NoRuleError("shows the memory of a value that is split over the ranks in another dtype")
    if state is None:
        return Rewrite(call.all_outputs(None), target=Tensor.reshape, args=(call.args[0], new), enter=False)
    moved = _regrouped(call.shape(call.args[0]), new, state, call.num_ranks)
    return Rewrite(call.all_outputs(moved), target=Tensor.reshape, args=(call.args[0], _local(new, moved, call.num_ranks)))


def _regrouped(old: Sequence[int], new: Sequence[int], state: Sharded, num_ranks: int) -> Sharded:
    if math.prod(old) != math.prod(new) or math.prod(old) == 0:
        raise NoRuleError("shows the memory of a value that is split over the ranks in another dtype")
    (a, b), (c, d) = next(pair for pair in groups(old, new) if pair[0][0] <= state.dim < pair[0][1])
    if (b - a, d - c) == (1, 1):
        return state.at(c)
    before, after = math.prod(old[a : state.dim]), math.prod(old[state.dim + 1 : b])
    if before * len(state.segments) > _MAX_SEGMENTS:
        raise NoRuleError(f"merges a dimension that is split over the ranks with {before} others before it")
    segments = tuple(size * after for size in state.segments) * before
    found = place(segments, new[c:d], num_ranks)
    if found is not None:
        index, placed = found
        return replace(state, dim=c + index, segments=placed, spans=state.spans and before == 1 and index == 0)
    raise _cannot_place(state, segments, new[c:d], num_ranks)


def _cannot_place(state: Sharded, segments: tuple[int, ...], dims: Sequence[int], num_ranks: int) -> Exception:
    """Returns the error for a view that splits a dimension; with segments for each of the first of its parts it may work."""
    first = next((size for size in dims if size > 1), 1)
    if state.spans and sum(segments) % first == 0 and len(segments) < first:
        each = sum(segments) // first
        if place((each,) * first, dims, num_ranks) is not None:
            return NeedsCutsError(state.sources, (Fraction(i, first) for i in range(first)))
    parts = " x ".join(map(str, dims))
    return NoRuleError(f"shows {sum(segments)} elements as {parts}, and {first} does not divide by {num_ranks}")


def _expand(call: Call) -> Rewrite:
    state, new = call.only_first(), call.result()
    if state is None:
        return Rewrite(call.all_outputs(None), target=Tensor.expand, args=(call.args[0], new), enter=False)
    moved = state.at(state.dim + len(new) - len(call.shape(call.args[0])))
    return Rewrite(call.all_outputs(moved), target=Tensor.expand, args=(call.args[0], _local(new, moved, call.num_ranks)))


def _repeat(call: Call) -> Rewrite:
    state = call.only()
    old, new = call.shape(call.args[0]), call.result()
    dim = state.dim + len(new) - len(old)
    times = new[dim] // old[state.dim]
    moved = replace(state, dim=dim, segments=state.segments * times, spans=state.spans and times == 1)
    return Rewrite(call.all_outputs(moved))


def _repeat_interleave(call: Call) -> Rewrite:
    state = call.only()
    times, dim = call.argument(1, "repeats"), call.argument(2, "dim")
    if not isinstance(times, int) or not isinstance(dim, int):
        raise NoRuleError("repeats elements by a tensor, or across dimensions")
    if dim % len(call.shape(call.args[0])) == state.dim:
        state = replace(state, segments=tuple(size * times for size in state.segments))
    return Rewrite(call.all_outputs(state))


# -- transposes -----------------------------------------------------------------------------------------------------------


def _transposing(order_of: Callable[[Call, int], Sequence[int]]) -> Rule:
    """Makes a rule from the order in which a call puts dimensions."""

    def rule(call: Call) -> Rewrite:
        state = call.only()
        rank = len(call.shape(call.args[0]))
        order = [d % rank for d in order_of(call, rank)]
        return Rewrite(call.all_outputs(state.at(order.index(state.dim))))

    return rule


def _swapped(rank: int, a: int, b: int) -> list[int]:
    order = list(range(rank))
    order[a], order[b] = order[b], order[a]
    return order


def _transpose(call: Call, rank: int) -> list[int]:
    names = ("dim0", "dim1") if call.name == "transpose" else ("axis0", "axis1")
    return _swapped(rank, call.argument(1, names[0]), call.argument(2, names[1]))


def _permute(call: Call, _rank: int) -> Sequence[int]:
    given = call.args[1:] or (call.kwargs["dims"],)
    return given[0] if len(given) == 1 and not isinstance(given[0], int) else given


def _movedim(call: Call, rank: int) -> list[int]:
    source, target = call.argument(1, "source"), call.argument(2, "destination")
    sources, targets = ([d] if isinstance(d, int) else list(d) for d in (source, target))
    sources, targets = [d % rank for d in sources], [d % rank for d in targets]
    rest = iter(d for d in range(rank) if d not in sources)
    return [sources[targets.index(d)] if d in targets else next(rest) for d in range(rank)]


def _attribute(call: Call) -> Rewrite:
    """Reads a property of a tensor that is a tensor."""
    name = call.args[1]
    rank = len(call.shape(call.args[0]))
    if name in ("T", "mT", "H", "mH"):
        order = list(range(rank))[::-1] if name in ("T", "H") else _swapped(rank, -1, -2)
        return _transposing(lambda *_: order)(call)  # type: ignore[return-value]
    if name == "data":
        return Rewrite(call.all_outputs(call.only()))
    raise NoRuleError(f"reads {name!r} of a value that is split over the ranks")


# -- parts ----------------------------------------------------------------------------------------------------------------


def _split(call: Call) -> Rewrite:
    """Splits into parts of given sizes, each of them a tensor."""
    state = call.only()
    value, rank = call.args[0], len(call.shape(call.args[0]))
    dim = call.argument(2, "dim", 0)
    if not isinstance(dim, int) or dim % rank != state.dim:
        return Rewrite(call.all_outputs(state))
    sizes = [shape[state.dim] for shape in call.outputs() if shape is not None]
    if sum(sizes) != state.width or len(sizes) < len(call.node.outputs):
        raise NoRuleError("does not split a value into all of its parts")
    bounds = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    if any(bound not in state.bounds() for bound in bounds):
        raise state.needs(*bounds[:-1])
    parts = tuple(state.part(a, b) for a, b in itertools.pairwise(bounds))
    local = [_local(shape, part, call.num_ranks)[state.dim] for shape, part in zip(call.outputs(), parts, strict=True) if shape]
    return Rewrite(parts, target=Tensor.split, args=(value, local, state.dim))


def _unbind(call: Call) -> Rewrite:
    state = call.only()
    dim = call.argument(1, "dim", 0) % len(call.shape(call.args[0]))
    if dim == state.dim:
        raise state.needs(*range(state.width))
    return Rewrite(call.all_outputs(state.at(state.dim - (dim < state.dim))))


def _select(call: Call) -> Rewrite:
    state = call.only()
    dim, index = call.argument(1, "dim"), call.argument(2, "index")
    rank = len(call.shape(call.args[0]))
    items: list[Any] = [slice(None)] * rank
    items[dim % rank] = index
    return _indexed(call, state, items)


def _narrow(call: Call) -> Rewrite:
    state = call.only()
    dim, start, length = (call.argument(i, name) for i, name in ((1, "dim"), (2, "start"), (3, "length")))
    rank = len(call.shape(call.args[0]))
    start = start % call.shape(call.args[0])[dim]
    items: list[Any] = [slice(None)] * rank
    items[dim % rank] = slice(start, start + length)
    return _indexed(call, state, items)


def _getitem(call: Call) -> Rewrite:
    index = call.args[1]
    items = list(index) if isinstance(index, tuple) else [index]
    if any(s is not None for r, s in call.split_operands().items() if Ref(r) != call.args[0]):
        raise NoRuleError("has an index that is split over the ranks")
    return _indexed(call, call.only(), items)


def _indexed(call: Call, state: Sharded, items: list[Any]) -> Rewrite:
    """Takes a part by an index of integers, slices, new dimensions, and at most one tensor."""
    shape = call.shape(call.args[0])
    if sum(isinstance(i, Ref) for i in items) > 1 or any(isinstance(i, (list, bool, Tensor)) for i in items):
        raise NoRuleError("takes elements by several indices")
    items = _without_ellipsis(items, len(shape), call)
    old = new = 0
    found: Sharded | None = None
    for position, item in enumerate(items):
        consumed, made = _extent(item, call)
        if old <= state.dim < old + consumed:
            if isinstance(item, Ref):
                raise NoRuleError(f"takes elements out of {state.width} that are split over the ranks")
            if isinstance(item, int):
                start = item % state.width
                raise state.needs(start, start + 1) if start + 1 < state.width else state.needs(start)
            found, items[position] = _sliced(item, state, call.num_ranks)
            found = found.at(new)
        old, new = old + consumed, new + made
    found = state.at(new + state.dim - old) if found is None else found
    if found.dim >= len(call.result()) or call.result()[found.dim] != found.width:
        raise NoRuleError("takes elements in an order of its own")
    return Rewrite(call.all_outputs(found), target=Tensor.__getitem__, args=(call.args[0], tuple(items)))


def _sliced(item: slice, state: Sharded, num_ranks: int) -> tuple[Sharded, slice]:
    start, stop, step = item.indices(state.width)
    if (start, stop, step) == (0, state.width, 1):
        return state, slice(None)
    if step != 1:
        raise NoRuleError(f"takes every {step}th of {state.width} elements that are split over the ranks")
    bounds = state.bounds()
    if start not in bounds or stop not in bounds:
        raise state.needs(*(b for b in (start, stop) if b < state.width))
    if not state.layout.is_even(num_ranks):
        raise NoRuleError(f"takes a part of {state.width} elements, which do not divide by {num_ranks}")
    return state.part(start, stop), slice(start // num_ranks, stop // num_ranks)


def _without_ellipsis(items: list[Any], rank: int, call: Call) -> list[Any]:
    at = next((i for i, item in enumerate(items) if item is Ellipsis), None)
    if at is None:
        return list(items)
    used = sum(_extent(item, call)[0] for item in items if item is not Ellipsis)
    return [*items[:at], *[slice(None)] * (rank - used), *items[at + 1 :]]


def _extent(item: Any, call: Call) -> tuple[int, int]:
    """Returns how many dimensions an index takes, and how many it makes."""
    if item is None:
        return 0, 1
    if isinstance(item, slice):
        return 1, 1
    if isinstance(item, int):
        return 1, 0
    if isinstance(item, Ref):
        value = call.graph.values[item.register]
        return (len(value.shape), 1) if value.dtype in (torch.bool, torch.uint8) else (1, len(value.shape))
    raise NoRuleError("takes elements by an index of another kind")


# -- joins ----------------------------------------------------------------------------------------------------------------


def _cat(call: Call) -> Rewrite:
    parts = [part for part in call.args[0] if len(call.shape(part)) > 1 or call.shape(part) != (0,)]
    rank = len(call.result())
    dim = call.argument(1, "dim", 0) % rank
    split = [s for part in parts if (s := call.state(part)) is not None]
    first = split[0]
    if any(s.dim != first.dim for s in split):
        raise NoRuleError("joins values that are split along different dimensions")
    sources: frozenset[str] = frozenset().union(*(s.sources for s in split))
    whole = [part for part in parts if call.state(part) is None]
    if dim != first.dim:
        if any(s.segments != first.segments for s in split):
            raise NoRuleError("joins values that are split differently")
        sliced = {part.register: Layout(first.dim, first.segments) for part in whole}
        return Rewrite(call.all_outputs(replace(first, sources=sources)), sliced=sliced)
    widths = {part.register: call.shape(part)[dim] for part in whole}
    odd = next((width for width in widths.values() if width % call.num_ranks), None)
    if odd is not None:
        raise NoRuleError(f"joins a value of {odd} elements, which do not divide by {call.num_ranks}")
    segments: tuple[int, ...] = ()
    for part in parts:
        state = call.state(part)
        segments += (call.shape(part)[dim],) if state is None else state.segments
    sliced = {register: Layout(dim, (width,)) for register, width in widths.items()}
    return Rewrite(call.all_outputs(Sharded(dim, segments, sources, spans=False)), sliced=sliced)


def _stack(call: Call) -> Rewrite:
    parts = call.args[0]
    dim = call.argument(1, "dim", 0) % len(call.result())
    split = [s for part in parts if (s := call.state(part)) is not None]
    first = split[0]
    if any((s.dim, s.segments) != (first.dim, first.segments) for s in split):
        raise NoRuleError("stacks values that are split differently")
    sources: frozenset[str] = frozenset().union(*(s.sources for s in split))
    sliced = {part.register: first.layout for part in parts if call.state(part) is None}
    state = replace(first, dim=first.dim + (dim <= first.dim), sources=sources, spans=False)
    return Rewrite(call.all_outputs(state), sliced=sliced)


RULES: dict[str, Rule] = {
    **dict.fromkeys(
        ("view", "reshape", "flatten", "unflatten", "ravel", "squeeze", "unsqueeze", "view_as", "reshape_as"),
        _reshape,
    ),
    **dict.fromkeys(("expand", "expand_as", "broadcast_to"), _expand),
    **dict.fromkeys(("repeat", "tile"), _repeat),
    "repeat_interleave": _repeat_interleave,
    **dict.fromkeys(("transpose", "swapaxes", "swapdims"), _transposing(_transpose)),
    "permute": _transposing(_permute),
    "movedim": _transposing(_movedim),
    "moveaxis": _transposing(_movedim),
    "t": _transposing(lambda _, rank: list(range(rank))[::-1]),
    "get_attribute": _attribute,
    **dict.fromkeys(("split", "chunk", "tensor_split", "split_with_sizes"), _split),
    "unbind": _unbind,
    "select": _select,
    "narrow": _narrow,
    "__getitem__": _getitem,
    **dict.fromkeys(("cat", "concat", "concatenate"), _cat),
    "stack": _stack,
}
