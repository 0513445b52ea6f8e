"""Walks a recorded forward in order, from what is split to what that makes of every call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from lightning_mgpu.partition.graph import Graph, Node
from lightning_mgpu.partition.names import Names
from lightning_mgpu.partition.tensor.call import Call, Decisions, Rewrite
from lightning_mgpu.partition.tensor.rules import DECIDING, RULES
from lightning_mgpu.partition.tensor.sharded import NeedsCutsError, NoRuleError, Sharded

__all__ = ["Walk", "WalkedCall", "live_calls", "transposed"]


@dataclass
class WalkedCall:
    """Is one call with what becomes of it.

    Attributes:
        call: the call.
        rewrite: what becomes of it on parts; ``None`` where it stays as it is, on whole values.
        gathered: split values that it gets put together.
    """

    call: Call
    rewrite: Rewrite | None
    gathered: dict[int, Sharded] = field(default_factory=dict)


def transposed(graph: Graph) -> dict[int, str]:
    """Finds the registers that hold the transpose of a parameter, as ``weight.T`` does, with the parameter's name."""
    found = {}
    for node in graph.nodes:
        if len(node.reads) == 1 == len(node.outputs) and node.outputs[0] is not None and _transposes(node):
            source = graph.sources.get(node.reads[0])
            if source is not None and source.kind == "parameter" and len(graph.values[node.reads[0]].shape) == 2:
                found[node.outputs[0]] = source.name
    return found


def _transposes(node: Node) -> bool:
    name, given = getattr(node.target, "__name__", ""), node.args[1:]
    if name in ("transpose", "swapaxes"):
        return sorted(d % 2 for d in given if isinstance(d, int)) == [0, 1]
    if name == "permute":
        order = given[0] if len(given) == 1 else given
        return [d % 2 for d in order] == [1, 0]
    return name == "t" or (name == "get_attribute" and given[0] in ("T", "mT"))


def live_calls(graph: Graph) -> list[int]:
    """Lists the calls that a result or an effect of the forward needs."""
    return graph.live_nodes([*graph.output_registers, *graph.buffer_writes.values()])


class Walk:
    """Goes through the calls that are needed.

    Args:
        graph: the recording.
        names: names below the root.
        decisions: says how weights are split.
        given: states of inputs, parameters and buffers, by register.
        resolve: is asked where a call can't be carried out on parts. Raises, or returns which values to put together.

    Attributes:
        order: indices of the calls.
        position: how many of them are done.
        states: state of every value that is split, after them.
    """

    def __init__(
        self,
        graph: Graph,
        names: Names,
        decisions: Decisions,
        given: Mapping[int, Sharded],
        resolve: Callable[[Call, NoRuleError | NeedsCutsError], dict[int, Sharded]],
    ) -> None:
        self.graph = graph
        self.names = names
        self.decisions = decisions
        self.resolve = resolve
        self.given = dict(given)
        self.order = live_calls(graph)
        self.position = 0
        self.states = dict(given)
        self._registers = {source.name: r for r, source in graph.sources.items() if source.is_weight}
        self.views = transposed(graph)
        self._made_at = dict.fromkeys(graph.sources, -1)
        self._before: list[tuple[int, int, Sharded | None]] = []  # position, register, its state before

    def step(self) -> WalkedCall:
        """Walks one call further, and says what becomes of it."""
        walked = self._walk(self.order[self.position])
        call = walked.call
        states = call.all_outputs(None) if walked.rewrite is None else walked.rewrite.outputs
        for register, state in zip(call.node.outputs, states, strict=True):
            if register is not None:
                self._made_at.setdefault(register, self.position)
                self._before.append((self.position, register, self.states.pop(register, None)))
                if state is not None:
                    self.states[register] = state
        self.position += 1
        return walked

    def rewind(self, position: int) -> None:
        """Goes back to a call that was walked before."""
        while self._before and self._before[-1][0] >= position:
            _, register, state = self._before.pop()
            self.states.pop(register, None)
            if state is not None:
                self.states[register] = state
            if self._made_at.get(register, -1) >= position:
                del self._made_at[register]
        self.position = position

    def _walk(self, index: int) -> WalkedCall:
        gathered: dict[int, Sharded] = {}
        while True:
            states = {r: s for r, s in self.states.items() if r not in gathered} if gathered else self.states
            call = Call(self.graph, index, self.names, self._registers, self.views, states, self.decisions)
            try:
                return WalkedCall(call, self._rewrite(call, freed=bool(gathered)), gathered)
            except (NoRuleError, NeedsCutsError) as error:
                more = self.resolve(call, error)
                assert more.keys() - gathered.keys(), "what is put together is more at every attempt"
                gathered.update(more)

    def _rewrite(self, call: Call, *, freed: bool) -> Rewrite | None:
        split = [r for r in call.refs() if call.state(r) is not None]
        if not split and call.name not in DECIDING:
            return None
        rule = RULES.get(call.name)
        if rule is None:
            raise NoRuleError("has no rule for values that are split over the ranks")
        rewrite = rule(call)
        if rewrite is None:
            if split:
                raise NoRuleError("needs a value whole that is split over the ranks")
            return None
        if call.node.random and rewrite.enter and call.function is None:
            raise NoRuleError("draws random numbers inside a layer")
        self._check_memory(call, rewrite, freed=freed)
        return rewrite

    def _check_memory(self, call: Call, rewrite: Rewrite, *, freed: bool) -> None:
        """Raises where a call on parts would change a whole value, or return an operand in another state."""
        for register in call.node.mutates:
            source = self.graph.sources.get(register)
            dealt = source is not None and source.name in rewrite.layouts
            if call.state(register) is None and not dealt:
                raise NoRuleError("changes a whole value in place by one that is split over the ranks")
        for made, state in zip(call.node.outputs, rewrite.outputs, strict=True):
            if made in self._made_at and not freed and self.states.get(made) != state and not call.node.mutates:
                raise NoRuleError("returns an operand that is split otherwise")
            if made in call.node.mutates and call.state(made) != state:
                raise NoRuleError("changes a value in place that is split otherwise")
