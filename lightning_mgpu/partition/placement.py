"""Who owns which parameter and buffer: decided at the first recording, by name, and kept from then on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from lightning_mgpu.mesh import Mesh

__all__ = ["Placement"]


@dataclass
class Placement:
    """Maps the name of every placed tensor to the stages that own it, and so to the processes that hold it.

    A parameter used in two stages is owned by both. Where several processes hold it, its *primary* holder has the gradient,
    and the others add to it.

    Attributes:
        num_stages: number of stages; the last one is the lead's.
        owners: stages by canonical name.
        homes: the position of each stage in the pipeline of processes; by default each has its own.
        num_replicas: copies of all stages, each on processes of its own.
        mesh: how the processes are arranged.
    """

    num_stages: int
    owners: dict[str, frozenset[int]] = field(default_factory=dict)
    homes: tuple[int, ...] = ()
    num_replicas: int = 1
    mesh: Mesh = field(init=False)

    def __post_init__(self) -> None:
        self.homes = self.homes or tuple(range(self.num_stages))
        self.mesh = Mesh(max(self.homes) + 1, self.num_replicas)

    @property
    def lead(self) -> int:
        """The stage that ends on the lead, which is the last."""
        return self.num_stages - 1

    @property
    def lead_process(self) -> int:
        """The process of the lead, which is the last."""
        return self.mesh.lead

    def processes(self, stage: int) -> tuple[int, ...]:
        """Lists the processes that hold a stage, one in each replica."""
        return self.mesh.across(self.homes[stage])

    def holders(self, name: str) -> frozenset[int]:
        """Returns the processes that hold a tensor: the lead alone until it is placed."""
        stages = self.owners.get(name)
        return frozenset({self.lead_process} if stages is None else (p for stage in stages for p in self.processes(stage)))

    def primary(self, name: str) -> int:
        """Returns the process that holds the whole gradient: the lead where it is one, since the user can look there.

        It is always in the lead's replica.
        """
        return max(self.holders(name))

    def held_by(self, process: int) -> list[str]:
        """Lists the tensors a process holds."""
        return [name for name in self.owners if process in self.holders(name)]

    def away(self) -> set[str]:
        """Names the tensors the lead does not have."""
        return {name for name in self.owners if self.lead_process not in self.holders(name)}

    def shared(self) -> dict[str, frozenset[int]]:
        """Returns the tensors that several processes hold, with those processes."""
        held = {name: self.holders(name) for name in self.owners}
        return {name: processes for name, processes in held.items() if len(processes) > 1}

    def allowed(self, names: Iterable[str]) -> frozenset[int] | None:
        """Returns the stages that own all of ``names``; ``None`` when none of them is placed."""
        sets = [self.owners[name] for name in names if name in self.owners]
        return frozenset.intersection(*sets) if sets else None

    def nearest(self, name: str) -> frozenset[int]:
        """Returns the owners of the placed tensor whose name shares the longest beginning with ``name``."""

        def shared_parts(other: str) -> int:
            count = 0
            for a, b in zip(name.split("."), other.split("."), strict=False):
                if a != b:
                    break
                count += 1
            return count

        if not self.owners:
            return frozenset({self.lead})
        best = max(self.owners, key=shared_parts)
        return frozenset({max(self.owners[best])}) if shared_parts(best) else frozenset({self.lead})
