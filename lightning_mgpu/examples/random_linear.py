"""Random numbers to fit random numbers to: the smallest data for the linear models."""

from typing import Any

import torch
from torch.utils.data import Dataset, TensorDataset
from typing_extensions import override

from lightning_mgpu.examples.splits import SplitDataModule

_NUM_SAMPLES = 100
_NUM_FEATURES = 10


class RandomLinearDataModule(SplitDataModule):
    """Three splits of 100 normally distributed inputs ``(10,)`` with normally distributed targets ``(num_targets,)``.

    Inputs and targets are independent, so there is nothing to learn but the targets' mean and, in the training split,
    their noise.

    Args:
        num_targets: The number of targets of a sample: 2 for ``Linear``, 1 for ``TwoLayerLinear``.
        batch_size: The number of samples in a batch.
        seed: The seed that the numbers are drawn from.
        num_workers: The number of loader processes.
    """

    def __init__(self, num_targets: int = 2, batch_size: int = 64, seed: int = 0, num_workers: int = 0) -> None:
        super().__init__(batch_size, num_workers)
        self.num_targets = num_targets
        self.seed = seed

    @override
    def load_splits(self) -> tuple[Dataset[Any], Dataset[Any], Dataset[Any]]:
        generator = torch.Generator().manual_seed(self.seed)

        def draw() -> TensorDataset:
            inputs = torch.randn(_NUM_SAMPLES, _NUM_FEATURES, generator=generator)
            targets = torch.randn(_NUM_SAMPLES, self.num_targets, generator=generator)
            return TensorDataset(inputs, targets)

        return draw(), draw(), draw()
