"""Programs: recorded nodes made ready to run again, on other numbers, in any process.

A program holds only plain values and functions, so it can be pickled; the modules and tensors it names are looked up in the
`Store` of the process that runs it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from lightning_mgpu import tree
from lightning_mgpu.errors import RecordingError
from lightning_mgpu.partition.ambient import Ambient
from lightning_mgpu.partition.batchnorm import DeferredStatistics, is_deferred_module
from lightning_mgpu.partition.fused import Fused, fuse
from lightning_mgpu.partition.graph import Graph, Ref, Source

__all__ = ["Environment", "Program", "Step", "Store", "compile_nodes"]

Environment = dict[int, Any]


class Store(Protocol):
    """Finds the modules and tensors of one process by name."""

    def module(self, path: str) -> nn.Module: ...

    def tensor(self, name: str) -> Tensor: ...

    def set_buffer(self, name: str, value: Tensor) -> None: ...


@dataclass(slots=True)
class Step:
    """Is one node, with its arguments laid out flat.

    Attributes:
        template: the leaves of the arguments, with `None` where a register's tensor goes.
        places: (position in the template, register) pairs.
        spec: how the leaves make up ``(args, kwargs)``, or ``None`` when the leaves are the positional arguments.
        frees: registers nobody reads after this step.
        changes: names of the buffers it changes.
        mutates: whether it changes any memory in place.
        once: whether the step runs only for the first or the last microbatch of a call, or for all.
    """

    target: str | Callable[..., Any]
    template: list[Any]
    places: tuple[tuple[int, int], ...]
    spec: tree.Spec | None
    outputs: tuple[int | None, ...]
    frees: tuple[int, ...]
    ambient: int
    label: str
    once: Literal["all", "first", "last"] = "all"
    batch_norm: bool = False
    changes: tuple[str, ...] = ()
    mutates: bool = False

    def arguments(self, environment: Environment) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Fills the template in."""
        leaves = self.template.copy()
        for position, register in self.places:
            leaves[position] = environment[register]
        if self.spec is None:
            return tuple(leaves), {}
        args, kwargs = tree.unflatten(leaves, self.spec)
        return args, kwargs


