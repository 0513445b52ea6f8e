"""A training step once per microbatch: the user's step is suspended at its module call until its output arrives.

Schedules that begin backward before the last forward need the loss of one microbatch by then. The step runs as gradient
accumulation over microbatches would run it: its module call, its loss and its logged values are those of the microbatch.

The gradients it makes are kept apart until the step's loss is differentiated, so that ``zero_grad``, accumulation and
hooks keep the order that the Trainer gives them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lightning_mgpu import tree
from lightning_mgpu.errors import PartitionError
from lightning_mgpu.partition.plan import CallPlan
from lightning_mgpu.partition.stage import Stage, StageRun
from lightning_mgpu.runtime import messages as m
from lightning_mgpu.runtime.engine import Call, Given
from lightning_mgpu.runtime.exchange import summed
from lightning_mgpu.runtime.pending import Pending
from lightning_mgpu.runtime.replicas import OtherReplicas
from lightning_mgpu.runtime.suspended import Suspended, Threads

if TYPE_CHECKING:
    from lightning_mgpu.runtime.lead import Lead

__all__ = ["MicrobatchedStep"]


@dataclass
class _Microbatch:
    """Is one microbatch on its way through the user's step.

    Attributes:
        weight: its share of the batch's rows.
        step: the user's step.
        plan: the plan of its module call.
        tensors: the tensors among the call's arguments.
        inputs: those, without gradient history, by register.
        whole: what the last stage made, as leaves of the user's graph.
        loss: the loss of the step; ``None`` where there is none.
    """

    weight: float
    step: Suspended
    plan: CallPlan
    tensors: list[Tensor]
    inputs: dict[int, Tensor]
    whole: list[Tensor] = field(default_factory=list)
    loss: Tensor | None = None
    given: Given | None = None

    def forget_graph(self) -> None:
        """Lets go of what only its backward needed: the history of the loss keeps the module's output alive."""
        self.whole = []
        if self.loss is not None:
            self.loss = self.loss.detach()
        self.step.result = tree.map_tensors(lambda t: t.detach(), self.step.result)


