"""Rules of products of values, attention among them."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

from lightning_mgpu.partition.graph import Ref
from lightning_mgpu.partition.tensor.call import Call, Rewrite
from lightning_mgpu.partition.tensor.collectives import GroupedAttention
from lightning_mgpu.partition.tensor.layout import Layout
from lightning_mgpu.partition.tensor.sharded import NeedsCutsError, NoRuleError, Sharded

__all__ = ["RULES", "joint_cuts", "matmul"]


def matmul(call: Call) -> Rewrite:
    """Multiplies matrices that are split along a batch dimension, rows, columns, or what is summed over."""
    a, b = call.argument(0, "input"), call.argument(1, "other", call.kwargs.get("mat2"))
    return _product(call, a, b)


def _product(call: Call, a: Ref, b: Ref) -> Rewrite:
    rank_a, rank_b = len(call.shape(a)), len(call.shape(b))
    if min(rank_a, rank_b) < 2:
        raise NoRuleError("multiplies a vector")
    # each dimension by its place in the product, counted from the last; what is summed over is called 0
    places_a = {d: (d - rank_a if d < rank_a - 1 else 0) for d in range(rank_a)}
    places_b = {d: (d - rank_b if d != rank_b - 2 else 0) for d in range(rank_b)}
    return _joined(call, {a.register: places_a, b.register: places_b}, max(rank_a, rank_b), same=a == b)


def _joined(call: Call, places: dict[int, dict[int, int]], rank: int, *, same: bool = False) -> Rewrite:
    """Splits a product at one place of its operands: whole operands that have the place are sliced."""
    split = {r: s for r in places if (s := call.state(r)) is not None}
    if same:
        raise NoRuleError("multiplies a split value with itself")
    where = {(places[r][s.dim], s.segments) for r, s in split.items()}
    if len({p for p, _ in where}) > 1:
        raise NoRuleError("multiplies values that are split along different dimensions")
    sources: frozenset[str] = frozenset().union(*(s.sources for s in split.values()))
    (place, segments), *others = where
    if others:
        raise joint_cuts(list(split.values()))
    width = sum(segments)
    rewrite = Rewrite(())
    for register, dims in places.items():
        if register in split:
            continue
        for dim, other in dims.items():
            if other == place and call.shape(register)[dim] == width:
                rewrite.sliced[register] = Layout(dim, segments)
    if place == 0:
        rewrite.outputs, rewrite.reduce = call.all_outputs(None), True
    else:
        rewrite.outputs = call.all_outputs(Sharded(rank + place, segments, sources, spans=False))
    return rewrite


def joint_cuts(states: list[Sharded]) -> Exception:
    """Returns the error that asks for segments which suit values that meet."""
    width = states[0].width
    if all(s.spans and s.width == width for s in states):
        places = sorted({bound for s in states for bound in s.bounds()})
        sources: frozenset[str] = frozenset().union(*(s.sources for s in states))
        return NeedsCutsError(sources, (Fraction(place, width) for place in places))
    return NoRuleError("combines values that are split differently")


def _baddbmm(call: Call) -> Rewrite:
    added, a, b = call.argument(0, "input"), call.argument(1, "batch1"), call.argument(2, "batch2")
    rewrite = _product(call, a, b)
    state = rewrite.outputs[0]
    if state is None or call.state(added) is not None or added in (a, b):
        raise NoRuleError("adds to a product that is split over the ranks")
    dim = state.dim - 3 + len(call.shape(added))
    if dim >= 0 and call.shape(added)[dim] == state.width:
        rewrite.sliced[added.register] = Layout(dim, state.segments)
    return rewrite


def _attention(call: Call) -> Rewrite:
    """Attends with a rank's own heads; of whole keys, values and masks it takes the part that belongs to them."""
    query, key, value = roles = [call.argument(i, name) for i, name in enumerate(("query", "key", "value"))]
    rank = len(call.shape(query))
    alone = call.state(value)
    if alone is not None and alone.dim == len(call.shape(value)) - 1 and not (call.state(query) or call.state(key)):
        return Rewrite(call.all_outputs(alone), forks=False)  # every rank mixes its features by the weights of all
    state = _heads(call, roles)
    dim, heads = state.dim, call.shape(query)[state.dim]
    rewrite = Rewrite(call.all_outputs(Sharded(dim, (heads,), state.sources, spans=False)))
    grouped = bool(call.argument(7, "enable_gqa", default=False))
    few = call.shape(key)[dim]
    if grouped and call.state(key) is None and call.state(value) is None and few % call.num_ranks and heads % few == 0:
        rewrite.target, rewrite.args = GroupedAttention(None, dim, heads, few), call.args
        rewrite.kwargs = {name: given for name, given in call.kwargs.items() if name != "enable_gqa"}
        roles = [query]
    for operand in roles:
        width = call.shape(operand)[dim]
        if call.state(operand) is None and width > 1:
            if width % call.num_ranks or (width != state.width and not grouped):
                raise NoRuleError(f"attends to {width} heads, which do not divide by {call.num_ranks}")
            rewrite.sliced[operand.register] = Layout(dim, (width,))
    _slice_mask(call, dim - rank, heads, rewrite)
    return rewrite


