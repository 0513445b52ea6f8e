"""What the example data sets share: three splits, loaded once and dealt out in batches."""

from abc import ABC, abstractmethod
from typing import Any

import lightning as L
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override


class SplitDataModule(L.LightningDataModule, ABC):
    """Deals a training, a validation and a test split out in batches; only the training split is shuffled.

    The order of the training batches comes from torch's global generator, as in any plain script: the seed of the run
    decides it, not the seed of the split.

    Args:
        batch_size: The number of samples in a batch; the last batch of a split may hold fewer.
        num_workers: The number of loader processes, 0 to load in the Trainer's own process.
    """

    def __init__(self, batch_size: int, num_workers: int = 0) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.num_workers = num_workers
        self._splits: tuple[Dataset[Any], Dataset[Any], Dataset[Any]] | None = None

    @abstractmethod
    def load_splits(self) -> tuple[Dataset[Any], Dataset[Any], Dataset[Any]]:
        """Loads the training, the validation and the test split."""

    @override
    def setup(self, stage: str) -> None:
        if self._splits is None:
            self._splits = self.load_splits()

    @override
    def train_dataloader(self) -> DataLoader[Any]:
        return self._loader(0, shuffle=True)

    @override
    def val_dataloader(self) -> DataLoader[Any]:
        return self._loader(1)

    @override
    def test_dataloader(self) -> DataLoader[Any]:
        return self._loader(2)

    @override
    def predict_dataloader(self) -> DataLoader[Any]:
        return self._loader(2)

    def _loader(self, split: int, *, shuffle: bool = False) -> DataLoader[Any]:
        assert self._splits is not None, "setup() comes before the loaders"
        return DataLoader(
            self._splits[split],
            batch_size=self.batch_size,
            shuffle=shuffle,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
        )
