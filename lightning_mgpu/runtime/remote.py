"""The differentiable remote call: to the user's code a module on its own device, with a ``grad_fn`` like any other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_mgpu.errors import PlacementError
from lightning_mgpu.partition.gather import deal_gradient
from lightning_mgpu.partition.plan import CallPlan
from lightning_mgpu.partition.stage import StageRun
from lightning_mgpu.runtime import messages as m
from lightning_mgpu.runtime.engine import Call

if TYPE_CHECKING:
    from lightning_mgpu.runtime.lead import Lead

__all__ = ["Anchor", "RemoteCall", "call_remotely"]


class Anchor:
    """Is a leaf tensor that every remote call depends on, so that its result needs a gradient when parameters elsewhere do.

    It also tells whether a backward adds gradients up in leaves, as ``loss.backward()``, or only asks for some, as
    ``torch.autograd.grad``.
    """

    def __init__(self) -> None:
        with torch.inference_mode(False), torch.enable_grad():
            self.tensor = torch.zeros((), requires_grad=True)
            view: Any = self.tensor.view_as(self.tensor).grad_fn
            self._leaf_node: Any = view.next_functions[0][0]

    def accumulates(self) -> bool:
        """Says, inside a backward, whether it adds up gradients in leaves."""
        return bool(torch._C._will_engine_execute_node(self._leaf_node))


class RemoteCall:
    """Is one call on its way: what the lead keeps of it until its backward.

    Attributes:
        inputs: the arguments of each microbatch of the batch, by register.
        stages: all stages, for each microbatch.
        share: the microbatches of the lead's own replica.
        state: what this process runs of it.
    """

    def __init__(self, lead: Lead, plan: CallPlan, number: int, inputs: Sequence[dict[int, Tensor]], *, grad: bool) -> None:
        self.lead = lead
        self.plan = plan
        self.number = number
        self.inputs = inputs
        self.grad = grad
        self.ended = False
        self.inference, self.seed = torch.is_inference_mode_enabled(), lead.seed_of(number)
        self.share = lead.mesh.deal(plan.num_microbatches)[-1]
        runs = {
            index: StageRun(
                lead.planner.store, self.share, grad=grad, inference=self.inference, seed=self.seed,
                recompute=index in lead.recomputed, replicated=lead.mesh.data > 1, devices=lead.devices,
            )
            for index in lead.own_stages
        }  # fmt: skip
        self.stages = [plan.stages[rows] for rows in plan.sizes]
        own = [{index: self.stages[i][index] for index in lead.own_stages} for i in self.share]
        self.state = Call(number, own, runs, lead.timed, self.share.start)

    def message(self, schedule: str) -> m.Forward:
        """Tells the workers of the call."""
        return m.Forward(
            self.number, schedule, self.plan.number, self.plan.sizes, self.grad, self.inference, self.seed, self.state.timed,
            self.lead.recomputed,
        )  # fmt: skip

    def differentiable(self) -> list[bool]:
        """Says which of the wanted tensors need a gradient."""
        return [c.requires_grad for c in self.plan.stages[self.plan.sizes[0]][-1].sends]

    def backward(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Runs the backward of the call.

        Args:
            gradients: one for each wanted tensor, ``None`` for none.

        Returns:
            The gradient of each tensor among the arguments, ``None`` for none.

        Raises:
            PlacementError: for a second backward without ``retain_graph``, as a module on one device would raise.
        """
        if self.ended:
            raise PlacementError(
                "a second backward through one call of a pipelined module; use backward(retain_graph=True) in the first"
            )
        retain = bool(torch._C._autograd._get_current_graph_task_keep_graph())
        self.ended = not retain
        present = frozenset(i for i, g in enumerate(gradients) if g is not None)
        first_only = frozenset(i for i, r in enumerate(self.plan.batching.wanted) if self.plan.batching.dims[r] is None)
        given = tuple(present if i == 0 else present - first_only for i in range(self.plan.num_microbatches))
        with self.lead.resumed():
            parts = self.lead.run_backward(
                self, given, deal_gradient(self.plan, gradients), retain=retain, accumulate=self.lead.anchor.accumulates()
            )
        return self._join(parts)

    def _join(self, parts: Sequence[dict[int, Tensor]]) -> list[Tensor | None]:
        joined: list[Tensor | None] = []
        for register, dim in zip(dict.fromkeys(self.plan.graph.inputs), self.plan.input_dims, strict=True):
            found = [part.get(register) for part in parts]
            if all(gradient is None for gradient in found):
                joined.append(None)
            elif isinstance(dim, int):
                pieces = [
                    torch.zeros_like(inputs[register]) if gradient is None else gradient
                    for gradient, inputs in zip(found, self.inputs, strict=True)
                ]
                joined.append(torch.cat(pieces, dim=dim))
            else:
                known = [gradient for gradient in found if gradient is not None]
                joined.append(torch.stack(known).sum(0) if len(known) > 1 else known[0])
        return joined

    def __del__(self) -> None:
        if self.grad and not self.ended:
            self.lead.forget(self.number)


class _Remote(torch.autograd.Function):
    """Puts a remote call into the lead's autograd graph."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, call: RemoteCall, *tensors: Tensor) -> tuple[Tensor, ...]:  # noqa: ARG004
        ctx.call = call
        ctx.set_materialize_grads(False)
        results = call.lead.run_forward(call)
        ctx.mark_non_differentiable(*(r for r, needed in zip(results, call.differentiable(), strict=True) if not needed))
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        if torch.is_grad_enabled():
            raise PlacementError(
                "second derivatives through a pipelined module are not possible (create_graph=True); compute the inner "
                'gradient in a module on the lead (module="..." pipelines another one), or use devices=1 with strategy="auto"'
            )
        return None, None, *ctx.call.backward(gradients)


def call_remotely(call: RemoteCall, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Runs a call and returns the wanted tensors, with gradient history where they need one."""
    if not call.grad:
        return call.lead.run_forward(call)
    return list(_Remote.apply(call.lead.anchor.tensor, call, *tensors))  # type: ignore[no-untyped-call]
