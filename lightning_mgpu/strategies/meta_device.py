"""Modules that are built on the meta device, where they take no memory: each stage gets its part of the values."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from lightning.pytorch.strategies.single_device import SingleDeviceStrategy
from torch import Tensor, nn
from typing_extensions import override

from lightning_mgpu.runtime.unmade import Origins, is_unmade, relink

__all__ = ["MetaDeviceStrategy"]


class MetaDeviceStrategy(SingleDeviceStrategy):
    """Takes modules on the meta device; to be subclassed.

    Attributes:
        origins: where their values come from.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.origins = Origins()

    @contextmanager
    @override
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Builds modules on the meta device where they are to be empty, as in ``trainer.init_module(empty_init=True)``."""
        if not empty_init:
            with super().tensor_init_context(empty_init):
                yield
            return
        with torch.device("meta"), self.precision_plugin.tensor_init_context():
            yield

    @override
    def model_to_device(self) -> None:
        """Moves what has values; placeholders stand for the rest from now on."""
        root = self.lightning_module
        assert root is not None
        self.origins.adopt(root, self.root_device)
        self.origins.check()
        with _without_empty(root):
            super().model_to_device()

    @override
    def teardown(self) -> None:
        """Leaves what never got a value on the meta device."""
        root = self.lightning_module
        try:
            with nullcontext() if root is None else _without_empty(root):
                super().teardown()
        finally:
            self.origins.forget()


@contextmanager
def _without_empty(root: nn.Module) -> Iterator[None]:
    """Takes what has no value out of a module for a block, since it can't be moved."""
    registries: list[dict[str, Any]] = [each for module in root.modules() for each in (module._parameters, module._buffers)]
    taken = [(registry, dict(registry)) for registry in registries if any(map(_is_empty, registry.values()))]
    try:
        for registry, before in taken:
            for key in [key for key, tensor in before.items() if _is_empty(tensor)]:
                del registry[key]
        yield
    finally:
        for registry, before in taken:
            now = dict(registry)
            registry.clear()
            registry.update({key: now.get(key, tensor) for key, tensor in before.items()})
        for module in root.modules() if taken else ():
            relink(module)


def _is_empty(tensor: Tensor | None) -> bool:
    return tensor is not None and (is_unmade(tensor) or tensor.is_meta)
