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
from lightning_mgpu.partition.cost import Balance, node_costs, weights_of
from lightning_mgpu.partition.graph import Graph
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


@dataclass
class _Body:
    """Is the sequence of body nodes with what decides where it may be cut; positions count body nodes."""

    graph: Graph
    batching: Batching
    names: Names

    def __post_init__(self) -> None:
        self.nodes = self.batching.body
        self.weights = [weights_of(self.graph, index, self.names) for index in self.nodes]
        self.first: dict[int, int] = {}
        self.last: dict[int, int] = {}
        for position, index in enumerate(self.nodes):
            node = self.graph.nodes[index]
            for register in node.outputs:
                if register is not None:
                    self.first.setdefault(register, position)
            for register in node.reads:
                self.last[register] = position
        self.last |= dict.fromkeys(self.batching.wanted, len(self.nodes))

    def crossing(self) -> list[float]:
        """Counts the bytes alive across each position."""
        bytes_ = [0.0] * (len(self.nodes) + 1)
        for register, last in self.last.items():
            source = self.graph.sources.get(register)
            if source is not None and source.kind != "input":
                continue
            for position in range(self.first.get(register, -1) + 1, min(last, len(self.nodes)) + 1):
                bytes_[position] += self.graph.values[register].num_bytes
        return bytes_

    def illegal(self) -> list[str]:
        """Says for each position why no cut may lie there; an empty string where it may."""
        reasons = [""] * (len(self.nodes) + 1)
        self._forbid_shared_memory(reasons)
        self._forbid_inside_buffers(reasons)
        for position, index in enumerate(self.nodes):
            node = self.graph.nodes[index]
            if node.target is torch.autograd.grad:
                start = min((self.first.get(r, 0) for r in node.reads), default=0)
                self._forbid(reasons, start + 1, position, f"{node} needs the calls before it in one stage")
        return reasons

    @staticmethod
    def _forbid(reasons: list[str], start: int, end: int, reason: str) -> None:
        for position in range(max(start, 0), min(end + 1, len(reasons))):
            reasons[position] = reasons[position] or reason

    def _forbid_shared_memory(self, reasons: list[str]) -> None:
        changes: dict[int, int] = {}
        for position, index in enumerate(self.nodes):
            for storage in self.graph.storage_of(self.graph.nodes[index].mutates):
                changes[storage] = position
        for storage, change in changes.items():
            sharing = [r for r in self.last if self.graph.values[r].storage == storage and r in self.first]
            for position in range(change + 1):
                alive = [r for r in sharing if self.first[r] < position <= self.last[r]]
                if len(alive) > 1:
                    node = self.graph.nodes[self.nodes[change]]
                    self._forbid(reasons, position, position, f"{node} changes memory that two values share there")

    def _forbid_inside_buffers(self, reasons: list[str]) -> None:
        uses: dict[str, list[int]] = {}
        changed: set[str] = set(self.graph.buffer_writes)
        storage_names = {self.graph.values[r].storage: s.name for r, s in self.graph.sources.items() if s.kind == "buffer"}
        for position, (index, weights) in enumerate(zip(self.nodes, self.weights, strict=True)):
            node = self.graph.nodes[index]
            found = {storage_names[s] for s in self.graph.storage_of(node.reads) if s in storage_names}
            found.update(w for w in weights if self.names.kinds[w] == "buffer")
            for name in found:
                uses.setdefault(name, []).append(position)
            changed.update(storage_names[s] for s in self.graph.storage_of(node.mutates) if s in storage_names)
            if node.is_module:
                changed.update(found)
        for name, register in self.graph.buffer_writes.items():
            if register in self.first:
                uses.setdefault(name, []).append(self.first[register])
        in_tail = self._changed_in_tail(storage_names)
        for name, where in uses.items():
            if name in in_tail:
                self._forbid(reasons, where[0] + 1, len(self.nodes), f"buffer {name!r} is changed on the whole batch")
            elif name in changed:
                self._forbid(reasons, min(where) + 1, max(where), f"buffer {name!r} is changed there")

    def _changed_in_tail(self, storage_names: dict[int, str]) -> set[str]:
        found = {n for n, r in self.graph.buffer_writes.items() if r not in self.first or self._is_batched(r)}
        for index in self.batching.tail:
            storages = self.graph.storage_of(self.graph.nodes[index].mutates)
            found.update(storage_names[s] for s in storages if s in storage_names)
        return found

    def _is_batched(self, register: int) -> bool:
        return self.batching.dims[register] is not None


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
    body = _Body(graph, batching, names)
    reasons = body.illegal()
    count = len(body.nodes)
    allowed = [placement.allowed(w) for w in body.weights]
    _check_tail_owners(graph, batching, names, placement)
    if any(a is not None for a in allowed):
        positions = _positions_by_owner(body, reasons, allowed, placement, request, path)
    elif request.cuts is not None:
        positions = tuple(_position_of(name, body, reasons, path) for name in request.cuts)
        _check_order(positions, request.cuts)
    else:
        costs = node_costs(graph, body.nodes, names, request.balance)
        counts = [any(names.kinds[w] == "parameter" for w in weights) for weights in body.weights]
        _check_layers(sum(counts), placement.num_stages, names.module_at[path])
        positions = partition(
            costs, placement.num_stages, crossing=body.crossing()[:count], legal=[not r for r in reasons[:count]], counts=counts
        )
    bounds = [0, *positions, count]
    return Layout(tuple(tuple(body.nodes[a:b]) for a, b in itertools.pairwise(bounds)))


def _check_layers(num_layers: int, num_stages: int, module: torch.nn.Module) -> None:
    if num_layers < num_stages:
        raise PartitionError(
            f"cannot cut {counted(num_layers, 'layer')} of {type(module).__name__} into {num_stages} stages; "
            f"use at most {counted(max(num_layers, 1), 'stage')} (devices={max(num_layers, 1)})"
        )


def _positions_by_owner(
    body: _Body,
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


def _position_of(name: str, body: _Body, reasons: list[str], path: str) -> int:
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
            owners = placement.owners.get(name)
            if owners is not None and placement.lead not in owners:
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
    used: dict[str, set[int]] = {}
    for index, stage in layout.stage_of().items():
        for name in weights_of(graph, index, names):
            used.setdefault(name, set()).add(stage)
    for name, register in graph.buffer_writes.items():
        producers = [s for i, s in layout.stage_of().items() if register in graph.nodes[i].outputs]
        if producers and batching.dims[register] is None:
            used.setdefault(name, set()).add(producers[0])
        else:
            used.setdefault(name, set()).add(placement.lead)
    for index in batching.tail:
        for name in weights_of(graph, index, names):
            used.setdefault(name, set()).add(placement.lead)
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


def _child(name: str, prefix: str) -> str:
    child, dot, _ = name.removeprefix(prefix).partition(".")
    return child if dot else ""
