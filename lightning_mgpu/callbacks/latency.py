"""Measures how many rows a run predicts a second, and how long batches take."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from typing_extensions import override

from lightning_mgpu import tree

__all__ = ["InferenceReport", "Latency"]


@dataclass(frozen=True)
class InferenceReport:
    """Says how fast a run predicted; its first batch, which sets everything up, does not count.

    Attributes:
        num_rows: rows predicted, without the first batch's.
        num_batches: batches, without the first.
        seconds: from the end of the first batch to the end of the last.
        rows_per_s: throughput, the loading of batches included.
        p50_ms, p99_ms: how long a batch takes from its start to its end, in the median, and at the worst of a hundred.
    """

    num_rows: int
    num_batches: int
    seconds: float
    rows_per_s: float
    p50_ms: float
    p99_ms: float

    def as_dict(self) -> dict[str, float]:
        """Returns the figures by name."""
        return asdict(self)

    def __str__(self) -> str:
        return (
            f"{self.num_rows} rows in {self.num_batches} batches and {self.seconds:.3f} s: {self.rows_per_s:.1f} rows/s; "
            f"a batch takes {self.p50_ms:.2f} ms (median), {self.p99_ms:.2f} ms (99th percentile)"
        )


class Latency(pl.Callback):
    """Takes the time of every predicted batch.

    Attributes:
        latencies_s: seconds of each batch.
    """

    def __init__(self) -> None:
        self.latencies_s: list[float] = []
        self._num_rows: list[int] = []
        self._start_s = 0.0
        self._ends_s: list[float] = []

    @override
    def on_predict_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, *_: Any) -> None:
        """Starts the clock."""
        self._start_s = time.perf_counter()

    @override
    def on_predict_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, *_: Any
    ) -> None:
        """Stops the clock, when the device has done its work."""
        if pl_module.device.type == "cuda":
            torch.cuda.synchronize(pl_module.device)
        self._ends_s.append(time.perf_counter())
        self.latencies_s.append(self._ends_s[-1] - self._start_s)
        self._num_rows.append(next((len(t) for t in tree.tensors_in(batch) if t.ndim), 1))

    def report(self) -> InferenceReport:
        """Returns the figures.

        Raises:
            ValueError: for fewer than two batches.
        """
        if len(self.latencies_s) < 2:
            raise ValueError(
                f"a report needs at least 2 batches, since the first one sets everything up, and there were "
                f"{len(self.latencies_s)}; use a smaller batch_size"
            )
        seconds, rows = self._ends_s[-1] - self._ends_s[0], sum(self._num_rows[1:])
        p50_ms, p99_ms = (float(p) * 1e3 for p in np.percentile(self.latencies_s[1:], (50, 99)))
        return InferenceReport(rows, len(self.latencies_s) - 1, seconds, rows / seconds, p50_ms, p99_ms)
