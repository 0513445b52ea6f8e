"""The worker: a process that holds one stage, does what the lead says, and ends when the lead does.

Started as ``python -m lightning_mgpu.runtime.worker``. It never runs the user's script and never imports lightning. One thread
reads the control connection, so that the lead's end is noticed even while the other one waits for a tensor.
"""

from __future__ import annotations

import os
import pickle
import queue
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_mgpu import tree
from lightning_mgpu.mesh import Mesh
from lightning_mgpu.partition.stage import Stage, StageRun
from lightning_mgpu.runtime import gradients
from lightning_mgpu.runtime import messages as m
from lightning_mgpu.runtime.dataplane import CommunicationError, DataPlane
from lightning_mgpu.runtime.engine import Call, Engine, Given
from lightning_mgpu.runtime.exchange import WorkerExchange
from lightning_mgpu.runtime.modes import set_modes
from lightning_mgpu.runtime.own_shard import OwnShard
from lightning_mgpu.runtime.pack import Packed, pack, unpack
from lightning_mgpu.runtime.pending import Pending
from lightning_mgpu.runtime.replicas import settle
from lightning_mgpu.runtime.settings import apply
from lightning_mgpu.runtime.sharing import Use, add_up, lend, shares_in, take_back
from lightning_mgpu.runtime.steps import PartState, part_state, received, step_part
from lightning_mgpu.schedule.catalog import SCHEDULES

__all__ = ["WorkerStore", "main"]

_PARENT_CHECK_S = 0.5
_IDLE_WAIT_S = 2.0


class WorkerStore:
    """Holds the modules and tensors a worker was given, by name."""

    def __init__(self) -> None:
        self.modules: dict[str, nn.Module] = {}
        self.tensors: dict[str, Tensor] = {}

    def module(self, path: str) -> nn.Module:
        return self.modules[path]

    def tensor(self, name: str) -> Tensor:
        owner, _, attribute = name.rpartition(".")
        module = self.modules.get(owner)
        if module is not None and module._buffers.get(attribute) is not None:
            return module._buffers[attribute]  # type: ignore[return-value]
        known = self.tensors.get(name)
        return getattr(self.modules[owner], attribute) if known is None else known

    def set_buffer(self, name: str, value: Tensor) -> None:
        owner, _, attribute = name.rpartition(".")
        self.tensors[name] = value
        if owner in self.modules:
            self.modules[owner]._buffers[attribute] = value

    def find(self, kind: str, key: str) -> Any:
        return self.modules[key] if kind == "module" else self.tensors[key]


