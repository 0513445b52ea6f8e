"""Cuts the body of a recorded forward into stages: by name, by balance, or so that parameters stay with their owners."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lightning_mgpu.errors import PartitionError, PlacementError, counted
from lightning_mgpu.partition.balance import partition
from lightning_mgpu.partition.batch import Batching
from lightning_mgpu.partition.body import Body
from lightning_mgpu.partition.cost import Balance, node_costs, weights_of
from lightning_mgpu.partition.graph import Graph, Node
from lightning_mgpu.partition.names import Names
from lightning_mgpu.partition.placement import Placement

__all__ = ["CutRequest", "Layout", "check_cut_names", "cut", "place"]

_MAX_TAIL_SHARE = 0.25


@dataclass(frozen=True)
class CutRequest:
    """Is what the user asks for: names of the modules that begin stages, or a measure to balance."""

    cuts: tuple[str, ...] | None = None
    balance: Balance = "flops"


@dataclass(frozen=True)
class Layout:
    """Is a cut body: for each stage the indices of its nodes, in order."""

    stages: tuple[tuple[int, ...], ...]

    def stage_of(self) -> dict[int, int]:
        return {index: j for j, nodes in enumerate(self.stages) for index in nodes}


def check_cut_names(cuts: Sequence[str], names: Names, num_stages: int) -> None:
    """Checks what can be known about named cuts before anything runs.

    Raises:
        PartitionError: for another number of cuts than stages need, a name twice, or a name that no module has.
    """
    if len(cuts) != num_stages - 1:
        raise PartitionError(
            f"{counted(len(cuts), 'cut')} would make {counted(len(cuts) + 1, 'stage')} of {counted(num_stages, 'device')}; "
            f"name {counted(num_stages - 1, 'cut')} or use devices={len(cuts) + 1}"
        )
    repeated = [c for c in cuts if list(cuts).count(c) > 1]
    if repeated:
        raise PartitionError(f"cut {repeated[0]!r} is named {list(cuts).count(repeated[0])} times; name each cut once")
    known = [path for path in names.module_at if path]
    for name in cuts:
        if name not in known and not any(path.endswith(f".{name}") for path in known):
            near = difflib.get_close_matches(name, known, n=3, cutoff=0.3) or known[:3]
            raise PartitionError(f"cut {name!r} names no module; the nearest names are {', '.join(map(repr, near))}")


def cut(
    graph: Graph,
    batching: Batching,
    names: Names,
    placement: Placement,
    request: CutRequest,
    path: str,
) -> Layout:
    """Cuts the body of one recording.

    Args:
        graph: recording of the whole batch.
        batching: its division into body and tail.
        names: names below the root.
        placement: owners so far; tensors it does not know are free.
        request: what the user asked for.
        path: path of the recorded module.

    Returns:
        The layout; parameters that have owners are used by their owners only.

    Raises:
        PartitionError: where the body can't be cut as asked.
        PlacementError: where it uses placed parameters against the order of the stages.
    """
    _check_tail(graph, batching, names, path)
    body = Body(graph, batching, names)
    reasons = body.illegal()
    count = len(body.nodes)
    allowed = [_allowed(graph.nodes[i], w, names, placement) for i, w in zip(body.nodes, body.weights, strict=True)]
    _check_tail_owners(graph, batching, names, placement)
    if any(a is not None for a in allowed):
        positions = _positions_by_owner(body, reasons, allowed, placement, request, path)
    elif request.cuts is not None:
        positions = tuple(_position_of(name, body, reasons, path) for name in request.cuts)
        _check_order(positions, request.cuts)
    else:
        costs = node_costs(graph, body.nodes, names, request.balance)
        counts = [any(names.kinds[w] == "parameter" for w in weights) for weights in body.weights]
        _check_layers(sum(counts), placement.num_stages, names.module_at[path], _layers_after_batch(graph, batching, names))
        legal, crossing = [not r for r in reasons[:count]], body.crossing()[:count]
        try:
            positions = partition(costs, placement.num_stages, crossing=crossing, legal=legal, counts=counts)
        except PartitionError as error:
            why = next((r for r in reasons[1:count] if r), "")
            raise PartitionError(f"{error} ({why})" if why else str(error)) from error
    bounds = [0, *positions, count]
    return Layout(tuple(tuple(body.nodes[a:b]) for a, b in itertools.pairwise(bounds)))


def _allowed(node: Node, weights: Sequence[str], names: Names, placement: Placement) -> frozenset[int] | None:
    """Says in which stages a node may lie: those that own its weights; a buffer that it only reads may come from before."""
    read = {w for w in weights if _only_reads(node, w, names) and w in placement.owners}
    stages = placement.allowed(w for w in weights if w not in read)
    for name in read:
        later = frozenset(range(min(placement.owners[name]), placement.num_stages))
        stages = later if stages is None else stages & later
    return stages


def _only_reads(node: Node, name: str, names: Names) -> bool:
    return not node.is_module and names.kinds[name] == "buffer" and name not in node.changes


def _check_layers(num_layers: int, num_stages: int, module: torch.nn.Module, after_batch: str) -> None:
    if num_layers < num_stages:
        raise PartitionError(
            f"cannot cut {counted(num_layers, 'layer')} of {type(module).__name__} into {num_stages} stages; "
            f"use at most {counted(max(num_layers, 1), 'stage')} (devices={max(num_layers, 1)}){after_batch}"
        )


def _layers_after_batch(graph: Graph, batching: Batching, names: Names) -> str:
    """Says how many layers can't be cut since they follow what looks across the batch; nothing where there are none."""
    parameters = {w for i in batching.tail for w in weights_of(graph, i, names) if names.kinds[w] == "parameter"}
    layers = {name.rpartition(".")[0] for name in parameters}
    if not layers:
        return ""
    return (
        f", or num_microbatches=1: {graph.nodes[batching.tail[0]]} looks across the whole batch, so what follows it, with "
        f"{counted(len(layers), 'layer')}, runs on the lead"
    )


