"""Lightning's own callbacks do what they do on one device."""

from __future__ import annotations

import io
from collections.abc import Callable
from contextlib import redirect_stdout
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.spike import TrainingSpikeException
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BaseFinetuning,
    DeviceStatsMonitor,
    EarlyStopping,
    GradientAccumulationScheduler,
    LambdaCallback,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelPruning,
    OnExceptionCheckpoint,
    SpikeDetection,
    ThroughputMonitor,
    Timer,
)
from torch.optim import Optimizer
from typing_extensions import override

from tests.parity.layouts import Layouts, MakeTrainer
from tests.parity.measured import Backbone, Measured, left, loader
from tests.parity.noting import Sheet


def fit(make: MakeTrainer, *callbacks: Callback, module: type[LightningModule] = Measured, **kwargs: Any) -> dict[str, Any]:
    """Trains for three epochs with callbacks, and returns what is left."""
    trainer = make(**{"max_epochs": 3, "callbacks": list(callbacks), **kwargs})
    made = module()
    trainer.fit(made, loader(), loader(20))
    return left(made, trainer)


# -- that watch --------------------------------------------------------------------------------------------------------


def test_model_checkpoint(layouts: Layouts, tmp_path: Path) -> None:
    def observe(make: MakeTrainer) -> Any:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        best = ModelCheckpoint(folder, monitor="val_loss", save_top_k=2, save_last=True, filename="{epoch}-{val_loss:.2f}")
        regular = ModelCheckpoint(folder / "steps", every_n_train_steps=2, save_top_k=-1)
        rest = fit(make, best, regular, enable_checkpointing=True)
        saved = {path.relative_to(folder).as_posix(): torch.load(path, weights_only=True) for path in folder.rglob("*.ckpt")}
        contents = {name: (dict(each["state_dict"]), each["optimizer_states"]) for name, each in saved.items()}
        return rest, contents, best.best_model_score, Path(best.best_model_path).name

    _, contents, _, _ = layouts.same(observe)
    assert {"last.ckpt", "steps/epoch=0-step=2.ckpt", "steps/epoch=1-step=4.ckpt"} <= contents.keys()
    assert len([name for name in contents if "val_loss" in name]) == 2


def test_early_stopping(layouts: Layouts) -> None:
    seen = layouts.same(lambda make: fit(make, EarlyStopping("val_loss", patience=1, min_delta=0.3), max_epochs=20))
    assert 1 < seen["epochs"] < 20


def test_learning_rate_monitor(layouts: Layouts) -> None:
    def observe(make: MakeTrainer) -> Any:
        sheet = Sheet()
        monitor = LearningRateMonitor(logging_interval="step", log_momentum=True, log_weight_decay=True)
        fit(make, monitor, logger=sheet)
        return sheet.rows

    assert any("lr-SGD-momentum" in row for _, row in layouts.same(observe))


def test_timer(layouts: Layouts) -> None:
    layouts.same(lambda make: fit(make, Timer(timedelta(minutes=5), interval="step")))

    def stopped_at_once(make: MakeTrainer) -> Any:
        return fit(make, Timer(timedelta(microseconds=1), interval="step"), num_sanity_val_steps=0)

    assert layouts.same(stopped_at_once)["steps"] == 1


def test_device_stats_monitor(layouts: Layouts) -> None:
    def observe(make: MakeTrainer) -> Any:
        sheet = Sheet()
        return fit(make, DeviceStatsMonitor(cpu_stats=True), logger=sheet), [sorted(row) for _, row in sheet.rows]

    assert any("cpu_percent" in name for row in layouts.same(observe)[1] for name in row)


def test_throughput_monitor(layouts: Layouts) -> None:
    class Counted(Measured):
        flops_per_batch = 1000

    def observe(make: MakeTrainer) -> Any:
        sheet = Sheet()
        monitor = ThroughputMonitor(batch_size_fn=lambda batch: len(batch[0]), window_size=3)
        rest = fit(make, monitor, module=Counted, logger=sheet)
        samples = [value for _, row in sheet.rows for name, value in row.items() if name == "train/samples"]
        return rest, [sorted(row) for _, row in sheet.rows], samples

    assert layouts.same(observe)[2][:3] == [8, 16, 24]


def test_lambda_callback(layouts: Layouts) -> None:
    def observe(make: MakeTrainer) -> Any:
        seen: list[Any] = []
        told = LambdaCallback(on_train_batch_end=lambda trainer, module, outputs, batch, i: seen.append((i, outputs["loss"])))
        return fit(make, told), seen

    layouts.same(observe)


