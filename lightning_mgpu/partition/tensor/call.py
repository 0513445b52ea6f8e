"""Recorded calls as rules see them, and what a rule makes of one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from lightning_mgpu.partition.graph import ApplyFunction, Graph, Node, Ref
from lightning_mgpu.partition.names import Names
from lightning_mgpu.partition.tensor.layout import Layout
from lightning_mgpu.partition.tensor.leaves import AsFunction, as_function
from lightning_mgpu.partition.tensor.sharded import NoRuleError, Sharded

__all__ = ["Call", "Decisions", "Rewrite", "Weight"]


@dataclass(frozen=True)
class Weight:
    """Describes a weight that a call could be split by.

    Attributes:
        name: canonical name of the parameter.
        in_dim: dimension that is contracted, or looked up.
        out_dim: dimension that becomes the result's.
        shape: its shape.
        num_parts: parts of the out dimension that are used one by one.
        refusal: why it can't be split at all; empty where it can.
    """

    name: str
    in_dim: int
    out_dim: int
    shape: tuple[int, ...]
    num_parts: int = 1
    refusal: str = ""


class Decisions(Protocol):
    """Says how weights are split: by choice while a plan is made, by the plan afterwards."""

    num_ranks: int

    def split(self, weight: Weight, given: Sharded | None) -> Layout | None:
        """Says how the weight of a contraction is split, given the state of its input along the contracted dimension."""

    def split_vocabulary(self, weight: Weight) -> Layout | None:
        """Says how the weight of an embedding is split."""

    def gathers(self, name: str) -> bool:
        """Says whether the result of a column layer is put together at once."""

    def follows(self, name: str, layout: Layout) -> bool:
        """Says whether a parameter that goes with a split value is split along with it; otherwise it is whole."""


@dataclass
class Rewrite:
    """Is what becomes of a call on parts.

    What is split is used as it is, what is whole enters through ``Copy``, except for what is listed here.

    Attributes:
        role: what the plan calls it.
        outputs: state of each result.
        sliced: registers of whole values a part of which is used.
        layouts: layouts of the parameters and buffers it uses in part.
        target, args, kwargs: what is called instead, where it is not the same.
        reduce: whether the result is a share of a sum.
        scale: what the sum is multiplied by.
        bias: the bias added to the sum, and its dimension counted from the last.
        gather: how the result is dealt out, where it is put together at once.
        enter: whether whole operands enter a computation on parts; otherwise the call makes a whole value.
        forks: whether every rank draws random numbers of its own.
    """

    outputs: tuple[Sharded | None, ...]
    role: str = ""
    sliced: dict[int, Layout] = field(default_factory=dict)
    layouts: dict[str, Layout] = field(default_factory=dict)
    target: Callable[..., Any] | None = None
    args: tuple[Any, ...] | None = None
    kwargs: dict[str, Any] = field(default_factory=dict)
    reduce: bool = False
    scale: float | None = None
    bias: tuple[int, int] | None = None
    gather: Layout | None = None
    enter: bool = True
    forks: bool = True


class Call:
    """Is one recorded call, a layer of torch.nn seen as the function it calls.

    Attributes:
        name: what rules are found by.
        function: what computes the result from ``args`` and ``kwargs``; ``None`` where only the module does.
        own: a layer's parameters and buffers by attribute.

    Args:
        graph: the recording.
        index: index of the call.
        names: names below the root.
        registers: registers of parameters and buffers by name.
        views: names of the parameters whose transposes lie in registers.
        states: states of values that are split, by register.
        decisions: says how weights are split.
    """

    def __init__(
        self,
        graph: Graph,
        index: int,
        names: Names,
        registers: Mapping[str, int],
        views: Mapping[int, str],
        states: Mapping[int, Sharded],
        decisions: Decisions,
    ) -> None:
        self.graph = graph
        self.index = index
        self.node: Node = graph.nodes[index]
        self.decisions = decisions
        self._views = views
        self._states = states
        self.own: dict[str, Ref] = {}
        target = self.node.target
        if isinstance(target, str):
            module = names.module_at[target]
            for name, _ in (*module.named_parameters(), *module.named_buffers()):
                self.own[name] = Ref(registers[names.canonical[f"{target}.{name}"]])
            seen = as_function(module, self.node.args, self.node.kwargs, self.own)
            self.kind = type(module).__name__
            self.kwargs: dict[str, Any] = {}
        else:
            seen = AsFunction(_function_name(target), target, self.node.args)
            self.kind = seen.name
            self.kwargs = self.node.kwargs
        self.name, self.function, self.args = seen.name, seen.function, seen.args

    # -- operands --------------------------------------------------------------------------------------------------

    @property
    def num_ranks(self) -> int:
        return self.decisions.num_ranks

    def refs(self) -> list[int]:
        """Lists the registers among the arguments, and those of a layer's own parameters and buffers."""
        return list(dict.fromkeys([*self.node.reads, *(ref.register for ref in self.own.values())]))

    def operands(self) -> list[int]:
        """Lists the registers among the arguments, each once."""
        return list(dict.fromkeys([*self.node.reads, *(arg.register for arg in self.args if isinstance(arg, Ref))]))

    def state(self, operand: Any) -> Sharded | None:
        return self._states.get(operand.register if isinstance(operand, Ref) else operand)

    def shape(self, operand: Any) -> tuple[int, ...]:
        """Returns the shape of the whole value."""
        return self.graph.values[operand.register if isinstance(operand, Ref) else operand].shape

    def split_operands(self) -> dict[int, Sharded]:
        """Returns the registers of the operands that are dealt out, with how."""
        return {r: s for r in self.operands() if (s := self._states.get(r)) is not None}

    def only(self) -> Sharded:
        """Returns the state of the first argument, which is the only one that may be dealt out."""
        split = self.split_operands()
        first = self.args[0] if self.args else None
        if not isinstance(first, Ref) or set(split) != {first.register}:
            raise NoRuleError("has another operand than the first split over the ranks")
        return split[first.register]

    def only_first(self) -> Sharded | None:
        """Returns the state of the first argument, where of the others nothing but the shape counts."""
        return self.state(self.args[0])

    def parameter(self, operand: Any) -> str | None:
        """Returns the name of the parameter that an operand is, if it is one."""
        source = self.graph.sources.get(operand.register) if isinstance(operand, Ref) else None
        return source.name if source is not None and source.kind == "parameter" else None

    def weight(self, operand: Any) -> tuple[str | None, bool]:
        """Returns the name of the parameter that an operand is, and whether it is that parameter transposed."""
        name = self._views.get(operand.register) if isinstance(operand, Ref) else None
        return (self.parameter(operand), False) if name is None else (name, True)

    def weight_name(self, operand: Any) -> str | None:
        """Returns the name of the parameter or buffer that an operand is, if it is one."""
        source = self.graph.sources.get(operand.register) if isinstance(operand, Ref) else None
        return source.name if source is not None and source.is_weight else None

    # -- arguments and results -------------------------------------------------------------------------------------

    def argument(self, position: int, name: str, default: Any = None) -> Any:
        """Returns an argument given by position or by name."""
        return self.args[position] if len(self.args) > position else self.kwargs.get(name, default)

    def outputs(self) -> list[tuple[int, ...] | None]:
        """Lists the shape of each result, ``None`` for what is no tensor."""
        return [None if r is None else self.graph.values[r].shape for r in self.node.outputs]

    def result(self) -> tuple[int, ...]:
        """Returns the shape of the only result."""
        shapes = self.outputs()
        if len(shapes) != 1 or shapes[0] is None:
            raise NoRuleError("returns several values")
        return shapes[0]

    def all_outputs(self, state: Sharded | None) -> tuple[Sharded | None, ...]:
        """Gives all results the same state."""
        return tuple(None if r is None else state for r in self.node.outputs)


def _function_name(target: Any) -> str:
    """Names a torch function; one of a library that happens to have the same name is told apart."""
    name = str(getattr(target, "__name__", repr(target)))
    if isinstance(target, ApplyFunction) or type(target).__module__.startswith(("torch._ops", "torch.jit")):
        return f"custom {name}"
    module = getattr(target, "__module__", None) or "torch"
    return name if module.split(".")[0] in ("torch", "lightning_mgpu") else f"custom {name}"
