"""The recorded forward: a list of calls in the order they were made.

A *register* is a number that stands for one tensor object of the recorded forward. A node reads registers and writes
registers; a call in place writes the register it read. Registers that no node makes are *sources*: the arguments of the
forward, parameters, buffers, and constants (tensors that lay around when the forward ran).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_mgpu.partition.ambient import Ambient
from lightning_mgpu.tree import Spec

__all__ = ["ApplyFunction", "Graph", "Guard", "Line", "Node", "Ref", "Source", "Value", "get_attribute", "set_attribute"]


@dataclass(frozen=True, slots=True)
class Ref:
    """Stands for the tensor of one register inside a node's arguments."""

    register: int


@dataclass(frozen=True, slots=True)
class Line:
    """Names the user's line a call came from."""

    filename: str
    lineno: int
    function: str

    def __str__(self) -> str:
        return f"{self.filename}:{self.lineno} in {self.function}"


@dataclass(frozen=True, slots=True)
class Source:
    """Says where a register that no node makes comes from; ``name`` is a parameter's, a buffer's, or a position."""

    kind: Literal["input", "parameter", "buffer", "constant"]
    name: str

    @property
    def is_weight(self) -> bool:
        """Whether it is a parameter or a buffer."""
        return self.kind in ("parameter", "buffer")


@dataclass(slots=True)
class Value:
    """Describes the tensor of one register.

    ``storage`` is equal for registers that share memory. ``private`` is true for what depends on weights or on random
    numbers, so that it differs between the recording and a run.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    storage: int
    private: bool

    @property
    def num_bytes(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count * self.dtype.itemsize


@dataclass(slots=True)
class Node:
    """Is one recorded call.

    Attributes:
        target: path of the leaf module that was called, or the function.
        args, kwargs: the arguments, with `Ref` in the place of tensors.
        outputs: register of each tensor in the result, in flattening order; ``None`` for leaves that are no tensors.
        mutates: registers whose memory the call changed.
        path: innermost module of the user's in whose forward the call stands.
        changes: names of the buffers whose memory the call changed.
        flops: floating-point operations of the forward call.
        num_bytes: bytes read and written by the forward call.
    """

    target: str | Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[int | None, ...]
    reads: tuple[int, ...]
    mutates: tuple[int, ...]
    ambient: Ambient
    path: str
    line: Line
    flops: float = 0.0
    num_bytes: int = 0
    random: bool = False
    dynamic: bool = False
    keep: bool = False
    metadata_only: bool = False
    changes: tuple[str, ...] = ()

    @property
    def is_module(self) -> bool:
        return isinstance(self.target, str)

    @property
    def name(self) -> str:
        if isinstance(self.target, str):
            return self.target
        inside = f" in {self.path}" if self.path else ""
        return f"{getattr(self.target, '__name__', repr(self.target))}{inside}"

    def __str__(self) -> str:
        return f"{self.name} ({self.line})"


@dataclass(slots=True)
class Guard:
    """Is a Python value that the forward took from tensors by calling ``target``, after ``position`` nodes."""

    register: int
    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    value: Any
    position: int
    line: Line


@dataclass(slots=True)
class Graph:
    """Is one recorded forward.

    Attributes:
        nodes: the calls in order.
        values: description of each register.
        sources: where registers that no node makes come from.
        inputs: registers of the tensors among the arguments, in flattening order.
        outputs: for each leaf of the result its register as `Ref`, or the leaf itself.
        spec: how the leaves make up the result (and the tensors stored on modules).
        guards: Python values taken from tensors.
        buffer_writes: buffers that the forward rebound, by name, to registers.
        constants: the tensors behind constant sources.
        leaves: paths of the modules called as one node.
        sharded: registers of which every rank of a tensor-parallel group has a part, or a share, of its own.
        attributes: simple Python values read from the modules, by (path, attribute).
    """

    nodes: list[Node]
    values: list[Value]
    sources: dict[int, Source]
    inputs: list[int]
    outputs: list[Any]
    spec: Spec
    guards: list[Guard] = field(default_factory=list)
    buffer_writes: dict[str, int] = field(default_factory=dict)
    constants: dict[int, Tensor] = field(default_factory=dict)
    leaves: tuple[str, ...] = ()
    sharded: frozenset[int] = frozenset()

    @property
    def output_registers(self) -> list[int]:
        return [leaf.register for leaf in self.outputs if isinstance(leaf, Ref)]

    def producers(self) -> dict[int, int]:
        """Maps each register to the index of the node that first wrote it."""
        made: dict[int, int] = {}
        for index, node in enumerate(self.nodes):
            for register in node.outputs:
                if register is not None and register not in self.sources:
                    made.setdefault(register, index)
        return made

    def live_nodes(self, wanted: Iterable[int], before: int | None = None, *, effects: bool = True) -> list[int]:
        """Lists the nodes needed for ``wanted`` registers, in order.

        A node that changes memory is needed when anything that shares this memory is.

        Args:
            wanted: registers to compute.
            before: only nodes before this position count, by default all.
            effects: whether nodes that matter without being read are needed too, with what they read.
        """
        storages = {self.values[r].storage for r in wanted}
        registers = set(wanted)
        needed: list[int] = []
        for index in range(len(self.nodes) if before is None else before)[::-1]:
            node = self.nodes[index]
            makes = any(r in registers for r in node.outputs if r is not None)
            changes = any(self.values[r].storage in storages for r in node.mutates)
            if makes or changes or (effects and node.keep):
                needed.append(index)
                registers.update(node.reads)
                storages.update(self.values[r].storage for r in node.reads)
        return needed[::-1]

    def storage_of(self, registers: Iterable[int]) -> set[int]:
        return {self.values[r].storage for r in registers}


@dataclass(frozen=True)
class ApplyFunction:
    """Calls a custom autograd function, as a target that can be pickled."""

    function: type[torch.autograd.Function]

    @property
    def __name__(self) -> str:
        return f"{self.function.__name__}.apply"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function.apply(*args, **kwargs)


def get_attribute(tensor: Tensor, name: str) -> Any:
    """Reads a property of a tensor, such as ``x.T``, as a target that can be pickled."""
    return getattr(tensor, name)


def set_attribute(tensor: Tensor, name: str, value: Any) -> None:
    """Sets a property of a tensor, such as ``x.requires_grad``, as a target that can be pickled."""
    setattr(tensor, name, value)


def positions(items: Sequence[Any], kind: type) -> list[int]:
    """Lists the indices of the items of one type."""
    return [i for i, item in enumerate(items) if isinstance(item, kind)]