@dataclass
class Program:
    """Is a sequence of steps with what they need from the process.

    Attributes:
        sources: parameters, buffers and constants the steps read, by register.
        ambients: the distinct modes the steps run under.
        buffer_writes: buffers to rebind after the last microbatch, by name.
        attributes: simple Python attributes of leaf modules the recording relied on, by path.
        clones: registers whose tensor the steps change in place, so that a received one is copied first.
        wanted: registers kept for the caller.
        compiled: arguments of ``torch.compile``, where runs of steps are to be compiled.
    """

    steps: list[Step]
    sources: dict[int, Source]
    ambients: list[Ambient]
    wanted: tuple[int, ...]
    clones: frozenset[int] = frozenset()
    buffer_writes: dict[str, int] = field(default_factory=dict)
    attributes: dict[str, dict[str, Any]] = field(default_factory=dict)
    constants: dict[int, Tensor] = field(default_factory=dict)
    compiled: dict[str, Any] | None = None
    _fused: list[Step | Fused] = field(default_factory=list, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_fused": []}

    def _units(self, store: Store, observe: Any) -> Sequence[Step | Fused]:
        """Returns what to run: the steps, or what the compiler made of them."""
        if self.compiled is None or observe is not None:
            return self.steps
        if not self._fused:
            self._fused = fuse(self.steps, store, self.compiled)
        return self._fused

    def modules(self) -> list[str]:
        """Lists the paths of the modules it calls."""
        return list(dict.fromkeys(s.target for s in self.steps if isinstance(s.target, str)))

    def move_to(self, device: torch.device) -> None:
        """Puts ``device`` in the place of the accelerator that the recording named in the steps' arguments."""
        for step in self.steps:
            for position, leaf in enumerate(step.template):
                if isinstance(leaf, torch.device) and leaf.type == device.type and leaf.type != "cpu":
                    step.template[position] = device
        self.constants = {r: t.to(device) if t.device.type != "cpu" else t for r, t in self.constants.items()}

    def prepare(self, store: Store) -> None:
        """Gives the leaf modules the Python attributes they had in the recording."""
        for path, values in self.attributes.items():
            module = store.module(path)
            for name, value in values.items():
                if module.__dict__.get(name) != value:
                    setattr(module, name, value)

    def run(
        self,
        environment: Environment,
        store: Store,
        *,
        microbatch: int = 0,
        num_microbatches: int = 1,
        statistics: DeferredStatistics | None = None,
        inference: bool = False,
        grad: bool = True,
        observe: Callable[[Step, Any], None] | None = None,
    ) -> Environment:
        """Runs the steps.

        Args:
            environment: tensors by register: what was received, inputs. Is filled with what the steps make; registers that
                nobody reads any more are dropped.
            store: where modules and tensors are found.
            microbatch: index of the microbatch within its call.
            num_microbatches: number of microbatches of the call.
            statistics: gathers batch statistics over the microbatches of the call, ``None`` for ordinary batch norm.
            inference: whether grad-free steps run under inference mode.
            grad: whether steps keep gradient history, as far as they were recorded with it.
            observe: is told each step's result.

        Returns:
            The environment, with at least the ``wanted`` registers.
        """
        for register, source in self.sources.items():
            known = source.kind == "constant"
            environment[register] = self.constants[register] if known else store.tensor(source.name)
        for register in self.clones:
            if register in environment:
                with torch.set_grad_enabled(environment[register].requires_grad):
                    environment[register] = environment[register].clone()
        first, last = microbatch == 0, microbatch == num_microbatches - 1
        units = self._units(store, observe)
        position, count = 0, len(units)
        while position < count:
            mode = units[position].ambient
            with self._modes(mode, inference=inference, grad=grad).applied():
                while position < count and units[position].ambient == mode:
                    step = units[position]
                    position += 1
                    if isinstance(step, Fused):
                        step.run(environment)
                        continue
                    if (step.once == "first" and not first) or (step.once == "last" and not last):
                        continue
                    try:
                        self._step(step, environment, store, statistics, observe)
                    except Exception as error:
                        error.add_note(f"raised by {step.label}")  # the traceback alone would not name the user's line
                        raise
        if last:
            for name, register in self.buffer_writes.items():
                store.set_buffer(name, environment[register])
        return environment

    def _modes(self, mode: int, *, inference: bool, grad: bool) -> Ambient:
        ambient = self.ambients[mode]
        return replace(ambient, grad=ambient.grad and grad, inference=inference and not ambient.grad)

    def changed_statistics(self) -> set[str]:
        """Names the running statistics of batch norms that a run changes."""
        return {name for step in self.steps if step.batch_norm for name in step.changes}

    def changed_buffers(self) -> set[str]:
        """Names the buffers that a run changes, running statistics of batch norms aside."""
        return {name for step in self.steps if not step.batch_norm for name in step.changes} | self.buffer_writes.keys()

    def _step(
        self,
        step: Step,
        environment: Environment,
        store: Store,
        statistics: DeferredStatistics | None,
        observe: Callable[[Step, Any], None] | None,
    ) -> None:
        args, kwargs = step.arguments(environment)
        target = store.module(step.target) if isinstance(step.target, str) else step.target
        if step.batch_norm and statistics is not None:
            result = statistics.run(step.label, target, args, kwargs)
        else:
            result = target(*args, **kwargs)
        if observe is not None:
            observe(step, result)
        outputs = step.outputs
        if isinstance(result, Tensor):
            if outputs and outputs[0] is not None:
                environment[outputs[0]] = result
        elif outputs:
            leaves = tree.flatten(result)[0]
            if len(leaves) != len(outputs):
                raise RecordingError(f"{step.label} returned {len(leaves)} values where the recording saw {len(outputs)}")
            for register, leaf in zip(outputs, leaves, strict=True):
                if register is not None:
                    environment[register] = leaf
        for register in step.frees:
            environment.pop(register, None)


def compile_nodes(
    graph: Graph,
    nodes: Sequence[int],
    wanted: Iterable[int],
    *,
    store: Store | None = None,
    unbatched: Callable[[int], bool] | None = None,
    simple_values: Callable[[str], Mapping[str, Any]] | None = None,
    buffer_writes: Mapping[str, int] | None = None,
    given: Collection[int] = (),
) -> Program:
    """Makes a program of some nodes of a graph.

    Args:
        graph: the recording.
        nodes: indices of the nodes, in order.
        wanted: registers the caller wants in the end.
        store: where leaf modules are looked at, to find batch norms.
        unbatched: says of a register that it is the same for all microbatches; updates of buffers from such values
            alone are made once per call.
        simple_values: gives the Python attributes a leaf module had, by path.
        buffer_writes: buffers to rebind, by name.
        given: registers of parameters and buffers that are handed in, rather than found in the store.

    Returns:
        The program; its constants are the graph's own tensors.
    """
    wanted = tuple(dict.fromkeys(wanted))
    keep = set(wanted) | set((buffer_writes or {}).values())
    last_read: dict[int, int] = {}
    for position, index in enumerate(nodes):
        node = graph.nodes[index]
        for register in (*node.reads, *node.outputs):
            if register is not None:
                last_read[register] = position
    frees: dict[int, list[int]] = {}
    for register, position in last_read.items():
        source = graph.sources.get(register)
        if register not in keep and (source is None or source.kind == "input"):
            frees.setdefault(position, []).append(register)
    ambients: dict[Ambient, int] = {}
    steps = [_step(graph, index, tuple(frees.get(position, ())), ambients, store) for position, index in enumerate(nodes)]
    if unbatched is not None:
        for step, once in zip(steps, _once(graph, nodes, unbatched, keep), strict=True):
            step.once = once
    used = {r for index in nodes for r in graph.nodes[index].reads} | keep
    sources = {r: s for r, s in graph.sources.items() if r in used and r not in given and s.kind != "input"}
    changed = graph.storage_of(r for index in nodes for r in graph.nodes[index].mutates)
    received: set[int] = set()
    made = set(sources)
    for index in nodes:
        received.update(r for r in graph.nodes[index].reads if r not in made)
        made.update(r for r in graph.nodes[index].outputs if r is not None)
    clones = {r for r in received if graph.values[r].storage in changed}
    program = Program(steps, sources, list(ambients), wanted, frozenset(clones), dict(buffer_writes or {}))
    program.constants = {r: graph.constants[r] for r, s in sources.items() if s.kind == "constant"}
    if simple_values is not None:
        program.attributes = {path: dict(simple_values(path)) for path in program.modules()}
    return program


def _step(graph: Graph, index: int, frees: tuple[int, ...], ambients: dict[Ambient, int], store: Store | None) -> Step:
    node = graph.nodes[index]
    flat = not node.kwargs and not any(isinstance(a, (list, tuple, dict)) or hasattr(a, "__dict__") for a in node.args)
    if flat:
        template, spec = list(node.args), None
    else:
        template, spec = tree.flatten((node.args, node.kwargs))
    places = tuple((i, leaf.register) for i, leaf in enumerate(template) if isinstance(leaf, Ref))
    for position, _ in places:
        template[position] = None
    norm = getattr(node.target, "__name__", "") == "batch_norm" or (
        isinstance(node.target, str) and store is not None and is_deferred_module(store.module(node.target))
    )
    mode = ambients.setdefault(node.ambient, len(ambients))
    label = f"{node} #{index}"
    return Step(
        node.target,
        template,
        places,
        spec,
        node.outputs,
        frees,
        mode,
        label,
        batch_norm=norm,
        changes=node.changes,
        mutates=bool(node.mutates),
    )


def _once(
    graph: Graph, nodes: Sequence[int], unbatched: Callable[[int], bool], wanted: Iterable[int]
) -> list[Literal["all", "first", "last"]]:
    """Finds updates of buffers and parameters that do not depend on the batch, to be made once per call.

    Such an update runs for the first microbatch when what it changes is only read after it, for the last one when that is
    only read before it, and for each (as documented) when it is read on both sides. What is computed for updates alone, as
    the products of a power iteration, does not count as a read.
    """
    kept = {graph.values[r].storage for r, s in graph.sources.items() if s.kind in ("parameter", "buffer")}
    changes = [graph.storage_of(graph.nodes[i].mutates) & kept for i in nodes]
    updates = {
        p for p, i in enumerate(nodes)
        if changes[p] and not graph.nodes[i].is_module and all(unbatched(r) for r in graph.nodes[i].reads)
    }  # fmt: skip
    reads = [graph.storage_of(graph.nodes[i].reads) for i in nodes]
    readers = set(range(len(nodes))) - updates - _serving(graph, nodes, updates, wanted)
    sent = graph.storage_of(wanted)
    result: list[Literal["all", "first", "last"]] = []
    for position in range(len(nodes)):
        if position not in updates:
            result.append("all")
            continue
        before = any(p < position and reads[p] & changes[position] for p in readers)
        after = bool(sent & changes[position]) or any(p > position and reads[p] & changes[position] for p in readers)
        result.append("all" if before and after else "last" if before else "first")
    return result


def _serving(graph: Graph, nodes: Sequence[int], updates: set[int], wanted: Iterable[int]) -> set[int]:
    """Finds the positions of the nodes whose results nothing but ``updates`` needs."""
    needed = set(wanted)
    serving: set[int] = set()
    for position in range(len(nodes))[::-1]:
        node = graph.nodes[nodes[position]]
        made = {r for r in node.outputs if r is not None}
        if position in updates:
            continue
        if node.keep or node.mutates or not made or made & needed:
            needed.update(node.reads)
        else:
            serving.add(position)
    return serving
