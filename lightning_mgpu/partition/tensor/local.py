"""What a rank has of a module: its parts of parameters and buffers, and layers that use them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from lightning_mgpu.partition.names import Names
from lightning_mgpu.partition.tensor.layout import shard
from lightning_mgpu.partition.tensor.plan import TensorPlan

__all__ = ["LocalStore", "local_leaf", "local_tensors"]


def local_leaf(module: nn.Module, path: str, find: Callable[[str], Tensor]) -> Any:
    """Makes a layer that is like another one but has other parameters and buffers.

    Args:
        module: the layer, which stays as it is.
        path: its path.
        find: returns what takes the place of a parameter or buffer, by its name.

    Returns:
        The layer; its settings and hooks are those of ``module`` at this moment.
    """
    local = module.__new__(type(module))
    local.__dict__.update(module.__dict__)
    local._parameters = _found(module._parameters, path, find)
    local._buffers = _found(module._buffers, path, find)
    local._modules = {
        key: None if child is None else local_leaf(child, f"{path}.{key}", find) for key, child in module._modules.items()
    }
    return local


def _found(registry: Mapping[str, Tensor | None], path: str, find: Callable[[str], Tensor]) -> dict[str, Any]:
    return {key: None if tensor is None else find(f"{path}.{key}") for key, tensor in registry.items()}


def local_tensors(names: Names, plan: TensorPlan, rank: int) -> dict[str, Tensor]:
    """Copies a rank's parts of the parameters and buffers below a root, by canonical name."""
    found: dict[str, Tensor] = {}
    for name, kind in names.kinds.items():
        whole = names.current(name)
        part = shard(whole.detach(), plan.layouts.get(name), rank, plan.num_ranks).clone()
        found[name] = nn.Parameter(part, requires_grad=whole.requires_grad) if kind == "parameter" else part
    return found


class LocalStore:
    """Holds a rank's parameters and buffers by the module's names, and layers that use them.

    Args:
        names: names below the root; the module itself stays as it is.
        tensors: the rank's part of each parameter and buffer, by canonical name.
    """

    def __init__(self, names: Names, tensors: dict[str, Tensor]) -> None:
        self.names = names
        self.tensors = tensors
        self._modules: dict[str, nn.Module] = {}

    def module(self, path: str) -> nn.Module:
        if path not in self._modules:
            whole = self.names.module_at[path]
            self._modules[path] = local_leaf(whole, path, lambda name: self.tensors[self.names.canonical[name]])
        for own, whole in zip(self._modules[path].modules(), self.names.module_at[path].modules(), strict=True):
            own.training = whole.training
        return self._modules[path]

    def tensor(self, name: str) -> Tensor:
        owner, _, attribute = name.rpartition(".")
        own = self._modules.get(owner)
        if own is not None and own._buffers.get(attribute) is not None:
            return own._buffers[attribute]  # type: ignore[return-value]
        return self.tensors[name]

    def set_buffer(self, name: str, value: Tensor) -> None:
        owner, _, attribute = name.rpartition(".")
        self.tensors[name] = value
        if owner in self._modules:
            self._modules[owner]._buffers[attribute] = value
