"""Writes what ``predict_step`` returns to one file, in the order of the data set, each row once."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.callbacks import BasePredictionWriter
from torch import Tensor
from typing_extensions import override

from lightning_mgpu.callbacks.columns import Columns, merged
from lightning_mgpu.callbacks.table_files import WRITERS

__all__ = ["PredictionFile"]


class PredictionFile(BasePredictionWriter):
    """Writes predictions batch by batch, and makes one file of them in the end.

    Nothing is gathered in memory: batches are appended to raw files beside the target, by each process of Lightning's own
    data parallelism to its own, and the file is made of those by memory mapping. It takes the place of an earlier one only
    when it is complete. Use it with ``trainer.predict(..., return_predictions=False)``, or predictions are kept in memory all
    the same.

    Args:
        path: the file: ``.pt`` (a dict of tensors), ``.npz`` or ``.parquet``. With several loaders, one file each, as in
            ``name_0.pt``.

    Raises:
        ValueError: for another ending; while predicting, for predictions that are no rows of numbers.

    Example:
        >>> trainer = pl.Trainer(callbacks=[PredictionFile("predictions.npz")])  # doctest: +SKIP
        >>> trainer.predict(model, datamodule, return_predictions=False)  # doctest: +SKIP
    """

    def __init__(self, path: str | Path) -> None:
        super().__init__(write_interval="batch")
        self.path = Path(path)
        if self.path.suffix not in WRITERS:
            raise ValueError(
                f"predictions can't be written to {self.path.name!r}; name a file that ends in {', '.join(WRITERS)}"
            )
        self._columns: dict[int, Columns] = {}
        self._num_rows: dict[int, int] = {}

    @property
    def _folder(self) -> Path:
        return self.path.with_name(f".{self.path.name}.partial")

    @override
    def on_predict_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Starts over, where an earlier run was interrupted."""
        self._columns, self._num_rows = {}, {}
        if trainer.is_global_zero:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder.mkdir(parents=True)
        trainer.strategy.barrier("predictions")

    @override
    def write_on_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        prediction: Any,
        batch_indices: Sequence[int] | None,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        """Appends a batch."""
        rows = _columns_of(prediction)
        num_rows = len(next(iter(rows.values())))
        if dataloader_idx not in self._columns:
            self._columns[dataloader_idx] = Columns(self._folder / f"{dataloader_idx}" / f"{trainer.global_rank}")
        start = self._num_rows.get(dataloader_idx, 0)
        self._num_rows[dataloader_idx] = start + num_rows
        known = trainer.world_size > 1 and batch_indices is not None
        places = np.asarray(list(batch_indices or ())) if known else np.arange(start, start + num_rows)
        if len(places) != num_rows:
            raise ValueError(f"predict_step returned {num_rows} rows for a batch of {len(places)}; return one for each")
        self._columns[dataloader_idx].append(rows, places)

    @override
    def on_predict_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Makes the file, on the first process."""
        for columns in self._columns.values():
            columns.close()
        trainer.strategy.barrier("predictions")
        if trainer.is_global_zero:
            loaders = sorted(self._folder.iterdir(), key=lambda folder: int(folder.name))
            for loader in loaders:
                self._write(loader, self.path if len(loaders) == 1 else self._numbered(loader.name))
            shutil.rmtree(self._folder)
        trainer.strategy.barrier("predictions")

    def _numbered(self, number: str) -> Path:
        return self.path.with_stem(f"{self.path.stem}_{number}")

    def _write(self, loader: Path, target: Path) -> None:
        ranks = sorted(loader.iterdir(), key=lambda folder: int(folder.name))
        unfinished = self._folder / f"whole{target.suffix}"
        WRITERS[target.suffix](merged(ranks, loader / "merged"), unfinished)
        unfinished.replace(target)


def _columns_of(prediction: Any) -> dict[str, np.ndarray[Any, Any]]:
    """Names the arrays of one batch's predictions.

    Raises:
        ValueError: for what is no tensor, no dict of tensors and no sequence of tensors, or has no common number of rows.
    """
    if isinstance(prediction, Tensor):
        named: Mapping[Any, Any] = {"predictions": prediction}
    elif isinstance(prediction, Mapping):
        named = prediction
    elif isinstance(prediction, (tuple, list)):
        named = dict(enumerate(prediction))
    else:
        named = {"predictions": prediction}
    for name, value in named.items():
        if not isinstance(value, Tensor) or value.ndim == 0:
            what = f"a {type(value).__name__}" if not isinstance(value, Tensor) else "a tensor without rows"
            raise ValueError(
                f"predict_step returned {what} as {str(name)!r}; return a tensor with a row for each row of the batch, or a "
                "dict or tuple of such tensors, or write a BasePredictionWriter of your own"
            )
    rows = {str(name): len(value) for name, value in named.items()}
    if not rows or len(set(rows.values())) > 1:
        raise ValueError(f"predict_step returned tensors of different numbers of rows, {rows}; return as many rows of each")
    return {str(name): _array(value) for name, value in named.items()}


def _array(tensor: Tensor) -> np.ndarray[Any, Any]:
    tensor = tensor.detach().cpu()
    array: np.ndarray[Any, Any] = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
    return array
