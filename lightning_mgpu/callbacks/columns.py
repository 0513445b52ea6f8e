"""Columns: arrays on the disk that grow by batches of rows, so that nothing has to be held in memory whole."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["Columns", "merged"]

INDICES = "indices"


@dataclass(frozen=True)
class Kind:
    """Is what all rows of a column have in common."""

    dtype: str
    shape: tuple[int, ...]


class Columns:
    """Appends rows to one raw file for each column.

    Args:
        folder: where the files are.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.kinds: dict[str, Kind] = {}

    def append(self, rows: Mapping[str, np.ndarray[Any, Any]], indices: np.ndarray[Any, Any]) -> None:
        """Appends a batch.

        Args:
            rows: for each column an array ``(rows, ...)``.
            indices: the place of each row in the data set.

        Raises:
            ValueError: where a batch has other columns, shapes or dtypes than the batches before.
        """
        kinds = {name: Kind(array.dtype.str, array.shape[1:]) for name, array in rows.items()}
        self.kinds = self.kinds or kinds
        if kinds != self.kinds:
            was, now = ({name: (kind.dtype, kind.shape) for name, kind in each.items()} for each in (self.kinds, kinds))
            raise ValueError(
                f"predictions of one batch are {now} where those before were {was}, so they do not make one table; return the "
                "same from predict_step for every batch"
            )
        for name, array in {**rows, INDICES: indices.astype(np.int64)}.items():
            with self._file(name).open("ab") as file:
                file.write(np.ascontiguousarray(array).data)

    def close(self) -> None:
        """Notes what the columns hold, for `merged`."""
        text = json.dumps({name: asdict(kind) for name, kind in self.kinds.items()})
        (self.folder / "kinds.json").write_text(text, encoding="utf-8")

    def _file(self, name: str) -> Path:
        return self.folder / f"{name}.raw"


def merged(folders: list[Path], into: Path) -> dict[str, np.ndarray[Any, Any]]:
    """Puts the rows of several processes into the order of the data set.

    Args:
        folders: what each process has written.
        into: a folder for what they make together.

    Returns:
        The columns, mapped into memory: their pages are read as they are used.

    Raises:
        ValueError: where an index is missing, or is there twice.
    """
    read = [json.loads((folder / "kinds.json").read_text(encoding="utf-8")) for folder in folders]
    parts = [(folder, kinds) for folder, kinds in zip(folders, read, strict=True) if kinds]
    if not parts:
        return {}
    indices = [_mapped(folder / f"{INDICES}.raw", Kind("<i8", ())) for folder, _ in parts]
    num_rows = sum(map(len, indices))
    seen = np.zeros(num_rows, dtype=bool)
    for each in indices:
        if len(each) and each.max() >= num_rows:
            raise ValueError(f"there is a prediction for row {each.max()}, but only {num_rows} predictions in all")
        seen[each] = True
    if not seen.all():
        raise ValueError(f"there is no prediction for row {int(seen.argmin())}, and two for another of {num_rows}")
    into.mkdir(parents=True, exist_ok=True)
    found = {}
    for name, described in parts[0][1].items():
        kind = Kind(described["dtype"], tuple(described["shape"]))
        if len(parts) == 1 and np.array_equal(indices[0], np.arange(num_rows)):
            found[name] = _mapped(parts[0][0] / f"{name}.raw", kind)
            continue
        whole = np.memmap(into / f"{name}.raw", dtype=kind.dtype, mode="w+", shape=(num_rows, *kind.shape))
        for (folder, _), places in zip(parts, indices, strict=True):
            whole[places] = _mapped(folder / f"{name}.raw", kind)
        found[name] = whole
    return found


def _mapped(path: Path, kind: Kind) -> np.ndarray[Any, Any]:
    return np.memmap(path, dtype=kind.dtype, mode="r").reshape(-1, *kind.shape)
