"""The plan: which parameters are split, and how, with the reason for each layer that stays whole.

Found by walking the recorded forward with every layer split that can be; a call that can't go on with parts sends the layers
they come from back to being whole, or asks them for segments, and the walk begins anew. Every restart takes one possibility
away, so it ends.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from lightning_mgpu.errors import PartitionError
from lightning_mgpu.partition.graph import Graph
from lightning_mgpu.partition.names import Names
from lightning_mgpu.partition.tensor.call import Call
from lightning_mgpu.partition.tensor.choosing import Choosing
from lightning_mgpu.partition.tensor.layout import Layout, local_shape
from lightning_mgpu.partition.tensor.sharded import NeedsCutsError, NoRuleError, Sharded
from lightning_mgpu.partition.tensor.steering import Steering
from lightning_mgpu.partition.tensor.walk import Walk, WalkedCall
from lightning_mgpu.remarks import remark

__all__ = ["GATHER_MIN", "Layer", "TensorPlan", "plan", "remark_small_share"]

GATHER_MIN = 1 << 16
"""A layer of so many elements is rather split and its result put together than left whole."""

_SMALL_SHARE = 0.5


@dataclass(frozen=True)
class Layer:
    """Says what becomes of the parameters of one module.

    Attributes:
        path: path of the module.
        kind: its class.
        role: ``column``, ``row``, ``vocabulary``, ``with its channels`` or ``whole``.
        layout: layout of its largest parameter.
        num_elements: elements of its parameters.
        local_elements: elements of them that a rank holds, the first one.
        reason: why it is whole, or why its result is put together.
    """

    path: str
    kind: str
    role: str
    layout: Layout | None
    num_elements: int
    local_elements: int
    reason: str


@dataclass(frozen=True)
class TensorPlan:
    """Is the plan for one module: fixed once made, whatever is recorded later.

    Attributes:
        n: number of ranks.
        layouts: layout of each parameter and buffer that is split, by canonical name; all others are whole.
        gathered: names of weights of column layers whose results are put together at once.
        inputs: layouts of arguments that are split, by their position among the tensors.
        shapes: shape of each parameter and buffer, whole.
        layers: what became of each layer, in the module's order.
        states: layout of each value of the recording that is split, by register.
        roles: what became of each call of the recording that works on parts, by its index.
    """

    n: int
    layouts: Mapping[str, Layout]
    gathered: frozenset[str] = frozenset()
    inputs: Mapping[int, Layout] = field(default_factory=dict)
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    layers: tuple[Layer, ...] = ()
    states: Mapping[int, Layout] = field(default_factory=dict)
    roles: Mapping[int, str] = field(default_factory=dict)

    def local_shape(self, name: str, rank: int) -> tuple[int, ...]:
        """Returns the shape of what a rank holds of a parameter or buffer."""
        return local_shape(self.shapes[name], self.layouts.get(name), rank, self.n)

    @property
    def share(self) -> float:
        """Share of the parameters that are split, by elements."""
        whole = sum(layer.num_elements for layer in self.layers)
        # what stays on a rank is the whole part and its piece of the rest: local = whole * (1 - share) + whole * share / n
        local = sum(layer.local_elements for layer in self.layers)
        return 0.0 if whole == 0 or self.n == 1 else (whole - local) / whole / (1 - 1 / self.n)

    def joined(self, other: TensorPlan) -> TensorPlan:
        """Returns the plan for the modules of both; what both know is as it is here."""
        return replace(
            self,
            layouts={**{n: x for n, x in other.layouts.items() if n not in self.shapes}, **self.layouts},
            gathered=self.gathered | {name for name in other.gathered if name not in self.shapes},
            shapes={**other.shapes, **self.shapes},
            layers=(*self.layers, *(layer for layer in other.layers if layer.path not in {own.path for own in self.layers})),
        )


def plan(
    graph: Graph,
    names: Names,
    n: int,
    *,
    path: str = "",
    steering: Mapping[str, str] | None = None,
    split_inputs: bool = False,
    gather_min: int = GATHER_MIN,
) -> TensorPlan:
    """Makes the plan of one recorded forward.

    Args:
        graph: the recording, with attention opened (`opened_attention`).
        names: names below the root.
        n: number of ranks.
        path: path of the recorded module.
        steering: role by pattern of layer names, as ``{"blocks.*.fc": "column", "head": "whole"}``; of several patterns that
            match, the last counts. Layers that none matches are planned by themselves.
        split_inputs: whether every rank is given only its columns of wide inputs.
        gather_min: elements from which a layer whose result is needed whole is split nonetheless.

    Returns:
        The plan.

    Raises:
        PartitionError: where a pattern matches no layer, a layer can't be split as it asks, or no input can be split.
    """
    choosing = Choosing(n, Steering(steering or {}, names), gather_min)
    wide = _wide_inputs(graph) if split_inputs else {}
    while True:
        attempt = _Attempt(graph, names, choosing, wide)
        if attempt.succeeds():
            break
    if split_inputs and not attempt.given:
        raise PartitionError(
            "cannot split an input by features: "
            + (next(iter(choosing.refused_inputs.values()), "it takes none with features along a last dimension"))
            + '; leave out split_input="features"'
        )
    choosing.steering.check_matches(choosing.weights)
    return attempt.plan(path)


def remark_small_share(made: TensorPlan) -> None:
    """Warns where less than half of the parameters are split."""
    if made.share >= _SMALL_SHARE:
        return
    whole = [layer for layer in made.layers if layer.role == "whole"]
    largest = max(whole, key=lambda layer: layer.num_elements)
    total, local = (sum(getattr(layer, which) for layer in made.layers) for which in ("num_elements", "local_elements"))
    remark(
        f"tensor parallelism over {made.n} ranks splits {made.share:.0%} of the parameters, so that a rank holds {local:,} of "
        f"{total:,}; the largest layer left whole is {largest.path or largest.kind!r}: {largest.reason}"
    )


def _wide_inputs(graph: Graph) -> dict[int, int]:
    """Returns the registers of arguments that have features along a last dimension, by their position."""
    found = {}
    for position, register in enumerate(dict.fromkeys(graph.inputs)):
        value = graph.values[register]
        if value.dtype.is_floating_point and len(value.shape) >= 2:
            found[position] = register
    return found


class _Attempt:
    """Is one walk with the choices made so far."""

    def __init__(self, graph: Graph, names: Names, choosing: Choosing, wide: Mapping[int, int]) -> None:
        self.graph = graph
        self.names = names
        self.choosing = choosing
        self.given = {
            position: Sharded(
                len(graph.values[r].shape) - 1, (graph.values[r].shape[-1],), frozenset({f"input {position}"}), spans=False
            )
            for position, r in wide.items()
            if position not in choosing.refused_inputs
        }
        self.walk = Walk(graph, names, choosing, {wide[p]: s for p, s in self.given.items()}, self._fail)
        self.demands: dict[str, dict[Layout | None, list[str]]] = {}
        self.roles: dict[str, str] = {}
        self.node_roles: dict[int, str] = {}
        self.paired: set[str] = set()

    def succeeds(self) -> bool:
        """Walks, and says whether the choices hold; otherwise there are fewer of them now."""
        try:
            for walked in self.walk:
                self._note(walked)
        except _Restart:
            return False
        return self._end() and self._agree()

    def _fail(self, call: Call, error: NoRuleError | NeedsCutsError) -> dict[int, Sharded]:
        reason = self.choosing.cut(error) if isinstance(error, NeedsCutsError) else str(error)
        if not reason:
            raise _Restart
        sources = {source for r in call.refs() if (s := call.state(r)) is not None for source in s.sources}
        self.choosing.blame(sources, f"{call.node.name} {reason}")
        raise _Restart

    def _note(self, walked: WalkedCall) -> None:
        """Takes down how a call uses each parameter and buffer."""
        call, rewrite = walked.call, walked.rewrite
        split = [s for r in call.refs() if (s := call.state(r)) is not None]
        sources = frozenset(source for s in split for source in s.sources)
        layouts = {} if rewrite is None else rewrite.layouts
        for register in call.refs():
            source = self.graph.sources.get(register)
            if source is not None and source.is_weight:
                ways = self.demands.setdefault(source.name, {})
                ways.setdefault(layouts.get(source.name), []).append(call.node.name)
        if rewrite is not None:
            self.roles = {**dict.fromkeys(layouts, rewrite.role), **self.roles}
            self.node_roles[call.index] = rewrite.role
            if rewrite.reduce:
                self.paired |= sources

    def _agree(self) -> bool:
        """Refuses layers whose parameters are used in several ways; what only goes along with a layer no longer does."""
        agreed = True
        for name, ways in self.demands.items():
            if len(ways) == 1:
                continue
            users = sorted({user for uses in ways.values() for user in uses})
            self.choosing.refuse([name], f"it is used in {len(ways)} ways, by {' and '.join(users)}")
            agreed = False
        return agreed

    def _end(self) -> bool:
        """Refuses small layers whose parts nothing but the result needs."""
        ends = [*self.graph.output_registers, *self.graph.buffer_writes.values()]
        sources = {source for r in ends if (s := self.walk.states.get(r)) is not None for source in s.sources}
        return self.choosing.end(sources - self.paired)

    def plan(self, path: str) -> TensorPlan:
        """Returns what was found."""
        layouts = {name: layout for name, ways in self.demands.items() for layout in ways if layout is not None}
        below = self.names.tensor_names(self.names.module_at[path])
        shapes = {name: tuple(self.names.tensors[name].shape) for name in below}
        made = TensorPlan(
            self.choosing.n,
            layouts,
            frozenset(self.choosing.gathered),
            {position: state.layout for position, state in self.given.items()},
            shapes,
            states={register: state.layout for register, state in self.walk.states.items()},
            roles=self.node_roles,
        )
        return replace(made, layers=tuple(self._layers(made)))

    def _layers(self, made: TensorPlan) -> list[Layer]:
        owners: dict[str, list[str]] = {}
        for name in made.shapes:
            if self.names.kinds[name] == "parameter":
                owners.setdefault(name.rpartition(".")[0], []).append(name)
        return [self._layer(path, parameters, made) for path, parameters in owners.items()]

    def _layer(self, path: str, parameters: list[str], made: TensorPlan) -> Layer:
        largest = max(parameters, key=lambda name: math.prod(made.shapes[name]))
        split = [name for name in parameters if name in made.layouts]
        main = largest if largest in split or not split else split[0]
        role = self.roles.get(main, "whole") if split else "whole"
        gathered = self.choosing.gathered.get(main, "")
        reason = f"put together, since {gathered}" if gathered else "" if split else self._reason(main)
        kind = type(self.names.module_at[path]).__name__
        count = sum(math.prod(made.shapes[name]) for name in parameters)
        local = sum(math.prod(made.local_shape(name, 0)) for name in parameters)
        return Layer(path, kind, role, made.layouts.get(main), count, local, reason)

    def _reason(self, name: str) -> str:
        refused = self.choosing.reason(name)
        if refused:
            return refused
        users = self.demands.get(name, {}).get(None)
        if not users:
            return "the recorded forward does not use it"
        return "works on whole values"


class _Restart(Exception):  # noqa: N818 - it is no error, but the next attempt
    """Ends a walk whose choices have changed."""