class MicrobatchedStep:
    """Runs training steps by microbatches, on a lead.

    Attributes:
        running: whether a step is under way.
    """

    def __init__(self, lead: Lead) -> None:
        self.lead = lead
        self.running = False
        self._threads = Threads()
        self._pending = Pending()

    def close(self) -> None:
        """Ends the threads."""
        self._threads.close()

    # -- a step ----------------------------------------------------------------------------------------------------

    def run(
        self,
        functions: Sequence[Callable[[], Any]],
        weights: Sequence[float],
        loss_of: Callable[[Any], Tensor | None],
        scale: float,
    ) -> tuple[list[Any], Tensor | None]:
        """Runs the forwards and backwards of one step.

        Args:
            functions: the user's step on each microbatch.
            weights: the share of each microbatch in the loss.
            loss_of: finds the loss in what the user's step returns.
            scale: the gradient of the step's loss to expect, so that small ones do not underflow.

        Returns:
            What the user's step returned for each microbatch, and the loss of the batch; the backward of the loss hands the
            gradients over. ``None`` for the loss where no microbatch has one.

        Raises:
            PartitionError: unless each step calls the pipelined module once.
        """
        self.running = True
        steps = [Suspended(self._threads, function) for function in functions]
        try:
            with self.lead.planner.one_microbatch():
                parts = [self._begin(step, weight) for step, weight in zip(steps, weights, strict=True)]
            self._pending.begin(self._own_parameters())
            with self.lead.attending(), self.lead.failures.guarded("training step"):
                self._exchange(parts, loss_of, scale)
            self._pending.end()
        finally:
            for step in steps:
                step.abandon()
            self.running = False
        losses = [part.loss * part.weight for part in parts if part.loss is not None]
        if not losses:
            return [step.result for step in steps], None
        total = torch.stack([loss.detach() for loss in losses]).sum()
        return [step.result for step in steps], _HandOver.apply(self.lead.anchor.tensor, self, total, scale)  # type: ignore[no-untyped-call]

    def _begin(self, step: Suspended, weight: float) -> _Microbatch:
        """Runs the user's step up to its module call."""
        step.start()
        if step.ended:
            raise PartitionError(
                f"schedule={self.lead.schedule.name!r} needs training_step to call the pipelined module, which it did not; "
                'use schedule="gpipe"'
            )
        plan, tensors, inputs = step.asked
        return _Microbatch(weight, step, plan, tensors, inputs)

    def call(self, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answers the module call of one microbatch, in the user's step.

        Raises:
            PartitionError: for a second call.
        """
        step = Suspended.current()
        if step is None or step.asked is not None:
            raise PartitionError(
                f"schedule={self.lead.schedule.name!r} allows one call of the pipelined module in a training step, and "
                f'{path or type(self.lead.root).__name__} is another; use schedule="gpipe"'
            )
        with self.lead.attending():
            plan, tensors = self.lead.plan(path, args, kwargs)
        inputs = dict(zip(dict.fromkeys(plan.graph.inputs), (t.detach() for t in tensors), strict=True))
        whole = step.pause((plan, tensors, inputs))
        with self.lead.attending():
            return self.lead.finish(plan, tensors, whole)

    def _own_parameters(self) -> list[nn.Parameter]:
        away = self.lead.planner.placement.away()
        names = self.lead.planner.names
        return [t for n, t in names.tensors.items() if isinstance(t, nn.Parameter) and n not in away]

    # -- the exchange with the workers -----------------------------------------------------------------------------

    def _exchange(self, parts: list[_Microbatch], loss_of: Callable[[Any], Tensor | None], scale: float) -> None:
        lead = self.lead
        number = lead.next_number()
        message = m.Train(
            number, lead.schedule.name, tuple((part.plan.number, part.plan.sizes[0]) for part in parts), lead.seed_of(number),
            lead.timed, lead.recomputed,
        )  # fmt: skip
        lead.tell_before_call(parts[0].plan)
        lead.workers.tell_all(message)
        share = lead.mesh.deal(len(parts))[-1]
        call = self._call(number, parts, share, message.seed)
        for stage in (stage for stages in call.stages for stage in stages.values()):
            stage.program.prepare(lead.planner.store)
        others = lead.others([_stages(part) for part in parts])
        others.deal_out([part.inputs for part in parts])
        exchange = _StepExchange(self, number, parts, others, loss_of, scale)
        found = lead.engine.run(call, lead.schedule.table(len(share), lead.mesh.pipeline), exchange)
        away = others.gradients_of_arguments([part.given or frozenset() for part in parts])
        found = [summed(a, b) for a, b in zip([*([{}] * share.start), *found], away, strict=True)]
        lead.settle(call, len(parts))
        lead.add_up({name: use for part in parts for name, use in lead.uses(part.plan).items()}, len(parts))
        if lead.timed:
            lead.collect_events()
        for part, gradients in zip(parts, found, strict=True):
            _into_arguments(part, gradients)

    def _call(self, number: int, parts: Sequence[_Microbatch], share: range, seed: int) -> Call:
        lead = self.lead
        runs = {
            index: StageRun(
                lead.planner.store, share, grad=True, inference=False, seed=seed, alone=True,
                recompute=index in lead.recomputed, replicated=lead.mesh.data > 1, devices=lead.devices,
            )
            for index in lead.own_stages
        }  # fmt: skip
        stages = [{index: _stages(parts[i])[index] for index in lead.own_stages} for i in share]
        return Call(number, stages, runs, lead.timed, share.start)

    def hand_over(self, factor: float) -> None:
        """Adds the gradients of the last step to those of the parameters, on all owners."""
        with self.lead.failures.guarded("backward"):
            self.lead.workers.tell_all(m.HandOver(factor))
            self._pending.hand_over(factor)


class _StepExchange:
    """Gives the lead's engine what the user's steps give.

    With the output of each microbatch of the lead's own replica come those of the others', which are as far by then: their
    steps go on here too, and their gradients go back at once.
    """

    def __init__(
        self,
        owner: MicrobatchedStep,
        number: int,
        parts: list[_Microbatch],
        others: OtherReplicas,
        loss_of: Callable[[Any], Tensor | None],
        scale: float,
    ) -> None:
        self.owner = owner
        self.number = number
        self.parts = parts
        self.others = others
        self.loss_of = loss_of
        self.scale = scale
        self.own = others.shares[-1]

    def given(self, microbatch: int, *, wait: bool) -> Given | None:  # noqa: ARG002 - known as soon as anyone can ask
        return self.parts[self.own[microbatch]].given

    def inputs(self, stage: Stage, microbatch: int) -> list[Tensor]:
        return [self.parts[self.own[microbatch]].inputs[c.register] for c in stage.inputs]

    def made(self, microbatch: int, tensors: list[Tensor]) -> None:
        """Lets the user's step go on with what the last stage made, and so those of the other replicas' microbatches."""
        self._go_on(self.parts[self.own[microbatch]], tensors)
        for replica, share in enumerate(self.others.shares[:-1]):
            if microbatch < len(share):
                i = share[microbatch]
                self._go_on(self.parts[i], self.others.result(replica, i))
                gradients = self._differentiate(i)
                self.others.send_gradient(replica, i, self.parts[i].given or frozenset(), gradients)

    def gradients(self, microbatch: int) -> Mapping[int, Tensor]:
        return self._differentiate(self.own[microbatch])

    def _go_on(self, part: _Microbatch, tensors: list[Tensor]) -> None:
        needed = [c.requires_grad for c in _stages(part)[-1].sends]
        part.whole = [t.detach().requires_grad_(need) for t, need in zip(tensors, needed, strict=True)]
        with self.owner.lead.users_turn():
            part.step.resume(part.whole)
            if not part.step.ended:
                raise AssertionError("a step pauses once")
            part.loss = self.loss_of(part.step.result)

    def _differentiate(self, i: int) -> Mapping[int, Tensor]:
        """Runs the backward of the user's step on one microbatch of the batch as far as the pipelined module."""
        part = self.parts[i]
        if part.loss is not None and part.loss.requires_grad:
            with self.owner.lead.users_turn():
                seed = torch.full_like(part.loss, part.weight * self.scale)
                part.loss.backward(seed, retain_graph=any(t.requires_grad for t in part.tensors))
        wanted = part.plan.batching.wanted
        found = {i: leaf.grad for i, leaf in enumerate(part.whole) if leaf.grad is not None}
        part.given = frozenset(found)
        part.forget_graph()
        self.others.tell(self.owner.lead.workers, i, m.GivenGradients(self.number, i, part.given))
        return {wanted[i]: gradient for i, gradient in found.items()}


class _HandOver(torch.autograd.Function):
    """Puts a finished step into the lead's autograd graph: its backward hands the gradients over."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, step: MicrobatchedStep, loss: Tensor, scale: float) -> Tensor:  # noqa: ARG004
        ctx.step, ctx.scale = step, scale
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.step.hand_over(float(gradient) / ctx.scale)
        return None, None, None, None


def _stages(part: _Microbatch) -> tuple[Stage, ...]:
    return part.plan.stages[part.plan.sizes[0]]


def _into_arguments(part: _Microbatch, gradients: Mapping[int, Tensor]) -> None:
    """Carries the gradients of the call's arguments on into the user's graph before the call."""
    registers = dict.fromkeys(part.plan.graph.inputs)
    pairs = [(t, gradients[r]) for r, t in zip(registers, part.tensors, strict=True) if t.requires_grad and r in gradients]
    if pairs:
        torch.autograd.backward([tensor for tensor, _ in pairs], [gradient for _, gradient in pairs])
