"""The example data: real digits and random numbers, the same for a seed, in splits that share nothing."""

import struct
import sys
from pathlib import Path

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor

from lightning_mgpu.examples import DigitsDataModule, MNISTDataModule, RandomLinearDataModule
from lightning_mgpu.examples.splits import SplitDataModule


def splits_of(data: SplitDataModule) -> list[tuple[Tensor, Tensor]]:
    """The inputs and targets of the three splits, whole and in order."""
    data.setup("fit")
    loaders = (data.train_dataloader(), data.val_dataloader(), data.test_dataloader())
    return [tuple(map(torch.stack, zip(*loader.dataset, strict=True))) for loader in loaders]


def test_digits_are_images_with_labels() -> None:
    splits = splits_of(DigitsDataModule())
    assert [images.shape for images, _ in splits] == [(num, 1, 28, 28) for num in (1197, 300, 300)]
    train_images, train_labels = splits[0]
    assert (train_images.dtype, train_labels.dtype) == (torch.float32, torch.int64)
    assert train_images.mean().item() == pytest.approx(0, abs=1e-5)
    assert train_images.std().item() == pytest.approx(1, abs=1e-5)


def test_digits_splits_share_nothing_and_miss_nothing() -> None:
    splits = splits_of(DigitsDataModule())
    images, labels = (torch.cat(parts) for parts in zip(*splits, strict=True))
    # Each of the 8 x 8 source pixels became 3 x 3, whose middle one holds its value still, 2 pixels of margin away.
    middles = images[:, 0, 3:26:3, 3:26:3]
    counts = ((middles - middles.min()) / (middles.max() - middles.min()) * 16).round().int().flatten(1)
    found = sorted((*image, label) for image, label in zip(counts.tolist(), labels.tolist(), strict=True))

    source_pixels, source_labels = load_digits(return_X_y=True)
    source = zip(source_pixels.astype(int).tolist(), source_labels.tolist(), strict=True)
    assert found == sorted((*image, label) for image, label in source)


def test_digits_of_a_seed_are_the_same_whatever_the_run_draws() -> None:
    torch.manual_seed(1)
    first = splits_of(DigitsDataModule(seed=3))
    torch.manual_seed(2)
    second = splits_of(DigitsDataModule(seed=3))
    other = splits_of(DigitsDataModule(seed=4))
    for (images, labels), (same_images, same_labels) in zip(first, second, strict=True):
        assert torch.equal(images, same_images)
        assert torch.equal(labels, same_labels)
    assert not torch.equal(first[0][1], other[0][1])


def test_loaders_shuffle_only_the_training_split() -> None:
    data = DigitsDataModule()
    data.setup("fit")
    _, val_labels = splits_of(data)[1]

    def labels_of(loader: torch.utils.data.DataLoader) -> Tensor:
        return torch.cat([labels for _, labels in loader])

    torch.manual_seed(5)
    first = labels_of(data.train_dataloader())
    torch.manual_seed(5)
    assert torch.equal(labels_of(data.train_dataloader()), first)
    assert not torch.equal(labels_of(data.train_dataloader()), first)
    assert torch.equal(labels_of(data.val_dataloader()), val_labels)
    assert [len(labels) for _, labels in data.train_dataloader()] == [64] * 18 + [45]


def test_setting_up_again_keeps_the_splits() -> None:
    data = DigitsDataModule()
    data.setup("fit")
    before = data.test_dataloader().dataset
    data.setup("test")
    assert data.test_dataloader().dataset is before


def test_random_linear_is_drawn_from_its_seed() -> None:
    splits = splits_of(RandomLinearDataModule(num_targets=1, seed=7))
    assert [(inputs.shape, targets.shape) for inputs, targets in splits] == [((100, 10), (100, 1))] * 3
    again = splits_of(RandomLinearDataModule(num_targets=1, seed=7))
    torch.testing.assert_close(again, splits, rtol=0, atol=0)
    assert not torch.equal(splits[0][0], splits[1][0])


def test_mnist_without_torchvision_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchvision", None)
    with pytest.raises(ModuleNotFoundError, match=r"needs torchvision.*pip install 'lightning_mgpu\[mnist\]'"):
        MNISTDataModule()


def test_mnist_without_files_says_where_they_belong(tmp_path: Path) -> None:
    pytest.importorskip("torchvision", reason="MNIST comes through torchvision, an optional dependency")
    with pytest.raises(FileNotFoundError, match=r"no MNIST files in .*download=True"):
        MNISTDataModule(str(tmp_path)).setup("fit")


def test_mnist_reads_files_and_sets_5000_aside(tmp_path: Path) -> None:
    pytest.importorskip("torchvision", reason="MNIST comes through torchvision, an optional dependency")
    write_mnist(tmp_path / "MNIST" / "raw", num_train=5010, num_test=7)
    data = MNISTDataModule(str(tmp_path))
    data.setup("fit")
    loaders = (data.train_dataloader(), data.val_dataloader(), data.test_dataloader())
    assert [len(loader.dataset) for loader in loaders] == [10, 5000, 7]
    image, label = data.test_dataloader().dataset[3]
    assert label == 3
    torch.testing.assert_close(image, torch.full((1, 28, 28), (3 / 255 - 0.1307) / 0.3081))


def write_mnist(folder: Path, *, num_train: int, num_test: int) -> None:
    """Writes images in MNIST's file format; image ``k`` is ``k % 256`` in every pixel and has the label ``k % 10``."""
    folder.mkdir(parents=True)
    for prefix, num in (("train", num_train), ("t10k", num_test)):
        pixels = b"".join(bytes([k % 256]) * 784 for k in range(num))
        (folder / f"{prefix}-images-idx3-ubyte").write_bytes(struct.pack(">4I", 0x803, num, 28, 28) + pixels)
        labels = bytes(k % 10 for k in range(num))
        (folder / f"{prefix}-labels-idx1-ubyte").write_bytes(struct.pack(">2I", 0x801, num) + labels)