def _heads(call: Call, roles: list[Ref]) -> Sharded:
    """Returns how the operands of an attention are split, where that is along one dimension before the last two."""
    split = [s for operand in roles if (s := call.state(operand)) is not None]
    rank = len(call.shape(roles[0]))
    if any(len(call.shape(operand)) != rank for operand in roles):
        raise NoRuleError("attends to values of different dimensions")
    dim = min((s.dim for s in split), default=rank)
    others = [s for s in split if s.dim != dim or dim >= rank - 2 or len(s.segments) > 1]
    if others or not split:
        numbers = list(dict.fromkeys(str(call.shape(o)[rank - 3]) for o in roles[:2])) if rank > 2 else ["no"]
        reason = f"attends with {' to '.join(numbers)} heads, which do not divide by {call.num_ranks}"
        raise NoRuleError(reason, frozenset().union(*(s.sources for s in others)))
    return replace(split[0], sources=frozenset().union(*(s.sources for s in split)))


def _slice_mask(call: Call, place: int, heads: int, rewrite: Rewrite) -> None:
    mask = call.argument(3, "attn_mask")
    if not isinstance(mask, Ref):
        return
    if call.state(mask) is not None:
        raise NoRuleError("has a mask that is split over the ranks")
    dim = len(call.shape(mask)) + place
    if dim >= 0 and call.shape(mask)[dim] == heads:
        rewrite.sliced[mask.register] = Layout(dim, (heads,))


def _einsum(call: Call) -> Rewrite:
    """Splits a sum over indices along one of them."""
    equation, operands = call.args[0], _listed(call.args[1:])
    if not isinstance(equation, str) or "." in equation or not all(isinstance(o, Ref) for o in operands):
        raise NoRuleError("sums over indices that are not named by letters")
    given, arrow, wanted = equation.replace(" ", "").partition("->")
    terms = given.split(",")
    if not arrow or any(len(set(term)) != len(term) for term in (*terms, wanted)) or len(set(operands)) != len(operands):
        raise NoRuleError("sums over indices without naming the result's, or takes a diagonal")
    places = {
        o.register: {d: _place(letter, wanted) for d, letter in enumerate(term)}
        for o, term in zip(operands, terms, strict=True)
    }
    split = [(terms[i][s.dim]) for i, o in enumerate(operands) if (s := call.state(o)) is not None]
    if len(set(split)) > 1:
        raise NoRuleError("multiplies values that are split along different indices")
    for o, term in zip(operands, terms, strict=True):  # two summed letters are two places
        places[o.register] = {d: p for d, p in places[o.register].items() if p != 0 or term[d] == split[0]}
    return _joined(call, places, len(wanted))


def _place(letter: str, wanted: str) -> int:
    return wanted.index(letter) - len(wanted) if letter in wanted else 0


def _listed(given: tuple[Any, ...]) -> list[Any]:
    return list(given[0]) if len(given) == 1 and isinstance(given[0], (list, tuple)) else list(given)


RULES = {
    "bmm": matmul,
    "baddbmm": _baddbmm,
    "scaled_dot_product_attention": _attention,
    "einsum": _einsum,
}
