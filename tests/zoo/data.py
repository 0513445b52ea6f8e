"""Random data sets of a few dozen rows, served by ordinary loaders; the caller seeds them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

Loader: TypeAlias = DataLoader[Any]


class NoisyRows(Dataset[tuple[Tensor, Tensor]]):
    """Adds fresh noise to a row each time it is read, as an augmentation would."""

    def __init__(self, num_rows: int) -> None:
        self.x = torch.randn(num_rows, 8)
        self.y = torch.randn(num_rows, 4)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index] + 0.1 * torch.rand(8), self.y[index]


class Prepared(Dataset[Any]):
    """Hands out batches that somebody prepared one by one; the loader collates nothing."""

    def __init__(self, batches: Sequence[Any]) -> None:
        self.batches = list(batches)

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> Any:
        return self.batches[index]


class Splits(LightningDataModule):
    """Serves two sets of rows in batches of 8: one to train on, one to every other loop."""

    def __init__(self, training_rows: TensorDataset, other_rows: TensorDataset) -> None:
        super().__init__()
        self.training_rows = training_rows
        self.other_rows = other_rows

    def train_dataloader(self) -> Loader:
        return DataLoader(self.training_rows, batch_size=8, shuffle=True)

    def val_dataloader(self) -> Loader:
        return DataLoader(self.other_rows, batch_size=8)

    def predict_dataloader(self) -> Loader:
        return DataLoader(self.other_rows, batch_size=8)


def rows(*columns: Tensor, batch_size: int = 8, shuffle: bool = False) -> Loader:
    """Serves the rows of parallel tensors as tuples."""
    return DataLoader(TensorDataset(*columns), batch_size=batch_size, shuffle=shuffle)


def as_it_is(batch: Any) -> Any:
    """Returns the batch unchanged, where the loader's own conversion makes lists of tuples."""
    return batch


def prepared(batches: Sequence[Any]) -> Loader:
    """Serves ready-made batches in their order."""
    return DataLoader(Prepared(batches), batch_size=None, collate_fn=as_it_is)


def vectors() -> Loader:
    """Serves 24 shuffled pairs of an (8,) input and a (4,) target."""
    return rows(torch.randn(24, 8), torch.randn(24, 4), shuffle=True)


def noisy_vectors() -> Loader:
    """Serves 24 shuffled pairs whose inputs are redrawn at every reading."""
    return DataLoader(NoisyRows(24), batch_size=8, shuffle=True)


def vector_pairs() -> Loader:
    """Serves 24 shuffled pairs of two related (8,) views of one sample."""
    view = torch.randn(24, 8)
    return rows(view, view + 0.3 * torch.randn(24, 8), shuffle=True)


def vector_splits() -> Splits:
    """Serves 22 vectors to each loop, so that the last batch holds 6 rows."""
    training, other = (TensorDataset(torch.randn(22, 8), torch.randn(22, 4)) for _ in range(2))
    return Splits(training, other)


def digit_splits() -> Splits:
    """Serves 20 grey images of 28 by 28 pixels with one of ten labels to each loop, the last 4 in a batch."""
    training, other = (TensorDataset(torch.randn(20, 1, 28, 28), torch.randint(10, (20,))) for _ in range(2))
    return Splits(training, other)


def vectors_in_batches_of(*num_rows: int) -> Loader:
    """Serves one batch of vectors for each number of rows."""
    return prepared([(torch.randn(each, 8), torch.randn(each, 4)) for each in num_rows])


def same_vector() -> Loader:
    """Serves 24 copies of one vector."""
    return rows(torch.randn(1, 8).repeat(24, 1), torch.randn(1, 4).repeat(24, 1))


def small_images() -> Loader:
    """Serves 24 colour images of 8 by 8 pixels with one of ten labels."""
    return rows(torch.randn(24, 3, 8, 8), torch.randint(10, (24,)), shuffle=True)


def image_pairs() -> Loader:
    """Serves 24 one-channel images of 8 by 8 pixels with an image as target."""
    return rows(torch.randn(24, 1, 8, 8), torch.randn(24, 1, 8, 8), shuffle=True)


def sentences() -> Loader:
    """Serves 24 sentences of 6 words out of 20, each with its next words as labels."""
    words = torch.randint(20, (24, 7))
    return rows(words[:, :-1], words[:, 1:], shuffle=True)


def ragged_sentences() -> Loader:
    """Serves 24 sentences of which row after row has fewer valid targets, the rest -100."""
    words, labels = torch.randint(20, (24, 6)), torch.randint(20, (24, 6))
    num_valid = torch.arange(24) % 6 + 1
    return rows(words, labels.masked_fill(torch.arange(6) >= num_valid[:, None], -100))


def sentence_pairs() -> Loader:
    """Serves 24 source sentences of 6 words, target sentences of 5 words and their labels."""
    target = torch.randint(20, (24, 6))
    return rows(torch.randint(20, (24, 6)), target[:, :-1], target[:, 1:])


def sentences_of_changing_length() -> Loader:
    """Serves three batches of 8 sentences with 5, 7 and 6 words."""
    return prepared([(torch.randint(20, (8, n)), torch.randint(20, (8, n))) for n in (5, 7, 6)])


def padding_in_last_rows(num_rows: int = 8, length: int = 6, num_padded: int = 2) -> Tensor:
    """Builds a mask that leaves out the end of the last rows only.

    Args:
        num_rows: Rows in the batch.
        length: Words in a row.
        num_padded: Rows, counted from the last, that end in padding.

    Returns:
        A boolean mask (num_rows, length), true for words.
    """
    mask = torch.ones(num_rows, length, dtype=torch.bool)
    for shortening, row in enumerate(range(num_rows - num_padded, num_rows), start=1):
        mask[row, -shortening - 1 :] = False
    return mask


def padded_sentences() -> Loader:
    """Serves dict batches: the first and third without padding, the second padded in its last two rows."""
    batches = []
    for num_padded in (0, 2, 0):
        mask = padding_in_last_rows(num_padded=num_padded)
        words = torch.randint(1, 20, (8, 6)).masked_fill(~mask, 0)
        batches.append({"words": words, "mask": mask, "label": torch.randint(4, (8,))})
    return prepared(batches)


def rows_of_uneven_length() -> Loader:
    """Serves dict batches whose longest row has 6, 5 and 6 words and stands in the last microbatch."""
    batches = []
    for longest in (6, 5, 6):
        lengths = torch.tensor([2, 2, 3, 3, 3, 4, 4, longest])
        words = torch.randint(1, 20, (8, 6)).masked_fill(torch.arange(6) >= lengths[:, None], 0)
        batches.append({"words": words, "lengths": lengths, "label": torch.randint(4, (8,))})
    return prepared(batches)
