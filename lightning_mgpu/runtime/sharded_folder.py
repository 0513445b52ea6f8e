"""A sharded checkpoint on disk: how its folder is told, read as one Lightning checkpoint, and made a single file.

The folder is that of Lightning's own ``ModelParallelStrategy``: ``.metadata`` and one ``__<j>_0.distcp`` per process hold
``state_dict.<name>`` and ``optimizer_<i>.<...>`` with the names of parameters; ``meta.pt`` holds everything else.
"""

from __future__ import annotations

import itertools
import pickle
import warnings
from collections import OrderedDict
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load as load_parts

from lightning_mgpu.errors import CheckpointError

__all__ = ["META", "by_name", "by_number", "check_sharded", "is_sharded", "read_sharded"]

META = "meta.pt"
LAYOUT = "lightning_mgpu.state_dict"
"""Key of what a file keeps and a folder of shards does not: the order of keys, versions of modules, and what is empty."""

_OPTIMIZER = "optimizer_"


def is_sharded(path: Path) -> bool:
    """Says whether a path is the folder of a sharded checkpoint."""
    return (path / META).is_file() and (path / ".metadata").is_file()


def check_sharded(path: Path) -> None:
    """Refuses a folder that is no sharded checkpoint.

    Raises:
        CheckpointError: with what is there instead.
    """
    lacking = [name for name in (META, ".metadata") if not (path / name).is_file()]
    if not lacking:
        return
    there = sorted(child.name for child in path.iterdir())
    shown = ", ".join(there[:4]) + (", ..." if len(there) > 4 else "") if there else "nothing"
    raise CheckpointError(
        f"{str(path)!r} is a folder, but no sharded checkpoint: it lacks {' and '.join(lacking)} and holds {shown}; name a "
        "checkpoint file, or a folder that was saved with save_distributed_checkpoint=True"
    )


def read_sharded(path: Path, *, weights_only: bool | None = None) -> dict[str, Any]:
    """Reads a sharded checkpoint as the dict that Lightning writes to a single file, with all tensors on the CPU.

    Args:
        path: the folder.
        weights_only: as in ``torch.load``; by default nothing but tensors and plain values is read.

    Raises:
        CheckpointError: where it is no sharded checkpoint, or a part of it is missing or cut short.
    """
    check_sharded(path)
    weights_only = weights_only is not False
    try:
        meta = torch.load(path / META, map_location="cpu", weights_only=weights_only)
        parts = _read_parts(path, weights_only=weights_only)
    except (RuntimeError, OSError, EOFError, CheckpointException) as error:
        raise CheckpointError(
            f"the sharded checkpoint {str(path)!r} can't be read: {_described(error)}; a file of it is missing or was cut "
            "short; use another checkpoint"
        ) from error
    layout = meta.pop(LAYOUT, {})
    found = parts.pop("state_dict", {})
    order = [key for key in layout.get("keys", ()) if key in found]
    state_dict = OrderedDict((key, found[key]) for key in dict.fromkeys([*order, *found]))
    if layout.get("versions") is not None:
        vars(state_dict)["_metadata"] = layout["versions"]  # where torch keeps them
    numbers = sorted(int(key.removeprefix(_OPTIMIZER)) for key in parts if key.startswith(_OPTIMIZER))
    if numbers or layout.get("has_optimizers", "lr_schedulers" in meta):
        meta["optimizer_states"] = [by_number(parts[f"{_OPTIMIZER}{i}"]) for i in numbers]
    return {**meta, "state_dict": state_dict}


def _described(error: BaseException) -> str:
    if isinstance(error, CheckpointException):  # keeps what each rank raised
        error = next((cause for cause, _ in error.failures.values()), error)
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


# -- optimizers --------------------------------------------------------------------------------------------------------


