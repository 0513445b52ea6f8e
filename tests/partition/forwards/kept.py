"""Forwards that keep something from call to call: counters, caches, schedules, changed weights."""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn

from tests.partition.forwards.case import forward, sequences, vectors, words
from tests.partition.forwards.control import Three


@forward(vectors)
class StepUsedAtTheEnd(Three):
    """Counts its calls first, and uses the count last, in another stage."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("step", torch.tensor(0.0))

    def forward(self, x: Tensor) -> Tensor:
        self.step += 1
        return self.fc3(torch.relu(self.fc2(torch.relu(self.fc1(x))))) * torch.exp(-self.step / 10)


@forward(vectors)
class AnnealedPenalty(Three):
    """Weighs a loss over the whole batch by a count, which grows while training, and returns the count."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("step", torch.tensor(0.0))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if self.training:
            self.step.add_(1.0)
        z = self.fc3(torch.relu(self.fc2(torch.relu(self.fc1(x)))))
        return z, z.pow(2).mean() * torch.clamp(self.step / 10, max=1.0), self.step


@forward(vectors)
class MaskMadeOnce(Three):
    """Makes a mask when it is first called, and keeps it as an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self._mask: Tensor | None = None

    def mask(self, n: int) -> Tensor:
        if self._mask is None or self._mask.size(0) != n:
            self._mask = torch.triu(torch.ones(n, n))
        return self._mask

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc2(torch.relu(self.fc1(x)))
        return self.fc3(h @ self.mask(h.size(1)))


@functools.cache
def table(n: int) -> Tensor:
    return torch.linspace(0, 1, n)


@forward(vectors)
class CachedTable(Three):
    """Uses a table that a cached function makes."""

    def __init__(self) -> None:
        super().__init__()
        table.cache_clear()

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc2(torch.relu(self.fc1(x)))
        return self.fc3(h + table(h.size(1)))


GLOBAL_TABLE = torch.zeros(8)


def changing_table(rows: int) -> tuple[Tensor]:
    GLOBAL_TABLE.add_(1.0)
    return vectors(rows)


@forward(changing_table)
class ChangingGlobal(Three):
    """Uses a tensor of the file's, which others change between calls."""

    def forward(self, x: Tensor) -> Tensor:
        return self.fc3(torch.relu(self.fc2(self.fc1(x)) + GLOBAL_TABLE))


@forward(vectors)
class FrozenTeacher(Three):
    """Asks a teacher in inference mode."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(6, 4).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.inference_mode():
            target = self.teacher(x)
        return self.fc3(torch.relu(self.fc2(self.fc1(x)))) * target.clone()


@forward(vectors)
class ClampedWeights(Three):
    """Clamps two parameters before it uses them, one of them through ``data``."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.fc1.weight.mul_(0.9)
        h = torch.relu(self.fc1(x))
        h = torch.relu(self.fc2(h))
        self.w.data = self.w.data.clamp(-0.5, 0.5)
        h = torch.relu(h @ self.w)
        self.fc3.weight.data.clamp_(-0.2, 0.2)
        return self.fc3(h)


@forward(words)
class ShortEmbeddings(nn.Module):
    """Shortens the embeddings that it looks up."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 8, max_norm=1.0)
        self.fc = nn.Linear(8, 8)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.fc(self.words(x))))


@forward(vectors)
class StandInWeights(Three):
    """Calls a layer and a block with other weights in their places."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(8, 8), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        h = torch.func.functional_call(self.fc2, {n: p * 0.5 for n, p in self.fc2.named_parameters()}, (self.fc1(x),))
        h = torch.func.functional_call(self.block, {n: p + 0.1 for n, p in self.block.named_parameters()}, (h,))
        return self.fc3(h)


@forward(vectors)
class OneLayerOfManyNames(Three):
    """Holds one layer under three names."""

    def __init__(self) -> None:
        super().__init__()
        self.again = self.fc2
        self.net = nn.Sequential(self.fc2, nn.ReLU(), self.fc2)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc3(self.net(self.again(self.fc1(x))))


@forward(sequences)
class SparseNeighbours(Three):
    """Adds up neighbours by a sparse matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("neighbours", torch.eye(7).roll(1, 0).to_sparse())

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.fc1(x))
        joined = torch.sparse.mm(self.neighbours, h.transpose(0, 1).reshape(7, -1)).view(7, -1, 8).transpose(0, 1)
        return self.fc3(self.fc2(joined))


@forward(vectors, promoted=("experts",), warns=r"experts \(Experts\) runs as one piece on each microbatch by itself")
class ChosenExperts(Three):
    """Sends each row to the expert that a gate chooses, with dropout that only trains."""

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(8, 3)
            self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
            self.drop = nn.Dropout(0.5)

        def forward(self, h: Tensor) -> Tensor:
            out = torch.zeros_like(h)
            chosen = self.gate(h).argmax(-1)
            for i, expert in enumerate(self.experts):
                rows = (chosen == i).nonzero().squeeze(-1)
                if len(rows):
                    out[rows] = expert(h[rows])
            return out if self.training else self.drop(out)

    def __init__(self) -> None:
        super().__init__()
        self.experts = self.Experts()

    def forward(self, x: Tensor) -> Tensor:
        return self.fc3(torch.relu(self.fc2(self.experts(torch.relu(self.fc1(x))))))
