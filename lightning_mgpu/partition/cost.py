"""What the nodes of a recorded forward cost, forward and backward together, for balancing stages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

from lightning_mgpu.errors import PartitionError
from lightning_mgpu.partition.graph import Graph
from lightning_mgpu.partition.names import Names

__all__ = ["Balance", "check_balance", "node_costs", "weights_of"]

Balance = Literal["flops", "parameters"]

_FLOPS_PER_BYTE = 4.0
"""A memory-bound operator counts as this many operations per byte it writes, so that it is not free."""


def check_balance(balance: str) -> None:
    """Raises `PartitionError` unless ``balance`` names a measure."""
    if balance not in get_args(Balance):
        known = ", ".join(repr(name) for name in get_args(Balance))
        raise PartitionError(f"balance={balance!r} is not known; use one of {known}")


def weights_of(graph: Graph, index: int, names: Names) -> list[str]:
    """Lists the parameters and buffers one node uses, by canonical name."""
    node = graph.nodes[index]
    used = names.tensor_names(names.module_at[node.target]) if isinstance(node.target, str) else []
    for register in node.reads:
        source = graph.sources.get(register)
        if source is not None and source.kind in ("parameter", "buffer"):
            used.append(source.name)
    return list(dict.fromkeys(used))


def node_costs(graph: Graph, nodes: Sequence[int], names: Names, balance: Balance) -> list[float]:
    """Computes the cost of each of ``nodes``.

    ``"flops"`` counts the operations of the forward, once more for the gradient of the weights where they train, and once
    more for the gradient of the input where something before it trains. ``"parameters"`` counts the elements of the weights
    at the node that uses them first.
    """
    trained: set[int] = set()
    seen: set[str] = set()
    costs: list[float] = []
    for index in nodes:
        node = graph.nodes[index]
        weights = weights_of(graph, index, names)
        own = any(names.kinds[w] == "parameter" and names.tensors[w].requires_grad for w in weights)
        before = any(r in trained for r in node.reads) or any(
            graph.values[r].requires_grad and graph.sources[r].kind == "input" for r in node.reads if r in graph.sources
        )
        if own or before:
            trained.update(r for r in (*node.outputs, *node.mutates) if r is not None)
        if balance == "parameters":
            costs.append(float(sum(names.tensors[w].numel() for w in weights if w not in seen)))
        else:
            costs.append((node.flops + _FLOPS_PER_BYTE * node.num_bytes) * (1 + own + before))
        seen.update(weights)
    return costs