def _positions_by_owner(
    body: Body,
    reasons: list[str],
    allowed: list[frozenset[int] | None],
    placement: Placement,
    request: CutRequest,
    path: str,
) -> tuple[int, ...]:
    furthest, blame = 0, ""
    for index, stages in zip(body.nodes, allowed, strict=True):
        if stages is not None:
            later = [stage for stage in stages if stage >= furthest]
            if not later:
                raise PlacementError(
                    f"{body.graph.nodes[index]} uses weights of stage {max(stages)} after {blame} used those of stage "
                    f"{furthest}, against the order of the stages; call the parts of a placed module in the order of its "
                    f'forward, or pipeline only one of them with module="..."'
                )
            furthest = max(furthest, min(later))
            blame = str(body.graph.nodes[index])
    costs = node_costs(body.graph, body.nodes, body.names, request.balance)
    legal = [not r for r in reasons]
    try:
        return partition(
            costs, placement.num_stages, crossing=body.crossing(), legal=legal, allowed=allowed, counts=[False] * len(costs)
        )
    except PartitionError as error:
        why = next((r for r in reasons if r), str(error))
        raise PlacementError(
            f"this call of {path or 'the module'} can't be cut where its parameters already live: {why}"
        ) from error


def _position_of(name: str, body: Body, reasons: list[str], path: str) -> int:
    full = name if name in body.names.module_at else f"{path}.{name}".lstrip(".")
    canonical = body.names.path_of[id(body.names.module_at[full])] if full in body.names.module_at else full
    for position, index in enumerate(body.nodes):
        node = body.graph.nodes[index]
        where = node.target if isinstance(node.target, str) else node.path
        if where == canonical or where.startswith(f"{canonical}."):
            if position == 0:
                raise PartitionError(f"cut {name!r} begins the forward, so no stage would lie before it; name a later module")
            if reasons[position]:
                raise PartitionError(f"cannot cut at {name!r}: {reasons[position]}; name another module")
            return position
    raise PartitionError(f"cut {name!r} names a module that the forward does not call; name one that it calls")


def _check_order(positions: Sequence[int], cuts: Sequence[str]) -> None:
    order = [c for _, c in sorted(zip(positions, cuts, strict=True), key=lambda pair: pair[0])]
    if list(cuts) != order:
        raise PartitionError(f"cuts={list(cuts)} are out of order; the forward calls them as cuts={order}")
    for a, b, left, right in zip(positions, positions[1:], cuts, cuts[1:], strict=False):
        if a == b:
            raise PartitionError(f"cuts {left!r} and {right!r} lie at the same place, so a stage would be empty; drop one")


