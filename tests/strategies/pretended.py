"""Pretended devices: tensors on the CPU are told apart by where they would be, and calls that mix devices fail as on GPUs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
from typing_extensions import override

from lightning_mgpu import LayerwiseStrategy
from lightning_mgpu.partition.devices import StageDevices
from lightning_mgpu.runtime.lead import Lead

HOME = 0  # where batches are
_BETWEEN_DEVICES = {torch.ops.aten.copy_.default, torch.ops.aten._has_compatible_shallow_copy_type.default}  # torch's own way


class PretendedDevices(TorchDispatchMode):
    """Follows every tensor's memory through every call, forward and backward.

    What is made of nothing, as by ``torch.arange``, goes with anything: the recording's device is put in its place.

    Attributes:
        moves: how often something was moved, by (from, to).
    """

    def __init__(self) -> None:
        super().__init__()
        self.moves: Counter[tuple[int | None, int]] = Counter()
        self._where: dict[int, int] = {}
        self._kept: list[Any] = []  # so that no memory is given to another tensor

    def of(self, tensor: Tensor) -> int | None:
        """Returns where a tensor is; ``None`` where it goes with anything."""
        return self._where.get(tensor.untyped_storage().data_ptr())

    def put(self, tensor: Tensor, device: int) -> None:
        """Notes where a tensor is."""
        if tensor.numel():
            self._where[tensor.untyped_storage().data_ptr()] = device
            self._kept.append(tensor.untyped_storage())

    @override
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        given = [t for t in tree_flatten((args, kwargs or {}))[0] if isinstance(t, Tensor) and t.device.type == "cpu"]
        real = [t for t in given if type(t) in (Tensor, nn.Parameter)]  # fake ones have no memory
        devices = {self.of(t) for t in real if t.numel() > 1} - {None}  # metrics add up single numbers of anywhere
        if func in _BETWEEN_DEVICES:
            return result
        if len(devices) > 1:
            shown = ", ".join(f"{tuple(t.shape)} on {self.of(t)}" for t in real)
            raise RuntimeError(f"{func} mixes devices: {shown}")
        for tensor in tree_flatten(result)[0]:
            if devices and isinstance(tensor, Tensor) and type(tensor) is Tensor:
                self.put(tensor, next(iter(devices)) or HOME)
        return result


class _Moved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, pretended: PretendedDevices, device: int) -> Tensor:
        ctx.pretended, ctx.source = pretended, pretended.of(tensor)
        return moved(tensor, pretended, device)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return moved(gradients[0], ctx.pretended, ctx.source or HOME), None, None


def moved(tensor: Tensor, pretended: PretendedDevices, device: int) -> Tensor:
    """Copies a tensor to another device."""
    with torch.utils._python_dispatch._disable_current_modes():
        copy = tensor.detach().clone()
    pretended.moves[pretended.of(tensor), device] += pretended.of(tensor) != device
    pretended.put(copy, device)
    return copy


@contextmanager
def pretended_devices(monkeypatch: Any, num_devices: int) -> Iterator[PretendedDevices]:
    """Has the stages of a lead on devices of their own for a block; the last stage is at home, stage 0 on device 1."""
    pretended = PretendedDevices()
    plain = Lead.__init__

    def init(self: Lead, *args: Any, **kwargs: Any) -> None:
        plain(self, *args, **kwargs)
        assert isinstance(self.devices, StageDevices)
        numbers = [*range(1, num_devices), HOME]
        self.devices.devices = tuple(torch.device("cpu", number) for number in numbers)
        self.devices.move = lambda tensor, device: _Moved.apply(tensor, pretended, device.index)

    def batch_to_device(self: LayerwiseStrategy, batch: Any, *args: Any, **kwargs: Any) -> Any:
        for tensor in tree_flatten(batch)[0]:
            if isinstance(tensor, Tensor):
                pretended.put(tensor, HOME)
        return batch

    monkeypatch.setattr(Lead, "__init__", init)
    monkeypatch.setattr(LayerwiseStrategy, "batch_to_device", batch_to_device)
    with pretended:
        yield pretended
