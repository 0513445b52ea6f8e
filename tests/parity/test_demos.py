"""Lightning's own demos, as they are: the same results as on one device."""

from __future__ import annotations

import random
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.demos import LightningLSTM, LightningTransformer, SequenceSampler, WikiText2, transformer
from lightning.pytorch.demos.boring_classes import (
    BoringDataModule,
    BoringDataModuleNoLen,
    BoringModel,
    DemoModel,
    IterableBoringDataModule,
    ManualOptimBoringModel,
    Net,
    RandomDataset,
)
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

from lightning_mgpu.errors import PartitionError
from tests.parity.layouts import Layouts, MakeTrainer, assert_equal_trees
from tests.parity.measured import Losses, left

WORDS = "the a cat dog sat on mat and ran home big red".split()


class DeepBoring(BoringModel):
    """Is the boring model with a layer more, so that there is something to cut."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(32, 8), nn.Linear(8, 2))  # type: ignore[assignment]


class DeepManual(ManualOptimBoringModel):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(32, 8), nn.Linear(8, 2))  # type: ignore[assignment]


class DeepDemo(DemoModel):
    def __init__(self) -> None:
        super().__init__(out_dim=8)
        self.l1 = nn.Sequential(nn.Linear(32, 16), nn.Linear(16, 8))  # type: ignore[assignment]


def run(make: MakeTrainer, module: LightningModule, data: Any = None, **kwargs: Any) -> Any:
    """Fits, and evaluates with what the module or its data has for that."""
    losses = Losses()
    trainer = make(**{"max_epochs": 1, "callbacks": [losses], "limit_train_batches": 10, "limit_val_batches": 5, **kwargs})
    trainer.fit(module, data)
    found: list[Any] = []
    if isinstance(module, BoringModel):
        found = [trainer.validate(module, data, verbose=False), trainer.test(module, data, verbose=False)]
        found.append(trainer.predict(module, data))
    return losses.kept, found, left(module, trainer)


@pytest.mark.parametrize("module", [BoringModel, ManualOptimBoringModel])
def test_one_layer_on_one_device_of_the_strategy(module: type[LightningModule], layouts: Layouts) -> None:
    layouts.same(lambda make: run(make, module()), num_stages=1)


@pytest.mark.parametrize("module", [BoringModel, ManualOptimBoringModel, DemoModel])
def test_one_layer_can_not_be_cut_in_two(module: type[LightningModule], layouts: Layouts) -> None:
    with layouts.lent() as make, pytest.raises(PartitionError) as caught:
        run(make, module(), DataLoader(RandomDataset(32, 64)))
    name = module.__name__
    assert str(caught.value) == f"cannot cut 1 layer of {name} into 2 stages; use at most 1 stage (devices=1)"


@pytest.mark.parametrize("data", [None, BoringDataModule, BoringDataModuleNoLen])
def test_boring_models(data: Any, layouts: Layouts) -> None:
    layouts.same(lambda make: run(make, DeepBoring(), data and data()))
    layouts.same(lambda make: run(make, DeepManual(), data and data(), callbacks=[]))


class TakesPairs(DeepBoring):
    """Takes what `IterableBoringDataModule` serves: rows of two loaders at once."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))  # type: ignore[assignment]

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.step(batch[0]) + self.step(batch[1])

    @override
    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return super().validation_step(batch, batch_idx)

    @override
    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return super().test_step(batch, batch_idx)

    @override
    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return self(batch)


def test_iterable_data_module(layouts: Layouts) -> None:
    layouts.same(lambda make: run(make, TakesPairs(), IterableBoringDataModule()))


def test_demo_model(layouts: Layouts) -> None:
    layouts.same(lambda make: run(make, DeepDemo(), DataLoader(RandomDataset(32, 64), batch_size=8)))


