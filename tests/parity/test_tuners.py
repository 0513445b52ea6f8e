"""Summaries, progress bars, and what looks for a learning rate or a batch size, as on one device."""

from __future__ import annotations

import io
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.throughput import measure_flops
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    LearningRateFinder,
    ModelSummary,
    RichModelSummary,
    RichProgressBar,
    TQDMProgressBar,
)
from lightning.pytorch.tuner import Tuner
from torch import Tensor
from torch.utils.data import DataLoader
from typing_extensions import override

from tests.parity.layouts import Layouts, MakeTrainer
from tests.parity.measured import Backbone, Measured, left, loader, table


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives tuners a folder for the checkpoints to which they go back."""
    monkeypatch.chdir(tmp_path)


# -- summaries ---------------------------------------------------------------------------------------------------------


class WithExample(Backbone):
    """Shows what its forward takes, so that a summary can list shapes and operations."""

    def __init__(self) -> None:
        super().__init__()
        self.example_input_array = torch.ones(2, 8)


class Tells(ModelSummary):
    """Keeps what it would print."""

    def __init__(self) -> None:
        super().__init__(max_depth=-1)
        self.told: list[Any] = []

    @override
    def summarize(self, summary_data: Any, *numbers: Any, **rest: Any) -> None:  # type: ignore[override]
        self.told.append((summary_data, numbers, rest))


@pytest.mark.parametrize("module", [Backbone, WithExample])
@pytest.mark.parametrize("num_stages", [2, 3])
def test_model_summary(module: type[Measured], num_stages: int, layouts: Layouts) -> None:
    def observe(make: MakeTrainer) -> Any:
        tells, made = Tells(), module()
        trainer = make(max_epochs=1, callbacks=[tells], enable_model_summary=True)
        trainer.fit(made, loader())
        trainer.fit_loop.max_epochs = 2
        trainer.fit(made, loader())
        return tells.told, left(made, trainer)

    told, _ = layouts.same(observe, num_stages)
    columns, numbers, _ = told[0]
    assert dict(columns)["Name"] == ["backbone", "backbone.0", "backbone.1", "backbone.2", "head"]
    assert numbers[0] == 8 * 16 + 16 + 16 * 16 + 16 + 16 * 4 + 4
    assert ("In sizes" in dict(columns)) == (module is WithExample)
    assert len(told) == 2


@pytest.mark.parametrize("summary", [ModelSummary, RichModelSummary])
def test_what_a_summary_prints(summary: type[ModelSummary], layouts: Layouts, caplog: pytest.LogCaptureFixture) -> None:
    def observe(make: MakeTrainer) -> Any:
        caplog.clear()
        with redirect_stdout(io.StringIO()) as out:
            made = WithExample()
            make(max_steps=1, callbacks=[summary(max_depth=-1)], enable_model_summary=True).fit(made, loader())
        return out.getvalue() + "\n".join(record.message for record in caplog.records if "params" in record.message)

    assert "backbone.2" in layouts.same(observe)


class Exemplary(WithExample):
    """Uses its example in a hook before training begins, and afterwards."""

    @override
    def on_fit_start(self) -> None:
        x = self.example_input_array
        assert isinstance(x, Tensor)
        self.noted.append(self(x).detach())
        self.noted.append(measure_flops(self, lambda: self(x), lambda y: y.sum()))
        self.zero_grad()

    @override
    def on_train_epoch_end(self) -> None:
        x = self.example_input_array
        self.eval()
        with torch.no_grad():
            self.noted.append(self(x))
        self.train()


def test_calls_in_hooks_outside_of_steps(layouts: Layouts) -> None:
    def observe(make: MakeTrainer) -> Any:
        module = Exemplary()
        trainer = make(max_epochs=2)
        trainer.fit(module, loader(), loader(20))
        return left(module, trainer)

    seen = layouts.same(observe)
    assert seen["noted"][1] > 1000


def test_a_count_of_operations_while_parameters_are_elsewhere_says_what_it_misses(layouts: Layouts) -> None:
    class Counts(Measured):
        @override
        def on_train_epoch_end(self) -> None:
            measure_flops(self, lambda: self(torch.ones(4, 8)))

    text = "FlopCounterMode sees only what runs in this process, one of 2; use it while the module is whole, as in on_fit_start"
    with layouts.lent() as make, pytest.warns(UserWarning, match=text):
        make(max_epochs=2).fit(Counts(), loader())


# -- progress bars -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bar", [TQDMProgressBar, RichProgressBar])
def test_progress_bars(bar: Any, layouts: Layouts) -> None:
    class Remembers(bar):  # type: ignore[misc]
        @override
        def get_metrics(self, *args: Any, **kwargs: Any) -> Any:
            found = super().get_metrics(*args, **kwargs)
            self.shown = [*getattr(self, "shown", []), dict(found)]
            return found

    def observe(make: MakeTrainer) -> Any:
        remembers, module = Remembers(), Measured()
        trainer = make(max_epochs=2, callbacks=[remembers], enable_progress_bar=True)
        with redirect_stdout(io.StringIO()):
            trainer.fit(module, loader(), loader(20))
        return remembers.shown, left(module, trainer)

    shown, _ = layouts.same(observe)
    assert {"train_loss", "val_loss"} <= {name for row in shown for name in row}


# -- learning rates ----------------------------------------------------------------------------------------------------


def found_rate(finder: Any, module: Measured) -> Any:
    return dict(finder.results), finder.suggestion(), module.lr


@pytest.mark.filterwarnings("ignore:.*weights_only")
def test_learning_rate_finder(layouts: Layouts) -> None:
    def observe(make: MakeTrainer) -> Any:
        finder, module = LearningRateFinder(num_training_steps=20, early_stop_threshold=None), Measured()
        trainer = make(max_epochs=2, callbacks=[finder])
        trainer.fit(module, loader(80))
        assert finder.optimal_lr is not None
        return found_rate(finder.optimal_lr, module), left(module, trainer)

    (results, suggestion, lr), _ = layouts.same(observe)
    assert len(results["loss"]) == 20
    assert suggestion == lr != 0.1


def test_lr_find(layouts: Layouts) -> None:
    def observe(make: MakeTrainer) -> Any:
        module = Measured()
        trainer = make(max_epochs=2)
        finder = Tuner(trainer).lr_find(module, loader(80), num_training=30, early_stop_threshold=None)
        found = found_rate(finder, module), left(module, trainer)
        trainer.fit(module, loader())
        return found, left(module, trainer)

    ((_, suggestion, lr), untrained), trained = layouts.same(observe)
    assert suggestion == lr
    assert untrained["steps"] == 0
    assert trained["steps"] == 6


# -- batch sizes -------------------------------------------------------------------------------------------------------


class Scaled(Measured):
    """Serves batches of the size that a tuner sets; larger ones than ``limit`` are too large.

    Attributes:
        limit: Rows that fit.
    """

    limit = 1000

    @override
    def train_dataloader(self) -> Any:
        return DataLoader(table(64), batch_size=self.batch_size)

    @override
    def val_dataloader(self) -> Any:
        return DataLoader(table(32), batch_size=self.batch_size)

    @override
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        if len(batch[0]) > self.limit:
            raise RuntimeError("CUDA out of memory.")
        return batch


class Tight(Scaled):
    limit = 20


@pytest.mark.parametrize("module", [Scaled, Tight])
def test_batch_size_finder(module: type[Scaled], layouts: Layouts) -> None:
    def observe(make: MakeTrainer) -> Any:
        finder, made = BatchSizeFinder(mode="binsearch", steps_per_trial=1, init_val=2, max_trials=6), module()
        trainer = make(max_epochs=2, callbacks=[finder])
        trainer.fit(made)
        return made.batch_size, finder.optimal_batch_size, left(made, trainer)

    size, _, rest = layouts.same(observe)
    assert size > 20 if module is Scaled else 8 < size <= 20
    assert rest["steps"] > 0


@pytest.mark.parametrize("method", ["fit", "validate"])
@pytest.mark.parametrize("mode", ["power", "binsearch"])
def test_scale_batch_size(mode: Any, method: Any, layouts: Layouts) -> None:
    def observe(make: MakeTrainer) -> Any:
        module = Tight() if method == "fit" else Scaled()
        trainer = make(max_epochs=1)
        found = Tuner(trainer).scale_batch_size(module, method=method, mode=mode, steps_per_trial=1, max_trials=8, init_val=2)
        before = left(module, trainer)
        trainer.fit(module)
        return found, before, left(module, trainer)

    found, _, trained = layouts.same(observe)
    assert found >= 8
    assert trained["steps"] == -(-64 // found)
