"""Methods of the user's own objects, answered by the pipeline for the length of a Trainer call.

Patches are instance attributes, so the classes stay as they are; each knows what it covered and takes itself off.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["Cover", "Patches"]

_MISSING = object()


class Cover:
    """Stands as an instance attribute in front of a method.

    A copy or a pickle of the object it stands on gets the method itself, since a copy is no part of the pipeline.
    """

    def __init__(self, obj: Any, name: str, function: Callable[..., Any], plain: Callable[..., Any]) -> None:
        functools.update_wrapper(self, plain)
        self.__dict__.update(function.__dict__)
        self._obj = obj
        self._name = name
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._obj, self._name)


class Patches:
    """Holds instance attributes that stand in front of methods."""

    def __init__(self) -> None:
        self._put: list[tuple[dict[str, Any], str, Any, Any]] = []

    def put(self, obj: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Covers ``obj.name`` by what ``make`` builds from the method as it was."""
        plain = getattr(obj, name)
        attributes = obj.__dict__
        covered = attributes.get(name, _MISSING)
        attributes[name] = Cover(obj, name, make(plain), plain)
        self._put.append((attributes, name, covered, attributes[name]))

    def replace(self, obj: Any, name: str, value: Any) -> None:
        """Puts a value in the place of an attribute."""
        attributes = obj.__dict__
        self._put.append((attributes, name, attributes.get(name, _MISSING), value))
        attributes[name] = value

    def take_off(self) -> None:
        """Uncovers everything."""
        while self._put:
            attributes, name, covered, _ = self._put.pop()
            _set(attributes, name, covered)

    @contextmanager
    def lifted(self) -> Iterator[None]:
        """Uncovers everything for a block, as objects are pickled."""
        for attributes, name, covered, _ in reversed(self._put):
            _set(attributes, name, covered)
        try:
            yield
        finally:
            for attributes, name, _, cover in self._put:
                attributes[name] = cover


def _set(attributes: dict[str, Any], name: str, value: Any) -> None:
    if value is _MISSING:
        attributes.pop(name, None)
    else:
        attributes[name] = value
