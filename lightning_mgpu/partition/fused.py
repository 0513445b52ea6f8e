"""Fused steps: what `torch.compile` makes of those calls of a stage that only compute.

A stage's program is a list of calls. Runs of calls that change nothing in place are handed to the compiler as one graph each.
Batch norms, updates of buffers, modules that have hooks or run as one piece, and the user's own autograd functions stay as they
are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn

from lightning_mgpu import tree
from lightning_mgpu.partition.recording import is_leaf_type

if TYPE_CHECKING:
    from lightning_mgpu.partition.program import Environment, Step, Store

__all__ = ["Fused", "fuse"]

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class _Bare(nn.Module):
    """Calls a layer of torch's own as its class has it, with nothing that others have put on the object."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return type(self.layer).forward(self.layer, *args, **kwargs)


class Fused:
    """Is a run of steps as one compiled function.

    Attributes:
        steps: the steps.
        ambient: the modes they run under.
        frees: registers nobody reads afterwards.
    """

    def __init__(self, steps: Sequence[Step], store: Store, options: Mapping[str, Any]) -> None:
        self.steps = steps
        self.ambient = steps[0].ambient
        self.frees = tuple(r for step in steps for r in step.frees)
        made = dict.fromkeys(r for step in steps for r in step.outputs if r is not None)
        self.inputs = tuple(dict.fromkeys(r for step in steps for _, r in step.places if r not in made))
        self.outputs = tuple(r for r in made if r not in set(self.frees))
        self._function = torch.compile(self._graph(store), dynamic=False, **options)

    def _graph(self, store: Store) -> fx.GraphModule:
        graph, layers = fx.Graph(), {}
        environment: dict[int, Any] = {register: graph.placeholder(f"r{register}") for register in self.inputs}
        for number, step in enumerate(self.steps):
            args, kwargs = step.arguments(environment)
            if isinstance(step.target, str):
                layers[f"layer{number}"] = _Bare(store.module(step.target))
                result = graph.call_module(f"layer{number}", args, kwargs)
            else:
                result = graph.call_function(step.target, args, kwargs)
            leaves = graph.call_function(_leaves, (result,))
            for position, register in enumerate(step.outputs):
                if register is not None:
                    environment[register] = graph.call_function(_nth, (leaves, position))
        graph.output(tuple(environment[register] for register in self.outputs))
        return fx.GraphModule(nn.ModuleDict(layers), graph)

    def run(self, environment: Environment) -> None:
        """Runs the steps; registers that nobody reads any more are dropped."""
        # costs seconds that only compiled stages need
        from torch._functorch import config as functorch_config  # noqa: PLC0415

        # kernels that reuse the memory of what they saved could not run a backward twice
        with functorch_config.patch(donated_buffer=False):
            made = self._function(*(environment[register] for register in self.inputs))
        environment.update(zip(self.outputs, made, strict=True))
        for register in self.frees:
            environment.pop(register, None)


def fuse(steps: Sequence[Step], store: Store, options: Mapping[str, Any]) -> list[Step | Fused]:
    """Replaces runs of at least two steps that only compute, under the same modes, by compiled ones.

    Args:
        steps: the steps of a program.
        store: where modules are found.
        options: arguments of `torch.compile`.
    """
    units: list[Step | Fused] = []
    run: list[Step] = []

    def end() -> None:
        units.extend([Fused(run.copy(), store, options)] if len(run) > 1 else run)
        run.clear()

    for step in steps:
        if not _only_computes(step, store):
            end()
            units.append(step)
            continue
        if run and run[-1].ambient != step.ambient:
            end()
        run.append(step)
    end()
    return units


def _only_computes(step: Step, store: Store) -> bool:
    if step.once != "all" or step.changes or step.mutates or step.batch_norm:
        return False
    if isinstance(step.target, str):
        module = store.module(step.target)
        return is_leaf_type(module) and not any(getattr(module, hooks) for hooks in _HOOKS)
    owner = getattr(step.target, "__self__", None)
    own_function = isinstance(owner, type) and issubclass(owner, torch.autograd.Function)
    return step.target is not torch.autograd.grad and not own_function


def _leaves(result: Any) -> list[Any]:
    """Lists what a call returned, in the order of `tree.flatten`."""
    if isinstance(result, Tensor):
        return [result]
    if isinstance(result, (tuple, list)):
        return [leaf for each in result for leaf in _leaves(each)]
    leaves: list[Any] = tree.flatten(result)[0]
    return leaves


def _nth(leaves: list[Any], position: int) -> Any:
    return leaves[position]
