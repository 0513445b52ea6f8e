"""Runs the calls of a lowered forward once on tensors without numbers, and compares every shape with the expected one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedFakeTensorException,
)

from lightning_mgpu import tree
from lightning_mgpu.errors import PartitionError
from lightning_mgpu.partition.batchnorm import by_any_momentum
from lightning_mgpu.partition.graph import Graph, Node, Ref
from lightning_mgpu.partition.names import Names
from lightning_mgpu.partition.recording import Recording
from lightning_mgpu.partition.tensor.collectives import Collective
from lightning_mgpu.partition.tensor.local import local_leaf
from lightning_mgpu.partition.tensor.plan import TensorPlan

__all__ = ["check_shapes"]

_FAKE_ERRORS = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedFakeTensorException)


class _Alone:
    """Stands for a group where no numbers count: every rank has what this one has."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor.clone()

    def all_gather(self, tensor: Tensor) -> Sequence[Tensor]:
        return [tensor] * self.size


def check_shapes(lowered: Recording, names: Names, plan: TensorPlan, rank: int) -> None:
    """Runs every call on parts, calls that are alike only once.

    Args:
        lowered: the lowered recording.
        names: names below the root.
        plan: the plan.
        rank: the rank.

    Raises:
        PartitionError: where a call fails on parts, or makes another shape or dtype than the plan expects.
    """
    check = _Check(lowered.graph, names, _Alone(rank, plan.num_ranks))
    split = lowered.graph.sharded
    for node in lowered.graph.nodes:
        if isinstance(node.target, Collective) or not split.isdisjoint((*node.reads, *node.outputs)):
            check.check(node)


Made = tuple[tuple[tuple[int, ...], torch.dtype] | None, ...]


class _Check:
    def __init__(self, graph: Graph, names: Names, group: _Alone) -> None:
        self.graph = graph
        self.names = names
        self.group = group
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.known: dict[Any, Made | None] = {}
        self.weights = {source.name: r for r, source in graph.sources.items() if source.is_weight}

    def check(self, node: Node) -> None:
        expected: Made = tuple(None if r is None else self._described(r) for r in node.outputs)
        leaves, spec = tree.flatten((node.args, node.kwargs))
        key = repr((self._target_key(node), [self._described(x.register) if isinstance(x, Ref) else x for x in leaves], spec))
        if key not in self.known:
            self.known[key] = self._run(node)
        made = self.known[key]
        if made is None:
            return
        for found, right in zip(made, expected, strict=True):
            if right is not None and found != right:
                raise PartitionError(
                    f"{node} makes {found} of a rank's parts where {right} is expected; ask for 'whole' of the layers before it"
                )

    def _described(self, register: int) -> tuple[tuple[int, ...], torch.dtype]:
        value = self.graph.values[register]
        return value.shape, value.dtype

    def _target_key(self, node: Node) -> Any:
        if not isinstance(node.target, str):
            return node.target, node.ambient
        module = self.names.module_at[node.target]
        own = [self._described(r) for name, r in self.weights.items() if name.startswith(f"{node.target}.")]
        return repr(module), module.training, own, node.ambient

    def _run(self, node: Node) -> Made | None:
        """Returns the shapes and dtypes of what a call makes; nothing where they follow from numbers."""
        leaves, spec = tree.flatten((node.args, node.kwargs))
        args, kwargs = tree.unflatten([self._tensor(x.register) if isinstance(x, Ref) else x for x in leaves], spec)
        target: Any = node.target
        if isinstance(target, str):
            find = self.names.canonical
            target = local_leaf(self.names.module_at[target], target, lambda name: self._tensor(self.weights[find[name]]))
        elif isinstance(target, Collective):
            target = target.of(self.group)
        try:
            with node.ambient.applied(), torch.no_grad(), by_any_momentum(target), torch.random.fork_rng([]):
                result = target(*args, **kwargs)
        except _FAKE_ERRORS:
            return None
        except Exception as error:
            raise PartitionError(f"{node} can't be called on a rank's parts: {type(error).__name__}: {error}") from error
        return tuple((tuple(x.shape), x.dtype) if isinstance(x, Tensor) else None for x in tree.flatten(result)[0])

    def _tensor(self, register: int) -> Tensor:
        value = self.graph.values[register]
        constant = self.graph.constants.get(register)
        if constant is not None:
            return constant
        with self.mode:
            return torch.empty(value.shape, dtype=value.dtype, device=value.device)
