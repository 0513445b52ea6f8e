"""The plan: which parameters are split, and how, with the reason for each layer that stays whole.

Found by walking the recorded forward with every layer split that can be; a call that can't go on with parts sends the layers
they come from back to being whole, or asks them for segments, and the walk begins anew. Every restart takes one possibility
away, so it ends.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from lightning_mgpu.errors import PartitionError
from lightning_mgpu.partition.graph import Graph
from lightning_mgpu.partition.names import Names
from lightning_mgpu.partition.tensor.choosing import Choosing
from lightning_mgpu.partition.tensor.layout import Layout, local_shape
from lightning_mgpu.partition.tensor.search import Found, Search
from lightning_mgpu.partition.tensor.steering import Steering
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
        num_split: elements of those that are split.
        local_elements: elements of them that a rank holds, the first one.
        reason: why it is whole, or why its result is put together.
    """

    path: str
    kind: str
    role: str
    layout: Layout | None
    num_elements: int
    num_split: int
    local_elements: int
    reason: str


@dataclass(frozen=True)
class TensorPlan:
    """Is the plan for one module: fixed once made, whatever is recorded later.

    Attributes:
        num_ranks: number of ranks.
        layouts: layout of each parameter and buffer that is split, by canonical name; all others are whole.
        gathered: names of weights of column layers whose results are put together at once.
        inputs: layouts of arguments that are split, by their position among the tensors.
        shapes: shape of each parameter and buffer, whole.
        layers: what became of each layer, in the module's order.
        states: layout of each value of the recording that is split, by register.
        roles: what became of each call of the recording that works on parts, by its index.
    """

    num_ranks: int
    layouts: Mapping[str, Layout]
    gathered: frozenset[str] = frozenset()
    inputs: Mapping[int, Layout] = field(default_factory=dict)
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    layers: tuple[Layer, ...] = ()
    states: Mapping[int, Layout] = field(default_factory=dict)
    roles: Mapping[int, str] = field(default_factory=dict)

    def local_shape(self, name: str, rank: int) -> tuple[int, ...]:
        """Returns the shape of what a rank holds of a parameter or buffer."""
        return local_shape(self.shapes[name], self.layouts.get(name), rank, self.num_ranks)

    @property
    def share(self) -> float:
        """Share of the parameters that are split, by elements."""
        return sum(layer.num_split for layer in self.layers) / max(sum(layer.num_elements for layer in self.layers), 1)

    def joined(self, other: TensorPlan) -> TensorPlan:
        """Returns the plan for the modules of both; what both know is as it is here."""
        return replace(
            self,
            layouts={**{name: x for name, x in other.layouts.items() if name not in self.shapes}, **self.layouts},
            gathered=self.gathered | {name for name in other.gathered if name not in self.shapes},
            shapes={**other.shapes, **self.shapes},
            layers=(*self.layers, *(layer for layer in other.layers if layer.path not in {own.path for own in self.layers})),
        )


def plan(
    graph: Graph,
    names: Names,
    num_ranks: int,
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
        num_ranks: number of ranks.
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
    choosing = Choosing(num_ranks, Steering(steering or {}, names), gather_min)
    wide = _wide_inputs(graph) if split_inputs else {}
    found = Search(graph, names, choosing, wide).run()
    if split_inputs and not found.inputs:
        reason = next(iter(choosing.refused_inputs.values()), "it takes none with features along a last dimension")
        raise PartitionError(f'cannot split an input by features: {reason}; leave out split_input="features"')
    choosing.steering.check_matches(choosing.weights)
    shapes = {name: tuple(names.tensors[name].shape) for name in names.tensor_names(names.module_at[path])}
    made = TensorPlan(
        num_ranks, found.layouts, frozenset(choosing.gathered), found.inputs, shapes, states=found.states, roles=found.roles
    )
    return replace(made, layers=tuple(_layers(made, names, found, choosing)))


def remark_small_share(made: TensorPlan) -> None:
    """Warns where less than half of the parameters are split."""
    whole = [layer for layer in made.layers if layer.role == "whole"]
    if made.share >= _SMALL_SHARE or not whole:
        return
    largest = max(whole, key=lambda layer: layer.num_elements)
    total, local = (sum(getattr(layer, which) for layer in made.layers) for which in ("num_elements", "local_elements"))
    remark(
        f"tensor parallelism over {made.num_ranks} ranks splits {made.share:.0%} of the parameters, so that a rank "
        f"holds {local:,} of {total:,}; the largest layer left whole is {largest.path or largest.kind!r}: {largest.reason}"
    )


def _wide_inputs(graph: Graph) -> dict[int, int]:
    """Returns the registers of the arguments with the most features along a last dimension, by their position."""
    registers = dict(enumerate(dict.fromkeys(graph.inputs)))
    values = {position: graph.values[register] for position, register in registers.items()}
    widths = {p: v.shape[-1] for p, v in values.items() if v.dtype.is_floating_point and len(v.shape) >= 2}
    return {p: registers[p] for p, width in widths.items() if width == max(widths.values())}


def _layers(made: TensorPlan, names: Names, found: Found, choosing: Choosing) -> Iterator[Layer]:
    owners: dict[str, list[str]] = {}
    for name in made.shapes:
        if names.kinds[name] == "parameter":
            owners.setdefault(name.rpartition(".")[0], []).append(name)
    for path, parameters in owners.items():
        largest = max(parameters, key=lambda name: math.prod(made.shapes[name]))
        split = [name for name in parameters if name in made.layouts]
        main = largest if largest in split or not split else split[0]
        gathered = choosing.gathered.get(main, "")
        whole = "" if split else choosing.reason(main) or found.whole.get(main, "the recorded forward does not use it")
        yield Layer(
            path,
            type(names.module_at[path]).__name__,
            found.parameter_roles.get(main, "whole"),
            made.layouts.get(main),
            sum(math.prod(made.shapes[name]) for name in parameters),
            sum(math.prod(made.shapes[name]) for name in split),
            sum(math.prod(made.local_shape(name, 0)) for name in parameters),
            f"put together, since {gathered}" if gathered else whole,
        )
