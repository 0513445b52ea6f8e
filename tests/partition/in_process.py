"""All stages of a pipeline in one process: each with its own copies of what it owns, as workers have, but no processes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from lightning_mgpu.mesh import Mesh
from lightning_mgpu.partition.cut import CutRequest
from lightning_mgpu.partition.gather import deal_inputs, finish, gather
from lightning_mgpu.partition.plan import CallPlan, Planner
from lightning_mgpu.partition.selfcheck import check_plan
from lightning_mgpu.partition.stage import Stage, StageRun
from lightning_mgpu.runtime.modes import modes_of, set_modes
from lightning_mgpu.runtime.pack import Packed, pack, unpack
from lightning_mgpu.runtime.placeholder import hide, is_hidden, restore
from lightning_mgpu.runtime.remote import Anchor, RemoteCall, call_remotely
from lightning_mgpu.runtime.worker import WorkerStore


class InProcess:
    """Answers the forward of a module over stages, all of them here, and stands in for the lead of a `RemoteCall`.

    Whatever passes between stages is copied, modules and steps are pickled, and what the last stage does not own is hidden,
    so that a stage has nothing that a worker would not have.

    Attributes:
        planner: plans of calls, and the placement.
        stores: what each stage holds.
    """

    def __init__(
        self,
        module: nn.Module,
        num_stages: int,
        num_microbatches: int,
        *,
        cuts: tuple[str, ...] | None = None,
        check: bool = True,
    ) -> None:
        self.module = module
        self.num_stages = num_stages
        self.mesh = Mesh(num_stages)
        self.devices = None
        self.check = check
        self.planner = Planner(module, num_stages, num_microbatches, CutRequest(cuts))
        self.planner.fetch = self.at_home
        self.stores: list[Any] = [*(WorkerStore() for _ in range(num_stages - 1)), self.planner.store]
        self.stages: dict[int, list[dict[int, Stage]]] = {}
        self.anchor = Anchor()
        self.timed = False
        self.own_stages = (num_stages - 1,)
        self.recomputed: frozenset[int] = frozenset()

    # -- a call ----------------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        names = self.planner.names
        first = not self.planner.is_planned("")
        plan, tensors, new = self.planner.find("", args, kwargs)
        self.first_plan = plan if first else self.first_plan
        self.last_plan = plan
        if new and first and self.check:
            check_plan(self.planner, plan, args, kwargs, tensors)
        self._place(plan)
        trains = any(t.requires_grad for t in [*tensors, *names.tensors.values()])
        inputs = deal_inputs(plan, [t.detach() for t in tensors])
        call = RemoteCall(self, plan, 0, inputs, grad=torch.is_grad_enabled() and trains)
        inference = torch.is_inference_mode_enabled()
        result, stored = finish(plan, tensors, call_remotely(call, tensors), self.planner.store, inference=inference)
        for (owner, name), value in stored.items():
            setattr(names.module_at[owner], name, value)
        return result

    def seed_of(self, number: int) -> int:
        return number

    def forget(self, number: int) -> None:
        """Is told of calls without a backward, of which nothing is kept here."""

    def resumed(self) -> AbstractContextManager[None]:
        """Is asked for around a backward, for the case that values were brought home in between; here they never are."""
        return nullcontext()

    def run_forward(self, call: RemoteCall) -> list[Tensor]:
        plan, own = call.plan, call.state.runs[self.num_stages - 1]
        self.runs = [
            StageRun(store, range(plan.num_microbatches), grad=call.grad, inference=own.inference, seed=own.seed)
            for store in self.stores[:-1]
        ] + [own]
        for j, every in enumerate(self.stages[plan.number]):
            for stage in every.values():
                stage.program.prepare(self.stores[j])
        made = []
        for i, rows in enumerate(plan.sizes):
            flowing: list[Tensor] = []
            for j, run in enumerate(self.runs):
                stage = self.stages[plan.number][j][rows]
                direct = [_sent(call.inputs[i][c.register]) for c in stage.inputs]
                flowing = [_sent(t) for t in run.forward(stage, i, flowing, direct)]
            made.append(flowing)
        return gather(plan, made)

    def run_backward(
        self,
        call: RemoteCall,
        given: Sequence[frozenset[int]],
        gradients: Sequence[Mapping[int, Tensor]],
        *,
        retain: bool,
        accumulate: bool,
    ) -> list[dict[int, Tensor]]:
        found = []
        for i, rows in enumerate(call.plan.sizes):
            arriving = dict(gradients[i])
            inputs: dict[int, Tensor] = {}
            for j in reversed(range(self.num_stages)):
                stage = self.stages[call.plan.number][j][rows]
                made = self.runs[j].backward(i, arriving, retain=retain, accumulate=accumulate)
                for crossing in stage.inputs:
                    if crossing.register in made:
                        here = made[crossing.register]
                        inputs[crossing.register] = inputs[crossing.register] + here if crossing.register in inputs else here
                asked = [c for c in stage.receives if c.has_gradient(given[i])]
                arriving = {c.register: _sent(made.get(c.register, torch.zeros(c.shape, dtype=c.dtype))) for c in asked}
            found.append(inputs)
        return found

    # -- what is where ---------------------------------------------------------------------------------------------

    def _place(self, plan: CallPlan) -> None:
        names, placement = self.planner.names, self.planner.placement
        for j, store in enumerate(self.stores[:-1]):
            for name in set(placement.held_by(j)) - store.tensors.keys():
                value = names.current(name).detach().clone()
                real = names.tensors[name]
                store.tensors[name] = nn.Parameter(value, real.requires_grad) if isinstance(real, nn.Parameter) else value
            tensors = {id(names.tensors[n]): n for n in store.tensors}
            wanted = {p for every in plan.stages.values() for p in every[j].program.modules()} - store.modules.keys()
            known = {id(names.module_at[p]): p for p in store.modules}
            shipped = {path: names.module_at[path] for path in sorted(wanted)}
            store.modules.update(_unpacked(pack(shipped, names=tensors, modules=known, what="modules"), store))
        if plan.number not in self.stages:
            self.stages[plan.number] = [
                _unpacked(pack({r: every[j] for r, every in plan.stages.items()}, what="the calls"), store)
                for j, store in enumerate(self.stores)
            ]
        for store in self.stores[:-1]:
            for path, shipped_module in store.modules.items():
                set_modes(shipped_module, modes_of(names.module_at[path]))
            for name, tensor in store.tensors.items():
                tensor.requires_grad_(names.tensors[name].requires_grad)
        self.hide()

    def hide(self) -> None:
        placement = self.planner.placement
        for name, owners in placement.owners.items():
            if placement.lead not in owners:
                hide(self.planner.names.current(name), name, max(owners))

    @contextmanager
    def at_home(self) -> Iterator[None]:
        """Shows all values and whole gradients on the module, for a block."""
        placement = self.planner.placement
        gradients = self.gradients()
        shown = {n: max(j) for n, j in placement.owners.items() if is_hidden(self.planner.names.current(n))}
        for name, stage in shown.items():
            restore(self.planner.names.current(name), self.stores[stage].tensor(name).detach().clone(), gradients.get(name))
        yield
        for name, stage in shown.items():
            hide(self.planner.names.current(name), name, stage)

    def gradients(self) -> dict[str, Tensor | None]:
        """Adds up the gradient of each parameter over its owners; ``None`` where none of them has one."""
        found: dict[str, Tensor | None] = {}
        for name, kind in self.planner.names.kinds.items():
            if kind == "parameter":
                parts = [t.grad for t in self.copies(name) if not is_hidden(t) and t.grad is not None]
                found[name] = torch.stack(parts).sum(0) if parts else None
        return found

    def copies(self, name: str) -> list[Tensor]:
        """Lists the tensor of each owner."""
        owners = self.planner.placement.owners.get(name, {self.planner.placement.lead})
        return [self.stores[j].tensor(name) for j in sorted(owners)]


def _sent(tensor: Tensor) -> Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def _unpacked(packed: Packed, store: Any) -> Any:
    """Unpacks copies of the tensors, for a worker's copies are its own."""
    if isinstance(store, WorkerStore):
        tensors = [t.detach().clone().requires_grad_(t.requires_grad) for t in packed.tensors]
        return unpack(Packed(packed.payload, packed.headers, tensors), store.find)
    return unpack(packed, _find_nothing)


def _find_nothing(kind: str, key: str) -> Any:
    raise KeyError(f"{kind} {key}")
