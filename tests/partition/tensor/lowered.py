"""A forward recorded, planned and lowered, run on all ranks in this process, and compared with the module itself."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_mgpu import tree
from lightning_mgpu.partition.graph import Ref
from lightning_mgpu.partition.names import Names
from lightning_mgpu.partition.plan import ModuleStore
from lightning_mgpu.partition.program import Program, compile_nodes
from lightning_mgpu.partition.record import Recorder
from lightning_mgpu.partition.recording import Recording
from lightning_mgpu.partition.tensor.attention import opened_attention
from lightning_mgpu.partition.tensor.collectives import joined
from lightning_mgpu.partition.tensor.layout import shard, unshard
from lightning_mgpu.partition.tensor.local import LocalStore, local_tensors
from lightning_mgpu.partition.tensor.lower import lower
from lightning_mgpu.partition.tensor.plan import TensorPlan, plan
from tests.partition.forwards.case import weighted_sum
from tests.partition.tensor.ranks import Member, Ranks

TOLERANCE = 5e-6


class Lowered:
    """Is a module split over ``num_ranks`` ranks.

    Args:
        module: the module, which stays as it is.
        num_ranks: number of ranks.
        args: arguments of the call that the plan is made from; a dict at the end holds keyword arguments.
        options: of the plan.
    """

    def __init__(self, module: nn.Module, num_ranks: int, *args: Any, **options: Any) -> None:
        self.module = module
        self.num_ranks = num_ranks
        self.names = Names(module)
        self.recorder = Recorder(self.names, opened_attention)
        self.plan: TensorPlan = plan(self.record(*args).graph, self.names, num_ranks, **options)

    def record(self, *args: Any) -> Recording:
        args, kwargs = _taken_apart(args)
        self.recording = self.recorder.record(self.module, args, kwargs)
        self.recorded_for = args, kwargs
        return self.recording

    def lowered(self, *args: Any) -> list[Recording]:
        """Lowers a call for every rank; where all layouts are even one will do."""
        before, now = (tree.flatten(given)[0] for given in (self.recorded_for, _taken_apart(args)))
        known = len(before) == len(now) and all(a is b for a, b in zip(before, now, strict=True))
        recording = self.recording if known else self.record(*args)
        layouts = (*self.plan.layouts.values(), *self.plan.inputs.values())
        ranks = [0] if all(layout.is_even(self.num_ranks) for layout in layouts) else range(self.num_ranks)
        found = [lower(recording, self.names, self.plan, rank) for rank in ranks]
        return found * self.num_ranks if len(found) < self.num_ranks else found

    def run(self, *args: Any, loss: Callable[[Any], Tensor] = weighted_sum, seed: int = 3) -> list[Outcome]:
        """Runs forward and backward on all ranks."""
        programs = []
        for lowered in self.lowered(*args):
            graph = lowered.graph
            results = [*graph.output_registers, *graph.buffer_writes.values()]
            store = ModuleStore(self.names)
            made = compile_nodes(graph, graph.live_nodes(results), results, store=store, buffer_writes=graph.buffer_writes)
            programs.append((made, graph))
        inputs = [leaf for leaf in tree.flatten(_taken_apart(args))[0] if isinstance(leaf, Tensor)]
        layouts = {r: self.plan.inputs.get(i) for i, r in enumerate(dict.fromkeys(self.recording.graph.inputs))}

        def on_rank(group: Member) -> Outcome:
            torch.manual_seed(seed)
            program, graph = programs[group.rank]
            store = LocalStore(self.names, local_tensors(self.names, self.plan, group.rank))
            own = {}
            for register, tensor in zip(graph.inputs, inputs, strict=True):
                part = shard(tensor.detach(), layouts[register], group.rank, self.num_ranks)
                own[register] = part.clone().requires_grad_(tensor.requires_grad)
            environment = joined(copied(program), group).run(dict(own), store)
            leaves = [environment[x.register] if isinstance(x, Ref) else x for x in graph.outputs]
            result = tree.unflatten(leaves, graph.spec)[0]
            number = loss(result)
            if number.requires_grad:
                number.backward()
            state = torch.get_rng_state()
            return Outcome(result, store, [t.grad for t in own.values()], state)

        return Ranks(self.num_ranks).run(on_rank)

    # -- comparing -------------------------------------------------------------------------------------------------

    def compare(
        self,
        *args: Any,
        loss: Callable[[Any], Tensor] = weighted_sum,
        tolerance: float = TOLERANCE,
        without: tuple[str, ...] = (),
    ) -> list[Outcome]:
        """Compares results, gradients and buffers of all ranks with the module's.

        Args:
            args: arguments of the call.
            loss: makes one number of the result.
            tolerance: relative to the largest number of a tensor.
            without: ends of the names of parameters whose true gradient is 0.
        """
        whole = copy.deepcopy(self.module)
        own_args, kwargs = _taken_apart(tree.map_tensors(lambda t: t.detach().clone().requires_grad_(t.requires_grad), args))
        result = whole(*own_args, **kwargs)
        number = loss(result)
        if number.requires_grad:
            number.backward()
        outcomes = self.run(*args, loss=loss)
        for outcome in outcomes:
            _same(outcome.result, result, tolerance)
        given = [leaf for leaf in tree.flatten((own_args, kwargs))[0] if isinstance(leaf, Tensor)]
        for position, tensor in enumerate(given):
            if tensor.requires_grad:
                grads = unshard([o.input_grads[position] for o in outcomes], self.plan.inputs.get(position))
                _near(grads, tensor.grad, tolerance, f"input {position}")
        self.compare_tensors(whole, outcomes, tolerance, without)
        return outcomes

    def compare_tensors(self, whole: nn.Module, outcomes: list[Outcome], tolerance: float, without: tuple[str, ...]) -> None:
        names = Names(whole)
        grads = [t.grad for name, t in names.tensors.items() if t.grad is not None and not name.endswith(without or ("\0",))]
        largest = max((float(g.abs().max()) for g in grads), default=0.0)
        for name, tensor in names.tensors.items():
            layout = self.plan.layouts.get(name)
            parts = [o.store.tensor(name) for o in outcomes]
            if names.kinds[name] == "buffer":
                _near(unshard(parts, layout), names.current(name), tolerance, name)
                continue
            if layout is None:
                assert all(_equal(parts[0].grad, part.grad) for part in parts), f"replicated gradients differ: {name}"
            if tensor.grad is None:
                assert all(part.grad is None for part in parts), name
                continue
            found = unshard([part.grad for part in parts], layout)
            floor = 1e-3 * largest if not name.endswith(without or ("\0",)) else largest
            assert found.shape == tensor.grad.shape
            error = float((found - tensor.grad).abs().max())
            assert error <= tolerance * (float(tensor.grad.abs().max()) + floor), (
                f"{name}: {error} of {float(tensor.grad.abs().max())}"
            )


class Outcome:
    """Is what one rank has after a forward and a backward."""

    def __init__(self, result: Any, store: LocalStore, input_grads: list[Tensor | None], state: Tensor) -> None:
        self.result = result
        self.store = store
        self.input_grads = input_grads
        self.state = state


def _taken_apart(args: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if args and isinstance(args[-1], dict):
        return args[:-1], dict(args[-1])
    return args, {}


def copied(program: Program) -> Program:
    """Copies a program as for another process, which has a group of its own."""
    return replace(program, steps=[replace(step) for step in program.steps])


def _equal(a: Tensor | None, b: Tensor | None) -> bool:
    return (a is None and b is None) or (a is not None and b is not None and torch.equal(a, b))


def _same(found: Any, expected: Any, tolerance: float) -> None:
    a, b = (tree.tensors_in(x) for x in (found, expected))
    assert len(a) == len(b)
    for left, right in zip(a, b, strict=True):
        _near(left, right, tolerance, "the result")


def _near(found: Tensor, expected: Tensor, tolerance: float, name: str) -> None:
    assert found.shape == expected.shape, f"{name}: {tuple(found.shape)} where {tuple(expected.shape)} is right"
    assert found.dtype == expected.dtype, name
    if not expected.is_floating_point():
        assert torch.equal(found, expected), name
        return
    error, scale = float((found - expected).detach().abs().max()), float(expected.detach().abs().max())
    assert error <= tolerance * (scale + 1e-3), f"{name}: {error} of {scale}"


def roles(plan: TensorPlan) -> Mapping[str, str]:
    """Returns the role of each layer by its path."""
    return {layer.path: layer.role for layer in plan.layers}
