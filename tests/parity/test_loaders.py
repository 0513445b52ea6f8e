"""Batches: every loader that Lightning takes, and every hook between a loader and a step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler
from typing_extensions import override

from tests.parity.layouts import Layouts, MakeTrainer
from tests.parity.measured import Measured, left, loader, table
from tests.zoo.data import Loader, NoisyRows, as_it_is, prepared


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    """Yields 21 rows and never says how many there are."""

    @override
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        yield from (table(21)[row] for row in range(21))


class CountedStream(Stream):
    """Says how many there are."""

    def __len__(self) -> int:
        return 21


class Batches:
    """Is no loader of torch's, but can be iterated."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        yield from loader(20)


LOADERS = {
    "loader processes": lambda: loader(num_workers=2),
    "loader processes that stay": lambda: loader(num_workers=1, persistent_workers=True, prefetch_factor=3),
    "augmented in the loader": lambda: DataLoader(NoisyRows(24), batch_size=8, shuffle=True),
    "stream without a length": lambda: DataLoader(Stream(), batch_size=8),
    "stream with a length": lambda: DataLoader(CountedStream(), batch_size=8, drop_last=True),
    "any iterable": Batches,
    "drop_last": lambda: loader(20, drop_last=True),
    "one row left": lambda: loader(17),
    "single rows": lambda: loader(4, batch_size=1),
    "batch sampler": lambda: DataLoader(table(12), batch_sampler=BatchSampler(RandomSampler(range(12)), 5, drop_last=False)),
}


@pytest.mark.filterwarnings("ignore:Your `IterableDataset` has `__len__` defined")
@pytest.mark.filterwarnings("ignore:.*sampler has shuffling enabled")
@pytest.mark.filterwarnings("ignore:You are using a custom batch sampler")
@pytest.mark.parametrize("make_loader", LOADERS.values(), ids=LOADERS)
def test_loader(make_loader: Any, layouts: Layouts) -> None:
    def observe(make: MakeTrainer) -> Any:
        module, trainer = Measured(), make(max_epochs=2)
        trainer.fit(module, make_loader(), make_loader())
        return left(module, trainer), trainer.predict(module, make_loader())

    assert layouts.same(observe)[0]["steps"] > 0


def test_stream_with_validation_between(layouts: Layouts) -> None:
    def observe(make: MakeTrainer) -> Any:
        module, trainer = Measured(), make(max_epochs=2, val_check_interval=2)
        trainer.fit(module, DataLoader(Stream(), batch_size=8), DataLoader(Stream(), batch_size=5))
        return left(module, trainer)

    layouts.same(observe)


# -- several loaders ---------------------------------------------------------------------------------------------------


class TakesSeveral(Measured):
    """Adds the losses of the batches of several loaders, some of which may have ended."""

    @override
    def training_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        batches = batch.values() if isinstance(batch, dict) else [batch]
        losses = [F.mse_loss(self(each[0]), each[1]) for each in batches if each is not None]
        self.noted.append((batch_idx, dataloader_idx, [loss.detach() for loss in losses]))
        self.log("train_loss", torch.stack(losses).sum(), batch_size=1)
        return torch.stack(losses).sum()


class ValidatesSeveral(TakesSeveral):
    @override
    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        self.training_step(batch, batch_idx, dataloader_idx)


@pytest.mark.parametrize("mode", ["min_size", "max_size", "max_size_cycle", "sequential"])
@pytest.mark.parametrize("where", ["training", "validation"])
def test_combined_loaders(mode: Any, where: str, layouts: Layouts) -> None:
    def observe(make: MakeTrainer) -> Any:
        combined = CombinedLoader({"a": loader(24), "b": loader(12, 4), "c": loader(7, 7)}, mode)
        module, trainer = (TakesSeveral() if where == "training" else ValidatesSeveral()), make(max_epochs=2)
        arguments = (combined, None) if where == "training" else (loader(), combined)
        if (mode, where) == ("sequential", "training"):
            with pytest.raises(ValueError, match=r"does not support the `CombinedLoader\(mode=\"sequential\"\)`"):
                trainer.fit(module, *arguments)
        else:
            trainer.fit(module, *arguments)
        return left(module, trainer)

    layouts.same(observe)


