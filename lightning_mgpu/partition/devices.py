"""Stages on several devices of one process: where each has its weights, and how what it is given gets there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from lightning_mgpu.partition.names import Names
    from lightning_mgpu.partition.placement import Placement

__all__ = ["StageDevices", "move"]


def move(tensor: Tensor, device: torch.device) -> Tensor:
    """Returns a tensor on a device, with its gradient history; the way that everything takes from device to device."""
    return tensor.to(device, non_blocking=True)


class StageDevices:
    """Spreads the weights of one process over the devices of its stages.

    Attributes:
        devices: the device of each stage; the last one is the lead's own.
        away: whether weights are on the devices of their stages now.
        move: what moves a tensor.
    """

    def __init__(
        self,
        names: Names,
        placement: Placement,
        devices: Sequence[torch.device],
        move: Callable[[Tensor, torch.device], Tensor] = move,
    ) -> None:
        self.names = names
        self.placement = placement
        self.devices = tuple(devices)
        self.move = move
        self.away = False

    @property
    def home(self) -> torch.device:
        """The lead's own device, where arguments come from and results go."""
        return self.devices[-1]

    def of(self, stage: int) -> torch.device:
        return self.devices[stage]

    def device_of(self, name: str) -> torch.device:
        """Returns where a parameter or buffer is: with the last of its stages, where another may borrow it."""
        owners = self.placement.owners.get(name)
        return self.home if owners is None else self.of(max(owners))

    # -- weights ---------------------------------------------------------------------------------------------------

    def place(self, optimizers: Iterable[Optimizer]) -> None:
        """Moves weights, their gradients and the optimizers' states to the devices of their stages."""
        self._move_all({name: self.device_of(name) for name in self.names.tensors}, optimizers)
        self.away = True

    def bring_home(self, optimizers: Iterable[Optimizer]) -> None:
        """Moves everything to the lead's own device."""
        if self.away:
            self._move_all(dict.fromkeys(self.names.tensors, self.home), optimizers)
            self.away = False

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Has all weights on the lead's own device for a block that runs parts of the module as they are."""
        if not self.away:
            yield
            return
        self.bring_home(())
        try:
            yield
        finally:
            self.place(())

    def _move_all(self, wanted: Mapping[str, torch.device], optimizers: Iterable[Optimizer]) -> None:
        with torch.no_grad():
            for name, device in wanted.items():
                tensor = self.names.current(name)
                if tensor.device != device or self.move is not move:
                    tensor.data = self.move(tensor.data, device)
                    if tensor.grad is not None:
                        tensor.grad = self.move(tensor.grad, device)
            for parameter, state in (item for optimizer in optimizers for item in optimizer.state.items()):
                device = wanted.get(self.names.name_of.get(id(parameter), ""), self.home)
                for key, value in state.items():
                    if isinstance(value, Tensor) and value.ndim:  # counts of steps stay where their optimizer wants them
                        state[key] = self.move(value, device)

    # -- a stage at work -------------------------------------------------------------------------------------------

    @contextmanager
    def at_work(self, stage: int, names: Iterable[str], *, grad: bool) -> Iterator[None]:
        """Makes a stage's device the current one for a block, with copies there of the weights that live on another.

        Args:
            stage: the stage.
            names: the weights it uses.
            grad: whether gradients go back from the copies to the weights.
        """
        device = self.of(stage)
        borrowed = [name for name in names if self.device_of(name) != device]
        current = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
        replaced: list[tuple[dict[str, Any], str, Tensor]] = []
        try:
            for name in borrowed:
                with torch.set_grad_enabled(grad):
                    moved = self.move(self.names.current(name), device)
                for registry, key in self._places_of(name):
                    replaced.append((registry, key, registry[key]))
                    registry[key] = moved
            with current:
                yield
        finally:
            for registry, key, tensor in replaced:
                registry[key] = tensor

    def _places_of(self, name: str) -> list[tuple[dict[str, Any], str]]:
        tensor = self.names.current(name)
        modules: Iterable[nn.Module] = self.names.root.modules()
        registries = [registry for module in modules for registry in (module._parameters, module._buffers)]
        return [(registry, key) for registry in registries for key, value in registry.items() if value is tensor]
