"""Batches that are more than a tuple of tensors, handed to forward as they are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from typing_extensions import override

from tests.zoo.data import prepared
from tests.zoo.recipe import Classification


class NamedInputs(NamedTuple):
    """Words (rows, 5), with what belongs to the batch as a whole; weights (rows,) are optional."""

    words: Tensor
    causal: Tensor
    temperature: Tensor
    mode: str
    num_rounds: int
    weights: Tensor | None


@dataclass
class DataInputs:
    """The same six fields in a dataclass."""

    words: Tensor
    causal: Tensor
    temperature: Tensor
    mode: str
    num_rounds: int
    weights: Tensor | None


class MixedReader(Classification):
    """Reads words under a (5, 5) mask that belongs to no row, with settings that are not tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 16)
        self.fc1 = nn.Linear(16, 16)
        self.fc2 = nn.Linear(16, 16)
        self.head = nn.Linear(16, 3)

    def read(
        self, words: Tensor, causal: Tensor, temperature: Tensor, mode: str, num_rounds: int, weights: Tensor | None
    ) -> Tensor:
        h = self.words(words)
        for _ in range(num_rounds):
            h = torch.tanh(self.fc1(causal @ h))
        h = self.fc2(h).mean(dim=1) if mode == "mean" else self.fc2(h)[:, -1]
        scores: Tensor = self.head(torch.tanh(h)) / temperature
        return scores if weights is None else scores * weights[:, None]

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, label = batch
        return F.cross_entropy(self(inputs), label)


class DictBatches(MixedReader):
    """Receives a dict as its only argument."""

    @override
    def forward(self, inputs: dict[str, Any]) -> Tensor:
        return self.read(**inputs)


class TupleBatches(MixedReader):
    """Receives a tuple as its only argument."""

    @override
    def forward(self, inputs: tuple[Any, ...]) -> Tensor:
        return self.read(*inputs)


class NamedTupleBatches(MixedReader):
    """Receives a NamedTuple as its only argument."""

    @override
    def forward(self, inputs: NamedInputs) -> Tensor:
        return self.read(**inputs._asdict())


class DataclassBatches(MixedReader):
    """Receives a dataclass as its only argument."""

    @override
    def forward(self, inputs: DataInputs) -> Tensor:
        assert isinstance(inputs, DataInputs)
        return self.read(**vars(inputs))


class ListBatches(MixedReader):
    """Receives a list of tensors, one a word, as its only argument."""

    @override
    def forward(self, inputs: list[Tensor]) -> Tensor:
        h = torch.stack([torch.tanh(self.fc1(self.words(column))) for column in inputs]).sum(dim=0)
        scores: Tensor = self.head(torch.tanh(self.fc2(h)))
        return scores


def labelled(make_container: Callable[[NamedInputs], Any]) -> DataLoader[Any]:
    """Serves three batches of 4 rows with labels; later ones set other values beside the tensors.

    Args:
        make_container: Puts the inputs of a batch into the container that forward receives.

    Returns:
        The loader of pairs of a container and labels (4,).
    """
    causal = torch.tril(torch.ones(5, 5)) / torch.arange(1, 6)[:, None]
    batches = []
    for mode, num_rounds, weights in (("mean", 1, None), ("last", 2, torch.rand(4)), ("mean", 2, None)):
        inputs = NamedInputs(
            words=torch.randint(20, (4, 5)),
            causal=causal,
            temperature=torch.rand(()) + 0.5,
            mode=mode,
            num_rounds=num_rounds,
            weights=weights,
        )
        batches.append((make_container(inputs), torch.randint(3, (4,))))
    return prepared(batches)


def dict_batches() -> DataLoader[Any]:
    """Serves the inputs as dicts."""
    return labelled(NamedInputs._asdict)


def tuple_batches() -> DataLoader[Any]:
    """Serves the inputs as plain tuples."""
    return labelled(tuple)


def named_tuple_batches() -> DataLoader[Any]:
    """Serves the inputs as NamedTuples."""
    return labelled(lambda inputs: inputs)


def dataclass_batches() -> DataLoader[Any]:
    """Serves the inputs as dataclasses."""
    return labelled(lambda inputs: DataInputs(**inputs._asdict()))


def list_batches() -> DataLoader[Any]:
    """Serves the words as lists of 5 columns."""
    return labelled(lambda inputs: list(inputs.words.unbind(dim=1)))
