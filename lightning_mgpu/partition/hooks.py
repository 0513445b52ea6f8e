"""Forward hooks that collect: they fill a list or dict of their own, which a replayed forward would not fill again.

A hook that changes what a module returns is recorded with the forward. One that keeps activations in a container outside the
modules would keep the recording's, once and never again, so it is refused and its container is put back as it was.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Self

from torch import nn

from lightning_mgpu.errors import RecordingError

__all__ = ["HookContainers"]

_CONTAINERS = (list, dict, set, deque)
_MAX_ITEMS = 10_000


def _hooks_of(module: nn.Module) -> Iterator[Callable[..., Any]]:
    yield from module._forward_hooks.values()
    yield from module._forward_pre_hooks.values()


def _reachable(function: Any) -> Iterator[Any]:
    """Yields what a hook can fill: variables it closes over, its bound object's attributes, partial arguments, globals."""
    inner = getattr(function, "func", None)
    if inner is not None and hasattr(function, "keywords"):
        yield from (*function.args, *function.keywords.values())
        yield from _reachable(inner)
        return
    owner = getattr(function, "__self__", None)
    function = getattr(function, "__func__", function)
    if not hasattr(function, "__code__") and callable(function):
        owner = function if owner is None else owner
        function = getattr(type(function).__call__, "__func__", type(function).__call__)
    if owner is not None and not isinstance(owner, nn.Module):
        yield from getattr(owner, "__dict__", {}).values()
    for cell in getattr(function, "__closure__", None) or ():
        try:
            held = cell.cell_contents
        except ValueError:
            continue
        yield held
        if not isinstance(held, (nn.Module, *_CONTAINERS)) and not callable(held):
            yield from getattr(held, "__dict__", {}).values()
    code, around = getattr(function, "__code__", None), getattr(function, "__globals__", {})
    if code is not None:
        yield from (around[name] for name in code.co_names if name in around)


class HookContainers:
    """Remembers the containers that hooks below a root can fill, and puts them back at the end."""

    def __init__(self, root: nn.Module) -> None:
        self._kept: list[tuple[str, Any, Any]] = []
        seen: set[int] = set()
        for path, module in root.named_modules():
            for hook in _hooks_of(module):
                if (getattr(hook, "__module__", None) or "").startswith("torch."):
                    continue
                for item in _reachable(hook):
                    if isinstance(item, _CONTAINERS) and id(item) not in seen and len(item) <= _MAX_ITEMS:
                        seen.add(id(item))
                        self._kept.append((path, item, item.copy()))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for _path, container, content in self._kept:
            if not _same(container, content):
                container.clear()
                if isinstance(container, (list, deque)):
                    container.extend(content)
                else:
                    container.update(content)

    def refuse_changes(self) -> None:
        """Raises where the forward filled one of them.

        Raises:
            RecordingError: with the module whose hook it is, and the remedy.
        """
        for path, container, content in self._kept:
            if not _same(container, content):
                raise RecordingError(
                    f"a forward hook of {path or 'the module'} keeps values in a {type(container).__name__} of its own, which "
                    "a replayed forward would not fill again; return what you need from the forward, store it on a module "
                    "(self.features = h), or remove the hook while the pipeline runs"
                )


def _same(now: Any, before: Any) -> bool:
    if len(now) != len(before):
        return False
    if isinstance(now, dict):
        return all(key in now and now[key] is value for key, value in before.items())
    if isinstance(now, set):
        return bool(now == before)
    return all(a is b for a, b in zip(now, before, strict=True))
