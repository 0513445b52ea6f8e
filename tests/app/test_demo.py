"""The demonstration's parts, on one device and for one epoch; the whole of it is ``make demo``."""

from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console

from lightning_mgpu.app.demo import Run, comparison, largest_difference, run
from lightning_mgpu.examples import CNN


def test_a_run_repeats_itself_and_leaves_an_ordinary_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "model.ckpt"
    first, second = (run("auto", devices=1, num_epochs=1, checkpoint=path) for _ in range(2))
    assert len(first.losses) == 19  # 1,197 digits in batches of 64
    assert first.losses[0] == pytest.approx(2.3, abs=0.2)  # the entropy of a guess among ten is 2.303
    assert (second.losses, second.test_accuracy) == (first.losses, first.test_accuracy)
    assert torch.load(path, weights_only=True)["state_dict"].keys() == CNN().state_dict().keys()


def test_a_nudge_moves_the_losses(tmp_path: Path) -> None:
    straight, nudged = (
        run("auto", devices=1, num_epochs=1, checkpoint=tmp_path / "model.ckpt", nudge=nudge) for nudge in (0.0, 0.01)
    )
    assert 0 < largest_difference(straight, nudged) < 0.1


def test_comparison_shows_the_runs_and_their_largest_differences() -> None:
    single = Run(num_epochs=1, losses=(2.0, 1.0, 0.5), test_accuracy=0.98, fit_s=3.0)
    pipeline = replace(single, losses=(2.0, 1.25, 0.5), fit_s=4.0)
    nudged = replace(single, losses=(2.0, 1.0, 0.625), test_accuracy=0.97)
    assert largest_difference(single, pipeline) == 0.25
    assert largest_difference(single, nudged, num_steps=2) == 0
    console = Console(width=120, record=True, file=StringIO())
    console.print(comparison(single, pipeline, nudged))
    shown = console.export_text()
    assert "2.5e-01" in shown
    assert "1.2e-01" in shown
    assert shown.count("0.9800") == 2


def test_runs_of_different_length_cannot_be_compared() -> None:
    longer, shorter = Run(1, (1.0, 1.0), 0.9, 1.0), Run(1, (1.0,), 0.9, 1.0)
    with pytest.raises(ValueError, match="shorter"):
        largest_difference(longer, shorter)
