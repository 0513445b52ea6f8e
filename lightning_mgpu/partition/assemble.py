"""Assembles stages from a cut recording, with exactly the values alive at each cut."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from lightning_mgpu.partition.batch import Batching
from lightning_mgpu.partition.cut import Layout
from lightning_mgpu.partition.graph import Graph
from lightning_mgpu.partition.program import Store, compile_nodes
from lightning_mgpu.partition.recording import Recording
from lightning_mgpu.partition.stage import Crossing, Stage

__all__ = ["make_stages"]


def make_stages(
    recording: Recording,
    batching: Batching,
    layout: Layout,
    *,
    store: Store,
    names_of: Callable[[int], Sequence[str]],
    simple_values: Callable[[str], Mapping[str, Any]],
    owners_of: Callable[[str], frozenset[int]],
) -> tuple[Stage, ...]:
    """Makes the stages of one recording.

    Args:
        recording: recording of a microbatch (whose shapes the stages have).
        batching: the division into body and tail.
        layout: the nodes of each stage.
        store: where leaf modules are looked at.
        names_of: lists the parameters and buffers of a node.
        simple_values: gives the Python attributes a leaf module had.
        owners_of: gives the owners of a parameter or buffer. A buffer that a later stage reads comes from its owner.

    Returns:
        One stage per process, first to last.
    """
    graph = recording.graph
    count = len(layout.stages)
    reached = _reached(recording, batching.wanted)

    def described(registers: Iterable[int]) -> tuple[Crossing, ...]:
        return tuple(_crossing(graph, register, reached) for register in registers)

    inputs = set(graph.inputs)
    made_in: dict[int, int] = {}
    for j, nodes in enumerate(layout.stages):
        for index in nodes:
            for register in graph.nodes[index].outputs:
                if register is not None and register not in graph.sources:
                    made_in.setdefault(register, j)
    read_in = [{r for i in nodes for r in graph.nodes[i].reads} for nodes in layout.stages]

    buffers = {r: owners_of(s.name) for r, s in graph.sources.items() if s.kind == "buffer"}
    from_stage: dict[tuple[int, int], int] = {}  # where a buffer comes from that a stage reads and does not own
    for k, read in enumerate([*read_in[:-1], read_in[-1] | set(batching.wanted)]):
        foreign = [r for r in read & buffers.keys() if k not in buffers[r]]
        from_stage.update({(r, k): max(j for j in buffers[r] if j < k) for r in foreign})

    def alive(j: int) -> tuple[int, ...]:
        """Lists the registers that cross from stage j to stage j + 1."""
        later = set().union(*read_in[j + 1 :])
        made = {r for r, stage in made_in.items() if stage <= j and (r in later or r in batching.wanted)}
        carried = inputs & set().union(*read_in[j + 1 : count - 1]) if j + 1 < count - 1 else set()
        brought = {r for (r, k), origin in from_stage.items() if origin <= j < k}
        return tuple(sorted(made | carried | brought))

    writes = {name: r for name, r in graph.buffer_writes.items() if r in made_in and batching.dims[r] is None}
    stages = []
    for j, nodes in enumerate(layout.stages):
        receives = alive(j - 1) if j > 0 else ()
        sends = alive(j) if j < count - 1 else batching.wanted
        direct: set[int] = set()
        if j == 0:
            direct = inputs & set().union(*read_in[: max(count - 1, 1)])
        if j == count - 1:
            direct |= inputs & read_in[j]
        program = compile_nodes(
            graph, nodes, sends, store=store,
            unbatched=lambda r: batching.dims[r] is None,
            simple_values=simple_values,
            buffer_writes={name: r for name, r in writes.items() if made_in[r] == j},
            given=[r for r in receives if r in buffers],
        )  # fmt: skip
        names = tuple(dict.fromkeys(name for index in nodes for name in names_of(index)))
        stages.append(Stage(j, program, described(receives), described(sends), described(sorted(direct)), names))
    return tuple(stages)


def _crossing(graph: Graph, register: int, reached: Mapping[int, frozenset[int]]) -> Crossing:
    value = graph.values[register]
    gradient = value.requires_grad and (value.dtype.is_floating_point or value.dtype.is_complex)
    return Crossing(register, value.shape, value.dtype, gradient, reached.get(register, frozenset()))


def _reached(recording: Recording, wanted: Sequence[int]) -> dict[int, frozenset[int]]:
    """Finds for each register which of the ``wanted`` tensors send a gradient to it, from the recorded autograd graph."""
    of_node: dict[Any, set[int]] = {}
    for position, register in enumerate(wanted):
        start = recording.tensors[register].grad_fn
        todo, seen = [start] if start is not None else [], {start}
        while todo:
            node = todo.pop()
            of_node.setdefault(node, set()).add(position)
            for following, _ in node.next_functions:
                if following is not None and following not in seen:
                    seen.add(following)
                    todo.append(following)
    return {
        register: frozenset(of_node.get(tensor.grad_fn, ()))
        for register, tensor in enumerate(recording.tensors)
        if tensor.grad_fn is not None
    }
