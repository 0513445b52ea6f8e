"""Whatever is logged, however it is logged, shows the same values, once, under the same names as on one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics import MaxMetric, MeanAbsoluteError, MeanMetric, MeanSquaredError, MetricCollection
from typing_extensions import override

from lightning_mgpu.errors import RecordingError
from tests.parity.layouts import Layouts, MakeTrainer
from tests.parity.noting import NotesInEveryWay, Noting, Sheet, log
from tests.zoo.data import vector_splits, vectors, vectors_in_batches_of
from tests.zoo.steps import Mlp


def test_every_option_of_log(layouts_of_any_kind: Layouts) -> None:
    seen = layouts_of_any_kind.same(lambda make: log(make, NotesInEveryWay))
    names = {name for _, row in seen["rows"] for name in row}
    assert {"train_both_step", "train_both_epoch", "val_sum", "train_a_epoch", "train_max_function"} <= names
    assert "train_unlogged" not in names
    assert any("train_unlogged" in readable for readable in seen["readable"])
    shown = {name for row in seen["shown"] for name in row}
    assert {"train_bar", "train_both_step", "train_both_epoch", "val_bar"} <= shown
    assert not {"train_plain", "val_plain", "train_unlogged"} & shown
    assert seen["tested"][0].keys() == seen["validated"][0].keys()


def test_log_every_n_steps(layouts_of_any_kind: Layouts) -> None:
    seen = layouts_of_any_kind.same(lambda make: log(make, NotesInEveryWay, log_every_n_steps=2))
    assert [step for step, row in seen["rows"] if "train_step" in row] == [1, 3, 5]


class NotesByCallable(Noting):
    @override
    def note(self, loss: Tensor, stage: str) -> None:
        self.log(f"{stage}_median", loss, on_step=False, on_epoch=True, reduce_fx=torch.median)


def test_a_reduction_of_ones_own_is_lightnings_error(layouts_of_any_kind: Layouts) -> None:
    def refusal(make: MakeTrainer) -> str:
        with pytest.raises(Exception, match=r"Only `self.log\(..., reduce_fx={min,max,mean,sum}\)` are supported") as caught:
            log(make, NotesByCallable)
        return f"{type(caught.value).__name__}: {caught.value}"

    layouts_of_any_kind.same(refusal)


# -- metric objects ----------------------------------------------------------------------------------------------------


class WithMetrics(Noting):
    """Logs metric objects of its own, of a list, of a child, and a collection."""

    def __init__(self) -> None:
        super().__init__()
        self.error = MeanAbsoluteError()
        self.largest = MaxMetric()
        self.several = nn.ModuleList([MeanSquaredError(), MeanMetric()])
        self.group = MetricCollection({"mse": MeanSquaredError(), "mae": MeanAbsoluteError()}, prefix="group_")
        self.val_group = self.group.clone(prefix="val_group_")

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        forecast = self(x)
        loss = F.mse_loss(forecast, y)
        self.log("error", self.error(forecast, y), on_step=True, on_epoch=True)
        self.largest.update(loss)
        self.log("largest", self.largest, on_step=False, on_epoch=True, metric_attribute="largest")
        self.several[0].update(forecast.detach(), y)
        self.several[1](loss)
        self.log("listed", self.several[1], on_step=True, on_epoch=True)
        self.group.update(forecast.detach(), y)
        self.log_dict(self.group, on_step=False, on_epoch=True)
        return loss

    @override
    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        x, y = batch
        self.val_group.update(self(x), y)

    test_step = validation_step

    @override
    def on_train_epoch_end(self) -> None:
        self.log("computed", self.several[0].compute())
        self.several[0].reset()

    @override
    def on_validation_epoch_end(self) -> None:
        self.log_dict(self.val_group.compute(), prog_bar=True)
        self.val_group.reset()

    on_test_epoch_end = on_validation_epoch_end


def test_metric_objects(layouts_of_any_kind: Layouts) -> None:
    seen = layouts_of_any_kind.same(lambda make: log(make, WithMetrics))
    names = {name for _, row in seen["rows"] for name in row}
    assert {"largest", "listed_step", "listed_epoch", "group_mse", "group_mae", "computed", "val_group_mse"} <= names


class NamesAnotherMetric(Noting):
    """Logs a metric that is no attribute of it."""

    def __init__(self) -> None:
        super().__init__()
        self.error = MeanMetric()

    @override
    def note(self, loss: Tensor, stage: str) -> None:
        stray = MeanMetric()
        stray(loss.detach())
        self.log("stray", stray)


def test_a_metric_that_is_no_attribute_is_lightnings_error(layouts_of_any_kind: Layouts) -> None:
    def refusal(make: MakeTrainer) -> str:
        with pytest.raises(Exception, match="Could not find the `LightningModule` attribute for the") as caught:
            log(make, NamesAnotherMetric)
        return str(caught.value)

    layouts_of_any_kind.same(refusal)


class MetricInPipelinedRoot(Mlp):
    """Is pipelined itself, and feeds a metric among its children in its step."""

    def __init__(self) -> None:
        super().__init__()
        self.metrics = nn.ModuleDict({"in_train": MeanSquaredError(), "in_val": MeanSquaredError()})

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self.measure(batch, "train")

    @override
    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.measure(batch, "val")

    def measure(self, batch: tuple[Tensor, Tensor], stage: str) -> Tensor:
        x, y = batch
        forecast = self(x)
        self.metrics[f"in_{stage}"](forecast.detach(), y)
        self.log(f"{stage}_mse", self.metrics[f"in_{stage}"], on_step=False, on_epoch=True)
        return F.mse_loss(forecast, y)


@pytest.mark.parametrize("num_stages", [2, 3])
def test_metrics_among_the_children_of_the_pipelined_module(num_stages: int, layouts_of_any_kind: Layouts) -> None:
    def observe(make: MakeTrainer) -> Any:
        sheet, module = Sheet(), MetricInPipelinedRoot()
        trainer = make(max_epochs=2, logger=sheet)
        trainer.fit(module, vector_splits())
        return sheet.rows, dict(trainer.callback_metrics), dict(module.state_dict())

    layouts_of_any_kind.same(observe, num_stages)


# -- several loaders ---------------------------------------------------------------------------------------------------


class NotesByLoader(Noting):
    """Logs with and without the loader's number."""

    @override
    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        x, y = batch
        loss = F.mse_loss(self(x), y)
        self.log("numbered", loss)
        self.log(f"named_{dataloader_idx}", loss, add_dataloader_idx=False)

    test_step = validation_step


