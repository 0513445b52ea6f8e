"""Recordings: a graph with what decides whether it still holds, and what can keep a forward from becoming one."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor, nn
from torch.nn.modules import container, transformer

from lightning_mgpu.partition.attributes import AttributeGuards
from lightning_mgpu.partition.graph import (
    Graph,
    Line,
)

__all__ = ["Recording", "StructureError", "Unrecordable", "is_leaf_type", "version_of"]


class Unrecordable(BaseException):
    """Carries why a call can't be recorded up to the innermost module that can become a leaf.

    A ``BaseException``, so that an ``except Exception`` in the user's forward does not swallow it.
    """

    def __init__(self, reason: str, line: Line) -> None:
        super().__init__(reason)
        self.reason = reason
        self.line = line
        self.path = ""


class StructureError(Exception):
    """Says that a microbatch takes another way through the forward than the whole batch."""


@dataclass
class Recording:
    """Is a graph with what decides whether it still holds.

    Attributes:
        graph: the calls.
        attributes: the Python values of modules that were read.
        tensors: the tensor of each register, as the recording left it.
        promoted: modules called as one leaf because their inside can't be recorded, with the reason.
        buffers: what the forward left in each buffer, by name, where numbers were computed.
        versions: how often each constant had been changed in place, by register.
    """

    graph: Graph
    attributes: AttributeGuards
    tensors: list[Tensor] = field(default_factory=list)
    promoted: dict[str, str] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    versions: dict[int, int] = field(default_factory=dict)

    def holds(self) -> bool:
        """Says whether the Python values and the constants that the forward used are what they were."""
        constants = self.graph.constants
        return self.attributes.changed() is None and all(version_of(constants[r]) == v for r, v in self.versions.items())


def version_of(tensor: Tensor) -> int:
    """Returns how often a tensor was changed in place; those of inference mode do not count."""
    return 0 if tensor.is_inference() else tensor._version


def is_leaf_type(module: nn.Module) -> bool:
    """Says whether a module is one of torch.nn's own layers, which are recorded as one call."""
    kind = type(module)
    if not kind.__module__.startswith("torch.nn.modules."):
        return False
    return kind.__module__ not in (container.__name__, transformer.__name__)