def by_name(state: Mapping[str, Any], names: list[list[str]]) -> dict[str, Any]:
    """Gives the numbered parameters of an optimizer's ``state_dict`` their names.

    Args:
        state: what ``optimizer.state_dict()`` returns.
        names: the name of each parameter of each group.
    """
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    name_of = dict(zip(numbers, (name for group in names for name in group), strict=True))
    groups = [{**group, "params": list(held)} for group, held in zip(state["param_groups"], names, strict=True)]
    return {"state": {name_of.get(key, key): value for key, value in state["state"].items()}, "param_groups": groups}


def by_number(state: Mapping[str, Any]) -> dict[str, Any]:
    """Undoes `by_name`: parameters are numbered in the order of the groups, as torch's optimizers do."""
    groups: list[dict[str, Any]] = []
    number_of: dict[str, int] = {}
    for group in state.get("param_groups", []):
        for name in group["params"]:
            number_of[name] = len(number_of)
        groups.append({**group, "params": [number_of[name] for name in group["params"]]})
    named = state.get("state", {})
    states: dict[Any, Any] = {number: named[name] for name, number in number_of.items() if name in named}
    states.update({name: value for name, value in named.items() if name not in number_of})
    return {"state": states, "param_groups": groups}


# -- reading -----------------------------------------------------------------------------------------------------------


def _read_parts(path: Path, *, weights_only: bool) -> dict[str, Any]:
    reader = _Reader(path)
    metadata = reader.read_metadata()
    found: dict[str, Any] = {}
    for key, what in metadata.state_dict_metadata.items():
        empty = None if isinstance(what, BytesStorageMetadata) else torch.empty(what.size, dtype=what.properties.dtype)
        _put(found, (metadata.planner_data or {}).get(key, (key,)), empty)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        load_parts(found, storage_reader=reader, planner=_Planner(weights_only=weights_only), no_dist=True)
    return found


def _put(tree: Any, path: tuple[Any, ...], value: Any) -> None:
    """Puts a value into nested dicts and lists; a number on the way is an index of a list."""
    for key, following in itertools.pairwise(path):
        empty: Any = [] if isinstance(following, int) else {}
        tree = _item(tree, key, empty)
    _item(tree, path[-1], value, replace=True)


def _item(tree: Any, key: Any, value: Any, *, replace: bool = False) -> Any:
    if isinstance(tree, list):
        tree.extend([None] * (key + 1 - len(tree)))
        if replace or tree[key] is None:
            tree[key] = value
    else:
        assert isinstance(tree, MutableMapping)
        if replace or key not in tree:
            tree[key] = value
    return tree[key]


class _Planner(DefaultLoadPlanner):
    """Reads plain values with no more trust than tensors, unless asked to."""

    def __init__(self, *, weights_only: bool) -> None:
        super().__init__()
        self._weights_only = weights_only

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        found = torch.load(value, weights_only=self._weights_only)
        _put(self.original_state_dict, self.mappings[read_item.dest_index.fqn], found)


class _Reader(FileSystemReader):
    """Reads metadata made of torch's own descriptions, and nothing else that a pickle may hold."""

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        with (Path(self.path) / ".metadata").open("rb") as file:
            try:
                metadata = _Unpickler(file).load()
            except pickle.UnpicklingError as error:
                raise RuntimeError(f".metadata: {error}") from error
        if not isinstance(metadata, Metadata):
            raise RuntimeError(f".metadata: holds {type(metadata).__name__} instead of Metadata")  # noqa: TRY004 - of a file
        return metadata


_DTYPES = frozenset(name for name in dir(torch) if isinstance(getattr(torch, name), torch.dtype))
_KNOWN = frozenset({
    *(("torch.distributed.checkpoint.metadata", name) for name in (
        "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "TensorProperties", "ChunkStorageMetadata",
        "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
    )),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"), ("torch", "device"), ("torch.serialization", "_get_layout"),
    *((module, name) for module in ("pathlib", "pathlib._local") for name in ("Path", "PosixPath", "PurePosixPath")),
})  # fmt: skip


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _KNOWN or (module == "torch" and name in _DTYPES):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"holds {module}.{name}, which no metadata does")
