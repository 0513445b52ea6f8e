"""The lead: the user's own process. It holds the last stage, plans calls, places parameters, and speaks to the workers.

A call of a pipelined module goes through here in this order: find its plan (`_plan`), place what has no owner yet
(`_place`), run the forward over the stages (`run_forward`), and later its backward (`run_backward`).
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_mgpu import tree
from lightning_mgpu.errors import PlacementError
from lightning_mgpu.mesh import Mesh
from lightning_mgpu.partition.cut import CutRequest
from lightning_mgpu.partition.devices import StageDevices
from lightning_mgpu.partition.gather import deal_inputs, finish, gather
from lightning_mgpu.partition.plan import CallPlan, Planner
from lightning_mgpu.partition.selfcheck import check_plan
from lightning_mgpu.partition.stage import Stage
from lightning_mgpu.remarks import remark
from lightning_mgpu.runtime import messages as m
from lightning_mgpu.runtime.checkpoint import OwnedState
from lightning_mgpu.runtime.engine import Call, Engine
from lightning_mgpu.runtime.exchange import BatchExchange, summed
from lightning_mgpu.runtime.failure import Failures
from lightning_mgpu.runtime.home import Home, check_dense, check_gradient_hooks
from lightning_mgpu.runtime.microbatched import MicrobatchedStep
from lightning_mgpu.runtime.modes import modes_of
from lightning_mgpu.runtime.optimizers import OwnedOptimizers
from lightning_mgpu.runtime.pack import pack
from lightning_mgpu.runtime.patches import Patches
from lightning_mgpu.runtime.remote import Anchor, RemoteCall, call_remotely
from lightning_mgpu.runtime.replicas import OtherReplicas, settle
from lightning_mgpu.runtime.sharing import Use, add_up, shares_in
from lightning_mgpu.runtime.unmade import Origins, is_unmade
from lightning_mgpu.runtime.workers import Workers
from lightning_mgpu.schedule.catalog import SCHEDULES, Schedule
from lightning_mgpu.timeline import Event, Timeline

__all__ = ["Lead"]

_MAX_TIMED_CALLS = 16


class Lead:
    """Runs the modules below one root over a set of stages.

    Attributes:
        planner: plans of calls, and the placement.
        workers: the other processes.
        schedule: the order of forwards and backwards.
        step: runs training steps by microbatches.
        recomputed: the stages that keep no activations, and are run again before their backwards.
        placed: whether parameters live with their stages now, rather than all on the lead.
        devices: where the stages of this process are, if on several devices.
        compiled: arguments of ``torch.compile`` for the stages, ``None`` to run them as they are.
        timed: whether calls are recorded for a timeline.
        closed: whether it serves no more calls.
        successor: the lead that took over when the module was changed.
    """

    def __init__(  # noqa: PLR0913 - what a run is made of
        self,
        root: nn.Module,
        workers: Workers,
        *,
        mesh: Mesh | None = None,
        num_microbatches: int | Literal["auto"] = "auto",
        schedule: Schedule = SCHEDULES["gpipe"],
        request: CutRequest | None = None,
        self_check: bool | Literal["auto"] = "auto",
        activation_checkpointing: bool | Literal["all but last"] = False,
        local_devices: Sequence[torch.device] = (),
        patches: Patches | None = None,
    ) -> None:
        self.root = root
        self.workers = workers
        self.mesh = mesh or Mesh(workers.num_processes)
        self.schedule = schedule
        homes = schedule.homes(self.mesh.pipeline)
        self.planner = Planner(
            root, len(homes), num_microbatches, request or CutRequest(), homes=homes, num_replicas=self.mesh.data
        )
        self.own_stages = self.stages_of(self.index)
        recomputed = range(len(homes) - (activation_checkpointing == "all but last")) if activation_checkpointing else ()
        self.recomputed = frozenset(recomputed)
        self.planner.fetch = self.shown
        self.devices: StageDevices | None = None
        if local_devices:
            self.devices = StageDevices(self.planner.names, self.planner.placement, local_devices)
            self.planner.names.device = self.devices.home
        self.self_check = self_check
        self.patches = patches or Patches()
        self.anchor = Anchor()
        self.optimizers = OwnedOptimizers(self)
        self.expects_training = False
        self.compiled: dict[str, Any] | None = None
        self.timed = False
        self.closed = False
        self.successor: Lead | None = None
        self.events: list[Event] = []
        self.stage_names: tuple[str, ...] = ()
        self.attending: Callable[[], AbstractContextManager[None]] = nullcontext
        self.resting: Callable[[], AbstractContextManager[None]] = nullcontext
        self.is_users_turn = False
        self.home = Home(self)
        self.owned_state = OwnedState(self)
        self.origins = Origins()
        self.step = MicrobatchedStep(self)
        self.failures = Failures(self)
        self.running_engine: Engine | None = None
        self._summoned = False
        self._calls = itertools.count()
        self._freed: list[int] = []
        self._seed = zlib.crc32(torch.get_rng_state().numpy().tobytes())
        self._known_plans: set[int] = set()
        self._uses: dict[int, dict[str, Use]] = {}
        self._arranged = False
        self._last_plan = -1

    # -- what is where ---------------------------------------------------------------------------------------------

    @property
    def num_stages(self) -> int:
        return self.planner.placement.num_stages

    @property
    def num_processes(self) -> int:
        return self.mesh.num_processes

    @property
    def index(self) -> int:
        """The lead's own process."""
        return self.mesh.lead

    @property
    def owners(self) -> range:
        """The workers of the lead's own replica: each parameter's primary holder is one of them, or the lead."""
        return self.mesh.row(-1)[:-1]

    @property
    def latest(self) -> Lead:
        """The lead that serves now: this one, or the last of those that took over from it."""
        return self if self.successor is None else self.successor.latest

    def stages_of(self, process: int) -> tuple[int, ...]:
        """Lists the stages of a process."""
        position = self.mesh.position(process)
        return tuple(stage for stage, home in enumerate(self.planner.placement.homes) if home == position)

    @property
    def placed(self) -> bool:
        return self.home.away

    @property
    def engine(self) -> Engine:
        if self.running_engine is None:
            self.workers.ready()
            self.running_engine = Engine(
                self.index,
                self.mesh.row(-1),
                self.planner.store,
                self.workers.plane,
                self.workers.devices[self.index],
                replica=self.mesh.data - 1,
            )
        return self.running_engine

    def others(self, stages: Sequence[Sequence[Stage]]) -> OtherReplicas:
        """Returns what deals with other processes' arguments and results in a call.

        Args:
            stages: all stages, for each microbatch of the batch.
        """
        return OtherReplicas(self.engine, self.mesh, self.planner.placement.homes, stages)

    @property
    def is_spread(self) -> bool:
        """Whether the module can't run as it is: its weights are in other processes, or on several devices."""
        return self.placed or (self.devices is not None and self.devices.away)

    def is_placed(self, module: nn.Module) -> bool:
        """Says whether any tensor of a module has an owner other than the lead alone."""
        holders = self.planner.placement.holders
        return any(holders(name) != {self.index} for name in self.planner.names.tensor_names(module))

    # -- a call ----------------------------------------------------------------------------------------------------

    def call(self, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answers the forward of one module.

        Args:
            path: path of the module below the root.
            args: positional arguments.
            kwargs: keyword arguments.

        Returns:
            What the forward returns on one device.

        Raises:
            RecordingError, PartitionError, SelfCheckError: where the forward can't be run in stages.
            StageError: where a stage failed.
        """
        plan, tensors = self.plan(path, args, kwargs)
        parameters = self.planner.names.module_at[path].parameters()
        trains = any(t.requires_grad for t in tensors) or any(p.requires_grad for p in parameters)
        grad = torch.is_grad_enabled() and trains
        inputs = deal_inputs(plan, [t.detach() for t in tensors])
        call = RemoteCall(self, plan, self.next_number(), inputs, grad=grad)
        return self.finish(plan, tensors, call_remotely(call, tensors))

    def finish(self, plan: CallPlan, tensors: Sequence[Tensor], whole: Sequence[Tensor]) -> Any:
        """Runs the tail of a call and returns what the forward returns.

        Args:
            plan: the plan of the call.
            tensors: the tensors among the arguments.
            whole: what the last stage made.
        """
        inference = torch.is_inference_mode_enabled()
        result, stored = finish(plan, tensors, whole, self.planner.store, inference=inference)
        for (owner, name), value in stored.items():
            setattr(self.planner.names.module_at[owner], name, value)
        return result

    def next_number(self) -> int:
        """Returns a number for the next call."""
        return next(self._calls)

    @contextmanager
    def users_turn(self) -> Iterator[None]:
        """Runs user code in the middle of an exchange: what it raises is its own, and it can't ask workers for anything."""
        engine, self.is_users_turn = self.engine, True
        at = (engine.stage, engine.microbatch, engine.doing)
        engine.stage, engine.microbatch, engine.doing = None, None, "training_step"
        try:
            with self.resting():
                yield
        finally:
            self.is_users_turn = False
        engine.stage, engine.microbatch, engine.doing = at

    def seed_of(self, number: int) -> int:
        """Returns the seed of one call's random numbers; the user's own generators are never advanced by a call."""
        return self._seed * 65_537 + number

    def plan(self, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[CallPlan, list[Tensor]]:
        """Finds the plan of a call, and places what it needs.

        Returns:
            The plan, and the tensors among the arguments.
        """
        first = not self.planner.is_planned(path)
        if first:
            check_gradient_hooks(self.planner.names, path)
        if first and self.expects_training:
            self._plan_training_first(path, args, kwargs)
        plan, tensors, new = self.planner.find(path, args, kwargs)
        if new and first:
            self._check(plan, args, kwargs, tensors)
        if new or not self.placed or plan.number not in self._known_plans:
            self._place(plan)
        return plan, tensors

    def _plan_training_first(self, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Plans and checks the call as a training step would make it, so that the cuts suit training.

        The first call of a fit is the sanity validation, in eval mode and without gradients. What can't be recorded in
        training mode is left for the first training step to report.
        """
        module = self.planner.names.module_at[path]
        modes = [(child, child.training) for child in module.modules()]
        plain = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        if plain and any(training for _, training in modes):
            return
        try:
            module.train()
            with torch.inference_mode(False), torch.enable_grad():
                args, kwargs = tree.map_tensors(lambda t: t.clone() if t.is_inference() else t, (args, kwargs))
                plan, tensors, _ = self.planner.find(path, args, kwargs)
                self._check(plan, args, kwargs, tensors)
        finally:
            for child, training in modes:
                child.training = training

    def _check(self, plan: CallPlan, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: Sequence[Tensor]) -> None:
        if self.self_check is False or self.placed:
            return
        if self.self_check == "auto" and not self._fits(plan.path):
            remark(
                f"the stages of {plan.path or type(self.root).__name__} are not compared with its own forward, since it does "
                "not fit this device; use self_check=False to silence this, or check a smaller copy of the model",
            )
            return
        check_plan(self.planner, plan, args, kwargs, tensors)

    def _fits(self, path: str) -> bool:
        return not any(is_unmade(t) for t in self.planner.names.module_at[path].parameters())

    # -- placing ---------------------------------------------------------------------------------------------------

    def _place(self, plan: CallPlan) -> None:
        """Gives workers what they lack for a plan: tensors, modules, optimizers, and the plan."""
        if not self.stage_names:
            self.stage_names = plan.stage_names()
        for stage in (stage for every in plan.stages.values() for stage in every):
            stage.program.compiled = self.compiled
        if self.num_processes == 1:
            self._place_here(plan)
            return
        check_dense(self.planner.names, self.planner.placement.shared())
        _ = self.engine  # waits for processes that are starting
        with self.failures.guarded("placement"):
            if not self._arranged:
                self.workers.tell_all(m.Reset(self.mesh))
                self._arranged = True
            fresh = self.home.send_tensors()
            self.origins.make_here(self.planner.placement.held_by(self.index))
            self.home.send_modules(plan)
            if fresh or not self.optimizers.sent:
                self.optimizers.send()
                if self.origins.sources:
                    self.optimizers.copy_own()
            self._drop_old_plans()
            if plan.number not in self._known_plans:
                self._send_plan(plan)
            self._send_flags()
            self.home.hide()

    def _place_here(self, plan: CallPlan) -> None:
        """Places a plan in this process alone, which may have several devices."""
        self.origins.make_here(self.planner.names.tensors)
        if self.devices is not None:
            for index, stage in (each for every in plan.stages.values() for each in enumerate(every)):
                stage.program.move_to(self.devices.of(index))
            self.devices.place(self.optimizers.faces)
        self._known_plans.add(plan.number)

    def _send_plan(self, plan: CallPlan) -> None:
        for process in self.workers.indices:
            here = self.stages_of(process)
            stages = {rows: {index: every[index] for index in here} for rows, every in plan.stages.items()}
            with self.patches.lifted():
                packed = pack(
                    (stages, self.uses(plan)),
                    names=self.home.names_at(process),
                    modules=self.home.modules_at(process),
                    what=f"the calls of stage {here[0]}",
                )
            self.workers.tell(process, m.AddPlan(plan.number, packed.header()), packed)
        self._known_plans.add(plan.number)

    def _drop_old_plans(self) -> None:
        old = tuple(n for n in self.planner.take_dropped() if n in self._known_plans)
        if old:
            self._known_plans.difference_update(old)
            self._uses = {number: uses for number, uses in self._uses.items() if number not in old}
            self.workers.tell_all(m.Free((), old))

    def uses(self, plan: CallPlan) -> dict[str, Use]:
        """Finds the trainable parameters with several holders that a plan uses, and where."""
        if plan.number not in self._uses:
            names, placement = self.planner.names, self.planner.placement
            found: dict[str, Use] = {}
            for name in placement.shared():
                if names.kinds[name] == "parameter" and names.tensors[name].requires_grad:
                    users = {placement.homes[s.index] for s in next(iter(plan.stages.values())) if name in s.names}
                    if users:
                        found[name] = Use(self.mesh.position(placement.primary(name)), tuple(sorted(users)))
            self._uses[plan.number] = found
        return self._uses[plan.number]

    def add_up(self, uses: Mapping[str, Use], num_microbatches: int) -> None:
        """Adds the gradients of shared parameters up on their primary holders."""
        if self.workers.plane is not None:
            shares = shares_in(self.mesh, uses, num_microbatches)
            add_up(self.workers.plane, self.index, shares, self.planner.store.tensor)

    def _send_flags(self) -> None:
        """Tells workers of modes and ``requires_grad`` that are not what they last heard."""
        names = self.planner.names
        for process in self.workers.indices:
            training = {p: modes_of(names.module_at[p]) for p in self.home.modules_at(process).values()}
            training = {p: t for p, t in training.items() if self.home.modes[process].get(p) != t}
            needs = {n: names.tensors[n].requires_grad for n in self.home.names_at(process).values()}
            needs = {n: r for n, r in needs.items() if self.home.needs[process].get(n) != r}
            if training or needs:
                self.workers.tell(process, m.SetFlags(training, needs))
                self.home.modes[process].update(training)
                self.home.needs[process].update(needs)

    # -- forward and backward --------------------------------------------------------------------------------------

    def run_forward(self, call: RemoteCall) -> list[Tensor]:
        """Runs the forward of a call over all stages and gathers what it wants."""
        with self.failures.guarded("forward"):
            self.tell_before_call(call.plan)
            self.workers.tell_all(call.message(self.schedule.name))
            for stage in (stage for stages in call.state.stages for stage in stages.values()):
                stage.program.prepare(self.planner.store)
            others = self.others(call.stages)
            others.deal_out(call.inputs)
            exchange = BatchExchange(call.inputs[call.share.start :])
            table = self.schedule.forward_table(len(call.share), self.mesh.pipeline)
            self.engine.run(call.state, table, exchange)
            results = [*others.results(), *exchange.results]
            self.settle(call.state, call.plan.num_microbatches)
            return gather(call.plan, results)

    def settle(self, call: Call, num_microbatches: int) -> None:
        """Makes the buffers that a forward changed the same in all replicas."""
        plane, store = self.workers.plane, self.planner.store
        if plane is not None:
            settle(
                plane,
                self.mesh,
                self.index,
                store=store,
                stages=call.stages[0],
                runs=call.runs,
                num_microbatches=num_microbatches,
            )
            self.home.copies.note()

    def tell_before_call(self, plan: CallPlan) -> None:
        """Tells workers what changed since the last call."""
        if self.num_processes > 1:
            self.home.send_changed()
            if plan.number != self._last_plan:
                self._send_flags()
                self._last_plan = plan.number
            self._tell_freed()

    def run_backward(
        self,
        call: RemoteCall,
        given: tuple[frozenset[int], ...],
        gradients: Sequence[Mapping[int, Tensor]],
        *,
        retain: bool,
        accumulate: bool,
    ) -> list[dict[int, Tensor]]:
        """Runs the backward of a call over all stages and returns the gradients of its arguments per microbatch."""
        if self.closed:
            raise PlacementError(
                "the backward of a call comes after the end of the Trainer call it was made in, or after a change of the "
                "module's layers, parameters or hooks; differentiate the loss before that"
            )
        with self.failures.guarded("backward"):
            self.workers.tell_all(m.Backward(call.number, given, retain, accumulate))
            others = self.others(call.stages)
            others.send_gradients(given, gradients)
            own = call.share.start
            table = self.schedule.backward_table(len(call.share), self.mesh.pipeline)
            exchange = BatchExchange(present=given[own:], seeds=gradients[own:])
            found = self.engine.run(call.state, table, exchange, retain=retain, accumulate=accumulate)
            away = others.gradients_of_arguments(given)
            parts = [summed(a, b) for a, b in zip([*([{}] * own), *found], away, strict=True)]
            if accumulate:
                self.add_up(self.uses(call.plan), call.plan.num_microbatches)
            if self.timed:
                self.collect_events()
            return parts

    def forget(self, number: int) -> None:
        """Notes that a call will have no backward; workers are told with the next one."""
        self._freed.append(number)

    def _tell_freed(self) -> None:
        if self._freed:
            calls, self._freed = tuple(self._freed), []
            self.workers.tell_all(m.Free(calls))

    # -- home ------------------------------------------------------------------------------------------------------

    def come_home(self) -> None:
        """Brings values, gradients and optimizer states to the lead for good; the next call places them again."""
        if not self.placed:
            return
        with self.failures.guarded("gathering"):
            states = self.optimizers.collect()
            self.home.bring()
            self.home.bring_attributes()
            self.home.stay()
        self.optimizers.take_home(states)

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Makes parameters and buffers readable on the lead for a block that changes nothing."""
        if self.devices is not None:
            with self.devices.gathered():
                yield
            return
        if not self.placed or self._summoned or self.owned_state.described:
            yield
            return
        with self.failures.guarded("gathering"):
            self.home.bring(gradients=False)
        try:
            yield
        finally:
            self.home.hide()

    @contextmanager
    def summoned(self) -> Iterator[None]:
        """Makes parameters, buffers and gradients whole on the lead for a block; what it changes goes back."""
        if not self.placed or self._summoned:
            yield
            return
        self._summon()
        try:
            yield
        finally:
            self._dismiss()

    def _summon(self) -> None:
        with self.failures.guarded("gathering"):
            self.home.bring()
        self._summoned = True

    def _dismiss(self) -> None:
        self._summoned = False
        if self.placed:
            with self.failures.guarded("placement"):
                self.home.send_back()
            self.home.hide()

    @contextmanager
    def resumed(self) -> Iterator[None]:
        """Interrupts a `summoned` block for work of the stages: they see its changes, and it sees theirs."""
        if not self._summoned:
            yield
            return
        self._dismiss()
        try:
            yield
        finally:
            if self.placed:
                self._summon()

    # -- the timeline ----------------------------------------------------------------------------------------------

    def collect_events(self) -> None:
        """Takes what was noted in the last call from all processes."""
        workers = list(self.workers.indices)
        found = self.workers.collect(workers, "events", [()] * len(workers)) if workers else []
        self.events.extend(event for events in found for event in events)
        self.events.extend(self.engine.events)
        self.engine.events = []
        oldest = max((e.call for e in self.events), default=0) - _MAX_TIMED_CALLS
        self.events = [e for e in self.events if e.call > oldest]

    def timeline(self) -> Timeline:
        """Returns what the stages did in the last calls."""
        homes = self.planner.placement.homes if self.num_stages > self.mesh.pipeline else ()
        return Timeline.from_events(self.events, num_stages=self.num_stages, names=self.stage_names, homes=homes)

    def close(self) -> None:
        """Makes the module whole and forgets everything the workers have of it."""
        self.come_home()
        if self.devices is not None:
            self.devices.bring_home(self.optimizers.faces)
        self.closed = True
        self.step.close()
        if self.num_processes > 1 and self.workers.plane is not None and self.workers.alive:
            self.workers.tell_all(m.Reset(self.mesh))
        self.start_over()

    def start_over(self) -> None:
        """Forgets what workers know; the next call tells them again."""
        self._known_plans.clear()
        self._uses.clear()
        self._arranged = False
        self.optimizers.forget()
        self._last_plan = -1
        self._freed.clear()
        self.home.forget()
        self.running_engine = None
