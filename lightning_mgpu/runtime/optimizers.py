"""The user's optimizers over all owners: steps and states, asked for on the lead and done where parameters live."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_mgpu import tree
from lightning_mgpu.errors import PlacementError
from lightning_mgpu.runtime import messages as m
from lightning_mgpu.runtime.away import AwayState
from lightning_mgpu.runtime.owned_gradients import OwnedGradients
from lightning_mgpu.runtime.pack import pack
from lightning_mgpu.runtime.placeholder import is_hidden
from lightning_mgpu.runtime.settings import Settings, apply, group_values, own_attributes
from lightning_mgpu.runtime.sharing import lend, take_back
from lightning_mgpu.runtime.steps import PartState, has_parameters, owned_part, shipped, step_part

if TYPE_CHECKING:
    from lightning_mgpu.runtime.lead import Lead

__all__ = ["OwnedOptimizers"]


class OwnedOptimizers:
    """Carries out what the user's optimizers are asked to do, on every owner's part of them.

    Attributes:
        faces: the user's own optimizer objects; their hyperparameters count.
        gradients: what is asked of gradients.
    """

    def __init__(self, lead: Lead) -> None:
        self.lead = lead
        self.faces: list[Optimizer] = []
        self.gradients = OwnedGradients(lead)
        self._parts: list[Optimizer] | None = None
        self._owners: tuple[dict[str, frozenset[int]], ...] = ()
        self._settings: list[Settings] = []
        self._stepped: list[list[int]] = []
        self._states: list[MutableMapping[Any, Any]] = []

    @property
    def sent(self) -> bool:
        """Whether the owners have their parts."""
        return self._parts is not None

    def index_of(self, optimizer: Any) -> int | None:
        """Returns the number of an optimizer, or of what shares its groups as a wrapper does; ``None`` for a foreign one."""
        for index, face in enumerate(self.faces):
            if face is optimizer or face.param_groups is getattr(optimizer, "param_groups", None):
                return index
        return None

    def forget(self) -> None:
        """Forgets the parts; the owners are told again with the next placement."""
        self._parts = None
        self._show_states()

    def take_home(self, states: Sequence[Sequence[PartState]]) -> None:
        """Puts the states of all owners into the user's optimizers for good."""
        self.take(states)
        self.forget()

    def send(self) -> None:
        """Sends every worker its part of the optimizers, with the state they have now."""
        names, placement = self.lead.planner.names, self.lead.planner.placement
        name_of = names.name_of
        if self._parts is not None:
            self.take(self.collect())
            self._show_states()

        def owned_by(process: int) -> Callable[[Tensor], bool]:
            return lambda p: process in placement.holders(name_of.get(id(p), ""))

        self._owners = tuple(self._shared_in(optimizer) for optimizer in self.faces)
        for process in self.lead.workers.indices:
            with self.lead.patches.lifted():
                parts = [shipped(owned_part(optimizer, owned_by(process))) for optimizer in self.faces]
                packed = pack(parts, names=self.lead.home.names_at(process), what="the optimizers")
            self.lead.workers.tell(process, m.Optimizers(packed.header(), self._owners), packed)
        self._parts = [owned_part(optimizer, owned_by(self.lead.index)) for optimizer in self.faces]
        self._settings = [Settings(optimizer) for optimizer in self.faces]
        self._stepped = [_parameters_of(optimizer) for optimizer in self.faces]
        self._hide_states()

    def copy_own(self) -> None:
        """Copies the states that stay on the lead: they may lie in a file, which somebody may write over."""
        for state in (state for part in self._parts or () for state in part.state.values()):
            state.update({key: tree.map_tensors(lambda t: t.clone(), value) for key, value in state.items()})

    def _shared_in(self, optimizer: Optimizer) -> dict[str, frozenset[int]]:
        name_of = self.lead.planner.names.name_of
        stepped = {name_of.get(id(p)) for group in optimizer.param_groups for p in group["params"]}
        return {n: s for n, s in self.lead.planner.placement.shared().items() if n in stepped}

    # -- steps -----------------------------------------------------------------------------------------------------

    def step(self, optimizer: Optimizer, kwargs: Mapping[str, Any]) -> None:
        """Steps one optimizer on all owners, with the hyperparameters it has now.

        Args:
            optimizer: the user's optimizer.
            kwargs: what its step was given beside the closure.
        """
        index, parts = self._renewed(optimizer)
        part, owners, settings = parts[index], self._owners[index], self._settings[index]
        changes = settings.take_changes(optimizer)
        with self.lead.failures.guarded("optimizer step"):
            self.lead.workers.settle()  # no owner steps where the backward failed on another
            self.lead.home.send_changed()
            self.lead.workers.tell_all(m.Step(index, changes.on_host(), dict(kwargs)))
            apply(part, changes)
            if self.lead.workers.plane is not None:
                lend(self.lead.workers.plane, self.lead.index, owners, self.lead.planner.store.tensor)
            step_part(part, kwargs)
            take_back(self.lead.index, owners, self.lead.planner.store.tensor)
            self.lead.home.copies.note()
        for number, group in enumerate(part.param_groups):
            if group["params"]:
                settings.take_group(optimizer, number, group_values(group))
        if has_parameters(part):
            settings.take_attributes(optimizer, own_attributes(part))

    def _renewed(self, optimizer: Optimizer) -> tuple[int, list[Optimizer]]:
        """Returns the number of an optimizer and the parts, sent anew where the user changed more than settings.

        Raises:
            PlacementError: for an optimizer that the strategy no longer has.
        """
        index = self.index_of(optimizer)
        if index is None:
            raise PlacementError(
                f"{type(optimizer).__name__} is none of the optimizers of the strategy; hand it over first, with "
                "trainer.strategy.optimizers = [optimizer]"
            )
        parameters = [_parameters_of(each) for each in self.faces]  # finetuning callbacks add some
        if self._stepped != parameters or not all(isinstance(face.state, AwayState) for face in self.faces):
            with self.lead.failures.guarded("placement"):
                self.send()
        assert self._parts is not None
        return index, self._parts

    def unscale(
        self, optimizer: Optimizer, inverse_scale: Tensor, found: Tensor, *, allow_half: bool
    ) -> dict[torch.device, Tensor]:
        """Divides the gradients of an optimizer by the scale of the loss on all owners; see `OwnedGradients.unscale`."""
        index, parts = self._renewed(optimizer)
        return self.gradients.unscale(parts[index], index, inverse_scale, found, allow_half=allow_half)

    # -- states ----------------------------------------------------------------------------------------------------

    def _hide_states(self) -> None:
        """Lets the user's optimizers hold nothing that lives elsewhere, and say so."""
        self._states = [face.state for face in self.faces]
        for state, face in zip(self._states, self.faces, strict=True):
            _drop_hidden(state)
            face.state = AwayState(type(face).__name__)  # type: ignore[assignment]

    def _show_states(self) -> None:
        """Gives the user's optimizers their states back, except where the user put another in their place."""
        for state, face in zip(self._states, self.faces, strict=False):
            if isinstance(face.state, AwayState):
                face.state = state  # type: ignore[assignment]
        self._states = []

    def collect(self) -> list[list[PartState]]:
        """Asks the owners for what their parts' steps made, by owner and optimizer."""
        owners = list(self.lead.owners)
        return self.lead.workers.collect(owners, "optimizers", [()] * len(owners))

    def take(self, states: Sequence[Sequence[PartState]]) -> None:
        """Puts what all owners' steps made into the user's optimizers.

        Args:
            states: for each worker, for each optimizer.
        """
        tensors = self.lead.planner.names.tensors
        for index, part in enumerate(self._parts or []):
            made = [of_worker[index] for of_worker in states if index < len(of_worker)]
            for of_worker in made:
                self._states[index].update({tensors[name]: state for name, state in of_worker.state.items()})
            self._states[index].update(part.state)
            self._take_settings(index, part, made)

    def _take_settings(self, index: int, part: Optimizer, made: Sequence[PartState]) -> None:
        """Takes groups and attributes from a worker where the lead steps none of their parameters."""
        face, settings = self.faces[index], self._settings[index]
        if self._stepped[index] != _parameters_of(face):
            return  # the user has changed the groups since
        for number, group in enumerate(part.param_groups):
            values = next((w.groups[number] for w in made if w.groups[number] is not None), None)
            if not group["params"] and values is not None:
                settings.take_group(face, number, values)
        attributes = next((w.attributes for w in made if w.attributes is not None), None)
        if not has_parameters(part) and attributes is not None:
            settings.take_attributes(face, attributes)

    def state_dict(self, optimizer: Optimizer, plain: Callable[..., dict[str, Any]]) -> dict[str, Any]:
        """Returns the whole state of one optimizer, as one device would.

        Args:
            optimizer: the user's optimizer.
            plain: its own ``state_dict``.
        """
        index = self.index_of(optimizer)
        if index is None or self._parts is None or not isinstance(optimizer.state, AwayState):
            return plain()
        with self.lead.failures.guarded("gathering"):
            self.take(self.lead.owned_state.parts(optimizer, index))
        away, optimizer.state = optimizer.state, self._states[index]  # type: ignore[assignment]
        try:
            return plain()
        finally:
            optimizer.state = away
            for state in self._states:
                _drop_hidden(state)


def _parameters_of(optimizer: Optimizer) -> list[int]:
    """Lists the parameters of all groups by ``id``, with a mark between groups."""
    return [number for group in optimizer.param_groups for number in (*map(id, group["params"]), -1)]


def _drop_hidden(state: MutableMapping[Any, Any]) -> None:
    for parameter in [p for p in state if isinstance(p, Tensor) and is_hidden(p)]:
        del state[parameter]
