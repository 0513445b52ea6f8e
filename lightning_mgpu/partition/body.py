"""The body of a recorded forward as a sequence to be cut: what each place costs in bytes, and where no cut may lie."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lightning_mgpu.partition.batch import Batching
from lightning_mgpu.partition.cost import weights_of
from lightning_mgpu.partition.graph import Graph
from lightning_mgpu.partition.names import Names

__all__ = ["Body"]


@dataclass
class Body:
    """Is the sequence of body nodes with what decides where it may be cut; positions count body nodes."""

    graph: Graph
    batching: Batching
    names: Names

    def __post_init__(self) -> None:
        self.nodes = self.batching.body
        self.weights = [weights_of(self.graph, index, self.names) for index in self.nodes]
        self.first: dict[int, int] = {}
        self.last: dict[int, int] = {}
        for position, index in enumerate(self.nodes):
            node = self.graph.nodes[index]
            for register in node.outputs:
                if register is not None:
                    self.first.setdefault(register, position)
            for register in node.reads:
                self.last[register] = position
        self.last |= dict.fromkeys(self.batching.wanted, len(self.nodes))

    def crossing(self) -> list[float]:
        """Counts the bytes alive across each position."""
        bytes_ = [0.0] * (len(self.nodes) + 1)
        for register, last in self.last.items():
            source = self.graph.sources.get(register)
            if source is not None and source.kind != "input":
                continue
            for position in range(self.first.get(register, -1) + 1, min(last, len(self.nodes)) + 1):
                bytes_[position] += self.graph.values[register].num_bytes
        return bytes_

    def illegal(self) -> list[str]:
        """Says for each position why no cut may lie there; an empty string where it may."""
        reasons = [""] * (len(self.nodes) + 1)
        self._forbid_shared_memory(reasons)
        self._forbid_inside_buffers(reasons)
        for register in self.graph.sharded & self.first.keys():
            reason = f"{self.graph.nodes[self.nodes[self.first[register]]]} makes a value that is split over ranks there"
            self._forbid(reasons, self.first[register] + 1, self.last.get(register, 0), reason)
        for position, index in enumerate(self.nodes):
            node = self.graph.nodes[index]
            if node.target is torch.autograd.grad:
                start = min((self.first.get(r, 0) for r in node.reads), default=0)
                self._forbid(reasons, start + 1, position, f"{node} needs the calls before it in one stage")
        return reasons

    @staticmethod
    def _forbid(reasons: list[str], start: int, end: int, reason: str) -> None:
        for position in range(max(start, 0), min(end + 1, len(reasons))):
            reasons[position] = reasons[position] or reason

    def _forbid_shared_memory(self, reasons: list[str]) -> None:
        changes: dict[int, int] = {}
        for position, index in enumerate(self.nodes):
            for storage in self.graph.storage_of(self.graph.nodes[index].mutates):
                changes[storage] = position
        for storage, change in changes.items():
            sharing = [r for r in self.last if self.graph.values[r].storage == storage and r in self.first]
            for position in range(change + 1):
                alive = [r for r in sharing if self.first[r] < position <= self.last[r]]
                if len(alive) > 1:
                    node = self.graph.nodes[self.nodes[change]]
                    self._forbid(reasons, position, position, f"{node} changes memory that two values share there")

    def _forbid_inside_buffers(self, reasons: list[str]) -> None:
        uses: dict[str, list[int]] = {}
        changed: dict[str, int] = {}
        owned = {self.graph.values[r].storage: s.name for r, s in self.graph.sources.items() if s.is_weight}
        for position, (index, weights) in enumerate(zip(self.nodes, self.weights, strict=True)):
            node = self.graph.nodes[index]
            for name in {owned[s] for s in self.graph.storage_of(node.reads) if s in owned} | set(weights):
                uses.setdefault(name, []).append(position)
            changed.update(dict.fromkeys(node.changes, position))
            if node.is_module:
                changed.update({w: position for w in weights if self.names.kinds[w] == "buffer"})
        for name, register in self.graph.buffer_writes.items():
            if register in self.first:
                uses.setdefault(name, []).append(self.first[register])
                changed[name] = max(uses[name])
        in_tail = self._changed_in_tail(owned)
        for name, where in uses.items():
            kind = self.names.kinds[name]
            if name in in_tail:
                self._forbid(reasons, where[0] + 1, len(self.nodes), f"{kind} {name!r} is changed on the whole batch")
            elif name in changed:  # what later stages read of a buffer comes from its owner; a parameter has its gradient
                end = changed[name] if kind == "buffer" else max(where)
                self._forbid(reasons, min(where) + 1, end, f"{kind} {name!r} is changed there")

    def _changed_in_tail(self, storage_names: dict[int, str]) -> set[str]:
        found = {n for n, r in self.graph.buffer_writes.items() if r not in self.first or self._is_batched(r)}
        for index in self.batching.tail:
            storages = self.graph.storage_of(self.graph.nodes[index].mutates)
            found.update(storage_names[s] for s in storages if s in storage_names)
        return found

    def _is_batched(self, register: int) -> bool:
        return self.batching.dims[register] is not None
