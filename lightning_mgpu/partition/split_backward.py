"""A backward in two parts: first the gradients that the stage before waits for, later those of the weights.

Qi et al. 2023, "Zero Bubble Pipeline Parallelism", section 2: the second part fills bubbles.

The first part visits the nodes of the autograd graph from which a received tensor can be reached. A weight hangs beside that
path, most often on one node of it, and then only that node is run again for it, with the gradient that it saw. A weight that
hangs on several nodes, as one used twice does, or on none, is computed from the roots, so that nothing is counted twice or
left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

__all__ = ["SplitBackward"]

Node: TypeAlias = Any


class SplitBackward:
    """Is the backward of one stage and microbatch.

    Args:
        roots: what the stage sent.
        seeds: the gradients of the roots.
        leaves: what the stage received, by register.
        weights: the parameters that need a gradient.
    """

    def __init__(
        self, roots: Sequence[Tensor], seeds: Sequence[Tensor], leaves: Mapping[int, Tensor], weights: Sequence[Tensor]
    ) -> None:
        self._roots = list(roots)
        self._seeds = list(seeds)
        self._leaves = dict(leaves)
        self._weights = list(weights)
        self._beside: dict[Node, list[Tensor]] = {}
        self._seen: dict[Node, tuple[Tensor | None, ...]] = {}

    def inputs(self) -> dict[int, Tensor]:
        """Runs the first part; returns the gradients of the leaves that have one, by register."""
        if not self._roots or not self._leaves:
            return {}  # nobody waits: all is done with the weights
        self._beside = _weights_by_node(self._roots, list(self._leaves.values()), self._weights)
        with self._watched():
            found: Sequence[Tensor | None] = torch.autograd.grad(
                self._roots, list(self._leaves.values()), self._seeds, retain_graph=True, allow_unused=True
            )
        return {register: gradient for register, gradient in zip(self._leaves, found, strict=True) if gradient is not None}

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Keeps the gradients that the nodes beside which weights hang see during a block."""

        def keep(node: Node) -> Any:
            def hook(gradients: tuple[Tensor | None, ...]) -> None:
                self._seen[node] = gradients

            return hook

        with ExitStack() as stack:
            for node in self._beside:
                stack.callback(node.register_prehook(keep(node)).remove)
            yield

    def weights(self) -> None:
        """Runs the second part, which adds up the gradients of the weights."""
        done: set[Tensor] = set()
        for node, gradients in self._seen.items():
            seen = [(i, gradient) for i, gradient in enumerate(gradients) if gradient is not None]
            edges = [GradientEdge(node, i) for i, _ in seen]
            _add(self._beside[node], edges, [gradient for _, gradient in seen])
            done.update(self._beside[node])
        rest = [weight for weight in self._weights if weight not in done]
        if rest and self._roots:
            _add(rest, self._roots, self._seeds)
        self._roots, self._seeds, self._leaves, self._beside, self._seen = [], [], {}, {}, {}


def _add(weights: Sequence[Tensor], roots: Sequence[Any], seeds: Sequence[Tensor]) -> None:
    """Adds the gradients that weights get from some roots to those they have."""
    found = torch.autograd.grad(roots, list(weights), seeds, retain_graph=True, allow_unused=True)
    with torch.no_grad():
        for weight, gradient in zip(weights, found, strict=True):
            if gradient is not None:
                weight.grad = gradient if weight.grad is None else weight.grad.add_(gradient)


def _weights_by_node(roots: Sequence[Tensor], leaves: Sequence[Tensor], weights: Sequence[Tensor]) -> dict[Node, list[Tensor]]:
    """Finds the weights that hang on one node of the way from the roots to the leaves, by that node."""
    order = _graph([get_gradient_edge(root).node for root in roots])
    on_the_way = _reaching(order, {get_gradient_edge(leaf).node for leaf in leaves})
    beside: dict[Node, set[Node]] = {}  # for each node off the way, the nodes of the way that it hangs on
    for node in order:
        for following in _following(node):
            if following not in on_the_way:
                hooks = {node} if node in on_the_way else beside.get(node, {None})
                beside.setdefault(following, set()).update(hooks)
    found: dict[Node, list[Tensor]] = {}
    for weight in weights:
        nodes = beside.get(get_gradient_edge(weight).node, set())
        if len(nodes) == 1 and None not in nodes:
            found.setdefault(next(iter(nodes)), []).append(weight)
    return found


def _graph(starts: Sequence[Node]) -> list[Node]:
    """Lists the nodes that can be reached, each before those that follow it."""
    order: list[Node] = []
    known: set[Node] = set()
    todo: list[tuple[Node, bool]] = [(start, False) for start in starts]
    while todo:
        node, entered = todo.pop()
        if entered:
            order.append(node)
        elif node not in known:
            known.add(node)
            todo.append((node, True))
            todo.extend((following, False) for following in _following(node) if following not in known)
    return order[::-1]


def _following(node: Node) -> list[Node]:
    return [following for following, _ in node.next_functions if following is not None]


def _reaching(order: Sequence[Node], ends: set[Node]) -> set[Node]:
    """Finds the nodes from which one of the ends can be reached."""
    reaching = set(ends)
    for node in reversed(order):
        if any(following in reaching for following in _following(node)):
            reaching.add(node)
    return reaching
