"""Who owns which parameter and buffer: decided at the first recording, by name, and kept from then on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

__all__ = ["Placement"]


@dataclass
class Placement:
    """Maps the name of every placed tensor to the stages that own it.

    A parameter used in two stages is owned by both; its *primary* owner holds the gradient, the others add to it.

    Attributes:
        num_stages: number of stages; the last one is the lead's.
        owners: stages by canonical name.
    """

    num_stages: int
    owners: dict[str, frozenset[int]] = field(default_factory=dict)

    @property
    def lead(self) -> int:
        """The stage of the lead, which is the last."""
        return self.num_stages - 1

    def primary(self, name: str) -> int:
        """Returns the owner that holds the whole gradient: the lead where it is one, since the user can look there."""
        return max(self.owners[name])

    def owned_by(self, stage: int) -> list[str]:
        """Lists the tensors a stage owns."""
        return [name for name, stages in self.owners.items() if stage in stages]

    def away(self) -> set[str]:
        """Names the tensors the lead does not have."""
        return {name for name, stages in self.owners.items() if self.lead not in stages}

    def shared(self) -> dict[str, frozenset[int]]:
        """Returns the tensors with several owners."""
        return {name: stages for name, stages in self.owners.items() if len(stages) > 1}

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
