"""Real handwritten digits that come with scikit-learn, so that nothing needs to be downloaded.

The 1,797 images are the test part of the UCI set "Optical Recognition of Handwritten Digits" (E. Alpaydin, C. Kaynak,
1998): 8 x 8 counts of 0 to 16, whose strokes reach the border. They are enlarged to 24 x 24 and given a margin of 2, as
models of MNIST take 28 x 28 and an unpadded convolution sees little of a border.
"""

from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import Dataset, TensorDataset
from typing_extensions import override

from lightning_mgpu.examples.splits import SplitDataModule

_NUM_VAL = 300
_NUM_TEST = 300


class DigitsDataModule(SplitDataModule):
    """1,197 digits to train on, 300 to validate and 300 to test, as images ``(1, 28, 28)`` with a label 0 to 9.

    Pixels are scaled to 0 to 1, then shifted and scaled by the mean and the standard deviation of the training split.

    Args:
        batch_size: The number of images in a batch.
        seed: The seed that decides which digit falls into which split; the same seed gives the same splits.
        num_workers: The number of loader processes.
    """

    def __init__(self, batch_size: int = 64, seed: int = 0, num_workers: int = 0) -> None:
        super().__init__(batch_size, num_workers)
        self.seed = seed

    @override
    def load_splits(self) -> tuple[Dataset[Any], Dataset[Any], Dataset[Any]]:
        pixels, labels = load_digits(return_X_y=True)
        images = torch.from_numpy(pixels).float().div(16).view(-1, 1, 8, 8)
        images = F.interpolate(images, size=(24, 24), mode="bilinear", align_corners=False)
        images = F.pad(images, (2, 2, 2, 2))
        targets = torch.from_numpy(labels).long()

        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(self.seed))
        test, val, train = order.tensor_split([_NUM_TEST, _NUM_TEST + _NUM_VAL])
        images = (images - images[train].mean()) / images[train].std()
        return (
            TensorDataset(images[train], targets[train]),
            TensorDataset(images[val], targets[val]),
            TensorDataset(images[test], targets[test]),
        )
