"""Gradients over all owners: forgotten, measured, clipped and unscaled, asked for on the lead and done where they are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lightning_mgpu.runtime import messages as m
from lightning_mgpu.runtime.gradients import clip, norms, total_norm, unscale
from lightning_mgpu.runtime.placeholder import is_hidden

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from lightning_mgpu.runtime.lead import Lead

__all__ = ["OwnedGradients"]


class OwnedGradients:
    """Does to gradients what the user asks for, on every owner.

    A parameter whose value is on the lead, as all are inside `Lead.summoned`, is done there.
    """

    def __init__(self, lead: Lead) -> None:
        self.lead = lead

    def zero(self, parameters: Iterable[nn.Parameter], *, set_to_none: bool) -> None:
        """Forgets the gradients of some parameters, wherever they are."""
        name_of, placement = self.lead.planner.names.name_of, self.lead.planner.placement
        away: dict[int, list[str]] = {process: [] for process in self.lead.workers.indices}
        for parameter in parameters:
            name = name_of.get(id(parameter), "")
            processes = placement.holders(name)
            for process in processes - {self.lead.index}:
                away[process].append(name)
            if self.lead.index in processes and parameter.grad is not None:
                parameter.grad = None if set_to_none else parameter.grad.detach_().zero_()
        with self.lead.failures.guarded("zero_grad"):
            for process, names in away.items():
                if names:
                    self.lead.workers.tell(process, m.ZeroGrad(tuple(names), set_to_none))

    def norm(self, parameters: Iterable[nn.Parameter], norm_type: float = 2.0, *, error_if_nonfinite: bool = False) -> Tensor:
        """Returns the norm of the gradients of some parameters, wherever they are, as one vector.

        Args:
            parameters: whose gradients; each counts once for each time it is listed.
            norm_type: which norm; ``inf`` for the largest absolute value.
            error_if_nonfinite: whether to raise where the norm is infinite or no number.

        Raises:
            RuntimeError: from torch, where ``error_if_nonfinite`` says so.
        """
        parameters = list(parameters)
        here, away = self._where(parameters)
        found = {id(p): norm for p, norm in norms(here, norm_type)}
        if away:
            tensors, processes = self.lead.planner.names.tensors, list(away)
            with self.lead.failures.guarded("gradient norm"):
                asked = [(norm_type, *away[process]) for process in processes]
                for answer in self.lead.workers.collect(processes, "norms", asked):
                    found.update({id(tensors[name]): norm for name, norm in answer.items()})
        parts = [found[id(p)] for p in parameters if id(p) in found]
        device = self.lead.workers.devices[self.lead.index]
        return total_norm(parts, device, norm_type, error_if_nonfinite=error_if_nonfinite)

    def clip_norm(
        self,
        parameters: Iterable[nn.Parameter],
        max_norm: float,
        norm_type: float = 2.0,
        *,
        error_if_nonfinite: bool = False,
    ) -> Tensor:
        """Scales gradients down to a norm of all of them together.

        Returns:
            The norm before.
        """
        parameters = list(parameters)
        norm = self.norm(parameters, norm_type, error_if_nonfinite=error_if_nonfinite)
        self._clip(parameters, factor=float(torch.clamp(max_norm / (norm + 1e-6), max=1.0)))
        return norm

    def clip_value(self, parameters: Iterable[nn.Parameter], bound: float) -> None:
        """Clamps each element of the gradients to ``±bound``."""
        self._clip(list(parameters), bound=bound)

    def _clip(self, parameters: Sequence[nn.Parameter], *, factor: float | None = None, bound: float | None = None) -> None:
        here, away = self._where(parameters)
        clip(here, factor, bound)
        if away:
            with self.lead.failures.guarded("clipping"):
                for process, names in away.items():
                    self.lead.workers.tell(process, m.Clip(tuple(names), factor, bound))

    def _where(self, parameters: Sequence[nn.Parameter]) -> tuple[list[nn.Parameter], dict[int, list[str]]]:
        """Splits parameters into those on the lead, and the names of the others by the process that has the gradient."""
        name_of, primary = self.lead.planner.names.name_of, self.lead.planner.placement.primary
        away: dict[int, list[str]] = {}
        for parameter in parameters:
            if is_hidden(parameter):
                name = name_of[id(parameter)]
                away.setdefault(primary(name), []).append(name)
        return [p for p in parameters if not is_hidden(p)], away

    def unscale(
        self, part: Optimizer, index: int, inverse_scale: Tensor, found: Tensor, *, allow_half: bool
    ) -> dict[torch.device, Tensor]:
        """Divides the gradients of an optimizer by the scale of the loss, and looks for what is not finite.

        Args:
            part: the lead's part of the optimizer.
            index: which optimizer it is.
            inverse_scale: what to multiply by.
            found: a zero, for the device of the scale.
            allow_half: whether gradients may be of half precision.

        Returns:
            By device, a number above zero where any owner found something.
        """
        processes = list(self.lead.workers.indices)
        with self.lead.failures.guarded("unscaling"):
            asked: list[tuple[Any, ...]] = [(index, float(inverse_scale), allow_half)] * len(processes)
            answers = self.lead.workers.collect(processes, "unscaled", asked)
        by_device = unscale(part, inverse_scale, found, allow_half=allow_half)
        total = found.clone()
        for answer in (*answers, *by_device.values()):
            total = torch.maximum(total, answer.to(total.device))
        return {found.device: total}
