"""Runs the calls of a lowered forward once on tensors without numbers, and compares every shape with the expected one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
)

from lightning_mgpu import tree
from lightning_mgpu.errors import PartitionError
from lightning_mgpu.partition.batchnorm import by_any_momentum
from lightning_mgpu.partition.graph import Node, Ref
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


def check_shapes(lowered: Recording, recorded: Recording, names: Names, plan: TensorPlan, rank: int) -> None:
    """Runs every call that the lowering has touched.

    Args:
        lowered: the lowered recording.
        recorded: the recording it was made of; its own tensors stand for what is whole.
        names: names below the root.
        plan: the plan.
        rank: the rank.

    Raises:
        PartitionError: where a call fails on parts, or makes another shape or dtype than the plan expects.
    """
    check = _Check(lowered, recorded, names, plan, rank)
    split = lowered.graph.sharded
    for node in lowered.graph.nodes:
        if isinstance(node.target, Collective) or not split.isdisjoint((*node.reads, *node.outputs)):
            check.run(node)


class _Check:
    def __init__(self, lowered: Recording, recorded: Recording, names: Names, plan: TensorPlan, rank: int) -> None:
        self.graph = lowered.graph
        self.recorded = recorded
        self.names = names
        self.group = _Alone(rank, plan.n)
        self.modes = {id(t.fake_mode): t.fake_mode for t in recorded.tensors if isinstance(t, FakeTensor)}
        self.mode = next(iter(self.modes.values()), None) or FakeTensorMode(allow_non_fake_inputs=True)
        self.made: dict[int, Tensor] = {}
        self.weights = {source.name: r for r, source in self.graph.sources.items() if source.is_weight}

    def tensor(self, register: int) -> Tensor:
        """Returns what a call made, or else a tensor of the shape that is expected."""
        if register not in self.made:
            known = self.recorded.tensors[register] if register < len(self.recorded.tensors) else None
            value = self.graph.values[register]
            if known is not None and tuple(known.shape) == value.shape and known.dtype == value.dtype:
                return known
            with self.mode:
                self.made[register] = torch.empty(value.shape, dtype=value.dtype, device=value.device)
        return self.made[register]

    def run(self, node: Node) -> None:
        args, kwargs = self._filled((node.args, node.kwargs))
        target: Any = node.target
        if isinstance(target, str):
            find = self.names.canonical
            target = local_leaf(self.names.module_at[target], target, lambda name: self.tensor(self.weights[find[name]]))
        elif isinstance(target, Collective):
            target = target.of(self.group)
        try:
            with torch.no_grad(), node.ambient.applied(), torch.no_grad(), by_any_momentum(target), torch.random.fork_rng([]):
                result = target(*args, **kwargs)
        except _FAKE_ERRORS:
            return  # its shape follows from numbers: what it makes is taken to be as expected
        except Exception as error:
            raise PartitionError(f"{node} can't be called on a rank's parts: {type(error).__name__}: {error}") from error
        for register, leaf in zip(node.outputs, tree.flatten(result)[0], strict=True):
            if register is None:
                continue
            value = self.graph.values[register]
            if tuple(leaf.shape) != value.shape or leaf.dtype != value.dtype:
                raise PartitionError(
                    f"{node} makes {tuple(leaf.shape)} and {leaf.dtype} of a rank's parts where {value.shape} and "
                    f"{value.dtype} is expected; ask for 'whole' of the layers before it"
                )
            self.made[register] = leaf

    def _filled(self, part: Any) -> Any:
        leaves, spec = tree.flatten(part)
        return tree.unflatten([self.tensor(x.register) if isinstance(x, Ref) else x for x in leaves], spec)
