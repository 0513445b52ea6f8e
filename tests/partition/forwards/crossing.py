"""Forwards that look across the rows of a batch: in several microbatches they are refused, whatever else they do."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.partition.forwards.case import forward, pairs, vectors
from tests.partition.forwards.control import Three

crossing = partial(forward, by_microbatch=True, refused={4: r"is the first to differ .*looks across the rows of the batch"})


class Noisy(Three):
    """Drops hidden values at random, so that no run on the whole batch can be compared with one on microbatches."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.2)

    def hidden(self, x: Tensor) -> Tensor:
        return self.drop(torch.relu(self.fc1(x)))

    def scores(self, h: Tensor) -> Tensor:
        return self.fc3(torch.relu(self.fc2(h)))


@forward(vectors, refused={4: r"mean \(.*\) looks across the whole batch in the middle of CentredByBatch: \d+% of the work"})
class CentredByBatch(Three):
    """Subtracts the mean of the batch."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc1(x)
        return self.fc3(torch.relu(self.fc2(h - h.mean(0))))


@crossing(vectors)
class RolledRows(Three):
    """Adds its neighbour to each row."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc1(x)
        return self.fc3(torch.relu(self.fc2(h + h.roll(1, 0))))


@crossing(vectors)
class NoisyFlippedRows(Noisy):
    """Turns the batch around, under dropout."""

    def forward(self, x: Tensor) -> Tensor:
        return self.scores(self.hidden(x).flip(0))


@crossing(vectors)
class NoisySumOverRows(Noisy):
    """Adds up all rows before each, which the first microbatch can't notice."""

    def forward(self, x: Tensor) -> Tensor:
        return self.scores(self.hidden(x).cumsum(0))


@crossing(vectors)
class NoisyAttentionOverRows(Noisy):
    """Lets rows look at each other."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.hidden(x)[None]
        return self.scores(F.scaled_dot_product_attention(h, h, h)[0])


@crossing(pairs)
class NoisyViewsInOne(Noisy):
    """Returns both views of the batch as one of twice the rows, whose order microbatches would change."""

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.scores(self.hidden(torch.cat([a, b])))


@crossing(vectors)
class MixedUpInTraining(Noisy):
    """Mixes rows with others drawn at random, while training alone."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.hidden(x)
        if self.training:
            h = 0.7 * h + 0.3 * h[torch.randperm(len(h))]
        return self.scores(h)


@crossing(vectors, buffers=False, rows=(8, 8))
class NormalisedAndRolled(Three):
    """Rolls rows behind a batch norm, which looks across the batch by right."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.fc1(x))
        return self.fc3(torch.relu(self.fc2(h + h.roll(1, 0))))


@forward(vectors, refused={4: r"abs|max \(.*\) looks across the whole batch"})
class ScaledByBatch(Three):
    """Divides its input by the largest number in the batch."""

    def forward(self, x: Tensor) -> Tensor:
        return self.fc3(torch.relu(self.fc2(self.fc1(x / x.abs().max()))))


@forward(vectors, refused={4: r"sum \(.*\) looks across the whole batch"})
class InnerGradient(Three):
    """Moves its input along the gradient of a sum over the batch."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            z = x.detach().requires_grad_()
            energy = self.fc3(torch.tanh(self.fc2(self.fc1(z)))).sum()
            (gradient,) = torch.autograd.grad(energy, z)
        return self.fc3(self.fc2(self.fc1(x + 0.1 * gradient)))
