"""Guards on tensors: Python values a forward took from its batch, taken again from each new batch and compared."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from lightning_mgpu import tree
from lightning_mgpu.partition.graph import Graph, Guard, Ref
from lightning_mgpu.partition.program import Environment, Program, Store, compile_nodes

__all__ = ["GuardChecks"]


class GuardChecks:
    """Runs what the guards of a recording depend on, one guard after the other.

    A later guard may only make sense while the earlier ones hold (``if mask.any(): n = int(mask.sum())``), so the first that
    does not ends the run.
    """

    def __init__(self, graph: Graph) -> None:
        self._checks: list[tuple[Program, Guard]] = []
        done: set[int] = set()
        for guard in graph.guards:
            reads = [leaf.register for leaf in tree.flatten((guard.args, guard.kwargs))[0] if isinstance(leaf, Ref)]
            live = graph.live_nodes(reads, before=guard.position, effects=False)
            needed = [i for i in live if not graph.nodes[i].keep]
            fresh = [i for i in needed if i not in done]
            done.update(fresh)
            kept = [*graph.inputs, *reads, *(r for i in fresh for r in graph.nodes[i].outputs if r is not None)]
            self._checks.append((compile_nodes(graph, fresh, kept), guard))

    def hold(self, environment: Environment, store: Store) -> bool:
        """Says whether every guard has the value it had.

        Args:
            environment: the tensors among the arguments by register.
            store: where buffers and parameters would be found; guards depend on none.
        """
        with torch.no_grad():
            for program, guard in self._checks:
                environment = program.run(environment, store)
                args, kwargs = _filled((guard.args, guard.kwargs), environment)
                if not _same(guard.target(*args, **kwargs), guard.value):
                    return False
        return True


def _filled(part: Any, environment: Environment) -> Any:
    leaves, spec = tree.flatten(part)
    return tree.unflatten([environment[leaf.register] if isinstance(leaf, Ref) else leaf for leaf in leaves], spec)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return bool(np.array_equal(a, b, equal_nan=np.asarray(a).dtype.kind == "f"))
    if isinstance(a, float) and isinstance(b, float) and math.isnan(a):
        return math.isnan(b)
    return bool(type(a) is type(b) and a == b)
