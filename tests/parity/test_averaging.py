"""Averages of weights over a run, by Lightning's callbacks and by torch's averaged model, as on one device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint, StochasticWeightAveraging, WeightAveraging
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from typing_extensions import override

from tests.parity.layouts import Layouts
from tests.zoo import data
from tests.zoo.recipe import Classification
from tests.zoo.reuse import TiedHead
from tests.zoo.steps import Mlp


class Validated(Mlp):
    """Notes the losses of its validations, which are made with averaged weights."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[Tensor] = []

    @override
    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        loss = F.mse_loss(self(batch[0]), batch[1])
        self.losses.append(loss)
        self.log("val_loss", loss)


class Normalised(Classification):
    """Normalises in its first and its last stage, by statistics that are averaged too."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.norm1 = nn.BatchNorm2d(8)
        self.body = nn.Conv2d(8, 8, 3)
        self.norm2 = nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 10)

    @override
    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.norm1(self.conv(x)))
        h = torch.relu(self.norm2(self.body(h)))
        scores: Tensor = self.head(h.mean(dim=(2, 3)))
        return scores


class EveryEpoch(WeightAveraging):
    """Averages equally over the weights after each epoch."""

    @override
    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        return epoch_idx is not None


class NotesAverage(Callback):
    """Notes what the average and the weights are after each batch.

    Args:
        averaging: the callback that averages.
    """

    def __init__(self, averaging: Any) -> None:
        self.averaging = averaging
        self.seen: list[Any] = []

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        self.seen.append([_copied(self.averaging._average_model.state_dict()), _copied(pl_module.state_dict())])


def _copied(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value.detach().clone() for name, value in state.items()}


AVERAGING = {
    "ema": lambda: EMAWeightAveraging(decay=0.5),
    "ema-of-weights": lambda: EMAWeightAveraging(decay=0.5, use_buffers=False),
    "ema-later": lambda: EMAWeightAveraging(decay=0.5, update_every_n_steps=2, update_starting_at_step=1),
    "equal": WeightAveraging,
    "every-epoch": EveryEpoch,
    "multi": lambda: WeightAveraging(multi_avg_fn=get_ema_multi_avg_fn(0.5)),
}


def trained(averaging: Callback, module: LightningModule, batches: Any, **trainer: Any) -> Callable[[Any], Any]:
    """Trains with an averaging callback, and returns the average after each batch and what is left at the end."""

    def observe(make_trainer: Any) -> Any:
        notes = NotesAverage(averaging)
        make_trainer(max_epochs=3, callbacks=[averaging, notes], **trainer).fit(module, batches)
        return notes.seen, _copied(module.state_dict())

    return observe


@pytest.mark.parametrize("num_stages", [2, 3])
@pytest.mark.parametrize("name", AVERAGING)
def test_averages(name: str, num_stages: int, layouts: Layouts) -> None:
    def observe(make_trainer: Any) -> Any:
        module = Validated()
        return trained(AVERAGING[name](), module, data.vector_splits())(make_trainer), module.losses

    (seen, left), losses = layouts.same(observe, num_stages)
    average, weights = seen[-1]
    assert not torch.equal(average["module.fc1.weight"], weights["fc1.weight"])
    assert torch.equal(left["fc1.weight"], average["module.fc1.weight"]) or name == "every-epoch"
    assert len(losses) > 3


@pytest.mark.parametrize("name", ["ema", "ema-of-weights"])
def test_statistics_are_averaged(name: str, layouts: Layouts) -> None:
    def observe(make_trainer: Any) -> Any:
        return trained(AVERAGING[name](), Normalised(), data.small_images())(make_trainer)

    layouts.same(observe, num_microbatches=1)


def test_a_shared_parameter_is_averaged_once(layouts: Layouts) -> None:
    def observe(make_trainer: Any) -> Any:
        return trained(AVERAGING["ema"](), TiedHead(), data.sentences())(make_trainer)

    layouts.same(observe, 3)


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_an_average_goes_on_from_a_checkpoint(layouts: Layouts, tmp_path: Path) -> None:
    def observe(make_trainer: Any) -> Any:
        folder = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        saves = ModelCheckpoint(folder, save_last=True)
        options = {"enable_checkpointing": True}
        make_trainer(max_epochs=1, callbacks=[EMAWeightAveraging(decay=0.5), saves], **options).fit(Mlp(), data.vectors())
        saved = torch.load(folder / "last.ckpt", weights_only=True)
        module, averaging = Mlp(), EMAWeightAveraging(decay=0.5)
        notes = NotesAverage(averaging)
        trainer = make_trainer(max_epochs=2, callbacks=[averaging, notes])
        trainer.fit(module, data.vectors(), ckpt_path=folder / "last.ckpt", weights_only=True)
        kept = {key: saved[key] for key in ("state_dict", "current_model_state", "averaging_state")}
        return kept, notes.seen, _copied(module.state_dict())

    layouts.same(observe)


# -- stochastic weight averaging ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_stages", [2, 3])
@pytest.mark.parametrize("strategy", ["cos", "linear"])
def test_stochastic_weight_averaging(strategy: Any, num_stages: int, layouts: Layouts) -> None:
    def observe(make_trainer: Any) -> Any:
        averaging = StochasticWeightAveraging(0.05, swa_epoch_start=2, annealing_epochs=2, annealing_strategy=strategy)
        module = Validated()
        make_trainer(max_epochs=5, callbacks=[averaging]).fit(module, data.vector_splits())
        assert averaging._average_model is not None
        return _copied(averaging._average_model.state_dict()), _copied(module.state_dict()), module.losses

    average, left, _ = layouts.same(observe, num_stages)
    assert torch.equal(average["fc1.weight"], left["fc1.weight"])


@pytest.mark.parametrize("num_stages", [2, 3])
def test_stochastic_weight_averaging_renews_statistics(num_stages: int, layouts: Layouts) -> None:
    def observe(make_trainer: Any) -> Any:
        module = Normalised()
        momenta = [module.norm1.momentum, module.norm2.momentum]
        averaging = StochasticWeightAveraging(0.05, swa_epoch_start=1)
        make_trainer(max_epochs=2, callbacks=[averaging]).fit(module, data.small_images())
        assert [module.norm1.momentum, module.norm2.momentum] == momenta
        return _copied(module.state_dict())

    left = layouts.same(observe, num_stages, num_microbatches=1)
    assert int(left["norm1.num_batches_tracked"]) == 3


# -- averages of the user's own ----------------------------------------------------------------------------------------


class OwnAverage(Mlp):
    """Averages its network in a hook, and validates with the average."""

    def __init__(self) -> None:
        super().__init__()
        del self.fc1, self.fc2, self.fc3
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))
        average = AveragedModel(self.net, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        average.requires_grad_(requires_grad=False)
        self.average: Any = average
        self.losses: list[Tensor] = []

    @override
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.net(x)
        return y

    @override
    def on_train_batch_end(self, *args: Any) -> None:
        self.average.update_parameters(self.net)

    @override
    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.losses.append(F.mse_loss(self.average(batch[0]), batch[1]))

    @override
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.parameters(), lr=0.1)


class HoldsAverage(Callback):
    """Averages the module, in an averaged model of its own."""

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.average = AveragedModel(pl_module, multi_avg_fn=get_ema_multi_avg_fn(0.5))

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        self.average.update_parameters(pl_module)


@pytest.mark.parametrize("num_stages", [2, 3])
def test_an_averaged_model_in_the_module(num_stages: int, layouts: Layouts) -> None:
    def observe(make_trainer: Any) -> Any:
        module = OwnAverage()
        make_trainer(max_epochs=2).fit(module, data.vector_splits())
        return _copied(module.state_dict()), module.losses

    layouts.same(observe, num_stages)


def test_an_averaged_model_in_a_callback(layouts: Layouts) -> None:
    def observe(make_trainer: Any) -> Any:
        holds = HoldsAverage()
        make_trainer(max_epochs=2, callbacks=[holds]).fit(Mlp(), data.vectors())
        return _copied(holds.average.state_dict())

    layouts.same(observe)


class AveragesByHand(Mlp):
    """Averages weights in a hook, reading each."""

    def __init__(self) -> None:
        super().__init__()
        self.average: dict[str, Tensor] = {}

    @override
    def on_train_batch_end(self, *args: Any) -> None:
        summon: Any = getattr(self.trainer.strategy, "summon_parameters", None)
        if summon is None:
            self.update()
        else:
            with summon():
                self.update()

    def update(self) -> None:
        """Takes half of the weights and half of the average."""
        for name, parameter in self.named_parameters():
            self.average[name] = 0.5 * (self.average.get(name, parameter.detach()) + parameter.detach())


def test_an_average_by_hand(layouts: Layouts) -> None:
    def observe(make_trainer: Any) -> Any:
        module = AveragesByHand()
        make_trainer(max_epochs=2).fit(module, data.vectors())
        return dict(module.average)

    layouts.same(observe)
