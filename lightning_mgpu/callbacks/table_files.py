"""The files that predictions can be written to, each from columns that are mapped into memory."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

__all__ = ["WRITERS", "write_npz", "write_parquet", "write_pt"]

Arrays = Mapping[str, np.ndarray[Any, Any]]

_ROWS = 16_384  # of a group of rows in a parquet file


def write_pt(columns: Arrays, path: Path) -> None:
    """Writes a dict of tensors for ``torch.load``."""
    torch.save({name: torch.from_numpy(_writable(array)) for name, array in columns.items()}, path)


def _writable(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Maps a file that is only read so that torch, which knows no such tensors, takes it without a copy."""
    if array.flags.writeable or not isinstance(array.base, np.memmap) or array.base.filename is None:
        return array
    return np.memmap(array.base.filename, dtype=array.dtype, mode="c", shape=array.shape)


def write_npz(columns: Arrays, path: Path) -> None:
    """Writes arrays for ``numpy.load``."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        for name, array in columns.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(file, array, allow_pickle=False)


def write_parquet(columns: Arrays, path: Path) -> None:
    """Writes a table; what has more than one dimension becomes a list in each row, flattened."""
    try:
        import pyarrow as pa  # noqa: PLC0415
        from pyarrow import parquet  # noqa: PLC0415
    except ImportError:
        raise ImportError("parquet files need pyarrow; pip install pyarrow, or write a .pt or .npz file") from None
    num_rows = len(next(iter(columns.values())))
    writer = None
    try:
        for start in range(0, max(num_rows, 1), _ROWS):
            piece = {name: _arrow(pa, array[start : start + _ROWS]) for name, array in columns.items()}
            table = pa.table(piece)
            writer = writer or parquet.ParquetWriter(path, table.schema)
            writer.write_table(table)
    finally:
        if writer is not None:
            writer.close()


def _arrow(pa: Any, rows: np.ndarray[Any, Any]) -> Any:
    flat = pa.array(np.ascontiguousarray(rows).reshape(-1))
    return flat if rows.ndim == 1 else pa.FixedSizeListArray.from_arrays(flat, int(np.prod(rows.shape[1:])))


WRITERS: Mapping[str, Callable[[Arrays, Path], None]] = {".pt": write_pt, ".npz": write_npz, ".parquet": write_parquet}
