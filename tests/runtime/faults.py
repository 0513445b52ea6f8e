"""A network that breaks in a chosen stage, microbatch and step, and the batches that make it break."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from tests.runtime.fuses import BackwardFuse, Fuse, raise_error
from tests.zoo.data import Loader, prepared
from tests.zoo.recipe import Classification
from tests.zoo.steps import Mlp

NUM_BATCHES = 4
MARKED_STEP = 2
MARKED_MICROBATCH = 2  # of four, of two rows each


class FaultyMlp(Mlp):
    """Breaks behind one of its three layers on a marked row.

    Args:
        layer: Index of the layer.
        where: In which pass it breaks.
        break_: What breaking is.
    """

    def __init__(self, layer: int, where: Literal["forward", "backward"], break_: Callable[[], None] = raise_error) -> None:
        super().__init__()
        self.layer = layer
        self.where = where
        self.break_ = break_
        self.fuse = Fuse(break_)

    @override
    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate((self.fc1, self.fc2, self.fc3)):
            x = torch.tanh(layer(x))
            if index == self.layer:
                x = self.fuse(x) if self.where == "forward" else BackwardFuse.apply(x, self.break_)
        return x


def batches(*, marked: bool) -> Loader:
    """Serves four batches of 8 rows; one row of the third, in its third microbatch of two rows, may be marked."""
    generator = torch.Generator().manual_seed(1)
    served = [(torch.randn(8, 8, generator=generator), torch.randn(8, 4, generator=generator)) for _ in range(NUM_BATCHES)]
    if marked:
        served[MARKED_STEP][0][2 * MARKED_MICROBATCH] = float("nan")
    return prepared(served)


class Words(Classification):
    """Looks words up by a call of torch's own, which fails on a word that there is no vector for."""

    def __init__(self) -> None:
        super().__init__()
        self.vectors = nn.Parameter(torch.randn(20, 16))
        self.fc1 = nn.Linear(16, 16)
        self.fc2 = nn.Linear(16, 20)

    @override
    def forward(self, words: Tensor) -> Tensor:
        x = F.embedding(words, self.vectors)
        y: Tensor = self.fc2(torch.tanh(self.fc1(x)))
        return y


def sentences_with_unknown_word() -> Loader:
    """Serves four batches of 8 sentences; the third holds, in its third microbatch of two, a word that there is not."""
    served = [(torch.randint(20, (8, 6)), torch.randint(20, (8, 6))) for _ in range(NUM_BATCHES)]
    served[MARKED_STEP][0][2 * MARKED_MICROBATCH, 3] = 20
    return prepared(served)
