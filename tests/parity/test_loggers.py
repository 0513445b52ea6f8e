"""Loggers and prediction writers are handed what they are handed on one device, once."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch import Tensor
from typing_extensions import override

from tests.parity.layouts import Layouts, MakeTrainer
from tests.parity.noting import NotesInEveryWay, log
from tests.zoo.data import vector_splits
from tests.zoo.steps import Mlp


class WithHyperparameters(NotesInEveryWay):
    def __init__(self, width: int = 16, name: str = "mlp") -> None:
        super().__init__()
        self.save_hyperparameters()


def test_csv_logger(layouts: Layouts, tmp_path: Path) -> None:
    def observe(make: MakeTrainer) -> Any:
        logger = CSVLogger(tmp_path / str(len(list(tmp_path.iterdir()))), flush_logs_every_n_steps=1)
        log(make, WithHyperparameters, logger=logger)
        folder = Path(logger.log_dir)
        with (folder / "metrics.csv").open() as file:
            rows = [{k: float(v) if v else v for k, v in row.items()} for row in csv.DictReader(file)]
        return rows, (folder / "hparams.yaml").read_text()

    rows, hyperparameters = layouts.same(observe)
    assert len(rows) > 8
    assert "width: 16" in hyperparameters


@pytest.mark.filterwarnings("ignore:`torch.jit.trace.*` is deprecated")  # torch's own graph writer calls it
def test_tensorboard_logger(layouts: Layouts, tmp_path: Path) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")

    class WithExample(WithHyperparameters):
        def __init__(self) -> None:
            super().__init__()
            self.example_input_array = torch.ones(2, 8)

    def observe(make: MakeTrainer) -> Any:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        logger = TensorBoardLogger(folder, log_graph=True, default_hp_metric=False)
        log(make, WithExample, logger=logger)
        found = events.EventAccumulator(logger.log_dir).Reload()
        scalars = {tag: [(each.step, each.value) for each in found.Scalars(tag)] for tag in found.Tags()["scalars"]}
        return scalars, found.Tags()["graph"], (Path(logger.log_dir) / "hparams.yaml").read_text()

    scalars, has_graph, _ = layouts.same(observe)
    assert {"train_both_step", "train_both_epoch", "val_sum"} <= scalars.keys()
    assert has_graph


class Keeps(BasePredictionWriter):
    """Keeps what it is told to write."""

    def __init__(self, interval: Any) -> None:
        super().__init__(interval)
        self.by_batch: list[Any] = []
        self.at_end: list[Any] = []

    @override
    def write_on_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        prediction: Any,
        batch_indices: Sequence[int] | None,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        self.by_batch.append((prediction, list(batch_indices or ()), batch_idx))

    @override
    def write_on_epoch_end(self, trainer: Trainer, pl_module: LightningModule, predictions: Any, batch_indices: Any) -> None:
        self.at_end.append((list(predictions), batch_indices))


class Predicts(Mlp):
    @override
    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        forecast: Tensor = self(batch[0])
        return forecast


@pytest.mark.parametrize("interval", ["batch", "epoch", "batch_and_epoch"])
def test_prediction_writer(interval: str, layouts: Layouts) -> None:
    def observe(make: MakeTrainer) -> Any:
        writer = Keeps(interval)
        returned = make(callbacks=[writer]).predict(Predicts(), vector_splits(), return_predictions=False)
        assert returned is None
        return {"by_batch": writer.by_batch, "at_end": writer.at_end, "interval": interval}

    seen = layouts.same(observe)
    assert bool(seen["by_batch"]) == ("batch" in interval)
    assert bool(seen["at_end"]) == ("epoch" in interval)
