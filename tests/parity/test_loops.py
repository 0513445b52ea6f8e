"""Every option of the Trainer's loops, and every order of Trainer calls, runs the same steps with the same results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import override

from tests.parity.layouts import Layouts, MakeTrainer
from tests.parity.measured import Losses, Measured, left, loader

OPTIONS: dict[str, dict[str, Any]] = {
    "overfit_batches=2": {"overfit_batches": 2},
    "overfit_batches=0.5": {"overfit_batches": 0.5},
    "limit batches": {"limit_train_batches": 2, "limit_val_batches": 2},
    "limit a part of the batches": {"limit_train_batches": 0.7, "limit_val_batches": 0.5},
    "limit_val_batches=0": {"limit_val_batches": 0},
    "fast_dev_run": {"fast_dev_run": True},
    "fast_dev_run=2": {"fast_dev_run": 2},
    "max_steps": {"max_steps": 4, "max_epochs": -1},
    "max_time": {"max_time": "00:01:00:00"},
    "min_epochs and min_steps": {"min_epochs": 1, "min_steps": 4},
    "val_check_interval=2": {"val_check_interval": 2},
    "val_check_interval=0.34": {"val_check_interval": 0.34},
    "val_check_interval over epochs": {"val_check_interval": 4, "check_val_every_n_epoch": None},
    "check_val_every_n_epoch=2": {"check_val_every_n_epoch": 2},
    "num_sanity_val_steps=0": {"num_sanity_val_steps": 0},
    "num_sanity_val_steps=-1": {"num_sanity_val_steps": -1},
    "accumulate_grad_batches=2": {"accumulate_grad_batches": 2},
    "inference_mode=False": {"inference_mode": False},
    "detect_anomaly": {"detect_anomaly": True},
    "deterministic=True": {"deterministic": True},
    "deterministic=warn": {"deterministic": "warn"},
    "benchmark": {"benchmark": True},
    "barebones": {"barebones": True},
    "reload_dataloaders_every_n_epochs": {"reload_dataloaders_every_n_epochs": 1},
    "use_distributed_sampler=False": {"use_distributed_sampler": False},
    "log_every_n_steps=2": {"log_every_n_steps": 2},
}


@pytest.fixture(autouse=True)
def _settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Puts back what ``deterministic`` and ``benchmark`` switch for good."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = False


@pytest.mark.filterwarnings("ignore:.*`self.log.*barebones")
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_option(options: dict[str, Any], layouts_of_any_kind: Layouts) -> None:
    def observe(make: MakeTrainer) -> Any:
        module = Measured()
        trainer = make(**{"max_epochs": 3, **options})
        trainer.fit(module, loader(), loader(20))
        return left(module, trainer)

    assert layouts_of_any_kind.same(observe)["steps"] > 0


# -- one Trainer call after the other ----------------------------------------------------------------------------------


def test_evaluation_without_fit(layouts_of_any_kind: Layouts) -> None:
    def observe(make: MakeTrainer) -> Any:
        module, trainer = Measured(), make()
        found = [
            trainer.validate(module, loader(), verbose=False),
            trainer.test(module, loader(20), verbose=False),
            trainer.predict(module, loader(20)),
            trainer.predict(module, loader(20), return_predictions=False),
            trainer.predict(module, [loader(8), loader(12, 5)]),
        ]
        return found, left(module, trainer)

    (_, _, predictions, none, several), _ = layouts_of_any_kind.same(observe, 3)
    assert [len(each) for each in predictions] == [8, 8, 4]
    assert none is None
    assert [[len(each) for each in of_loader] for of_loader in several] == [[8], [5, 5, 2]]


@pytest.mark.parametrize("num_stages", [2, 3])
def test_calls_in_turn(num_stages: int, layouts_of_any_kind: Layouts) -> None:
    def observe(make: MakeTrainer) -> Any:
        module, trainer = Measured(), make(max_epochs=1)
        seen = []
        for epochs in (1, 2, 3):
            trainer.fit_loop.max_epochs = epochs
            trainer.fit(module, loader(), loader(20))
            trainer.validate(module, loader(20), verbose=False)
            trainer.test(module, loader(20), verbose=False)
            seen.append((trainer.predict(module, loader(20)), left(module, trainer)))
        another = make(max_epochs=1)
        another.fit(module, loader())
        return seen, left(module, another)

    seen, _ = layouts_of_any_kind.same(observe, num_stages)
    assert [rest["steps"] for _, rest in seen] == [3, 6, 9]


def test_another_module_with_the_same_trainer(layouts_of_any_kind: Layouts) -> None:
    def observe(make: MakeTrainer) -> Any:
        first, second, trainer = Measured(), Measured(lr=0.01), make(max_epochs=1)
        trainer.fit(first, loader())
        trainer.fit_loop.max_epochs = 2
        trainer.fit(second, loader())
        return left(first, trainer), left(second, trainer)

    layouts_of_any_kind.same(observe)


def test_frozen_and_thawed(layouts_of_any_kind: Layouts) -> None:
    def observe(make: MakeTrainer) -> Any:
        module, trainer = Measured(), make(max_epochs=1)
        module.freeze()
        scores = trainer.validate(module, loader(), verbose=False)
        module.unfreeze()
        trainer.fit(module, loader())
        return scores, left(module, trainer)

    _, rest = layouts_of_any_kind.same(observe)
    assert len(rest["trained"]) == 6


# -- loops that end or turn off early ----------------------------------------------------------------------------------


class Stops(Callback):
    @override
    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        trainer.should_stop = trainer.global_step == 2


class EvaluatesInBetween(Callback):
    """Runs the validation loop by hand in the middle of training."""

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        pl_module.eval()
        with torch.no_grad():
            pl_module.noted.append(pl_module(torch.ones(5, 8)))  # type: ignore[operator, union-attr]
        pl_module.train()


@pytest.mark.parametrize("callback", [Stops, EvaluatesInBetween])
def test_callback_that_steers(callback: Callable[[], Callback], layouts_of_any_kind: Layouts) -> None:
    def observe(make: MakeTrainer) -> Any:
        module, trainer = Measured(), make(max_epochs=3, callbacks=[callback()])
        trainer.fit(module, loader(), loader(20))
        return left(module, trainer)

    assert layouts_of_any_kind.same(observe)["steps"] == (2 if callback is Stops else 9)


class SkipsEpochs(Measured):
    """Leaves an epoch at its second batch."""

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 1 else None


class ReturnsNothing(Measured):
    """Returns nothing after it has called its network."""

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx == 1 else loss


class BeginsWithNothing(Measured):
    """Returns nothing for its first batches, for which it never calls its network."""

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        return None if batch_idx < 2 else super().training_step(batch, batch_idx)


class ReturnsMore(Measured):
    """Returns its loss among values of many kinds."""

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return {"loss": loss, "scores": loss.detach(), "number": 3, "text": "more", "nested": {"list": [loss.detach() * 2]}}


class TakesTheIterator(Measured):
    """Fetches its batches itself."""

    @override
    def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
        batch, batch_idx, _ = next(dataloader_iter)
        x, y = batch
        loss = F.mse_loss(self(x), y)
        self.noted.append((batch_idx, loss.detach()))
        return loss


class KeepsOutputs(Measured):
    """Collects what its steps made until the epoch ends, and logs it then."""

    @override
    def on_train_epoch_start(self) -> None:
        self.outputs: list[Tensor] = []

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        x, y = batch
        forecast = self(x)
        self.outputs.append(forecast.detach())
        return F.mse_loss(forecast, y)

    @override
    def on_train_epoch_end(self) -> None:
        self.log("spread", torch.cat(self.outputs).std())
        self.outputs.clear()


@pytest.mark.filterwarnings("ignore:You are using the `dataloader_iter` step flavor")
@pytest.mark.filterwarnings("ignore:Found `dataloader_iter` argument")
@pytest.mark.parametrize(
    "module", [SkipsEpochs, ReturnsNothing, BeginsWithNothing, ReturnsMore, TakesTheIterator, KeepsOutputs]
)
def test_training_step(module: type[Measured], layouts_of_any_kind: Layouts) -> None:
    def observe(make: MakeTrainer) -> Any:
        made, losses = module(), Losses()
        trainer = make(max_epochs=2, callbacks=[losses])
        trainer.fit(made, loader(20), loader(20))
        return left(made, trainer), losses.kept

    rest, _ = layouts_of_any_kind.same(observe)
    assert rest["steps"] > 0


class ValidatesNothing(Measured):
    """Does not call its network on the first batches it validates on."""

    @override
    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int, dataloader_idx: int = 0) -> Any:
        return None if batch_idx < 2 else super().validation_step(batch, batch_idx)


def test_validation_step_that_skips(layouts_of_any_kind: Layouts) -> None:
    def observe(make: MakeTrainer) -> Any:
        module, trainer = ValidatesNothing(), make(max_epochs=1)
        scores = trainer.validate(module, loader(), verbose=False)
        trainer.fit(module, loader(), loader())
        return scores, left(module, trainer)

    layouts_of_any_kind.same(observe)


def test_what_the_trainer_says_of_itself(layouts_of_any_kind: Layouts) -> None:
    def observe(make: MakeTrainer) -> Any:
        seen = []

        class Asks(Callback):
            @override
            def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
                seen.append((trainer.world_size, trainer.num_devices, trainer.global_rank, trainer.is_global_zero))
                seen.append((trainer.estimated_stepping_batches, trainer.num_training_batches, str(pl_module.device)))
                seen.append((trainer.strategy.broadcast("x"), trainer.strategy.reduce(torch.ones(1))))
                seen.append((pl_module.all_gather(torch.ones(2)), trainer.strategy.root_device))

        make(max_epochs=2, callbacks=[Asks()]).fit(Measured(), loader())
        return seen

    layouts_of_any_kind.same(observe)
