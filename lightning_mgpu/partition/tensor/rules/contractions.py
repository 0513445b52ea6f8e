"""Rules of the calls that have weights to split: linear layers, convolutions, embeddings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn import functional as F

from lightning_mgpu.partition.graph import Ref
from lightning_mgpu.partition.tensor.attention import project
from lightning_mgpu.partition.tensor.call import Call, Rewrite, Weight
from lightning_mgpu.partition.tensor.collectives import VocabularyEmbedding
from lightning_mgpu.partition.tensor.layout import Layout
from lightning_mgpu.partition.tensor.rules.products import matmul
from lightning_mgpu.partition.tensor.sharded import NoRuleError, Sharded

__all__ = ["DECIDING", "RULES"]


@dataclass(frozen=True)
class _Contraction:
    """Describes a call that contracts its input with a weight.

    Attributes:
        value: the input.
        weight: the weight.
        bias: the bias, or ``None``.
        in_dim, out_dim: dimensions of the weight.
        dim: the contracted dimension of the input, which becomes the result's.
        bare: the function and the arguments that compute the same without a bias.
        num_parts, part: the weight has so many parts along ``out_dim``, of which one is used.
        refusal: why the weight can't be split.
    """

    value: Ref
    weight: Ref
    bias: Ref | None
    in_dim: int
    out_dim: int
    dim: int
    bare: tuple[Callable[..., Any], tuple[Any, ...]]
    num_parts: int = 1
    part: int = 0
    refusal: str = ""


def _contract(call: Call, c: _Contraction) -> Rewrite | None:
    given = call.state(c.value)
    contracted = given if given is not None and given.dim == c.dim else None
    name, turned = call.weight(c.weight)
    layout = None
    if name is not None and (given is None or contracted is not None):
        weight = Weight(name, c.in_dim, c.out_dim, call.shape(c.weight), c.num_parts, c.refusal)
        layout = call.decisions.split(_turned(weight) if turned else weight, contracted)
    elif name is not None and call.state(c.weight) is not None:
        raise NoRuleError("has a split weight and an input that is split along another dimension")
    if layout is None:
        return _whole_weight(call, c, given)
    assert name is not None
    seen = Layout(1 - layout.dim, layout.segments) if turned else layout
    if seen.dim == c.out_dim:
        return _column(call, c, name, layout)
    return _row(call, c, seen, {name: layout}, role="row")


def _turned(weight: Weight) -> Weight:
    """Describes a weight whose transpose is used."""
    return replace(weight, in_dim=weight.out_dim, out_dim=weight.in_dim, shape=weight.shape[::-1])


def _whole_weight(call: Call, c: _Contraction, given: Sharded | None) -> Rewrite | None:
    if call.state(c.weight) is not None or (c.bias is not None and call.state(c.bias) is not None):
        raise NoRuleError("is made with a split weight that is no parameter")
    if given is None:
        return None
    if c.refusal:
        raise NoRuleError(f"is left whole, since {c.refusal}")
    if given.dim == c.dim:
        return _row(call, c, Layout(c.in_dim, given.segments), {}, role="row of a whole weight")
    if given.dim > c.dim:
        raise NoRuleError("convolves along a dimension that is split over the ranks")
    return Rewrite(call.all_outputs(given))


def _column(call: Call, c: _Contraction, name: str, layout: Layout) -> Rewrite:
    if call.state(c.value) is not None:
        raise NoRuleError(f"is a column layer, which needs its input whole ({name!r})")
    width = layout.width // c.num_parts
    state = Sharded(c.dim, layout.segments, frozenset({name}))
    if c.num_parts > 1:
        state = state.part(c.part * width, (c.part + 1) * width)
    gathers = call.decisions.gathers(name)
    rewrite = Rewrite(call.all_outputs(None if gathers else state), "column", layouts={name: layout})
    rewrite.gather = state.layout if gathers else None
    if c.bias is not None:
        _deal_along(call, c.bias, Layout(0, layout.segments), rewrite)
    return rewrite


def _row(call: Call, c: _Contraction, layout: Layout, layouts: dict[str, Layout], *, role: str) -> Rewrite:
    if c.num_parts > 1 and c.bias is not None:
        raise NoRuleError("uses a part of a bias, which can't be added to a sum")
    rewrite = Rewrite(call.all_outputs(None), role, layouts=layouts, reduce=True)
    rewrite.target, rewrite.args = c.bare
    given = call.state(c.value)
    if given is None:
        rewrite.sliced[c.value.register] = Layout(c.dim, layout.segments)
    elif given.dim != c.dim or given.segments != layout.segments:
        raise NoRuleError("has an input that is split otherwise than its weight")
    if not layouts:
        rewrite.sliced[c.weight.register] = layout
    if c.bias is not None:
        if call.state(c.bias) is not None:
            raise NoRuleError("adds a bias that is split over the ranks to a whole value")
        rewrite.bias = c.bias.register, c.dim - len(call.shape(c.value))
    return rewrite


def _deal_along(call: Call, operand: Ref, layout: Layout, rewrite: Rewrite) -> None:
    """Uses the part of a bias that belongs to the rank's part of a weight."""
    name = call.parameter(operand)
    if name is not None and call.decisions.follows(name, layout):
        rewrite.layouts[name] = layout
    elif call.state(operand) is not None:
        raise NoRuleError("has a bias that is split otherwise than its weight")
    else:
        rewrite.sliced[operand.register] = layout


