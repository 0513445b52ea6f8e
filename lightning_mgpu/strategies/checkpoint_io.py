"""Reads and writes checkpoint files: Lightning's own format, on a local disk all or nothing, with faults said clearly."""

from __future__ import annotations

import os
import pickle
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO
from typing_extensions import override

from lightning_mgpu import tree
from lightning_mgpu.errors import CheckpointError
from lightning_mgpu.runtime.replacing import replacing

__all__ = ["PipelineCheckpointIO", "check_is_checkpoint", "check_no_foreign_folder", "local_path", "with_default"]

_NUM_SHOWN = 5


class PipelineCheckpointIO(TorchCheckpointIO):
    """Is the pipeline's default for reading and writing checkpoints; other strategies can use it too.

    On a local disk a file appears whole or not at all, whatever happens meanwhile, and is written without a second copy in
    memory. Folders of sharded checkpoints are read as well. Other places (``s3://``, ``memory://``) are left to Lightning.

    Example:
        >>> trainer = Trainer(plugins=[PipelineCheckpointIO()])  # reads sharded checkpoints on one device  # doctest: +SKIP
    """

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        local = local_path(path)
        if local is None or storage_options is not None:  # Lightning refuses the options
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        check_no_foreign_folder(local)
        with replacing(local) as partial:
            torch.save(checkpoint, partial)

    @override
    def load_checkpoint(
        self,
        path: str | Path,
        map_location: Callable[..., Any] | None = lambda storage, _: storage,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        local = local_path(path)
        if local is not None and local.is_dir():
            # costs half a second that only sharded checkpoints need
            from lightning_mgpu.runtime.sharded_folder import read_sharded  # noqa: PLC0415

            return read_sharded(local, weights_only=weights_only)
        if local is None or not local.exists():  # Lightning says that it is not there
            return super().load_checkpoint(path, map_location, weights_only)
        read = super().load_checkpoint
        checkpoint: dict[str, Any] = self._read(local, lambda: read(path, map_location, weights_only))
        return checkpoint

    def load_mapped(self, path: str | Path, *, weights_only: bool | None = None) -> dict[str, Any]:
        """Loads a checkpoint whose weights and optimizer states stay in a local file, and are read when they are used.

        Args:
            path: the checkpoint; one that is no local file of today's format is loaded into memory.
            weights_only: as in ``torch.load``.
        """
        local = local_path(path)
        if local is None or not zipfile.is_zipfile(local):
            return self.load_checkpoint(path, weights_only=weights_only)
        loaded: Any = self._read(local, lambda: torch.load(local, map_location="cpu", mmap=True, weights_only=weights_only))
        for key in loaded if isinstance(loaded, dict) else ():
            if key not in ("state_dict", "optimizer_states"):
                loaded[key] = tree.map_tensors(lambda t: t.clone(), loaded[key])
        checkpoint: dict[str, Any] = loaded
        return checkpoint

    def _read(self, local: Path, read: Callable[[], Any]) -> Any:
        _check_is_whole(local)
        try:
            return read()
        except (RuntimeError, EOFError, OSError) as error:
            raise CheckpointError(f"{_described(local)} can't be read: {error}; use another checkpoint") from error
        except pickle.UnpicklingError as error:
            if _has_whole_pickle(local):  # torch says that it holds more than weights, and what to do
                raise
            what = "is damaged" if zipfile.is_zipfile(local) else "is no file of torch.save"
            raise CheckpointError(f"{_described(local)} {what}, so it can't be read; use another checkpoint") from error


def local_path(path: str | Path | os.PathLike[str]) -> Path | None:
    """Returns the path on the local disk, ``None`` where that is not where it leads."""
    filesystem, stripped = url_to_fs(str(path))
    return Path(stripped) if isinstance(filesystem, LocalFileSystem) else None


def _described(path: Path) -> str:
    return f"{str(path)!r} ({path.stat().st_size:,} bytes)"


def _check_is_whole(path: Path) -> None:
    with path.open("rb") as file:
        start = file.read(4)
    if not start:
        raise CheckpointError(f"{str(path)!r} is empty, so it is no checkpoint; use another one")
    if start == b"PK\x03\x04" and not zipfile.is_zipfile(path):
        raise CheckpointError(f"{_described(path)} was cut short: the end of the file is missing; use another checkpoint")


def _has_whole_pickle(path: Path) -> bool:
    """Says whether the part of a file that describes the rest is as it was written."""
    try:
        with zipfile.ZipFile(path) as file:
            return all(file.read(name) is not None for name in file.namelist() if name.endswith("data.pkl"))
    except zipfile.BadZipFile:
        return False


def check_no_foreign_folder(path: Path) -> None:
    """Refuses to write over a folder, unless that is a checkpoint."""
    if path.is_dir() and not ((path / "meta.pt").is_file() and (path / ".metadata").is_file()):
        raise IsADirectoryError(f"{str(path)!r} is a folder, and no sharded checkpoint; name a file to save to")


def check_is_checkpoint(checkpoint: Any, path: Any) -> None:
    """Refuses what is no Lightning checkpoint.

    Raises:
        CheckpointError: with what it is instead, and the remedy.
    """
    needed = ("state_dict", "pytorch-lightning_version")
    if isinstance(checkpoint, Mapping) and all(key in checkpoint for key in needed):
        return
    if not isinstance(checkpoint, Mapping):
        what = f"it holds an object of type {type(checkpoint).__name__}"
    else:
        keys = [repr(key) for key in checkpoint]
        lacking = " and ".join(repr(key) for key in needed if key not in checkpoint)
        shown = ", ".join(keys[:_NUM_SHOWN]) + (", ..." if len(keys) > _NUM_SHOWN else "")
        what = f"it lacks {lacking} and has {len(keys)} keys: {shown}"
    raise CheckpointError(
        f"{str(path)!r} is no Lightning checkpoint: {what}; load weights alone with module.load_state_dict(torch.load(path))"
    )


def with_default(checkpoint_io: Any) -> Any:
    """Returns the user's own plugin, or the default one; a wrapper gets the default to wrap unless it has one."""
    if checkpoint_io is None:
        return PipelineCheckpointIO()
    if isinstance(checkpoint_io, _WrappingCheckpointIO):
        checkpoint_io.checkpoint_io = PipelineCheckpointIO()  # Lightning's setter leaves one that is there
    return checkpoint_io
