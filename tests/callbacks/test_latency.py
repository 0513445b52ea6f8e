"""How fast a run predicted: computed from what was measured, without the batch that sets everything up."""

from __future__ import annotations

import pytest
from lightning.pytorch import Trainer

from lightning_mgpu.callbacks.latency import Latency
from tests.callbacks.test_prediction_file import NUM_ROWS, built, loader


def test_a_report() -> None:
    latency = Latency()
    latency._ends_s, latency._num_rows = [10.0, 10.5, 11.0, 12.0], [100, 4, 4, 2]
    latency.latencies_s = [9.0, 0.1, 0.2, 0.9]
    report = latency.report()
    assert (report.num_rows, report.num_batches, report.seconds, report.rows_per_s) == (10, 3, 2.0, 5.0)
    assert report.p50_ms == pytest.approx(200)
    assert report.p99_ms == pytest.approx(886)
    assert str(report).startswith("10 rows in 3 batches and 2.000 s: 5.0 rows/s; a batch takes 200.00 ms (median)")


def test_a_run_is_measured() -> None:
    latency = Latency()
    Trainer(accelerator="cpu", callbacks=[latency], logger=False, enable_progress_bar=False).predict(built(), loader())
    report = latency.report()
    assert (report.num_rows, report.num_batches) == (NUM_ROWS - 4, 5)
    assert 0 < report.p50_ms <= report.p99_ms <= 1e3 * report.seconds


def test_one_batch_makes_no_report() -> None:
    with pytest.raises(ValueError, match=r"at least 2 batches, .* there were 0; use a smaller batch_size"):
        Latency().report()
