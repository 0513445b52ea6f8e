"""Rules of calls that treat every element alike, or every channel."""

from __future__ import annotations

from collections.abc import Callable

from lightning_mgpu.partition.graph import Ref
from lightning_mgpu.partition.tensor.call import Call, Rewrite
from lightning_mgpu.partition.tensor.layout import Layout
from lightning_mgpu.partition.tensor.rules.products import joint_cuts
from lightning_mgpu.partition.tensor.sharded import NoRuleError, Sharded

__all__ = ["RULES", "aligned"]

Rule = Callable[[Call], Rewrite | None]


def aligned(call: Call, rank: int) -> tuple[Sharded, dict[int, Layout]]:
    """Brings operands that broadcast together to one split dimension.

    Args:
        call: the call.
        rank: number of dimensions of the result.

    Returns:
        The state of the result, and which parts of whole operands go with it.

    Raises:
        NoRuleError: where operands are split along different dimensions.
    """
    states = [s.at(s.dim + rank - len(call.shape(r))) for r, s in call.split_operands().items()]
    state = states[0]
    if any(s.dim != state.dim for s in states):
        raise NoRuleError("combines values that are split along different dimensions")
    if any(s.segments != state.segments for s in states):
        raise joint_cuts(states)
    sliced: dict[int, Layout] = {}
    for register in call.operands():
        shape = call.shape(register)
        dim = state.dim - rank + len(shape)
        if call.state(register) is None and dim >= 0 and shape[dim] != 1:
            sliced[register] = Layout(dim, state.segments)
    spans = all(s.spans for s in states)
    return Sharded(state.dim, state.segments, frozenset().union(*(s.sources for s in states)), spans), sliced


def _elementwise(call: Call) -> Rewrite:
    shape = call.result()
    state, sliced = aligned(call, len(shape))
    if shape[state.dim] != state.width or "out" in call.kwargs or call.node.dynamic:
        raise NoRuleError("does not keep the shape of a value that is split over the ranks")
    return Rewrite(call.all_outputs(state), sliced=sliced)


def _like_first(call: Call) -> Rewrite:
    """Keeps the first operand's elements, or makes others in its shape; of further tensors it takes dtype or device."""
    first = call.args[0]
    state = call.state(first) if isinstance(first, Ref) else None
    if call.result() != call.shape(first):
        raise NoRuleError("does not keep the shape of a value that is split over the ranks")
    if state is None:
        raise NoRuleError("takes the dtype of a value that is split over the ranks")
    return Rewrite(call.all_outputs(state))


def _shapeless(call: Call) -> Rewrite:
    """Makes a whole value of a size of its own, whatever the operand's."""
    call.only()
    return Rewrite(call.all_outputs(None), enter=False)


def _spatial(num_dims: int | None) -> Rule:
    """Works on the last dimensions of each channel by itself."""

    def rule(call: Call) -> Rewrite:
        state = call.only()
        rank = len(call.shape(call.args[0]))
        if state.dim >= (rank - num_dims if num_dims is not None else 2):
            raise NoRuleError("works on a dimension whole that is split over the ranks")
        return Rewrite(call.all_outputs(state))

    return rule


def _pad(call: Call) -> Rewrite:
    state = call.only()
    sizes = call.argument(1, "pad")
    last = len(call.shape(call.args[0])) - 1 - state.dim  # sizes begin with the last dimension
    if any(sizes[2 * last : 2 * last + 2]):
        raise NoRuleError("pads a dimension that is split over the ranks")
    return Rewrite(call.all_outputs(state))


def _prelu(call: Call) -> Rewrite:
    value, weight = call.args
    state = call.state(value)
    if state is None or (call.state(weight) is not None and call.parameter(weight) is None):
        raise NoRuleError("has a split slope and a whole value")
    rewrite = Rewrite(call.all_outputs(state))
    if call.shape(weight) != (1,) and state.dim == 1:
        layout, name = Layout(0, state.segments), call.parameter(weight)
        if name is not None and call.decisions.follows(name, layout):
            rewrite.layouts[name] = layout
        else:
            rewrite.sliced[weight.register] = layout
    if call.state(weight) is not None and not rewrite.layouts:
        raise NoRuleError("has a slope that is split otherwise than its channels")
    return rewrite


_ELEMENTWISE = (
    "abs absolute acos acosh add addcdiv addcmul alpha_dropout asin asinh atan atan2 atanh bernoulli bitwise_and "
    "bitwise_not bitwise_or bitwise_xor cauchy ceil celu clamp clamp_max clamp_min clip copy copysign cos cosh deg2rad div "
    "divide dropout elu eq erf erfc erfinv exp exp2 expm1 exponential fill float_power floor floor_divide fmod frac ge gelu "
    "greater greater_equal gt hardshrink hardsigmoid hardswish hardtanh heaviside hypot isfinite isinf isnan le leaky_relu "
    "lerp less less_equal lgamma log log10 log1p log2 log_sigmoid logaddexp logical_and logical_not logical_or logical_xor "
    "logit logsigmoid lt masked_fill maximum minimum mish mul multiply nan_to_num ne neg negative normal not_equal positive "
    "pow reciprocal relu relu6 remainder round rrelu rsqrt rsub selu sigmoid sign silu sin sinc sinh softplus softshrink "
    "softsign sqrt square sub subtract tan tanh tanhshrink threshold true_divide trunc uniform where xlogy zero"
).split()
_DUNDER = (
    "add sub mul truediv div floordiv mod pow radd rsub rmul rtruediv rdiv rfloordiv rpow rmod and or xor rand ror rxor eq ne "
    "lt le gt ge neg pos abs invert iadd isub imul itruediv idiv iand ior ixor ipow"
).split()
_LIKE_FIRST = (
    "to type type_as float double half bfloat16 int long bool short byte char cpu cuda contiguous clone detach detach_ "
    "requires_grad_ zeros_like ones_like full_like empty_like rand_like randn_like randint_like"
).split()

RULES: dict[str, Rule] = {
    **dict.fromkeys([*_ELEMENTWISE, *(f"{name}_" for name in _ELEMENTWISE)], _elementwise),
    **dict.fromkeys((f"__{name}__" for name in _DUNDER), _elementwise),
    **dict.fromkeys(_LIKE_FIRST, _like_first),
    **dict.fromkeys(("new_zeros", "new_ones", "new_full", "new_empty", "new_tensor"), _shapeless),
    **{
        f"{kind}pool{k}d": _spatial(k)
        for kind in ("", "max_", "avg_", "lp_", "adaptive_max_", "adaptive_avg_")
        for k in (1, 2, 3)
    },
    **{f"{kind}pool{k}d_with_indices": _spatial(k) for kind in ("max_", "adaptive_max_") for k in (1, 2, 3)},
    **{f"dropout{k}d": _spatial(k) for k in (1, 2, 3)},
    **dict.fromkeys(("interpolate", "upsample", "feature_alpha_dropout"), _spatial(None)),
    "pad": _pad,
    "prelu": _prelu,
}