def test_spike_detection(layouts: Layouts, tmp_path: Path) -> None:
    def observe(make: MakeTrainer) -> Any:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        watches = SpikeDetection(rtol=0.01, warmup=1, exclude_batches_path=folder)
        with pytest.raises(TrainingSpikeException) as caught:
            fit(make, watches, max_epochs=20)
        return str(caught.value), watches.bad_batches, (folder / "skip_batches.json").read_text()

    layouts.same(observe)


class Fails(Callback):
    @override
    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == 2:
            raise ValueError("the third batch")


@pytest.mark.filterwarnings(r"ignore:.*`?.fit\(ckpt_path=")  # Lightning looks for a checkpoint to go on from
def test_checkpoint_on_exception(layouts: Layouts, tmp_path: Path) -> None:
    def observe(make: MakeTrainer) -> Any:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        with pytest.raises(ValueError, match="the third batch"):
            fit(make, OnExceptionCheckpoint(folder), Fails(), enable_checkpointing=True)
        saved = torch.load(folder / "on_exception.ckpt", weights_only=True)
        return dict(saved["state_dict"]), saved["optimizer_states"], saved["global_step"]

    assert layouts.same(observe)[2] == 2


# -- that change how it is trained -------------------------------------------------------------------------------------


def test_gradient_accumulation_scheduler(layouts: Layouts) -> None:
    seen = layouts.same(lambda make: fit(make, GradientAccumulationScheduler({0: 1, 1: 2})))
    assert seen["steps"] == 3 + 2 + 2


class Thaws(BaseFinetuning):
    """Begins with the head, and adds a layer in each epoch."""

    @override
    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze([pl_module.fc1, pl_module.fc2])

    @override
    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Optimizer) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.fc2, optimizer, lr=0.05)
        if epoch == 2:
            self.unfreeze_and_add_param_group(pl_module.fc1, optimizer, lr=0.02)


@pytest.mark.parametrize("num_stages", [2, 3])
def test_base_finetuning(num_stages: int, layouts: Layouts) -> None:
    seen = layouts.same(lambda make: fit(make, Thaws()), num_stages)
    assert [group["size"] for group in seen["groups"][0]] == [2, 2, 2]


def test_backbone_finetuning(layouts: Layouts) -> None:
    callback: Callable[[], Callback] = lambda: BackboneFinetuning(1, lambda epoch: 1.5)  # noqa: E731 - a new one for each run
    seen = layouts.same(lambda make: fit(make, callback(), module=Backbone))
    assert [group["size"] for group in seen["groups"][0]] == [2, 4]


@pytest.mark.filterwarnings("ignore:.*no value in `module` is a floating")
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"use_lottery_ticket_hypothesis": False}, id="global"),
        pytest.param({"use_global_unstructured": False, "use_lottery_ticket_hypothesis": False, "verbose": 2}, id="layerwise"),
        pytest.param({"apply_pruning": lambda epoch: epoch == 1}, id="lottery ticket"),
        pytest.param({"use_lottery_ticket_hypothesis": False, "prune_on_train_epoch_end": False}, id="after validation"),
    ],
)
def test_model_pruning(options: dict[str, Any], layouts: Layouts, tmp_path: Path) -> None:
    def observe(make: MakeTrainer) -> Any:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        pruned = ModelPruning("l1_unstructured", parameter_names=["weight"], amount=0.3, **options)
        rest = fit(make, pruned, ModelCheckpoint(folder), enable_checkpointing=True)
        [path] = folder.iterdir()
        return rest, dict(torch.load(path, weights_only=True)["state_dict"])

    rest, saved = layouts.same(observe)
    assert rest["weights"].keys() == saved.keys() == {f"fc{i}.{name}" for i in (1, 2, 3) for name in ("weight", "bias")}
    assert sum(int((saved[f"fc{i}.weight"] == 0).sum()) for i in (1, 2, 3)) > 100


# -- that say what is printed ------------------------------------------------------------------------------------------


def test_prints_go_out_once(layouts: Layouts) -> None:
    class Talks(Measured):
        def on_train_epoch_end(self) -> None:
            self.print("epoch", self.current_epoch, "done")

    def observe(make: MakeTrainer) -> Any:
        with redirect_stdout(io.StringIO()) as out:
            fit(make, module=Talks)
        return out.getvalue()

    assert layouts.same(observe) == "epoch 0 done\nepoch 1 done\nepoch 2 done\n"
