"""The ``training`` flags of a module and all below it, as one value that travels to its copy on a worker."""

from __future__ import annotations

from torch import nn

__all__ = ["Modes", "modes_of", "set_modes"]

Modes = tuple[bool, ...]


def modes_of(module: nn.Module) -> Modes:
    """Returns the flags of a module and of those below it, in the order of ``module.modules()``."""
    return tuple([child.training for child in module.modules()])


def set_modes(module: nn.Module, modes: Modes) -> None:
    """Gives a module and those below it their flags."""
    for child, training in zip(module.modules(), modes, strict=True):
        child.training = training
