"""Replicas: copies of a pipeline that share each batch. What they make of it becomes one on the lead's own replica.

Running statistics of batch norms and buffers that a forward changes are settled after it: moments of the other replicas'
microbatches are joined with those of the lead's, and what came of it is given to the others, so that all copies stay equal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_mgpu.mesh import Mesh
from lightning_mgpu.partition.stage import Stage, StageRun
from lightning_mgpu.runtime.engine import Given, arguments_of

if TYPE_CHECKING:
    from lightning_mgpu.partition.program import Store
    from lightning_mgpu.runtime.dataplane import DataPlane, Receipt
    from lightning_mgpu.runtime.engine import Engine
    from lightning_mgpu.runtime.workers import Workers

__all__ = ["OtherReplicas", "settle"]

Stages = Mapping[int, Stage]


class OtherReplicas:
    """Is the lead's side of what other processes take from it, and give to it, in one call.

    Args:
        engine: the lead's engine.
        mesh: how the processes are arranged.
        homes: the position of each stage.
        stages: for each microbatch of the batch, all its stages.
    """

    def __init__(self, engine: Engine, mesh: Mesh, homes: Sequence[int], stages: Sequence[Sequence[Stage]]) -> None:
        self.engine = engine
        self.mesh = mesh
        self.homes = homes
        self.stages = stages
        self.shares = mesh.deal(len(stages))

    def _takers(self) -> list[tuple[int, int, Stages]]:
        """Lists what other processes take arguments for: (process, microbatch, its stages), in the order of sending."""
        takers: list[tuple[int, int, Stages]] = []
        for replica, microbatches in enumerate(self.shares):
            for process in self.mesh.row(replica):
                position = self.mesh.position(process)
                for i in microbatches:
                    stages = {s.index: s for s in self.stages[i] if self.homes[s.index] == position and s.inputs}
                    if stages and process != self.engine.process:
                        takers.append((process, i, stages))
        return takers

    def deal_out(self, inputs: Sequence[Mapping[int, Tensor]]) -> None:
        """Sends the arguments of all microbatches to the processes that take them."""
        for process, i, stages in self._takers():
            self.engine.send([inputs[i][c.register] for c in arguments_of(stages)], process)

    def gradients_of_arguments(self, given: Sequence[Given]) -> list[dict[int, Tensor]]:
        """Receives the gradients of those arguments, for each microbatch of the batch.

        Args:
            given: for each microbatch the wanted tensors that have a gradient.
        """
        receipts = [
            (i, self.engine.receive_gradients(arguments_of(stages), given[i], process)) for process, i, stages in self._takers()
        ]
        found: list[dict[int, Tensor]] = [{} for _ in self.stages]
        for i, of_stages in receipts:
            for register, receipt in of_stages.items():
                new = receipt.wait()
                found[i][register] = found[i][register] + new if register in found[i] else new
        return found

    def results(self) -> list[list[Tensor]]:
        """Receives what the last stages of the other replicas made, for each of their microbatches."""
        receipts = [self._result(replica, i) for replica, share in enumerate(self.shares[:-1]) for i in share]
        return [[receipt.wait() for receipt in each] for each in receipts]

    def result(self, replica: int, i: int) -> list[Tensor]:
        """Receives what the last stage of another replica made of one microbatch."""
        return [receipt.wait() for receipt in self._result(replica, i)]

    def _result(self, replica: int, i: int) -> list[Receipt]:
        return self.engine.receive(self.stages[i][-1].sends, self.mesh.process(self.homes[-1], replica))

    def tell(self, workers: Workers, i: int, message: Any) -> None:
        """Tells the workers of the replica that has one microbatch something about it."""
        replica = next(replica for replica, share in enumerate(self.shares) if i in share)
        for process in self.mesh.row(replica):
            if process != self.engine.process:
                workers.tell(process, message)

    def send_gradients(self, given: Sequence[Given], gradients: Sequence[Mapping[int, Tensor]]) -> None:
        """Sends the other replicas' last stages the gradients of what they made."""
        for replica, microbatches in enumerate(self.shares[:-1]):
            for i in microbatches:
                self.send_gradient(replica, i, given[i], gradients[i])

    def send_gradient(self, replica: int, i: int, given: Given, gradients: Mapping[int, Tensor]) -> None:
        """Sends the gradients of what one microbatch's last stage made, those of the wanted tensors in ``given``."""
        sends = self.stages[i][-1].sends
        there = [gradients[c.register] for position, c in enumerate(sends) if position in given]
        self.engine.send(there, self.mesh.process(self.homes[-1], replica))


def settle(
    plane: DataPlane,
    mesh: Mesh,
    process: int,
    *,
    store: Store,
    stages: Stages,
    runs: Mapping[int, StageRun],
    num_microbatches: int,
) -> None:
    """Makes the buffers that a forward changed the same in all replicas.

    Args:
        plane: the data plane.
        mesh: how the processes are arranged.
        process: this process.
        store: the modules and tensors of this process.
        stages: the stages here.
        runs: what was run of them; nothing where this replica got no microbatch.
        num_microbatches: microbatches of the whole batch.
    """
    statistics = sorted({name for stage in stages.values() for name in stage.program.changed_statistics()})
    buffers = sorted({name for stage in stages.values() for name in stage.program.changed_buffers()})
    if mesh.data == 1 or not (statistics or buffers):
        return
    *others, own = mesh.across(mesh.position(process))
    working = [p for p, share in zip((*others, own), mesh.deal(num_microbatches), strict=True) if share]
    if process == own:
        for other in working[:-1]:
            _join(plane, runs, other)
        for run in runs.values():
            if run.statistics is not None:
                run.statistics.commit()
        for other in others:
            for name in (*statistics, *buffers):
                plane.send(store.tensor(name), other)
    else:
        if process in working:
            for index in sorted(runs):
                for moments in _moments(runs[index]):
                    for tensor in moments:
                        plane.send(tensor, own)
        _receive(plane, store, (*statistics, *buffers), own)
    plane.flush()


def _moments(run: StageRun) -> list[tuple[Tensor, Tensor, Tensor]]:
    return [] if run.statistics is None else run.statistics.moments()


def _join(plane: DataPlane, runs: Mapping[int, StageRun], other: int) -> None:
    """Takes what another replica's batch norms have seen to what those of this one have."""
    for index in sorted(runs):
        receipts = [[plane.receive(t.shape, t.dtype, other) for t in moments] for moments in _moments(runs[index])]
        received = [(count.wait(), mean.wait(), deviations.wait()) for count, mean, deviations in receipts]
        statistics = runs[index].statistics
        if statistics is not None:
            statistics.join(received)


def _receive(plane: DataPlane, store: Store, names: Sequence[str], source: int) -> None:
    """Takes the values of buffers, and writes those that differ: a backward that waits would take that for a change."""
    with torch.inference_mode(False):
        receipts = [(name, plane.receive(store.tensor(name).shape, store.tensor(name).dtype, source)) for name in names]
        for name, receipt in receipts:
            value = receipt.wait()
            if not torch.equal(store.tensor(name), value):
                store.set_buffer(name, value)
