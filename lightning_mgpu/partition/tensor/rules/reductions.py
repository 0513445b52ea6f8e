"""Rules of calls that work along given dimensions: softmax, sums, means, sorting; and of norms."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from lightning_mgpu.partition.graph import Ref
from lightning_mgpu.partition.tensor.call import Call, Rewrite
from lightning_mgpu.partition.tensor.layout import Layout
from lightning_mgpu.partition.tensor.sharded import NoRuleError, Sharded

__all__ = ["RULES"]

Rule = Callable[[Call], Rewrite | None]


def _dims(call: Call, position: int, name: str = "dim", default: Any = None) -> set[int]:
    """Returns the dimensions a call works along; all where it names none."""
    rank = len(call.shape(call.args[0]))
    given = call.argument(position, name, call.kwargs.get("axis", default))
    if given is None or given == () or isinstance(given, bool):
        return set(range(rank))
    if not isinstance(given, (int, tuple, list)):
        raise NoRuleError("names its dimensions by a tensor")
    dims = [given] if isinstance(given, int) else given
    return {d % max(rank, 1) for d in dims}


def _along(position: int, name: str = "dim", default: Any = None) -> Rule:
    """Works along dimensions that are not split, and keeps them."""

    def rule(call: Call) -> Rewrite:
        state = call.only()
        if state.dim in _dims(call, position, name, default):
            raise NoRuleError(f"works along the {state.width} elements that are split over the ranks")
        return Rewrite(call.all_outputs(state))

    return rule


def _reducing(position: int = 1, *, summing: bool = False) -> Rule:
    """Works along dimensions and leaves them out; sums may run over what is split."""

    def rule(call: Call) -> Rewrite:
        state = call.only()
        dims = _dims(call, position)
        if state.dim in dims:
            if summing:
                return _sum(call, dims)
            raise NoRuleError(f"works along the {state.width} elements that are split over the ranks")
        rank = len(call.shape(call.args[0]))
        outputs = []
        for shape in call.outputs():
            kept = shape is not None and len(shape) == rank
            outputs.append(None if shape is None else state if kept else state.at(state.dim - sum(d < state.dim for d in dims)))
        return Rewrite(tuple(outputs))

    return rule


def _sum(call: Call, dims: set[int]) -> Rewrite:
    """Adds up what each rank has."""
    value = call.args[0]
    shape, result = call.shape(value), call.result()
    dtype = call.kwargs.get("dtype")
    if len(result) == len(shape):  # a norm by hand: to add up its statistics would split all that follows by features
        raise NoRuleError(f"takes statistics over the {call.only().width} elements that are split over the ranks")
    rewrite = Rewrite(call.all_outputs(None), reduce=True)
    rewrite.target = torch.sum
    rewrite.args = (value, tuple(sorted(dims)))
    rewrite.kwargs = {} if dtype is None else {"dtype": dtype}
    rewrite.scale = 1 / math.prod(shape[d] for d in dims) if call.name == "mean" else None
    return rewrite


def _flip(call: Call) -> Rewrite:
    state, rank = call.only(), len(call.shape(call.args[0]))
    given = call.args[1:] or (call.kwargs["dims"],)
    dims = given[0] if isinstance(given[0], (tuple, list)) else given
    if state.dim in {d % rank for d in dims}:
        raise NoRuleError(f"works along the {state.width} elements that are split over the ranks")
    return Rewrite(call.all_outputs(state))


def _index(call: Call) -> Rewrite:
    """Takes elements along one dimension by an index that has the shape of the result."""
    state = call.only()
    index = call.argument(2, "index", call.argument(1, "indices"))
    dim = call.argument(1, "dim") if call.name != "take_along_dim" else call.argument(2, "dim")
    if not isinstance(dim, int) or not isinstance(index, Ref):
        raise NoRuleError("takes elements across all dimensions")
    if state.dim == dim % len(call.shape(call.args[0])):
        raise NoRuleError(f"takes elements out of {state.width} that are split over the ranks")
    if call.name == "index_select":
        return Rewrite(call.all_outputs(state))
    width = call.shape(index)[state.dim]
    if width != state.width and not (width == 1 and call.name == "take_along_dim"):
        raise NoRuleError("takes fewer elements than there are of what is split over the ranks")
    sliced = {index.register: Layout(state.dim, state.segments)} if width != 1 else {}
    return Rewrite(call.all_outputs(state), sliced=sliced)


def _lower_triangle(call: Call) -> Rewrite:
    state = call.only()
    if state.dim >= len(call.shape(call.args[0])) - 2:
        raise NoRuleError("cuts a triangle out of a dimension that is split over the ranks")
    return Rewrite(call.all_outputs(state))


# -- norms ----------------------------------------------------------------------------------------------------------------


def _norm_of_rows(call: Call) -> Rewrite:
    """Normalises the last dimensions, with weights that every rank has whole."""
    value, shape = call.argument(0, "input"), call.argument(1, "normalized_shape")
    state = call.state(value)
    if state is None:
        raise NoRuleError("has weights that are split over the ranks")
    if state.dim >= len(call.shape(value)) - len(shape):
        raise NoRuleError(f"normalises over the {state.width} elements that are split over the ranks")
    if len(call.split_operands()) > 1:
        raise NoRuleError("has weights that are split over the ranks")
    return Rewrite(call.all_outputs(state))


def _group_norm(call: Call) -> Rewrite:
    value, num_groups = call.argument(0, "input"), call.argument(1, "num_groups")
    weight, bias, eps = call.argument(2, "weight"), call.argument(3, "bias"), call.argument(4, "eps", 1e-5)
    state = _of_channels(call, value)
    if num_groups % call.num_ranks or len(state.segments) > 1 or (state.width // num_groups) == 0:
        raise NoRuleError(f"its {num_groups} groups do not divide by {call.num_ranks}")
    rewrite = Rewrite(call.all_outputs(state), args=(value, num_groups // call.num_ranks, weight, bias, eps))
    _go_along(call, [weight, bias], state, rewrite)
    return rewrite


def _batch_norm(call: Call) -> Rewrite:
    """Normalises each channel by itself; its weights and statistics are split with the channels."""
    arguments = ("input", "running_mean", "running_var", "weight", "bias")
    value, *others = (call.argument(i, name) for i, name in enumerate(arguments))
    state = _of_channels(call, value)
    rewrite = Rewrite(call.all_outputs(state))
    _go_along(call, others, state, rewrite)
    if call.name == "instance_norm":  # the layer would compare the number of channels with its own
        rewrite.args, rewrite.kwargs = call.args, call.kwargs
    return rewrite


def _channel_norm(call: Call) -> Rewrite:
    """Is a layer of batch norm, which stays the call of a module."""
    value = call.args[0]
    own = next((s for ref in call.own.values() if (s := call.state(ref)) is not None), None)
    if call.state(value) is None and own is not None:
        state = Sharded(1, own.segments, own.sources, spans=False)
        rewrite = Rewrite(call.all_outputs(state), "with its channels", sliced={value.register: state.layout})
    else:
        state = _of_channels(call, value)
        rewrite = Rewrite(call.all_outputs(state), "with its channels")
    _go_along(call, [ref for name, ref in call.own.items() if name != "num_batches_tracked"], state, rewrite)
    if rewrite.sliced.keys() - {value.register}:
        raise NoRuleError("has weights that are split otherwise than its channels")
    return rewrite


def _of_channels(call: Call, value: Ref) -> Sharded:
    state = call.state(value)
    if state is None:
        raise NoRuleError("has weights that are split over the ranks")
    if state.dim != 1 or (call.kind.startswith("InstanceNorm") and len(call.shape(value)) != int(call.kind[-2]) + 2):
        raise NoRuleError("normalises over a dimension that is split over the ranks")
    return state


def _go_along(call: Call, operands: list[Any], state: Sharded, rewrite: Rewrite) -> None:
    """Splits what a norm has for each channel like the channels."""
    layout = Layout(0, state.segments)
    for operand in operands:
        if not isinstance(operand, Ref):
            continue
        name = call.weight_name(operand)
        if name is not None and call.decisions.follows(name, layout):
            rewrite.layouts[name] = layout
        elif call.state(operand) is not None or operand.register in call.node.mutates:
            raise NoRuleError("has weights that are split otherwise than its channels")
        else:
            rewrite.sliced[operand.register] = layout


RULES: dict[str, Rule] = {
    **dict.fromkeys(("softmax", "log_softmax", "softmin", "cumsum", "cumprod", "logcumsumexp"), _along(1)),
    "flip": _flip,
    **dict.fromkeys(("gumbel_softmax",), _along(4, default=-1)),
    **dict.fromkeys(("sort", "argsort"), _along(1, default=-1)),
    "glu": _along(1, default=-1),
    "topk": _along(2, default=-1),
    "roll": _along(2, "dims"),
    "normalize": _along(2, default=1),
    **dict.fromkeys(("sum", "mean"), _reducing(summing=True)),
    **dict.fromkeys(
        ("amax", "amin", "max", "min", "argmax", "argmin", "std", "var", "prod", "any", "all", "logsumexp", "median"),
        _reducing(),
    ),
    "norm": _reducing(2),
    **dict.fromkeys(("index_select", "gather", "take_along_dim"), _index),
    **dict.fromkeys(("tril", "triu"), _lower_triangle),
    **dict.fromkeys(("layer_norm", "rms_norm"), _norm_of_rows),
    "group_norm": _group_norm,
    **dict.fromkeys(("batch_norm", "instance_norm"), _batch_norm),
    "channel_norm": _channel_norm,
}
