"""MNIST through torchvision, which is an optional dependency: ``pip install 'lightning_mgpu[mnist]'``."""

import importlib
from types import ModuleType
from typing import Any

import torch
from torch.utils.data import Dataset, Subset
from typing_extensions import override

from lightning_mgpu.examples.splits import SplitDataModule

_NUM_VAL = 5000
_MEAN, _STD = 0.1307, 0.3081  # of the 60,000 training images' pixels, scaled to 0 to 1


class MNISTDataModule(SplitDataModule):
    """55,000 digits to train on, 5,000 to validate and 10,000 to test, as images ``(1, 28, 28)`` with a label 0 to 9.

    Args:
        data_dir: The folder that holds ``MNIST/raw``, or is to hold it.
        batch_size: The number of images in a batch.
        seed: The seed that decides which training digits are set aside to validate.
        num_workers: The number of loader processes.
        download: Whether to fetch the files when the folder lacks them.

    Raises:
        ModuleNotFoundError: If torchvision is not installed.
    """

    def __init__(
        self,
        data_dir: str = "data",
        batch_size: int = 64,
        seed: int = 0,
        num_workers: int = 0,
        *,
        download: bool = False,
    ) -> None:
        super().__init__(batch_size, num_workers)
        self.data_dir = data_dir
        self.seed = seed
        self.download = download
        _import_torchvision()  # says what is missing here, rather than in the middle of a run

    @override
    def prepare_data(self) -> None:
        if self.download:
            datasets = _import_torchvision().datasets
            for train in (True, False):
                datasets.MNIST(self.data_dir, train=train, download=True)

    @override
    def load_splits(self) -> tuple[Dataset[Any], Dataset[Any], Dataset[Any]]:
        torchvision = _import_torchvision()
        to_tensor = torchvision.transforms.ToTensor()
        normalize = torchvision.transforms.Normalize((_MEAN,), (_STD,))
        transform = torchvision.transforms.Compose([to_tensor, normalize])
        try:
            labelled = torchvision.datasets.MNIST(self.data_dir, train=True, transform=transform)
            test = torchvision.datasets.MNIST(self.data_dir, train=False, transform=transform)
        except RuntimeError as error:
            message = (
                f"found no MNIST files in {self.data_dir!r}; put them into its folder MNIST/raw, "
                "or pass download=True to fetch them"
            )
            raise FileNotFoundError(message) from error
        order = torch.randperm(len(labelled), generator=torch.Generator().manual_seed(self.seed)).tolist()
        return Subset(labelled, order[_NUM_VAL:]), Subset(labelled, order[:_NUM_VAL]), test


def _import_torchvision() -> ModuleType:
    """Imports torchvision, or says how to get it."""
    try:
        return importlib.import_module("torchvision")
    except ModuleNotFoundError as error:
        if error.name != "torchvision":
            raise
        message = (
            "MNISTDataModule needs torchvision, which is not installed; run pip install 'lightning_mgpu[mnist]', "
            "or use DigitsDataModule, whose digits come with scikit-learn"
        )
        raise ModuleNotFoundError(message, name="torchvision") from error
