"""Fake parameters and buffers, put in the place of the real ones for the length of a recording.

A fake tensor has shape, dtype and device but no numbers, so whatever depends on weights costs nothing while a forward is
recorded, and weights that live in another process need not be here. The module is changed in place and put back: a deep
copy would lose the Trainer, fail on locks, and cost memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

__all__ = ["Swap", "fake_weights", "named_weights"]


def named_weights(module: nn.Module) -> Iterator[tuple[str, str, Tensor]]:
    """Yields (kind, name, tensor) for every parameter and buffer, shared ones under each of their names."""
    for path, child in module.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        for name, parameter in child._parameters.items():
            if parameter is not None:
                yield "parameter", prefix + name, parameter
        for name, buffer in child._buffers.items():
            if buffer is not None:
                yield "buffer", prefix + name, buffer


class Swap:
    """Knows the fake of each real tensor, and can put single modules' real ones back.

    Attributes:
        fake_of: the fake by ``id`` of the real tensor.
        mode: the mode the fakes belong to.
    """

    def __init__(self, root: nn.Module, mode: FakeTensorMode, device: torch.device | None = None) -> None:
        self.root = root
        self.mode = mode
        self.device = device
        self.fake_of: dict[int, Tensor] = {}
        self._real: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._lists: list[tuple[list[Any], list[Any]]] = []

    def fake(self, real: Tensor) -> Tensor:
        """Returns the fake of one tensor, of the same shape, dtype, device and kind."""
        if nn.parameter.is_lazy(real):
            return real
        if id(real) not in self.fake_of:
            with self.mode, torch.no_grad():
                empty = torch.empty(real.shape, dtype=real.dtype, device=self.device or real.device)
            fake = nn.Parameter(empty, requires_grad=real.requires_grad) if isinstance(real, nn.Parameter) else empty
            self.fake_of[id(real)] = fake
        return self.fake_of[id(real)]

    def enter(self) -> None:
        """Puts the fakes in place."""
        for module in self.root.modules():
            if isinstance(module, torch.jit.ScriptModule):
                continue  # compiled code takes no fakes
            for registry in (module._parameters, module._buffers):
                self._real.append((registry, dict(registry)))
                for name, tensor in registry.items():
                    if tensor is not None:
                        registry[name] = self.fake(tensor)  # type: ignore[assignment]
            for value in module.__dict__.values():  # recurrent layers keep a second list of their weights
                if isinstance(value, list) and any(isinstance(item, nn.Parameter) for item in value):
                    self._lists.append((value, list(value)))
                    value[:] = [self.fake(item) if isinstance(item, nn.Parameter) else item for item in value]

    @contextmanager
    def real_weights(self, module: nn.Module) -> Iterator[None]:
        """Puts the real tensors of one module back for a block, with copies of its buffers, so that none changes."""
        own = {id(m._parameters) for m in module.modules()} | {id(m._buffers) for m in module.modules()}
        kept = [(registry, dict(registry)) for registry, _ in self._real if id(registry) in own]
        lists = [(items, list(items)) for items, _ in self._lists]
        try:
            for registry, before in self._real:
                if id(registry) in own:
                    for name, tensor in before.items():
                        is_buffer = tensor is not None and not isinstance(tensor, nn.Parameter)
                        registry[name] = tensor.clone() if is_buffer else tensor
            for items, before_items in self._lists:
                items[:] = before_items
            yield
        finally:
            for registry, fakes in kept:
                registry.update(fakes)
            for items, fake_items in lists:
                items[:] = fake_items

    def leave(self) -> None:
        """Puts the real tensors back, whatever the forward bound in between."""
        for registry, before in self._real:
            registry.clear()
            registry.update(before)
        for items, before_items in self._lists:
            items[:] = before_items
        self._real, self._lists = [], []


@contextmanager
def fake_weights(root: nn.Module, *, enabled: bool = True, device: torch.device | None = None) -> Iterator[Swap]:
    """Runs a block with fake parameters and buffers below ``root``.

    Args:
        root: the module whose weights are replaced.
        enabled: with ``False`` the real tensors stay, for a recording that computes numbers.
        device: where the fakes seem to be; by default where the real ones are.
    """
    swap = Swap(root, FakeTensorMode(allow_non_fake_inputs=True), device)
    try:
        if enabled:
            swap.enter()
        yield swap
    finally:
        swap.leave()
