"""Deals the arguments of a call to its microbatches, gathers what the stages make, and finishes the call with its tail."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_mgpu import tree
from lightning_mgpu.microbatch import deal
from lightning_mgpu.partition.graph import Ref
from lightning_mgpu.partition.plan import CallPlan
from lightning_mgpu.partition.program import Environment, Store

__all__ = ["deal_gradient", "deal_inputs", "finish", "gather"]


def deal_inputs(plan: CallPlan, tensors: Sequence[Tensor]) -> list[dict[int, Tensor]]:
    """Returns for each microbatch its part of each argument, by register."""
    parts: list[dict[int, Tensor]] = [{} for _ in plan.sizes]
    for register, dim, tensor in zip(dict.fromkeys(plan.graph.inputs), plan.input_dims, tensors, strict=True):
        for i, part in enumerate(deal(tensor, plan.sizes, dim if isinstance(dim, int) else None)):
            parts[i][register] = part
    return parts


def gather(plan: CallPlan, made: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Joins what the last stage made for each microbatch.

    Args:
        plan: the plan of the call.
        made: for each microbatch the wanted tensors.

    Returns:
        The wanted tensors of the whole batch; what does not carry the batch is the first microbatch's.
    """
    whole = []
    for position, register in enumerate(plan.batching.wanted):
        dim = plan.batching.dims[register]
        parts = [tensors[position] for tensors in made]
        whole.append(torch.cat(parts, dim=dim) if isinstance(dim, int) and len(parts) > 1 else parts[0])
    return whole


def deal_gradient(plan: CallPlan, gradients: Sequence[Tensor | None]) -> list[dict[int, Tensor]]:
    """Returns for each microbatch the gradients of what `gather` joined, by register; what has none is missing."""
    dealt: list[dict[int, Tensor]] = [{} for _ in plan.sizes]
    for register, gradient in zip(plan.batching.wanted, gradients, strict=True):
        if gradient is None:
            continue
        dim = plan.batching.dims[register]
        if isinstance(dim, int) and len(plan.sizes) > 1:
            for part, piece in zip(dealt, deal(gradient, plan.sizes, dim), strict=True):
                part[register] = piece.contiguous()
        else:
            dealt[0][register] = gradient
    return dealt


def finish(plan: CallPlan, tensors: Sequence[Tensor], whole: Sequence[Tensor], store: Store, *, inference: bool = False) -> Any:
    """Runs the tail on the gathered batch and builds what the forward returned.

    Args:
        plan: the plan of the call.
        tensors: the tensors among the arguments.
        whole: the gathered tensors.
        store: the lead's modules and tensors.
        inference: whether the call was made in inference mode.

    Returns:
        The result, and the tensors the forward stored on modules by (path, attribute).
    """
    graph = plan.graph
    environment: Environment = dict(zip(dict.fromkeys(graph.inputs), tensors, strict=True))
    environment.update(zip(plan.batching.wanted, whole, strict=True))
    environment = plan.tail.run(environment, store, inference=inference)
    leaves = [environment[leaf.register] if isinstance(leaf, Ref) else leaf for leaf in graph.outputs]
    return tree.unflatten(leaves, graph.spec)