# -- what contracts -------------------------------------------------------------------------------------------------------


def _linear(call: Call) -> Rewrite | None:
    value, weight, bias = call.argument(0, "input"), call.argument(1, "weight"), call.argument(2, "bias")
    if len(call.shape(weight)) != 2:
        raise NoRuleError("has a weight of one dimension")
    dim = len(call.shape(value)) - 1
    return _contract(call, _Contraction(value, weight, bias, 1, 0, dim, (F.linear, (value, weight))))


def _project(call: Call) -> Rewrite | None:
    value, weight, bias, part, num_parts = call.args
    dim, bare = len(call.shape(value)) - 1, (project, (value, weight, None, part, num_parts))
    return _contract(call, _Contraction(value, weight, bias, 1, 0, dim, bare, num_parts, part))


def _addmm(call: Call) -> Rewrite | None:
    bias, value, weight = call.argument(0, "input"), call.argument(1, "mat1"), call.argument(2, "mat2")
    plain = len(call.args) <= 3 and not {"beta", "alpha", "out"} & call.kwargs.keys()
    if not plain or len(call.shape(bias)) != 1 or call.shape(bias) != call.shape(weight)[1:]:
        if call.split_operands():
            raise NoRuleError("is no product with a bias")
        return None
    return _contract(call, _Contraction(value, weight, bias, 0, 1, 1, (torch.mm, (value, weight))))


def _matmul(call: Call) -> Rewrite | None:
    value, weight = call.argument(0, "input"), call.argument(1, "other", call.kwargs.get("mat2"))
    if call.weight(weight)[0] is None or len(call.shape(weight)) != 2 or len(call.shape(value)) < 2 or "out" in call.kwargs:
        return matmul(call) if call.split_operands() else None
    dim = len(call.shape(value)) - 1
    return _contract(call, _Contraction(value, weight, None, 0, 1, dim, (torch.matmul, (value, weight))))


_CONV_ARGUMENTS = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")


def _conv(call: Call) -> Rewrite | None:
    given = dict(zip(_CONV_ARGUMENTS, call.args, strict=False)) | call.kwargs
    value, weight, bias, num_groups = given["input"], given["weight"], given.get("bias"), given.get("groups", 1)
    more = tuple(given.get(name, default) for name, default in zip(_CONV_ARGUMENTS[3:6], (1, 0, 1), strict=True))
    dim = len(call.shape(value)) - len(call.shape(weight)) + 1
    assert call.function is not None
    bare = call.function, (value, weight, None, *more, 1)
    refusal = f"its channels are convolved in {num_groups} groups" if num_groups > 1 else ""
    return _contract(call, _Contraction(value, weight, bias, 1, 0, dim, bare, refusal=refusal))


# -- embeddings -----------------------------------------------------------------------------------------------------------

_EMBEDDING_ARGUMENTS = ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")


def _embedding(call: Call) -> Rewrite | None:
    given = dict(zip(_EMBEDDING_ARGUMENTS, call.args, strict=False)) | call.kwargs
    words, weight = given["input"], given["weight"]
    name = call.parameter(weight)
    if call.state(words) is not None:
        raise NoRuleError("looks up words that are split over the ranks")
    refused = [what for what in ("max_norm", "scale_grad_by_freq", "sparse") if given.get(what)]
    layout = None
    if name is not None:
        refusal = f"its option {refused[0]} needs all rows" if refused else ""
        layout = call.decisions.split_vocabulary(Weight(name, 0, 1, call.shape(weight), refusal=refusal))
    if layout is None:
        if call.state(weight) is not None:
            raise NoRuleError("looks up rows of a weight that is split over the ranks")
        return None
    assert name is not None
    if layout.dim == 1:
        state = Sharded(len(call.result()) - 1, layout.segments, frozenset({name}))
        return Rewrite(call.all_outputs(state), "column", layouts={name: layout})
    if len(layout.segments) > 1:
        raise NoRuleError("looks up rows of a weight that is split in segments")
    target = VocabularyEmbedding(None, layout.width, given.get("padding_idx"))
    return Rewrite(
        call.all_outputs(None), "vocabulary", layouts={name: layout}, target=target, args=(words, weight), reduce=True
    )


RULES = {
    "linear": _linear,
    "project": _project,
    "addmm": _addmm,
    "matmul": _matmul,
    "mm": _matmul,
    "conv1d": _conv,
    "conv2d": _conv,
    "conv3d": _conv,
    "embedding": _embedding,
}
DECIDING = frozenset(RULES)
