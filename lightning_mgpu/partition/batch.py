"""Finds which values of a recorded forward carry the batch, by comparing a microbatch's recording with the whole batch's.

A value that scales with the batch in one dimension can be computed per microbatch. A node that turns such values into
something that does not (a loss, a batch statistic, similarities between all pairs of rows) has to see the whole batch: it and
all that follows it form the *tail*, which runs once, on the lead, on the gathered batch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lightning_mgpu.partition.graph import Graph, Node
from lightning_mgpu.partition.recording import StructureError

__all__ = ["Batching", "batch_dims", "split_tail"]

Dim = int | None | Literal["irregular"]


def batch_dims(whole: Graph, micro: Graph, batch_size: int, rows: int) -> list[Dim]:
    """Says for each register along which dimension it carries the batch.

    Args:
        whole: recording of the whole batch.
        micro: recording of a microbatch.
        batch_size: rows of the whole batch.
        rows: rows of the microbatch.

    Returns:
        For each register the dimension, ``None`` for a value that is the same size in both, ``"irregular"`` for one that
        changes otherwise.

    Raises:
        StructureError: where the two recordings made different calls.
    """
    for a, b in zip(whole.nodes, micro.nodes, strict=False):
        if a.target != b.target or a.outputs != b.outputs or a.reads != b.reads or a.mutates != b.mutates:
            raise StructureError(f"the whole batch calls {a}, a microbatch of {rows} rows calls {b}")
    if len(whole.nodes) != len(micro.nodes) or len(whole.values) != len(micro.values):
        raise StructureError(f"the whole batch makes {len(whole.nodes)} calls, a microbatch {len(micro.nodes)}")
    for register, constant in whole.constants.items():
        if not _is_same(constant, micro.constants.get(register)):
            raise StructureError("a tensor is made anew in each forward by a call that can't be recorded")
    return [_dim(a.shape, b.shape, batch_size, rows) for a, b in zip(whole.values, micro.values, strict=True)]


def _is_same(a: Tensor, b: Tensor | None) -> bool:
    """Says whether two constants are one, or were made anew with the same numbers, as by ``torch.from_numpy``."""
    return a is b or (b is not None and a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b))


def _dim(whole: tuple[int, ...], micro: tuple[int, ...], batch_size: int, rows: int) -> Dim:
    if whole == micro:
        return None
    if len(whole) != len(micro):
        return "irregular"
    changed = [d for d, (a, b) in enumerate(zip(whole, micro, strict=True)) if a != b]
    if len(changed) == 1 and whole[changed[0]] * rows == micro[changed[0]] * batch_size:
        return changed[0]
    return "irregular"


@dataclass(frozen=True)
class Batching:
    """Divides the needed nodes of a forward.

    Attributes:
        dims: batch dimension of each register.
        body: indices of the nodes that run per microbatch, in order.
        tail: indices of the nodes that run once on the gathered batch, in order.
        wanted: registers the body hands over: results, and what the tail reads.
        first_gathering: index of the first node that needs the whole batch, if any does.
    """

    dims: Sequence[Dim]
    body: tuple[int, ...]
    tail: tuple[int, ...]
    wanted: tuple[int, ...]
    first_gathering: int | None = None


def split_tail(graph: Graph, dims: Sequence[Dim] | None, away: Collection[str] = ()) -> Batching:
    """Divides the needed nodes into body and tail.

    Args:
        graph: recording of the whole batch.
        dims: batch dimension of each register, or ``None`` when the batch is one microbatch, which has no tail.
        away: names of the buffers the lead does not have, so that the body hands them over where they are asked for.

    Returns:
        The division.
    """
    results = list(dict.fromkeys([*graph.output_registers, *graph.buffer_writes.values()]))
    needed = graph.live_nodes(results)
    if dims is None:
        away = {*away, *_changed(graph, needed)}
        made_here = tuple(r for r in results if r not in graph.sources or _is_buffer(graph, r, away))
        return Batching([None] * len(graph.values), tuple(needed), (), made_here)
    late: set[int] = set()  # registers the tail makes
    changed: set[int] = set()  # storages the tail changes
    body: list[int] = []
    tail: set[int] = set()
    first_gathering = None
    for index in needed:
        node = graph.nodes[index]
        if late.intersection(node.reads) or graph.storage_of(node.reads) & changed or _gathers(node, dims):
            first_gathering = index if first_gathering is None else first_gathering
            tail.add(index)
            late.update(r for r in node.outputs if r is not None)
            changed |= graph.storage_of(node.mutates)
        else:
            body.append(index)
    made = {r for index in body for r in graph.nodes[index].outputs if r is not None and r not in graph.sources}
    away = {*away, *_changed(graph, body)}
    made.update(r for r in graph.sources if _is_buffer(graph, r, away))
    asked = [*results, *(r for index in sorted(tail) for r in graph.nodes[index].reads)]
    wanted: list[int] = []
    for register in dict.fromkeys(asked):
        if register in made:
            again = _recomputable(graph, register)
            if again is None:
                wanted.append(register)
            else:
                tail.update(again)
    alive = set(graph.live_nodes([*wanted, *_body_writes(graph, dims, made)]))
    return Batching(dims, tuple(i for i in body if i in alive), tuple(sorted(tail)), tuple(wanted), first_gathering)


def _changed(graph: Graph, nodes: Iterable[int]) -> set[str]:
    return {name for index in nodes if not graph.nodes[index].is_module for name in graph.nodes[index].changes}


def _is_buffer(graph: Graph, register: int, names: Collection[str]) -> bool:
    source = graph.sources.get(register)
    return source is not None and source.kind == "buffer" and source.name in names


def _body_writes(graph: Graph, dims: Sequence[Dim], made: set[int]) -> list[int]:
    return [r for r in graph.buffer_writes.values() if r in made and dims[r] is None]


def _recomputable(graph: Graph, register: int) -> list[int] | None:
    """Lists the nodes that make a value of the batch alone, so that the lead can make it from the whole batch itself.

    Returns:
        The nodes, or ``None`` for a value that depends on weights or random numbers, or carries gradient.
    """
    value = graph.values[register]
    if value.private or value.requires_grad:
        return None
    nodes = [i for i in graph.live_nodes([register], effects=False) if not graph.nodes[i].keep]
    clean = all(not graph.values[r].private for i in nodes for r in graph.nodes[i].reads)
    return nodes if clean and not any(graph.nodes[i].is_module for i in nodes) else None


def _gathers(node: Node, dims: Sequence[Dim]) -> bool:
    if node.metadata_only or _is_batch_norm(node):
        return False
    made = [r for r in (*node.outputs, *node.mutates) if r is not None]
    if not any(dims[r] is not None for r in node.reads):
        return any(dims[r] == "irregular" for r in made)
    return (node.dynamic and not node.is_module) or any(dims[r] is None or dims[r] == "irregular" for r in made)


def _is_batch_norm(node: Node) -> bool:
    return getattr(node.target, "__name__", "") == "batch_norm"