def test_several_loaders_to_evaluate_on(layouts: Layouts) -> None:
    def observe(make: MakeTrainer) -> Any:
        module, trainer = Measured(), make(max_epochs=2)
        several = [loader(16), loader(12, 5)]
        trainer.fit(module, loader(), several)
        scores = trainer.test(module, several, verbose=False)
        return scores, trainer.predict(module, several), left(module, trainer)

    scores, _, _ = layouts.same(observe)
    assert [list(each) for each in scores] == [["val_loss/dataloader_idx_0"], ["val_loss/dataloader_idx_1"]]


# -- on the way to a step ----------------------------------------------------------------------------------------------


class Transfers(Measured):
    """Changes its batches at every station."""

    @override
    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] + 1, batch[1]]

    @override
    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        self.noted.append((str(device), dataloader_idx))
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    @override
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        x, y = batch
        return x * (1 + torch.rand(1)), y


@dataclass
class Record:
    """Is a batch of the user's own kind."""

    x: Tensor
    y: Tensor
    names: list[str]


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


class Records(Measured):
    """Takes batches of its own kind, which it moves itself."""

    @override
    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        return Record(batch.x.to(device), batch.y.to(device), batch.names)

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        assert batch.names == [f"row {i}" for i in range(len(batch.x))]
        return super().training_step((batch.x, batch.y), batch_idx)


class Named(Measured):
    @override
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step((batch.x, batch.y), batch_idx)


def records() -> Loader:
    return prepared([Record(x, y, [f"row {i}" for i in range(len(x))]) for x, y in loader(20)])


def pairs() -> Loader:
    return DataLoader([Pair(x, y) for x, y in table(20)], batch_size=8)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("module", "make_loader"),
    [(Transfers, loader), (Records, records), (Named, pairs)],
    ids=["hooks", "own kind", "named tuples"],
)
def test_transfer(module: type[Measured], make_loader: Any, layouts: Layouts) -> None:
    def observe(make: MakeTrainer) -> Any:
        made, trainer = module(), make(max_epochs=2)
        trainer.fit(made, make_loader())
        return left(made, trainer)

    layouts.same(observe)


class Stations(LightningDataModule):
    """Prepares, sets up, serves, changes and tears down, and writes it all down."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.save_hyperparameters({"rows": 24})

    @override
    def prepare_data(self) -> None:
        self.calls.append("prepare_data")

    @override
    def setup(self, stage: str) -> None:
        self.calls.append(f"setup {stage} {self.trainer is not None}")
        self.rows = self.hparams["rows"]

    @override
    def teardown(self, stage: str) -> None:
        self.calls.append(f"teardown {stage}")

    @override
    def train_dataloader(self) -> Loader:
        self.calls.append("train_dataloader")
        return loader(self.rows)

    @override
    def val_dataloader(self) -> list[Loader]:
        return [loader(16), loader(7)]

    @override
    def test_dataloader(self) -> Loader:
        return loader(12)

    predict_dataloader = test_dataloader

    @override
    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] + dataloader_idx, batch[1]]

    @override
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return as_it_is([batch[0] * 0.5, batch[1]])


def test_data_module(layouts: Layouts) -> None:
    def observe(make: MakeTrainer) -> Any:
        module, data, trainer = Measured(), Stations(), make(max_epochs=2, reload_dataloaders_every_n_epochs=1)
        trainer.fit(module, data)
        seen = [trainer.validate(module, data, verbose=False), trainer.test(module, data, verbose=False)]
        return seen, trainer.predict(module, data), left(module, trainer), data.calls

    *_, calls = layouts.same(observe)
    assert calls.count("train_dataloader") == 2
