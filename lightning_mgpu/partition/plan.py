"""Plans: for each kind of call of a module, how it is cut and dealt out; recorded once, reused while its guards hold."""

from __future__ import annotations

import itertools
import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from torch import Tensor, nn

from lightning_mgpu import tree
from lightning_mgpu.errors import MgpuError, PartitionError, PlacementError, RecordingError
from lightning_mgpu.microbatch import batch_sizes_of, num_microbatches_for, sizes_of
from lightning_mgpu.partition.ambient import Ambient
from lightning_mgpu.partition.assemble import make_stages
from lightning_mgpu.partition.batch import Batching, Dim, batch_dims, split_tail
from lightning_mgpu.partition.cost import weights_of
from lightning_mgpu.partition.cut import CutRequest, Layout, cut, place
from lightning_mgpu.partition.dealing import doubtful, ways_to_deal
from lightning_mgpu.partition.graph import Graph, Guard
from lightning_mgpu.partition.guards import GuardChecks
from lightning_mgpu.partition.names import Names
from lightning_mgpu.partition.placement import Placement
from lightning_mgpu.partition.program import Program, Store, compile_nodes
from lightning_mgpu.partition.record import Recorder
from lightning_mgpu.partition.recording import Recording, StructureError
from lightning_mgpu.partition.stage import Stage
from lightning_mgpu.remarks import remark

__all__ = ["CallPlan", "ModuleStore", "Planner", "counted_buffers"]

_MAX_PLANS = 64
_MANY_RECORDINGS = 32


class ModuleStore:
    """Finds modules and tensors below a root in this process."""

    def __init__(self, names: Names) -> None:
        self.names = names

    def module(self, path: str) -> nn.Module:
        return self.names.module_at[path]

    def tensor(self, name: str) -> Tensor:
        return self.names.current(name)

    def set_buffer(self, name: str, value: Tensor) -> None:
        owner, _, attribute = name.rpartition(".")
        self.names.module_at[owner]._buffers[attribute] = value


@dataclass
class CallPlan:
    """Says how one kind of call is carried out.

    Attributes:
        number: tells plans apart, also between processes.
        sizes: rows of each microbatch, in order.
        stages: the stages by rows of the microbatch.
        tail: what runs on the lead once, on the gathered batch.
        whole: recording of the whole batch.
        input_dims: batch dimension of each tensor among the arguments, ``None`` for replicated ones.
        guards: finds out whether the values the forward takes from tensors are what they were.
    """

    number: int
    path: str
    sizes: tuple[int, ...]
    stages: dict[int, tuple[Stage, ...]]
    batching: Batching
    tail: Program
    whole: Recording
    layout: Layout
    input_dims: tuple[Dim, ...]
    guards: GuardChecks | None

    @property
    def graph(self) -> Graph:
        return self.whole.graph

    @property
    def num_microbatches(self) -> int:
        return len(self.sizes)

    def stage_names(self) -> tuple[str, ...]:
        """Names each stage by the layer that begins it."""
        found = []
        for nodes in self.layout.stages:
            layers = [self.graph.nodes[i].target for i in nodes if self.graph.nodes[i].is_module]
            found.append(str(layers[0]) if layers else "")
        return tuple(found)


