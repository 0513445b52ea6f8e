"""Finds calls that mix the rows of a batch, where random numbers keep a run from being compared with another.

The rows of all microbatches but one are replaced; what that one computes must stay as it was.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_mgpu import tree
from lightning_mgpu.microbatch import deal
from lightning_mgpu.partition.batch import Dim
from lightning_mgpu.partition.closeness import close
from lightning_mgpu.partition.plan import CallPlan, Planner
from lightning_mgpu.partition.recording import Recording

__all__ = ["evaluating", "find_mixing"]


@contextmanager
def evaluating(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Puts modules in evaluation mode for a block, each by itself."""
    modes = [(module, module.training) for module in modules]
    try:
        for module, _ in modes:
            module.training = False
        yield
    finally:
        for module, training in modes:
            module.training = training


def find_mixing(
    planner: Planner, plan: CallPlan, args: Any, kwargs: Any, tensors: Sequence[Tensor]
) -> tuple[str, Tensor, Tensor] | None:
    """Changes the rows of other microbatches, and sees whether the first and the last compute the same as before.

    Random numbers repeat meanwhile, and batch norms use the statistics they have.

    Args:
        planner: the planner that made the plan.
        plan: the plan.
        args: positional arguments of the call.
        kwargs: keyword arguments.
        tensors: the tensors among them.

    Returns:
        The first call whose results differ, with both; ``None`` where none does, or where that can't be said.
    """
    if any(getattr(plan.graph.nodes[i].target, "__name__", "") == "batch_norm" for i in plan.batching.body):
        return None
    module = planner.names.module_at[plan.path]
    state = torch.get_rng_state()

    def run(changed: Sequence[Tensor]) -> Recording:
        by_id = dict(zip((id(t) for t in tensors), changed, strict=True))
        own_args, own_kwargs = tree.map_tensors(lambda t: by_id[id(t)], (args, kwargs))
        torch.set_rng_state(state)
        with torch.no_grad(), evaluating(m for m in module.modules() if isinstance(m, _BatchNorm)):
            return planner.recorder.record(module, own_args, own_kwargs, answers=plan.graph.guards, real=True)

    truth = run(tensors)
    for position in (0, plan.num_microbatches - 1):
        try:
            other = run([_only(t, plan, dim, position) for t, dim in zip(tensors, plan.input_dims, strict=True)])
        except Exception:
            return None  # it looks at numbers that belong together
        if _mixed(plan, other, truth, position, plan.batching.wanted) is None:
            continue
        for node in (plan.graph.nodes[i] for i in plan.batching.body):
            first = _mixed(plan, other, truth, position, [r for r in node.outputs if r is not None])
            if first is not None and node.random:
                return None  # how much it draws depends on the rows, so that the draws do not repeat
            if first is not None:
                return str(node), other.tensors[first], truth.tensors[first]
    return None


def _mixed(plan: CallPlan, other: Recording, truth: Recording, position: int, registers: Iterable[int]) -> int | None:
    """Finds the first of some values whose rows of one microbatch differ between two recordings of the whole batch."""
    for register in registers:
        dim, a, b = plan.batching.dims[register], other.tensors[register], truth.tensors[register]
        if isinstance(dim, int) and a.shape == b.shape:
            got, expected = (deal(t, plan.sizes, dim)[position] for t in (a, b))
            if not close(got, expected):
                return register
    return None


def _only(tensor: Tensor, plan: CallPlan, dim: Dim, position: int) -> Tensor:
    """Puts copies of one row of a microbatch in the place of all rows of the others."""
    if not isinstance(dim, int):
        return tensor
    parts = deal(tensor.detach(), plan.sizes, dim)
    row = parts[position].narrow(dim, 0, 1)
    return torch.cat([part if i == position else row.expand_as(part) for i, part in enumerate(parts)], dim=dim)