class Worker:
    """Carries out the lead's messages, one after the other."""

    plane: DataPlane

    def __init__(self, connection: Connection, process: int, num_processes: int, device: torch.device) -> None:
        self.connection = connection
        self.process = process
        self.num_processes = num_processes
        self.device = device
        self.idle = threading.Event()
        self.inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.sending = threading.Lock()
        self.shard = OwnShard(self.say)

    def connect(self, path: str) -> None:
        """Joins the data plane, which waits for all other stages."""
        self.plane = DataPlane(path, self.process, self.num_processes, self.device)
        self._forget(Mesh(self.num_processes))

    @property
    def lead(self) -> int:
        return self.num_processes - 1

    def _forget(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.replica = mesh.replica(self.process)
        self.store = WorkerStore()
        self.engine = Engine(self.process, mesh.row(self.replica), self.store, self.plane, self.device, replica=self.replica)
        self.plans: dict[int, tuple[dict[int, dict[int, Stage]], dict[str, Use]]] = {}
        self.calls: dict[int, tuple[Call, m.Forward]] = {}
        self.pending = Pending()
        self.optimizers: list[Optimizer] = []
        self.owners: tuple[Any, ...] = ()

    def say(self, message: Any) -> None:
        with self.sending:
            self.connection.send_bytes(cloudpickle.dumps(message))

    # -- the two threads -------------------------------------------------------------------------------------------

    def listen(self) -> None:
        """Reads the control connection until it ends, and then ends the process."""
        while True:
            try:
                message = pickle.loads(self.connection.recv_bytes())
            except (EOFError, OSError):
                os._exit(0)
            if isinstance(message, m.Surrender):
                self.idle.wait(_IDLE_WAIT_S)
                self.surrender()
            else:
                self.inbox.put(message)

    def surrender(self) -> None:
        """Hands everything it owns over the control connection, and ends."""
        try:
            self.say(m.State(self.everything()))
        finally:
            os._exit(0)

    def everything(self) -> bytes:
        """Pickles parameters, buffers, gradients and optimizer states by name."""
        with torch.no_grad():
            tensors = {name: self.store.tensor(name).detach().cpu() for name in self.store.tensors}
            grads = {n: t.grad.cpu() for n, t in self.store.tensors.items() if t.grad is not None}
            states = [tree.map_tensors(lambda t: t.cpu(), self._optimizer_state(o)) for o in self.optimizers]
        return cloudpickle.dumps((tensors, grads, states))  # type: ignore[no-any-return]

    def serve(self) -> None:
        """Carries out messages until the process ends."""
        while True:
            if self.inbox.empty():
                self.idle.set()
            message = self.inbox.get()
            self.idle.clear()
            try:
                self.carry_out(message)
            except BaseException as error:  # reported, then the process ends
                self.report(error, type(message).__name__)
                os._exit(1)

    def report(self, error: BaseException, doing: str) -> None:
        engine = self.engine
        try:
            pickled = cloudpickle.dumps(error)
            pickle.loads(pickled)
        except Exception:  # the summary has to do
            pickled = None
        state = None
        try:
            state = self.everything()
        except Exception:  # the report matters more than the state
            state = None
        self.say(
            m.Failure(
                engine.stage, engine.microbatch, engine.doing if engine.doing != "idle" else doing, time.monotonic(),
                isinstance(error, CommunicationError), pickled, f"{type(error).__name__}: {error}",
                "".join(traceback.format_exception(error)), state,
            )
        )  # fmt: skip

    # -- messages --------------------------------------------------------------------------------------------------

    def carry_out(self, message: Any) -> None:
        """Does what one message says."""
        handler = getattr(self, f"_on_{type(message).__name__.lower()}", None)
        if handler is None:
            raise TypeError(f"a worker does not know the message {type(message).__name__}")
        handler(message)

    def _unpack(self, packed: Packed) -> Any:
        return unpack(self.plane.receive_packed(packed, self.lead), self.store.find)

    def _on_reset(self, message: m.Reset) -> None:
        self._forget(message.mesh)

    def _on_load(self, message: m.Load) -> None:
        tensors, grads = self._unpack(message.packed)
        for name, tensor in tensors.items():
            known = self.store.tensors.get(name)
            if known is not None:
                self._update(self.store.tensor(name), tensor)
            elif message.kinds[name] == "parameter":
                self.store.tensors[name] = nn.Parameter(tensor.detach(), requires_grad=tensor.requires_grad)
            else:
                self.store.tensors[name] = tensor
        for name in tensors:
            if message.kinds[name] == "parameter":
                self.store.tensors[name].grad = grads.get(name)

    def _update(self, known: Tensor, tensor: Tensor) -> None:
        """Writes a value that came back, unless it is the same: a backward that waits would take that for a change."""
        with torch.no_grad():
            if known.layout != torch.strided or not torch.equal(known, tensor):
                known.copy_(tensor)
        if known.is_leaf and known.requires_grad != tensor.requires_grad:
            known.requires_grad_(tensor.requires_grad)

    def _on_ship(self, message: m.Ship) -> None:
        self.store.modules.update(self._unpack(message.packed))

    def _on_addplan(self, message: m.AddPlan) -> None:
        stages, uses = self._unpack(message.packed)
        for stage in (stage for every in stages.values() for stage in every.values()):
            stage.program.move_to(self.device)
        self.plans[message.number] = (stages, uses)

    def _on_setflags(self, message: m.SetFlags) -> None:
        for path, modes in message.training.items():
            set_modes(self.store.modules[path], modes)
        for name, requires_grad in message.requires_grad.items():
            self.store.tensors[name].requires_grad_(requires_grad)

    def _on_forward(self, message: m.Forward) -> None:
        every = [self.plans[message.plan][0][rows] for rows in message.sizes]
        call = self._call(
            message.call, every, grad=message.grad, inference=message.inference, seed=message.seed, timed=message.timed,
            recomputed=message.recomputed,
        )  # fmt: skip
        with torch.inference_mode(message.inference), torch.set_grad_enabled(message.grad):
            if call.stages:
                table = SCHEDULES[message.schedule].forward_table(len(call.stages), self.mesh.pipeline)
                self.engine.run(call, table, self._exchange(call, _no_gradients))
            self._settle(call, every)
        if message.grad:
            self.calls[message.call] = (call, message)

    def _on_backward(self, message: m.Backward) -> None:
        call, forward = self.calls[message.call] if message.retain else self.calls.pop(message.call)
        given = [message.given[call.first + i] for i in range(len(call.stages))]
        if call.stages:
            table = SCHEDULES[forward.schedule].backward_table(len(call.stages), self.mesh.pipeline)
            exchange = WorkerExchange(self.engine, call, (), lambda i, _: given[i], self.lead)
            found = self.engine.run(call, table, exchange, retain=message.retain, accumulate=message.accumulate)
            self.engine.return_gradients(call, found, given, self.lead)
        if message.accumulate:
            self._add_up(self.plans[forward.plan][1], len(forward.sizes))

    def _on_train(self, message: m.Train) -> None:
        every = [self.plans[plan][0][rows] for plan, rows in message.microbatches]
        call = self._call(
            message.call, every, grad=True, inference=False, seed=message.seed, timed=message.timed, alone=True,
            recomputed=message.recomputed,
        )  # fmt: skip
        given: dict[int, Given] = {}

        def ask(microbatch: int, wait: bool) -> Given | None:
            while microbatch not in given and (wait or not self.inbox.empty()):
                said = self.inbox.get()
                if not isinstance(said, m.GivenGradients) or said.call != message.call:
                    raise TypeError(f"the lead said {type(said).__name__} in the middle of a training step")
                given[said.microbatch - call.first] = said.given
            return given.get(microbatch)

        self.pending.begin([t for t in self.store.tensors.values() if isinstance(t, nn.Parameter)])
        if call.stages:
            table = SCHEDULES[message.schedule].table(len(call.stages), self.mesh.pipeline)
            with torch.enable_grad():
                found = self.engine.run(call, table, self._exchange(call, ask))
            present = [ask(i, True) or frozenset() for i in range(len(call.stages))]
            self.engine.return_gradients(call, found, present, self.lead)
        self._settle(call, every)
        uses = {name: use for plan, _ in message.microbatches for name, use in self.plans[plan][1].items()}
        self._add_up(uses, len(every))
        self.pending.end()

    def _on_handover(self, message: m.HandOver) -> None:
        self.pending.hand_over(message.factor)

    def _call(
        self,
        number: int,
        every: Sequence[Mapping[int, Stage]],
        *,
        grad: bool,
        inference: bool,
        seed: int,
        timed: bool,
        recomputed: frozenset[int],
        alone: bool = False,
    ) -> Call:
        """Begins this replica's part of a call; ``every`` has the stages here for each microbatch of the batch."""
        share = self.mesh.deal(len(every))[self.replica]
        own = [every[i] for i in share]
        for stage in (stage for stages in own for stage in stages.values()):
            stage.program.prepare(self.store)
        runs = {
            index: StageRun(
                self.store, share, grad=grad, inference=inference, seed=seed, alone=alone, recompute=index in recomputed,
                replicated=self.mesh.data > 1,
            )
            for index in (own[0] if own else ())
        }  # fmt: skip
        return Call(number, own, runs, timed, share.start)

    def _exchange(self, call: Call, given: Callable[[int, bool], Given | None]) -> WorkerExchange:
        return WorkerExchange(self.engine, call, self.engine.receive_arguments(call, self.lead), given, self.lead)

    def _settle(self, call: Call, every: Sequence[Mapping[int, Stage]]) -> None:
        settle(
            self.plane, self.mesh, self.process, store=self.store, stages=every[0], runs=call.runs, num_microbatches=len(every)
        )

    def _add_up(self, uses: Mapping[str, Use], num_microbatches: int) -> None:
        add_up(self.plane, self.process, shares_in(self.mesh, uses, num_microbatches), self.store.tensors.__getitem__)

    def _on_free(self, message: m.Free) -> None:
        for number in message.calls:
            self.calls.pop(number, None)
        for number in message.plans:
            self.plans.pop(number, None)

    def _on_optimizers(self, message: m.Optimizers) -> None:
        self.optimizers = [received(sent) for sent in self._unpack(message.packed)]
        self.owners = message.owners

    def _on_step(self, message: m.Step) -> None:
        self.engine.doing = "optimizer step"
        optimizer, owners = self.optimizers[message.optimizer], self.owners[message.optimizer]
        apply(optimizer, message.changes)
        lend(self.plane, self.process, owners, self.store.tensors.__getitem__)
        step_part(optimizer, message.kwargs)
        take_back(self.process, owners, self.store.tensors.__getitem__)
        self.engine.doing = "idle"

    def _on_sync(self, _: m.Sync) -> None:
        self.say(m.Done())

    def _on_zerograd(self, message: m.ZeroGrad) -> None:
        for name in message.names:
            tensor = self.store.tensors[name]
            if tensor.grad is not None:
                tensor.grad = None if message.set_to_none else tensor.grad.detach_().zero_()

    def _on_clip(self, message: m.Clip) -> None:
        gradients.clip([self.store.tensors[name] for name in message.names], message.factor, message.bound)

    def _on_collect(self, message: m.Collect) -> None:
        answer: Any
        if message.what == "values":
            answer = {name: self.store.tensor(name).detach() for name in message.names}
        elif message.what == "gradients":
            answer = {name: self.store.tensors[name].grad for name in message.names}
        elif message.what == "norms":
            answer = self._norms(*message.names)
        elif message.what == "unscaled":
            answer = self._unscaled(*message.names)
        elif message.what == "optimizers":
            answer = [self._optimizer_state(optimizer) for optimizer in self.optimizers]
        elif message.what == "optimizer":
            answer = self._some_optimizer_state(*message.names)
        else:
            answer, self.engine.events = self.engine.events, []
        packed = pack(answer, what=f"the {message.what} of process {self.process}")
        self.say(m.Answer(message.what, packed.header()))
        self.plane.send_packed(packed, self.lead)
        self.plane.flush()

    def _norms(self, norm_type: float, *names: str) -> dict[str, Tensor]:
        tensors = {name: self.store.tensors[name] for name in names}
        found = {id(p): norm for p, norm in gradients.norms(tensors.values(), norm_type)}
        return {name: found[id(p)] for name, p in tensors.items() if id(p) in found}

    def _unscaled(self, index: int, inverse_scale: float, allow_half: bool) -> Tensor:
        self.engine.doing = "unscaling"
        scale, found = (torch.tensor(v, dtype=torch.float32, device=self.device) for v in (inverse_scale, 0.0))
        by_device = gradients.unscale(self.optimizers[index], scale, found, allow_half=allow_half)
        self.engine.doing = "idle"
        return torch.stack([found, *(f.to(self.device) for f in by_device.values())]).max()

    def _some_optimizer_state(self, index: int, *names: str) -> PartState:
        wanted = {id(self.store.tensors[name]): name for name in names}
        return part_state(self.optimizers[index], lambda p: wanted.get(id(p)))

    def _on_saveshard(self, message: m.SaveShard) -> None:
        self.shard.plan(message, self.store.tensor, self.optimizers)

    def _on_writeshard(self, message: m.WriteShard) -> None:
        self.shard.write(message)

    def _optimizer_state(self, optimizer: Optimizer) -> PartState:
        names = {id(tensor): name for name, tensor in self.store.tensors.items()}
        return part_state(optimizer, lambda p: names.get(id(p)))


def _no_gradients(microbatch: int, wait: bool) -> Given | None:  # noqa: ARG001 - the protocol's
    """Is asked in a forward by mistake only."""
    raise AssertionError("a forward asks for no gradient")


def _end_with(parent: int) -> None:
    """Ends this process soon after its parent, in case the connection outlives it in a forked child.

    Linux could do so itself (``PR_SET_PDEATHSIG``), but would end it with the thread that started it.
    """
    while os.getppid() == parent:
        time.sleep(_PARENT_CHECK_S)
    os._exit(0)


def main() -> None:
    """Runs a worker; what it must know comes as one pickle on standard input."""
    warnings.filterwarnings("ignore", message=r".*LeafSpec.* is deprecated")  # torch's own pickles of trees raise it
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the lead, which tells its workers
    start = pickle.load(sys.stdin.buffer)
    threading.Thread(target=_end_with, args=(start["parent"],), daemon=True, name="parent watch").start()
    sys.path[:] = start["path"]
    if start["num_threads"] is not None:
        torch.set_num_threads(start["num_threads"])
    device = torch.device(start["device"])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    for key, value in start["flags"].items():
        setattr(torch.backends.cuda.matmul if key == "allow_tf32" else torch.backends.cudnn, key, value)
    connection = Connection(start["connection"])
    try:
        connection.send_bytes(pickle.dumps(m.Hello(start["index"], os.getpid())))
    except OSError:
        os._exit(0)  # the lead ended, or no longer wants its workers
    worker = Worker(connection, start["index"], start["num_processes"], device)
    threading.Thread(target=worker.listen, daemon=True, name="listener").start()
    worker.connect(start["store"])
    worker.serve()


if __name__ == "__main__":
    main()
