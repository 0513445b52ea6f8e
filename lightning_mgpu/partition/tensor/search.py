"""The search for a plan: walks the forward, and goes back to a layer whenever its split turns out not to work."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from lightning_mgpu.partition.graph import Graph
from lightning_mgpu.partition.names import Names
from lightning_mgpu.partition.tensor.call import Call, Weight
from lightning_mgpu.partition.tensor.choosing import Choosing
from lightning_mgpu.partition.tensor.layout import Layout
from lightning_mgpu.partition.tensor.leaves import HOOKED
from lightning_mgpu.partition.tensor.rules import RULES
from lightning_mgpu.partition.tensor.sharded import NeedsCutsError, NoRuleError, Sharded
from lightning_mgpu.partition.tensor.walk import Walk, WalkedCall

__all__ = ["Found", "Search"]


@dataclass(frozen=True)
class Found:
    """Is what a search has found.

    Attributes:
        layouts: layout of each parameter and buffer that is split.
        inputs: layout of each argument that is split, by position.
        states: layout of each value that is split, by register.
        roles: role of each call on parts, by index.
        parameter_roles: role of each parameter and buffer that is split.
        whole: why a parameter is whole that nobody decided about.
    """

    layouts: Mapping[str, Layout]
    inputs: Mapping[int, Layout]
    states: Mapping[int, Layout]
    roles: Mapping[int, str]
    parameter_roles: Mapping[str, str]
    whole: Mapping[str, str]


class Search:
    """Searches for a plan; what it has decided is in ``choosing``.

    Args:
        graph: the recording.
        names: names below the root.
        choosing: what is decided.
        wide: registers of the arguments to split, by position.
    """

    def __init__(self, graph: Graph, names: Names, choosing: Choosing, wide: Mapping[int, int]) -> None:
        self.graph = graph
        self.names = names
        self.choosing = choosing
        self.wide = wide
        self.num_ranks = choosing.num_ranks
        self.asked_at: dict[str, int] = {}  # where the walk has to begin again when a weight is decided otherwise

    def run(self) -> Found:
        """Walks until everything goes together."""
        while True:
            size = self.choosing.size()
            found = self._attempt()
            if found is not None:
                return found
            assert self.choosing.size() > size, "every attempt takes a possibility away"

    def _attempt(self) -> Found | None:
        """Walks once to the end; returns nothing where what was decided has to be decided otherwise from the beginning."""
        self.walk = Walk(self.graph, self.names, self, self._given(), self._fail)
        calls: list[WalkedCall] = []
        while self.walk.position < len(self.walk.order):
            try:
                calls.append(self.walk.step())
            except _BackError as error:
                if error.position is None:
                    return None
                self.walk.rewind(error.position)
                del calls[error.position :]
        return self._found(calls) if self._end(calls) and self._agree(calls) else None

    def _given(self) -> dict[int, Sharded]:
        given = {}
        for position, register in self.wide.items():
            if position not in self.choosing.refused_inputs:
                shape = self.graph.values[register].shape
                sources = frozenset({f"input {position}"})
                given[register] = Sharded(len(shape) - 1, (shape[-1],), sources, spans=False)
        return given

    # -- what rules ask --------------------------------------------------------------------------------------------

    def split(self, weight: Weight, given: Sharded | None) -> Layout | None:
        self._note_asked(weight)
        return self.choosing.split(weight, given)

    def split_vocabulary(self, weight: Weight) -> Layout | None:
        self._note_asked(weight)
        return self.choosing.split_vocabulary(weight)

    def gathers(self, name: str) -> bool:
        return self.choosing.gathers(name)

    def follows(self, name: str, layout: Layout) -> bool:
        return self.choosing.follows(name, layout)

    def _note_asked(self, weight: Weight) -> None:
        position = self.walk.position
        self.asked_at[weight.name] = min(self.asked_at.get(weight.name, position), position)

    # -- what does not go together ---------------------------------------------------------------------------------

    def _fail(self, call: Call, error: NoRuleError | NeedsCutsError) -> dict[int, Sharded]:
        """Decides otherwise about a layer that a call's operands come from, and goes back there.

        It is the first of several: whatever comes after may be what it is because of it.
        """
        size = self.choosing.size()
        sources = error.sources or _sources_of(call)
        first = min(sources, key=self._asked_at)
        reason = self.choosing.cut(error) if isinstance(error, NeedsCutsError) else str(error)
        if reason:
            self.choosing.blame(first, f"{call.node.name} {reason}")
        assert self.choosing.size() > size, f"{call.node} is decided about only once"
        raise _BackError(self._asked_at(first))

    def _asked_at(self, source: str) -> int:
        """Returns where a weight was first asked about; -1 for an input."""
        return self.asked_at.get(source, -1)

    def _end(self, calls: Sequence[WalkedCall]) -> bool:
        """Leaves small layers whole whose parts nothing but the result needs."""
        paired = {s for c in calls if c.rewrite is not None and c.rewrite.reduce for s in _sources_of(c.call)}
        ends = [*self.graph.output_registers, *self.graph.buffer_writes.values()]
        states = [state for r in ends if (state := self.walk.states.get(r)) is not None]
        return self.choosing.end({source for state in states for source in state.sources} - paired)

    def _agree(self, calls: Sequence[WalkedCall]) -> bool:
        """Leaves parameters whole that are used in several ways."""
        agreed = True
        for name, ways in self._uses(calls).items():
            if len(ways) > 1:
                users = sorted({user for users in ways.values() for user in users})
                self.choosing.refuse(name, f"it is used in {len(ways)} ways, by {' and '.join(users)}")
                agreed = False
        return agreed

    def _uses(self, calls: Sequence[WalkedCall]) -> dict[str, dict[Layout | None, list[str]]]:
        """Lists for each parameter and buffer the calls that use it, by the layout they use."""
        uses: dict[str, dict[Layout | None, list[str]]] = {}
        for walked in calls:
            layouts = {} if walked.rewrite is None else walked.rewrite.layouts
            for name in self._weights(walked.call):
                uses.setdefault(name, {}).setdefault(layouts.get(name), []).append(walked.call.node.name)
        return uses

    def _weights(self, call: Call) -> Iterator[str]:
        """Yields the parameters and buffers a call uses; to transpose one is no use by itself."""
        if any(register in self.walk.views for register in call.node.outputs):
            return
        for register in call.refs():
            source = self.graph.sources.get(register)
            if register in self.walk.views:
                yield self.walk.views[register]
            elif source is not None and source.is_weight:
                yield source.name

    def _found(self, calls: Sequence[WalkedCall]) -> Found:
        uses = self._uses(calls)
        on_parts = {c.call.index: c.rewrite for c in calls if c.rewrite is not None}
        parameter_roles: dict[str, str] = {}
        for rewrite in on_parts.values():
            for name in rewrite.layouts:
                parameter_roles.setdefault(name, rewrite.role)
        return Found(
            layouts={name: layout for name, ways in uses.items() for layout in ways if layout is not None},
            inputs={p: self.walk.given[r].layout for p, r in self.wide.items() if r in self.walk.given},
            states={register: state.layout for register, state in self.walk.states.items()},
            roles={index: rewrite.role for index, rewrite in on_parts.items()},
            parameter_roles=parameter_roles,
            whole={name: reason for c in calls for name, reason in self._reasons(c)},
        )

    def _reasons(self, walked: WalkedCall) -> Iterator[tuple[str, str]]:
        """Yields why the parameters of a call are whole that has no say in it."""
        name = walked.call.name
        reason = "has hooks, which are to see whole values" if name == HOOKED else "works on whole values"
        if name not in RULES and name != HOOKED:
            reason = f"{name} has no rule for values that are split over the ranks"
        for weight in self._weights(walked.call):
            yield weight, reason


def _sources_of(call: Call) -> frozenset[str]:
    states = [state for r in call.refs() if (state := call.state(r)) is not None]
    return frozenset(source for state in states for source in state.sources)


class _BackError(Exception):
    """Sends the walk back to a call, or to the beginning with other inputs where it names none."""

    def __init__(self, position: int) -> None:
        super().__init__(position)
        self.position = position if position >= 0 else None
