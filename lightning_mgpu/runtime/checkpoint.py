"""Checkpoints on the lead: what lives elsewhere is gathered piece by piece, or written where it lives.

A ``state_dict`` is first made of placeholders. For a single file each is then replaced by its value, which comes to the lead's
memory in pieces, so that there is one copy of it and no value passes through the module. For a sharded checkpoint the
placeholders stay, and `save_sharded` has their owners write them.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_mgpu import tree
from lightning_mgpu.errors import CheckpointError, PlacementError
from lightning_mgpu.runtime.placeholder import hidden_name, is_hidden, kept_by_detach
from lightning_mgpu.runtime.steps import PartState
from lightning_mgpu.runtime.unmade import is_unmade

if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning_mgpu.runtime.lead import Lead

__all__ = ["OwnedState"]

_PIECE_BYTES = 64 * 2**20


class OwnedState:
    """Makes state dicts of what the owners have.

    Attributes:
        described: whether placeholders stand for values now.
    """

    def __init__(self, lead: Lead) -> None:
        self.lead = lead
        self.described = False
        self._fresh: dict[int, weakref.ref[Tensor]] = {}

    @contextmanager
    def in_placeholders(self) -> Iterator[None]:
        """Lets state dicts be made of placeholders for a block, and nothing be gathered."""
        self.described = True
        try:
            with kept_by_detach():
                yield
        finally:
            self.described = False

    def take_fresh(self) -> set[int]:
        """Returns the ``id`` of the tensors that were gathered since this was last asked, which nobody else changes."""
        fresh, self._fresh = self._fresh, {}
        return {number for number, tensor in fresh.items() if tensor() is not None}

    def _note_fresh(self, tensors: Sequence[Tensor]) -> None:
        self._fresh.update({id(t): weakref.ref(t) for t in tensors})

    # -- the module ------------------------------------------------------------------------------------------------

    def of_module(self, plain: Callable[[], Any], *, whole: bool) -> Any:
        """Makes the module's ``state_dict``, on the CPU.

        Args:
            plain: makes it as on one device.
            whole: whether to put values in the place of placeholders.

        Raises:
            CheckpointError: where it can't be made of placeholders, since the user's own code reads values.
        """
        try:
            with self.in_placeholders():
                state = plain()
        except PlacementError as error:
            if not whole:
                raise CheckpointError(
                    f"the state_dict of {type(self.lead.root).__name__} can't be written where its tensors live, since making "
                    f"it reads their values ({error}); use save_distributed_checkpoint=False"
                ) from error
            state = plain()  # with everything brought home for its time
        return self.on_host(self.filled(state) if whole else state)

    def filled(self, state: Any) -> Any:
        """Puts values in the place of placeholders, in place where ``state`` is a dict of tensors."""
        if not isinstance(state, MutableMapping):
            return tree.map_tensors(self._values_of(tree.tensors_in(state)), state)
        value_of = self._values_of([t for value in state.values() for t in tree.tensors_in(value)])
        for key, value in state.items():
            state[key] = tree.map_tensors(value_of, value)
        return state

    def _values_of(self, tensors: Sequence[Tensor]) -> Callable[[Tensor], Tensor]:
        placeholders = {hidden_name(t): t for t in tensors if is_hidden(t)}
        values = self.values({name: t for name, t in placeholders.items() if not is_unmade(t)})
        values.update({name: self.lead.origins.value(name).clone() for name, t in placeholders.items() if is_unmade(t)})
        return lambda t: values[hidden_name(t)] if is_hidden(t) else t

    def values(self, placeholders: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Brings values to the lead's memory, piece by piece.

        Args:
            placeholders: what stands for them, by name.
        """
        by_process = self._by_process(placeholders)
        found: dict[str, Tensor] = {}
        with self.lead.failures.guarded("gathering"):
            for process, names in by_process.items():
                for piece in _pieces(names, placeholders):
                    [answer] = self.lead.workers.collect([process], "values", [piece])
                    found.update({name: value.cpu() for name, value in answer.items()})
        self._note_fresh(list(found.values()))
        return found

    def _by_process(self, names: Mapping[str, Any]) -> dict[int, list[str]]:
        found: dict[int, list[str]] = {}
        for name in names:
            found.setdefault(self.lead.planner.placement.primary(name), []).append(name)
        return found

    def on_host(self, state: Any) -> Any:
        """Copies what is on a GPU to the CPU, since a model that is cut may not fit one GPU; what is shared stays shared."""
        known: dict[Any, Tensor] = {}

        def move(tensor: Tensor) -> Tensor:
            if is_hidden(tensor) or tensor.device.type == "cpu" or tensor.layout != torch.strided:
                return tensor
            key = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
            if key not in known:
                known[key] = tensor.detach().cpu()
            return known[key]

        if self.lead.workers.devices[self.lead.index].type == "cpu":
            return state
        if not isinstance(state, MutableMapping):
            return tree.map_tensors(move, state)
        for key, value in state.items():
            state[key] = tree.map_tensors(move, value)
        return state

    # -- optimizers ------------------------------------------------------------------------------------------------

    def of_optimizer(self, plain: Callable[[], dict[str, Any]], *, whole: bool) -> dict[str, Any]:
        """Makes an optimizer's ``state_dict``, on the CPU.

        Args:
            plain: the optimizer's own, as the pipeline answers it.
            whole: whether to gather what other processes have; otherwise that is missing.
        """
        if whole:
            state = plain()
        else:
            with self.in_placeholders():
                state = plain()
        if isinstance(states := state.get("state"), dict) and all(isinstance(number, int) for number in states):
            state["state"] = dict(sorted(states.items()))  # the order in which one device makes them
        moved: dict[str, Any] = self.on_host(state)
        return moved

    def parts(self, optimizer: Optimizer, index: int) -> list[list[PartState]]:
        """Brings what the owners of one optimizer's parameters have made of it, piece by piece.

        Args:
            optimizer: the user's optimizer.
            index: its number.

        Returns:
            For each worker, for each optimizer up to this one, its part; those before are empty.
        """
        name_of = self.lead.planner.names.name_of
        held = {name_of[id(p)]: p for group in optimizer.param_groups for p in group["params"] if is_hidden(p)}
        by_process = self._by_process({} if self.described else held)
        empty = [PartState({}, [None] * len(face.param_groups), None) for face in self.lead.optimizers.faces[:index]]
        found = []
        for process in self.lead.owners:
            states: dict[str, Any] = {}
            for piece in [(), *_pieces(by_process.get(process, []), held)]:
                [part] = self.lead.workers.collect([process], "optimizer", [(index, *piece)])
                states.update(self._moved(part.state))
            self._note_fresh(tree.tensors_in(states))
            found.append([*empty, replace(part, state=states)])
        return found

    def _moved(self, states: Mapping[str, Any]) -> Mapping[str, Any]:
        if self.lead.workers.devices[self.lead.index].type == "cpu":
            return states
        moved: Mapping[str, Any] = tree.map_tensors(lambda t: t.cpu(), dict(states))
        return moved


def _pieces(names: Sequence[str], tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, ...]]:
    """Yields names whose tensors have some 64 MB together."""
    piece: list[str] = []
    size_bytes = 0
    for name in names:
        piece.append(name)
        size_bytes += tensors[name].numel() * tensors[name].element_size()
        if size_bytes >= _PIECE_BYTES:
            yield tuple(piece)
            piece, size_bytes = [], 0
    if piece:
        yield tuple(piece)
