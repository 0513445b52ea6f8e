"""The mesh: how the processes of a run are arranged in replicas of one pipeline.

Processes are numbered replica by replica, and within one by their position in the pipeline. The last one is the lead: it ends
the last replica's pipeline.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from lightning_mgpu.errors import PartitionError, counted

__all__ = ["Mesh", "check_size", "mesh_of"]


@dataclass(frozen=True)
class Mesh:
    """Arranges processes in ``data`` replicas of ``pipeline`` positions.

    Attributes:
        pipeline: processes that share one copy of the model.
        data: copies of the model, each of which gets its part of every batch.
    """

    pipeline: int
    data: int = 1

    @property
    def num_processes(self) -> int:
        return self.pipeline * self.data

    @property
    def lead(self) -> int:
        """The process of the user's own script, which is the last."""
        return self.num_processes - 1

    @property
    def replicas(self) -> range:
        return range(self.data)

    def process(self, position: int, replica: int = -1) -> int:
        """Returns the process at a position of a replica; of the lead's replica, which is the last, unless said otherwise."""
        return (replica % self.data) * self.pipeline + position

    def position(self, process: int) -> int:
        """Returns the position of a process in its pipeline."""
        return process % self.pipeline

    def replica(self, process: int) -> int:
        """Returns the replica of a process."""
        return process // self.pipeline

    def row(self, replica: int) -> range:
        """Lists the processes of one replica, in the pipeline's order."""
        return range(self.process(0, replica), self.process(0, replica) + self.pipeline)

    def across(self, position: int) -> tuple[int, ...]:
        """Lists the processes at one position of all replicas."""
        return tuple(self.process(position, replica) for replica in self.replicas)

    def deal(self, num_microbatches: int) -> tuple[range, ...]:
        """Deals the microbatches of a batch out: a run of them for each replica, as even as can be.

        The last replicas get more where it does not come out even, so that the lead's own is never the one without any.
        """
        least, more = divmod(num_microbatches, self.data)
        counts = [least + (replica >= self.data - more) for replica in self.replicas]
        return tuple(range(sum(counts[:replica]), sum(counts[: replica + 1])) for replica in self.replicas)


def check_size(name: str, size: int | Literal["auto"]) -> int | Literal["auto"]:
    """Returns the size of an axis when it is ``"auto"`` or a positive whole number.

    Raises:
        PartitionError: for anything else, with the value.
    """
    if size != "auto" and (type(size) is not int or size < 1):
        raise PartitionError(f'{name}={size!r} is not possible; use a whole number of at least 1, or "auto"')
    return size


def mesh_of(num_devices: int, *, pipeline: int | Literal["auto"], data: int | Literal["auto"]) -> Mesh:
    """Arranges so many devices; ``"auto"`` for a size is what the other one leaves.

    Raises:
        PartitionError: where the sizes do not multiply to the number of devices, with those that do.
    """
    if pipeline == "auto" and data == "auto":
        pipeline = num_devices
    mesh = Mesh(_rest(num_devices, data) if pipeline == "auto" else pipeline, 1 if data == "auto" else data)
    if data == "auto":
        mesh = Mesh(mesh.pipeline, _rest(num_devices, mesh.pipeline))
    if mesh.num_processes != num_devices:
        fitting = ", ".join(f"{a} x {b}" for a, b in _factors(num_devices))
        raise PartitionError(
            f"pipeline_parallel_size={pipeline} and data_parallel_size={data} do not multiply to "
            f"{counted(num_devices, 'device')}; sizes that do (pipeline x data): {fitting}"
        )
    return mesh


def _rest(num_devices: int, size: int | Literal["auto"]) -> int:
    return max(1, num_devices // size) if isinstance(size, int) else num_devices


def _factors(number: int) -> Iterator[tuple[int, int]]:
    return ((a, number // a) for a in range(1, number + 1) if number % a == 0)