class Planner:
    """Makes and keeps the plans of the modules below one root.

    Attributes:
        placement: who owns what, fixed by the first plan of each module.
        num_recordings: forwards recorded so far.
    """

    def __init__(
        self,
        root: nn.Module,
        num_stages: int,
        num_microbatches: int | Literal["auto"],
        request: CutRequest,
        *,
        homes: tuple[int, ...] = (),
        num_replicas: int = 1,
    ) -> None:
        self.names = Names(root)
        self.store: Store = ModuleStore(self.names)
        self.recorder = Recorder(self.names)
        self.placement = Placement(num_stages, homes=homes, num_replicas=num_replicas)
        self.num_microbatches = num_microbatches
        self.request = request
        self.num_recordings = 0
        self.fetch: Callable[[], AbstractContextManager[None]] | None = None
        self._plans: OrderedDict[Any, list[CallPlan]] = OrderedDict()
        self._numbers = itertools.count()
        self._replicated: dict[Any, set[int]] = {}
        self._warned = False
        self._parts: dict[str, tuple[list[nn.Module], list[nn.Parameter]]] = {}
        self._planned: set[str] = set()
        self._dropped: list[int] = []
        self._whole = False

    def is_planned(self, path: str) -> bool:
        """Says whether a module has a plan already, so that its parameters are placed."""
        return path in self._planned

    def take_dropped(self) -> list[int]:
        """Returns the numbers of the plans that were dropped since it was last asked."""
        dropped, self._dropped = self._dropped, []
        return dropped

    def find(self, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[CallPlan, list[Tensor], bool]:
        """Finds the plan for one call, or makes it.

        Args:
            path: path of the called module.
            args: positional arguments.
            kwargs: keyword arguments.

        Returns:
            The plan, the tensors among the arguments, and whether the plan is new.

        Raises:
            RecordingError: where the forward can't be recorded, or there is no tensor among the arguments.
            PartitionError: where it can't be cut.
        """
        leaves, spec = tree.flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        unique = list({id(t): t for t in tensors}.values())
        if not unique:
            raise RecordingError(
                f"the call of {self._describe(path)} got no tensor, so there is no batch to split; pass the batch's tensors "
                'as arguments, or pipeline another module with module="..."'
            )
        signature = self._signature(path, leaves, spec)
        known = self._plans.get(signature, [])
        for plan in known:
            if plan.whole.holds() and self._guards_hold(plan, unique):
                self._plans.move_to_end(signature)
                return plan, unique, False
        plan = self.make(path, args, kwargs, unique, spec)
        self._plans.setdefault(signature, []).insert(0, plan)
        self._bound()
        return plan, unique, True

    def _describe(self, path: str) -> str:
        return f"{path} ({type(self.names.module_at[path]).__name__})" if path else type(self.names.root).__name__

    def _bound(self) -> None:
        while sum(map(len, self._plans.values())) > _MAX_PLANS:
            oldest = next(iter(self._plans))
            self._dropped.append(self._plans[oldest].pop().number)
            if not self._plans[oldest]:
                del self._plans[oldest]
        most = max(map(len, self._plans.values()))
        if most > _MANY_RECORDINGS and not self._warned:
            self._warned = True
            remark(
                f"the forward was recorded {most} times for batches of one shape, since Python values that it takes from "
                "tensors or attributes keep changing; every new value costs a recording",
            )

    def _signature(self, path: str, leaves: Sequence[Any], spec: tree.Spec) -> Any:
        modules, parameters = self._parts_of(path)
        modes = tuple([m.training for m in modules])
        flags = tuple([p.requires_grad for p in parameters])
        described = tuple(_described(leaf) for leaf in leaves)
        return path, _spec_key(spec), described, modes, flags, self._whole, Ambient.current().without_inference()

    def _parts_of(self, path: str) -> tuple[list[nn.Module], list[nn.Parameter]]:
        if path not in self._parts:
            module = self.names.module_at[path]
            self._parts[path] = list(module.modules()), list(module.parameters())
        return self._parts[path]

    # -- guards ----------------------------------------------------------------------------------------------------

    def _guards_hold(self, plan: CallPlan, tensors: Sequence[Tensor]) -> bool:
        if plan.guards is None:
            return True
        environment = dict(zip(dict.fromkeys(plan.graph.inputs), (t.detach() for t in tensors), strict=True))
        return plan.guards.hold(environment, self.store)

    # -- making a plan ---------------------------------------------------------------------------------------------

    def make(
        self, path: str, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: Sequence[Tensor], spec: tree.Spec
    ) -> CallPlan:
        """Records one call and cuts it, placing what has no owner yet."""
        self._check_initialized(path)
        first = True
        while True:
            num_promoted = len(self.recorder.promoted)
            whole = self._record(path, args, kwargs, None)
            try:
                micro, dims, sizes = self._microbatches(path, args, kwargs, whole, tensors, spec, patient=not first)
            except StructureError:
                first = False  # the first recording may have filled a cache of the user's: once more
                continue
            if len(self.recorder.promoted) == num_promoted:
                break  # otherwise the recordings saw different leaves: once more
        kinds = self.names.kinds
        self.names.changing.update(n for node in whole.graph.nodes for n in node.changes if kinds[n] == "parameter")
        batching = split_tail(whole.graph, dims, self.placement.away())
        layout = cut(whole.graph, batching, self.names, self.placement, self.request, path)
        place(whole.graph, batching, layout, self.names, self.placement, path)
        stages = {rows: self._stages(recording, batching, layout) for rows, recording in micro.items()}
        self._refuse_counted_buffers(path, stages, len(sizes))
        if path not in self._planned and len(sizes) > 1:
            self._name_counted_buffers(path, stages)
            self._name_batch_norms(path, stages)
            self._name_promoted(whole)
        self._planned.add(path)
        inputs = tuple(batching.dims[r] for r in dict.fromkeys(whole.graph.inputs))
        tail = self._tail(whole.graph, batching)
        _mark_repeatable([stage for every in stages.values() for stage in every], tail)
        guards = GuardChecks(whole.graph) if whole.graph.guards else None
        whole.tensors.clear()
        return CallPlan(next(self._numbers), path, sizes, stages, batching, tail, whole, layout, inputs, guards)

    def _check_initialized(self, path: str) -> None:
        for name in self.names.tensor_names(self.names.module_at[path]):
            if nn.parameter.is_lazy(self.names.tensors[name]):
                raise RecordingError(
                    f"{name!r} has no shape yet, so {self._describe(path)} can't be cut; call the module once on a batch, as "
                    "in setup(), or use a layer that is not lazy"
                )

    def _name_promoted(self, recording: Recording) -> None:
        """Warns of modules that run as one piece on each microbatch, since a decision over the batch would be another one."""
        for leaf in recording.graph.leaves:
            if leaf in recording.promoted:
                remark(
                    f"{self._describe(leaf)} runs as one piece on each microbatch by itself, since its forward "
                    f"{recording.promoted[leaf]}; where it decides over the whole batch, use num_microbatches=1",
                )

    def _name_counted_buffers(self, path: str, stages: dict[int, tuple[Stage, ...]]) -> None:
        """Warns of buffers that every microbatch changes, where one device changes them once per batch."""
        counted = counted_buffers(next(iter(stages.values())))
        if counted:
            remark(
                f"{self._describe(path)} changes the buffers {', '.join(sorted(counted))} in its forward, which every "
                "microbatch does again; use num_microbatches=1 where once per batch matters",
            )

    def _name_batch_norms(self, path: str, stages: dict[int, tuple[Stage, ...]]) -> None:
        """Warns of batch norms, which see a microbatch where one device shows them the batch."""
        steps = [step for stage in next(iter(stages.values())) for step in stage.program.steps]
        norms = list(dict.fromkeys(str(step.target) for step in steps if step.batch_norm and step.changes))
        if norms:
            shown = ", ".join(norms[:3]) + (", ..." if len(norms) > 3 else "")
            remark(
                f"{self._describe(path)} has batch norms ({shown}), which normalise each microbatch by itself; use "
                "num_microbatches=1 where the whole batch has to be normalised at once",
            )

    def _refuse_counted_buffers(self, path: str, stages: dict[int, tuple[Stage, ...]], num_microbatches: int) -> None:
        """Refuses buffers that every microbatch changes where there are replicas, which would not agree on them."""
        some = next(iter(stages.values()))
        if self.placement.mesh.data == 1 or (num_microbatches == 1 and not self._whole):
            return
        changed = {n for s in some for n in s.program.changed_buffers()} if self._whole else counted_buffers(some)
        if changed:
            raise PartitionError(
                f"{self._describe(path)} changes the buffers {', '.join(sorted(changed))} in its forward on every microbatch, "
                f"so its {self.placement.mesh.data} replicas would not agree on them; use data_parallel_size=1"
            )

    def _stages(self, recording: Recording, batching: Batching, layout: Layout) -> tuple[Stage, ...]:
        return make_stages(
            recording,
            batching,
            layout,
            store=self.store,
            names_of=lambda index: weights_of(recording.graph, index, self.names),
            simple_values=lambda leaf: recording.attributes.simple_values(self.names.module_at[leaf]),
            owners_of=lambda name: self.placement.owners.get(name, frozenset({self.placement.lead})),
        )

    def _record(self, path: str, args: tuple[Any, ...], kwargs: dict[str, Any], answers: Sequence[Guard] | None) -> Recording:
        self.num_recordings += 1
        num_promoted = len(self.recorder.promoted)
        try:
            with self._weights_for_promoted():
                return self.recorder.record(self.names.module_at[path], args, kwargs, answers=answers)
        except PlacementError:
            if len(self.recorder.promoted) == num_promoted:
                raise
        with self._weights_for_promoted():  # the first one was promoted just now, with its weights elsewhere
            return self.recorder.record(self.names.module_at[path], args, kwargs, answers=answers)

    @contextmanager
    def _weights_for_promoted(self) -> Iterator[None]:
        """Brings the weights of promoted modules here, since a recording runs those for real."""
        if self.fetch is None or not self.recorder.promoted:
            yield
            return
        with self.fetch():
            yield

    def _microbatches(
        self,
        path: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        whole: Recording,
        tensors: Sequence[Tensor],
        spec: tree.Spec,
        *,
        patient: bool,
    ) -> tuple[dict[int, Recording], list[Dim] | None, tuple[int, ...]]:
        given = tuple(isinstance(leaf, Tensor) for leaf in tree.flatten((args, kwargs))[0])
        replicated = self._replicated.setdefault((path, _spec_key(spec), given), set())
        failure: Exception | None = None
        for batch_size, count, split in ways_to_deal(tensors, self._count, replicated):
            sizes = sizes_of(batch_size, count)

            def record(rows: int, split: set[int] = split) -> Recording:
                return self._record(path, *_narrowed(args, kwargs, tensors, split, rows), whole.graph.guards)

            try:
                if doubtful(tensors, batch_size) & split and 1 in sizes and batch_size > 2:
                    record(2)  # one row would fit whatever it meets
                micro = {rows: record(rows) for rows in dict.fromkeys(sizes)}
                found = [batch_dims(whole.graph, r.graph, batch_size, rows) for rows, r in micro.items()]
                if any(dims != found[0] for dims in found):
                    raise StructureError("microbatches of different sizes carry the batch differently")
            except MgpuError:
                raise
            except StructureError as error:
                if not patient:
                    raise
                failure = error
                continue
            except Exception as error:  # whatever fails on fewer rows works on the whole batch
                failure = error
                continue
            replicated.update(set(range(len(tensors))) - split)
            if failure is not None and count < self._count(batch_size):
                self._warn_fewer(path, batch_size, count, failure)
            return micro, found[0], sizes
        rows = next(iter(batch_sizes_of(tensors)), 1)
        if failure is not None:
            self._warn_fewer(path, rows, 1, failure)
        return {rows: whole}, None, (rows,)

    def _count(self, batch_size: int) -> int:
        if self._whole:
            return 1
        mesh = self.placement.mesh
        return num_microbatches_for(self.num_microbatches, mesh.pipeline, batch_size, num_replicas=mesh.data)

    @contextmanager
    def one_microbatch(self) -> Iterator[None]:
        """Plans calls for a block as one microbatch each, however many rows they have."""
        self._whole = True
        try:
            yield
        finally:
            self._whole = False

    def _warn_fewer(self, path: str, batch_size: int, count: int, failure: Exception) -> None:
        remark(
            f"{self._describe(path)} is run in {count} microbatch{'es' * (count > 1)} for a batch of {batch_size} rows, since "
            f"its forward does not work the same on fewer rows: {type(failure).__name__}: {failure}",
        )

    def _tail(self, graph: Graph, batching: Batching) -> Program:
        made = {r for i in batching.body for r in graph.nodes[i].outputs}
        writes = {n: r for n, r in graph.buffer_writes.items() if r not in made or batching.dims[r] is not None}
        results = graph.output_registers
        return compile_nodes(graph, batching.tail, results, store=self.store, buffer_writes=writes, given=batching.wanted)


def _mark_repeatable(stages: Sequence[Stage], tail: Program) -> None:
    """Notes which stages use no buffer that the call changes anywhere."""
    changed = tail.changed_buffers().union(*(stage.program.changed_buffers() for stage in stages))
    for stage in stages:
        stage.is_repeatable = changed.isdisjoint(stage.names)


def counted_buffers(stages: Sequence[Stage]) -> set[str]:
    """Names the buffers that every microbatch changes."""
    steps = [step for stage in stages for step in stage.program.steps]
    once = {name for step in steps if step.once != "all" for name in step.changes}
    return {name for step in steps if step.once == "all" and not step.batch_norm for name in step.changes} - once


def _described(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), leaf.dtype, leaf.device, leaf.requires_grad
    if isinstance(leaf, np.ndarray):
        return leaf.shape, leaf.dtype.str, leaf.tobytes()
    try:
        hash(leaf)
    except TypeError:
        try:
            return type(leaf), pickle.dumps(leaf)
        except Exception:  # what can't be pickled is told apart by identity
            return type(leaf), id(leaf)
    return type(leaf), leaf


def _spec_key(spec: tree.Spec) -> Any:
    try:
        hash(spec)
    except TypeError:
        return str(spec)
    return spec


def _narrowed(
    args: tuple[Any, ...], kwargs: dict[str, Any], tensors: Sequence[Tensor], split: set[int], rows: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Takes the first ``rows`` rows of the tensors that are split."""
    first = {id(t): t[:rows] if i in split else t for i, t in enumerate(tensors)}
    return tree.map_tensors(lambda t: first[id(t)], (args, kwargs))  # type: ignore[no-any-return]