def _check_tail(graph: Graph, batching: Batching, names: Names, path: str) -> None:
    if not batching.tail:
        return
    for index in batching.tail:
        node = graph.nodes[index]
        if not graph.sharded.isdisjoint((*node.reads, *node.outputs)):
            raise PartitionError(
                f"{node} needs the whole batch, and is split over tensor-parallel ranks; use num_microbatches=1, or ask for "
                "'whole' of the layers it comes from"
            )
    every = sorted((*batching.body, *batching.tail))
    cost = dict(zip(every, node_costs(graph, every, names, "flops"), strict=True))
    late = sum(cost[i] for i in batching.tail)
    if late > _MAX_TAIL_SHARE * sum(cost.values()):
        node = graph.nodes[batching.tail[0] if batching.first_gathering is None else batching.first_gathering]
        raise PartitionError(
            f"{node} looks across the whole batch in the middle of {path or type(names.root).__name__}: "
            f"{late / sum(cost.values()):.0%} of the work follows from it, and splitting the batch would change it; use "
            'num_microbatches=1, or pipeline the part before it with module="..."'
        )


def _check_tail_owners(graph: Graph, batching: Batching, names: Names, placement: Placement) -> None:
    for index in batching.tail:
        for name in weights_of(graph, index, names):
            if any(s.name == name for r, s in graph.sources.items() if r in batching.wanted):
                continue
            owners = placement.owners.get(name)
            if owners is not None and placement.lead_process not in placement.holders(name):
                raise PlacementError(
                    f"{graph.nodes[index]} needs the whole batch on the lead, but uses {name!r}, which an earlier call "
                    f"placed on stage {max(owners)}; use num_microbatches=1"
                )


def place(graph: Graph, batching: Batching, layout: Layout, names: Names, placement: Placement, path: str) -> None:
    """Gives every tensor below ``path`` that has no owner yet its owners, from where the layout uses it.

    A tensor that modules outside ``path`` share is owned by the lead as well, since they run there. One that the forward
    does not use goes to its nearest neighbour by name, unless the forward uses nothing of the child it belongs to: such a
    child is called elsewhere, and stays free.
    """
    used = _users(graph, batching, layout, names, placement.lead)
    prefix = f"{path}." if path else ""
    for name, stages in used.items():
        if name not in placement.owners:
            outside = [alias for alias in names.aliases[name] if not alias.startswith(prefix)]
            placement.owners[name] = frozenset(stages | ({placement.lead} if outside else set()))
    below = Placement(placement.num_stages, {n: s for n, s in placement.owners.items() if n.startswith(prefix)})
    children = {_child(name, prefix) for name in below.owners}
    for name in names.tensor_names(names.module_at[path]):
        if name not in placement.owners and _child(name, prefix) in children - {""}:
            placement.owners[name] = below.nearest(name)


def _users(graph: Graph, batching: Batching, layout: Layout, names: Names, lead: int) -> dict[str, set[int]]:
    """Finds the stages that must own each tensor; where a buffer is changed, those that only read it later need not."""
    used: dict[str, set[int]] = {}
    changed = {name for index in batching.body for name in graph.nodes[index].changes}
    stages = layout.stage_of()
    for index, stage in (*stages.items(), *((index, lead) for index in batching.tail)):
        for name in weights_of(graph, index, names):
            if name not in changed or not _only_reads(graph.nodes[index], name, names):
                used.setdefault(name, set()).add(stage)
    for name, register in graph.buffer_writes.items():
        producers = [stage for index, stage in stages.items() if register in graph.nodes[index].outputs]
        unbatched = bool(producers) and batching.dims[register] is None
        used.setdefault(name, set()).add(producers[0] if unbatched else lead)
    for source in (graph.sources[r] for r in graph.output_registers if r in graph.sources):
        if source.is_weight and source.name not in changed:
            used.setdefault(source.name, set()).add(lead)
    return used


def _child(name: str, prefix: str) -> str:
    child, dot, _ = name.removeprefix(prefix).partition(".")
    return child if dot else ""
