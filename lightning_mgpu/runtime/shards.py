"""One process's part of a sharded checkpoint, in the format of ``torch.distributed.checkpoint``.

What that package agrees on over a process group, the lead agrees on over the control connection: every process plans what it
will write, the lead numbers the plans and makes the metadata of all of them, every process writes one file, and the lead
writes the metadata once all files are there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from lightning_mgpu.errors import CheckpointError

__all__ = ["Shard", "agree", "check_keys"]


class Shard:
    """Writes what one process owns.

    Args:
        folder: where every process writes its file.
        state: nested dicts of what this process owns; the keys of all processes together make up the checkpoint.
    """

    def __init__(self, folder: Path, state: Mapping[str, Any]) -> None:
        self._writer = FileSystemWriter(folder, sync_files=False)  # the lead flushes the whole folder in the end
        self._planner = DefaultSavePlanner()
        self._planner.set_up_planner(dict(state))

    def plan(self) -> SavePlan:
        """Says what this process will write, without the tensors themselves."""
        self._writer.set_up_storage_writer(False)
        return self._writer.prepare_local_plan(self._planner.create_local_plan())

    def write(self, plan: SavePlan) -> list[WriteResult]:
        """Writes the file of this process.

        Args:
            plan: what `agree` made of this process's plan.

        Returns:
            What lies where in the file.
        """
        written: list[WriteResult] = self._writer.write_data(self._planner.finish_plan(plan), self._planner).wait()
        return written

    def finish(self, metadata: Metadata, written: Sequence[list[WriteResult]]) -> None:
        """Writes the metadata, by which the folder becomes a checkpoint.

        Args:
            metadata: what `agree` made.
            written: what each process wrote.
        """
        self._writer.finish(metadata, list(written))


def agree(plans: Sequence[SavePlan], folder: Path) -> tuple[list[SavePlan], Metadata]:
    """Makes one plan of the plans of all processes.

    Args:
        plans: the plan of each process.
        folder: where they will write.

    Returns:
        The plan of each process with a number for its file, and the metadata of the whole.
    """
    numbered, metadata = DefaultSavePlanner().create_global_plan(list(plans))
    return FileSystemWriter(folder).prepare_global_plan(numbered), metadata


def check_keys(state: Mapping[Any, Any], path: str = "") -> None:
    """Refuses keys that would come back as another type: a folder of shards knows nothing but names.

    Raises:
        CheckpointError: with the first such key.
    """
    for key, value in state.items():
        if not isinstance(key, str):
            raise CheckpointError(
                f"{path or 'the checkpoint'} has the key {key!r} of type {type(key).__name__}, and a sharded checkpoint keeps "
                "strings only; use save_distributed_checkpoint=False"
            )
        if isinstance(value, Mapping):
            check_keys(value, f"{path}.{key}" if path else key)
