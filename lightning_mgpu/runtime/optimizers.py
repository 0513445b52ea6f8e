"""The user's optimizers over all owners: steps, gradients and states, asked for on the lead and done where parameters live."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_mgpu.runtime import messages as m
from lightning_mgpu.runtime.gradients import clip, norms, total_norm
from lightning_mgpu.runtime.pack import pack
from lightning_mgpu.runtime.placeholder import is_hidden
from lightning_mgpu.runtime.sharing import lend, take_back
from lightning_mgpu.runtime.steps import hyperparameters, owned_part

if TYPE_CHECKING:
    from lightning_mgpu.runtime.lead import Lead

__all__ = ["OwnedOptimizers"]


class OwnedOptimizers:
    """Carries out what the user's optimizers are asked to do, on every owner's part of them.

    Attributes:
        faces: the user's own optimizer objects; their hyperparameters count.
    """

    def __init__(self, lead: Lead) -> None:
        self.lead = lead
        self.faces: list[Optimizer] = []
        self._parts: list[Optimizer] | None = None
        self._owners: tuple[dict[str, frozenset[int]], ...] = ()
        self._groups: list[list[int]] = []

    @property
    def sent(self) -> bool:
        """Whether the owners have their parts."""
        return self._parts is not None

    def forget(self) -> None:
        """Forgets the parts; the owners are told again with the next placement."""
        self._parts = None

    def take_home(self, states: Sequence[Sequence[Mapping[str, Any]]]) -> None:
        """Puts the states of all owners into the user's optimizers for good."""
        self.take(states)
        self.forget()

    def send(self) -> None:
        """Sends every worker its part of the optimizers, with the state they have now."""
        names, placement = self.lead.planner.names, self.lead.planner.placement
        name_of = names.name_of
        if self._parts is not None:
            self.take(self.collect())

        def owned_by(stage: int) -> Callable[[Tensor], bool]:
            return lambda p: stage in placement.holders(name_of.get(id(p), ""))

        owners = tuple(self._shared_in(optimizer) for optimizer in self.faces)
        for stage in self.lead.workers.stages:
            with self.lead.patches.lifted():
                parts = [owned_part(optimizer, owned_by(stage)) for optimizer in self.faces]
                packed = pack(parts, names=self.lead.home.names_at(stage), what="the optimizers")
            self.lead.workers.tell(stage, m.Optimizers(packed.header(), owners), packed)
        self._parts = [owned_part(optimizer, owned_by(self.lead.index)) for optimizer in self.faces]
        self._groups = self._sizes_of_groups()
        self._owners = owners

    def _sizes_of_groups(self) -> list[list[int]]:
        return [[len(group["params"]) for group in optimizer.param_groups] for optimizer in self.faces]

    def _shared_in(self, optimizer: Optimizer) -> dict[str, frozenset[int]]:
        name_of = self.lead.planner.names.name_of
        stepped = {name_of.get(id(p)) for group in optimizer.param_groups for p in group["params"]}
        return {n: s for n, s in self.lead.planner.placement.shared().items() if n in stepped}

    def step(self, index: int, kwargs: Mapping[str, Any]) -> None:
        """Steps one optimizer on all owners, with the hyperparameters it has now."""
        if self._groups != self._sizes_of_groups():  # parameters were added, as finetuning callbacks do
            with self.lead.failures.guarded("placement"):
                self.send()
        assert self._parts is not None
        part, owners = self._parts[index], self._owners[index]
        groups = hyperparameters(self.faces[index])
        with self.lead.failures.guarded("optimizer step"):
            if self.lead.num_stages > 1:
                self.lead.workers.settle()  # no owner steps where the backward failed on another
                self.lead.workers.tell_all(m.Step(index, groups))
            for mine, face in zip(part.param_groups, self.faces[index].param_groups, strict=True):
                mine.update({k: v for k, v in face.items() if k != "params"})
            if self.lead.workers.plane is not None:
                lend(self.lead.workers.plane, self.lead.index, owners, self.lead.planner.store.tensor)
            part.step(**kwargs)
            take_back(self.lead.index, owners, self.lead.planner.store.tensor)

    def zero_grad(self, parameters: Iterable[nn.Parameter], *, set_to_none: bool) -> None:
        """Forgets the gradients of some parameters, wherever they are."""
        name_of, placement = self.lead.planner.names.name_of, self.lead.planner.placement
        away: dict[int, list[str]] = {stage: [] for stage in self.lead.workers.stages}
        for parameter in parameters:
            name = name_of.get(id(parameter), "")
            stages = placement.holders(name)
            for stage in stages - {self.lead.index}:
                away[stage].append(name)
            if self.lead.index in stages and parameter.grad is not None:
                parameter.grad = None if set_to_none else parameter.grad.detach_().zero_()
        with self.lead.failures.guarded("zero_grad"):
            for stage, names in away.items():
                if names:
                    self.lead.workers.tell(stage, m.ZeroGrad(tuple(names), set_to_none))

    def gradient_norm(self, parameters: Iterable[nn.Parameter]) -> Tensor:
        """Returns the 2-norm of the gradients of some parameters, wherever they are."""
        return total_norm(self._norms(list(parameters)).values(), self.lead.workers.devices[self.lead.index])

    def _by_primary(self, parameters: Iterable[nn.Parameter]) -> dict[int, list[str]]:
        name_of, primary = self.lead.planner.names.name_of, self.lead.planner.placement.primary
        found: dict[int, list[str]] = {stage: [] for stage in range(self.lead.num_stages)}
        for parameter in parameters:
            name = name_of[id(parameter)]
            found[primary(name)].append(name)
        return found

    def _norms(self, parameters: Sequence[nn.Parameter]) -> dict[str, Tensor]:
        by_primary = self._by_primary(parameters)
        found = norms(by_primary[self.lead.index], self.lead.planner.store.tensor)
        asked = [stage for stage in self.lead.workers.stages if by_primary[stage]] if self.lead.placed else []
        if asked:
            with self.lead.failures.guarded("gradient norm"):
                for answer in self.lead.workers.collect(asked, "norms", [by_primary[stage] for stage in asked]):
                    found.update(answer)
        order = (self.lead.planner.names.name_of[id(p)] for p in parameters)
        return {name: found[name] for name in order if name in found}

    def clip(self, parameters: Iterable[nn.Parameter], *, max_norm: float | None = None, bound: float | None = None) -> None:
        """Clips gradients by their global norm, or each element to ``±bound``, on their owners.

        Args:
            parameters: whose gradients.
            max_norm: largest norm of all of them together.
            bound: largest absolute value of an element.
        """
        parameters = list(parameters)
        factor = None
        if max_norm is not None:
            norm = self.gradient_norm(parameters)
            factor = float(torch.clamp(max_norm / (norm + 1e-6), max=1.0))
        by_primary = self._by_primary(parameters)
        clip(by_primary[self.lead.index], self.lead.planner.store.tensor, factor, bound)
        with self.lead.failures.guarded("clipping"):
            for stage in self.lead.workers.stages if self.lead.placed else ():
                if by_primary[stage]:
                    self.lead.workers.tell(stage, m.Clip(tuple(by_primary[stage]), factor, bound))

    def collect(self) -> list[list[dict[str, Any]]]:
        """Asks the workers for the states of their parts, by worker, optimizer and name of the parameter."""
        stages = list(self.lead.workers.stages)
        return self.lead.workers.collect(stages, "optimizers", [()] * len(stages))

    def take(self, states: Sequence[Sequence[Mapping[str, Any]]]) -> None:
        """Puts the optimizer states of all owners into the user's optimizers.

        Args:
            states: for each worker, for each optimizer, the state by name of the parameter.
        """
        tensors = self.lead.planner.names.tensors
        for index, part in enumerate(self._parts or []):
            optimizer = self.faces[index]
            for of_worker in states:
                if index < len(of_worker):
                    optimizer.state.update({tensors[name]: state for name, state in of_worker[index].items()})
            optimizer.state.update(part.state)

    def state_dict(self, plain: Callable[..., dict[str, Any]]) -> dict[str, Any]:
        """Returns the whole state of one optimizer, as one device would.

        Args:
            plain: the optimizer's own ``state_dict``.
        """
        if not self.lead.placed:
            return plain()
        with self.lead.failures.guarded("gathering"):
            self.take(self.collect())
        state = plain()
        for optimizer in self.faces:
            for parameter in [p for p in optimizer.state if is_hidden(p)]:
                del optimizer.state[parameter]
        return state
