"""What a forward changes besides tensors: attributes of modules, containers they hold, random generators."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from lightning_mgpu import tree
from lightning_mgpu.errors import RecordingError
from lightning_mgpu.partition.attributes import is_simple
from lightning_mgpu.partition.graph import (
    Line,
)
from lightning_mgpu.partition.names import Names
from lightning_mgpu.partition.recording import is_leaf_type

__all__ = ["ModuleChanges", "draws", "preserved_rng", "unrepeatable_text"]


@contextmanager
def preserved_rng() -> Iterator[None]:
    """Puts the states of torch's, Python's and NumPy's random generators back at the end."""
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def draws() -> Any:
    """Returns the states of Python's and NumPy's generators, to see whether anything drew from them."""
    state: Any = np.random.get_state()
    return random.getstate()[1], state[1].tobytes(), state[2]


class ModuleChanges:
    """Remembers the attributes of all modules, finds what a forward changed, and puts everything back."""

    def __init__(self, root: nn.Module) -> None:
        self.before = [(module, dict(module.__dict__), _contents(module)) for module in root.modules()]
        self.known = {id(module): attributes for module, attributes, _ in self.before}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for module, attributes, contents in self.before:
            if _differs(module.__dict__, attributes):
                module.__dict__.clear()
                module.__dict__.update(attributes)
            for name, content in contents.items():
                _refill(attributes[name], content)

    def stored_tensors(self, names: Names, leaves: Sequence[str]) -> dict[tuple[str, str], Any]:
        """Returns what the forward stored on modules by (path, attribute), where it holds tensors.

        Everything else that changed is refused: a replayed forward would not change it again. What leaf modules do inside
        is their own: they run as they are.
        """
        stored: dict[tuple[str, str], Any] = {}
        inside = {id(child) for leaf in leaves for child in names.module_at[leaf].modules()}
        for module, attributes, contents in self.before:
            path = names.path_of[id(module)]
            if module.training != attributes.get("training", module.training):
                reason = f"puts {path or 'itself'!r} in another mode, which a replayed forward would not do; override train()"
                raise RecordingError(unrepeatable_text(names.root, reason))
            if id(module) in inside:
                _refuse_kept_tensors(module, attributes, path)
                continue
            for name, value in module.__dict__.items():
                old = attributes.get(name, ModuleChanges)
                if value is old or (is_simple(value) and is_simple(old) and value == old):
                    continue
                if tree.tensors_in(value):
                    stored[path, name] = value
                elif name != "_forward_pre_hooks":
                    raise RecordingError(unrepeatable_text(module, _changed_text(path, name)))
            for name, content in contents.items():
                if not _same_items(attributes[name], content):
                    raise RecordingError(unrepeatable_text(module, _changed_text(path, name)))
        return stored


def _refuse_kept_tensors(module: nn.Module, before: dict[str, Any], path: str) -> None:
    """Refuses a tensor that was put on a leaf from outside, as by a hook: the leaf may run in another process."""
    for name, value in module.__dict__.items():
        if name not in before and isinstance(value, Tensor) and is_leaf_type(module):
            raise RecordingError(unrepeatable_text(module, _changed_text(path, name)))


def unrepeatable_text(module: nn.Module, reason: str) -> str:
    """Writes why a module's forward can't be recorded, with the line it begins at."""
    code = getattr(type(module).forward, "__code__", None)
    where = "" if code is None else f" ({Line(code.co_filename, code.co_firstlineno, code.co_name)})"
    return f"cannot record the forward of {type(module).__name__}{where}: it {reason}"


def _changed_text(path: str, name: str) -> str:
    where = f"{path}.{name}" if path else name
    return (
        f"changes the attribute {where!r}, which a replayed forward would not do again; change it in training_step, in a "
        "callback, or keep it as a buffer"
    )


def _differs(now: dict[str, Any], before: dict[str, Any]) -> bool:
    return len(now) != len(before) or any(now.get(k, ModuleChanges) is not v for k, v in before.items())


def _contents(module: nn.Module) -> dict[str, Any]:
    own = nn.Module().__dict__
    return {
        name: (list(value) if isinstance(value, list) else dict(value))
        for name, value in module.__dict__.items()
        if name not in own and type(value) in (list, dict) and len(value) <= 256
    }


def _same_items(now: Any, before: Any) -> bool:
    if len(now) != len(before):
        return False
    if isinstance(now, dict):
        return all(key in now and now[key] is value for key, value in before.items())
    return all(a is b or _are_parameters(a, b) for a, b in zip(now, before, strict=True))


def _are_parameters(now: Any, before: Any) -> bool:
    """Says whether a weight stands in the place of a weight, as a fake one does while a forward is recorded."""
    return isinstance(now, nn.Parameter) and isinstance(before, nn.Parameter)


def _refill(container_: Any, content: Any) -> None:
    if _same_items(container_, content):
        return
    if isinstance(container_, list):
        container_[:] = content
    else:
        container_.clear()
        container_.update(content)