def test_add_dataloader_idx(layouts_of_any_kind: Layouts) -> None:
    def observe(make: MakeTrainer) -> Any:
        sheet, module = Sheet(), NotesByLoader()
        trainer = make(max_epochs=1, logger=sheet)
        loaders = [vectors_in_batches_of(8, 6), vectors_in_batches_of(8, 3, 5)]
        trainer.fit(module, vectors(), loaders)
        return sheet.rows, dict(trainer.callback_metrics), trainer.test(module, loaders, verbose=False)

    _, callbacks, tested = layouts_of_any_kind.same(observe)
    assert {"numbered/dataloader_idx_0", "numbered/dataloader_idx_1", "named_0", "named_1"} <= callbacks.keys()
    assert [sorted(each) for each in tested] == [
        ["named_0", "numbered/dataloader_idx_0"],
        ["named_1", "numbered/dataloader_idx_1"],
    ]


# -- where logging is refused ------------------------------------------------------------------------------------------


class LogsInForward(Mlp):
    @override
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.log("largest", y.max())
        return y


def test_logging_inside_the_forward_is_refused(layouts: Layouts) -> None:
    with layouts.lent() as make, pytest.raises(RecordingError) as caught:
        make(max_steps=1).fit(LogsInForward(), vectors())
    assert str(caught.value) == (
        "the forward calls self.log, which a replayed forward would not do again; return the value and log it in the step"
    )