class Images(LightningModule):
    """Trains the demos' convolutional network as their MNIST script does."""

    def __init__(self) -> None:
        super().__init__()
        self.net = without_dropout(Net())

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, label = batch
        return F.nll_loss(self.net(x), label)

    @override
    def configure_optimizers(self) -> Any:
        return torch.optim.Adadelta(self.parameters(), lr=1.0)


@pytest.mark.parametrize("num_stages", [2, 3])
def test_convolutional_network(num_stages: int, layouts: Layouts) -> None:
    def observe(make: MakeTrainer) -> Any:
        images = TensorDataset(torch.randn(24, 1, 28, 28), torch.randint(10, (24,)))
        return run(make, Images(), DataLoader(images, batch_size=8))

    layouts.same(observe, num_stages)


# -- language models ---------------------------------------------------------------------------------------------------


@pytest.fixture
def _text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts a small text where the demos would download WikiText to, so that they find it and download nothing."""
    draw = random.Random(0)
    lines = [" ".join(draw.choice(WORDS) for _ in range(12)) for _ in range(80)]
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "wikitext-2.txt").write_text("\n".join(lines))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "requests", types.ModuleType("requests"))
    monkeypatch.setattr(transformer, "_REQUESTS_AVAILABLE", True)


def without_dropout(module: nn.Module) -> Any:
    """Switches off what is random in a forward, since each microbatch draws masks of its own."""
    for child in module.modules():
        if isinstance(child, nn.Dropout):
            child.p = 0.0
        elif isinstance(child, nn.MultiheadAttention | nn.LSTM):
            child.dropout = 0.0
    return module


@pytest.mark.usefixtures("_text")
@pytest.mark.parametrize("num_stages", [2, 3])
@pytest.mark.parametrize("batch_size", [1, 8])
def test_transformer(batch_size: int, num_stages: int, layouts: Layouts) -> None:
    """In double precision, since some of its gradients are the small difference of large numbers."""

    def observe(make: MakeTrainer) -> Any:
        text = WikiText2()
        module = without_dropout(LightningTransformer(text.vocab_size))
        own = None if batch_size == 1 else DataLoader(text, batch_size=batch_size)
        return run(make, module, own, limit_train_batches=3, precision="64-true")

    layouts.same(observe, num_stages)


@pytest.mark.usefixtures("_text")
def test_transformer_with_dropout(layouts: Layouts) -> None:
    """Draws other masks than one device, and learns as well."""

    def observe(make: MakeTrainer) -> list[float]:
        text = WikiText2()
        losses, _, _ = run(make, LightningTransformer(text.vocab_size), DataLoader(text, batch_size=8), max_epochs=4)
        return [loss.item() for loss in losses]

    one, cut, again = layouts.one_device(observe), layouts.stages(observe), layouts.stages(observe)
    assert cut == again != one
    assert len(cut) == len(one)
    for losses in (one, cut):
        assert losses[-1] < 0.5 * losses[0]
    assert cut[-1] == pytest.approx(one[-1], rel=0.2)


@pytest.mark.usefixtures("_text")
@pytest.mark.parametrize("own_loader", [True, False])
def test_lstm(own_loader: bool, layouts: Layouts) -> None:
    """Carries its state from batch to batch, with the rows in the second dimension, so that no microbatch is cut from it.

    Its learning rate of 20 allows few steps before rounding shows.
    """

    def observe(make: MakeTrainer) -> Any:
        text = WikiText2()
        module = without_dropout(LightningLSTM(text.vocab_size))
        data = DataLoader(text, batch_sampler=SequenceSampler(text, batch_size=8)) if own_loader else None
        losses, _, rest = run(make, module, data, limit_train_batches=3, precision="64-true")
        return losses, rest

    expected = layouts.one_device(observe)
    with pytest.warns(UserWarning, match=r"model \(SimpleLSTM\) is run in 1 microbatch for a batch of . rows, since its"):
        ours = layouts.stages(observe)
    assert_equal_trees(expected, ours)
