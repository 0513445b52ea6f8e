"""Names of modules and tensors below one root: what a recording, a placement and a checkpoint call them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from lightning_mgpu.partition.fakes import named_weights

__all__ = ["Names"]


class Names:
    """Gives every module and tensor below ``root`` its name; what is shared goes by its first one.

    Attributes:
        root: the module all names start from.
        path_of: path by ``id`` of the module.
        module_at: module by path, under each of its paths.
        name_of: canonical name by ``id`` of the tensor.
        tensors: parameter or buffer by canonical name.
        kinds: ``"parameter"`` or ``"buffer"`` by canonical name.
        aliases: every name of a tensor, by canonical name.
        canonical: canonical name by each name.
        changing: names of the parameters that a recorded forward changes by itself, as one that clips its weights.
        device: where weights seem to be while a forward is recorded; ``None`` for where they are.
    """

    def __init__(self, root: nn.Module) -> None:
        self.root = root
        self.device: torch.device | None = None
        self.path_of: dict[int, str] = {}
        self.module_at: dict[str, nn.Module] = {}
        for path, module in root.named_modules(remove_duplicate=False):
            self.path_of.setdefault(id(module), path)
            self.module_at[path] = module
        self.name_of: dict[int, str] = {}
        self.tensors: dict[str, Tensor] = {}
        self.kinds: dict[str, str] = {}
        self.aliases: dict[str, list[str]] = {}
        self.canonical: dict[str, str] = {}
        self.changing: set[str] = set()
        for kind, name, tensor in named_weights(root):
            canonical = self.name_of.setdefault(id(tensor), name)
            self.tensors.setdefault(canonical, tensor)
            self.kinds.setdefault(canonical, kind)
            self.aliases.setdefault(canonical, []).append(name)
            self.canonical[name] = canonical

    def current(self, name: str) -> Tensor:
        """Returns the parameter or buffer that the module holds under a name now, or held when it still had the name."""
        owner, _, attribute = name.rpartition(".")
        module = self.module_at[owner]
        for registry in (module._parameters, module._buffers):
            if attribute in registry and (found := registry[attribute]) is not None:
                return found
        return self.tensors[name]

    @contextmanager
    def scratch_buffers(self) -> Iterator[None]:
        """Gives all modules copies of their buffers for a block, so that what it changes is forgotten.

        What it changes in parameters is undone.
        """
        modules = (m for m in self.root.modules() if not isinstance(m, torch.jit.ScriptModule))
        kept = [(m._buffers, dict(m._buffers)) for m in modules]
        copies: dict[int, Tensor] = {}
        parameters = [self.current(name) for name in sorted(self.changing)]
        values = [(p, p.data, p.data.clone()) for p in parameters]
        try:
            for registry, before in kept:
                for key, buffer in before.items():
                    if buffer is not None:
                        registry[key] = copies.setdefault(id(buffer), buffer.detach().clone())
            yield
        finally:
            for registry, before in kept:
                registry.clear()
                registry.update(before)
            for parameter, data, value in values:
                parameter.data = data
                data.copy_(value)

    def tensor_names(self, module: nn.Module) -> list[str]:
        """Lists the canonical names of the parameters and buffers below a module."""
        found = (self.name_of[id(t)] for _, _, t in named_weights(module) if id(t) in self.name_of)
        return list(dict.fromkeys(found))

    def modules_below(self, path: str) -> Iterable[tuple[str, nn.Module]]:
        """Yields (canonical path, module) for a module and all below it, each once."""
        for module in self.module_at[path].modules():
            yield self.path_of[id(module)], module

    def is_shared(self, name: str) -> bool:
        """Says whether a tensor goes by several names."""
        return len(self.aliases[name]) > 1
