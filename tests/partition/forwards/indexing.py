"""Indexing, sorting, scattering, and writing into parts of tensors."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.partition.forwards.case import forward, labelled, ragged_sequences, sequences, vectors, words


class Layers(nn.Module):
    """Owns three layers that the forwards of this file join."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(6, 8)
        self.fc2 = nn.Linear(8, 8)
        self.fc3 = nn.Linear(8, 4)


@forward(vectors)
class WhereWithScalars(Layers):
    """Chooses between tensors and numbers."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc1(x)
        h = torch.where(h > 0, h, 0.1)
        h = torch.where(x[:, :1] > 0, 1.0, h)
        h = self.fc2(h).clamp(min=-1, max=1)
        h = h.where(h < 0.5, torch.tensor(0.5))
        return self.fc3(h) * torch.sign(x.sum(-1, keepdim=True))


@forward(vectors)
class SlicesInPlace(Layers):
    """Changes slices in place: by operators, by fill, by copy, through transposes."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc1(x)
        h[:, :2] *= 2
        h[:, 2:4] += x[:, :2]
        h[..., -1] = 0
        h[:, 4:6].zero_()
        g = self.fc2(h)
        g.t()[0] -= 1.0
        g[:, ::2].copy_(h[:, ::2])
        g.select(1, 3).fill_(0.25)
        g[x[:, 0] > 0, 1] = 0.5
        return self.fc3(g)


@forward(vectors)
class ChunksJoined(Layers):
    """Takes tensors apart in every way, and joins them."""

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.fc1(x).chunk(2, dim=1)
        h = torch.cat([torch.sigmoid(a) * b, torch.tanh(b) * a], dim=-1)
        c, d, e = torch.split(self.fc2(h), [2, 4, 2], dim=1)
        f, *rest = d.unbind(1)
        h = torch.cat((e, c, f[:, None], torch.stack(rest, 1)), 1)
        left, right = torch.tensor_split(h, 2, dim=1)
        return self.fc3(torch.hstack([right, left.flip(1)]))


@forward(labelled)
class ScatteredAndGathered(Layers):
    """Scatters, gathers, and adds by index within rows."""

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        h = self.fc1(x)
        h = h.scatter(1, label[:, None], 1.0)
        h = torch.zeros_like(h).scatter_add_(1, torch.stack([label, label + 1], 1), h[:, :2]) + h
        h = h.index_add(1, torch.tensor([0, 2]), self.fc2(h)[:, :2], alpha=0.5)
        h = h.index_fill(1, torch.tensor([5]), 0.0).index_select(1, torch.arange(8).flip(0))
        h = h.scatter_reduce(1, label.unsqueeze(1), x[:, :1], reduce="amax", include_self=True)
        return torch.take_along_dim(self.fc3(h), label.unsqueeze(-1), dim=-1).squeeze(-1)


@forward(vectors)
class SortedWithinRows(Layers):
    """Sorts and ranks features of each row, by values that depend on weights."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.fc1(x)
        values, places = h.topk(4, dim=-1)
        ordered, _ = self.fc2(h).sort(dim=1, descending=True)
        h = torch.zeros_like(h).scatter(1, places, values) + ordered
        ranks = h.argsort(dim=1).argsort(dim=1)
        best = self.fc3(h + h.median(dim=1, keepdim=True).values + h.kthvalue(2, dim=1, keepdim=True)[0])
        return best.max(dim=1).values, ranks


@forward(labelled)
class OneHot(Layers):
    """Encodes labels, with the number of classes given."""

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        code = F.one_hot(label, num_classes=4).to(x.dtype)
        h = torch.tanh(self.fc1(x)) * (1 + code.repeat(1, 2))
        return self.fc3(self.fc2(h)) * code + F.one_hot(label, 4)


@forward(sequences)
class SumsOverTime(Layers):
    """Sums, means, differences and running maxima over time."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc1(x.cumsum(1) / torch.arange(1, x.size(1) + 1).view(1, -1, 1))
        h = h.cummax(dim=1).values + F.pad(h.diff(dim=1), (0, 0, 1, 0))
        h = self.fc2(h) - h.mean(1, keepdim=True)
        h = F.pad(h, (0, 0, 2, 0)).unfold(1, 3, 1).mean(-1)
        return self.fc3(h.amax(1) + h.std(dim=1) + h.var(1, unbiased=False) + h.norm(dim=1))


@forward(sequences)
class ComputedMasks(Layers):
    """Fills by masks that it computes from the batch and from hidden values."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc1(x)
        quiet = x.abs().sum(-1) < 4.0
        h = h.masked_fill(quiet.unsqueeze(-1), 0.0)
        h = self.fc2(h).masked_fill_(h > 1, -1e4)
        scores = torch.softmax(h, -1) * ~quiet[..., None]
        far = torch.triu(torch.ones(7, 7, dtype=torch.bool), diagonal=1)
        mixed = scores @ scores.mT
        return self.fc3(mixed.masked_fill(far, 0.0) @ scores)


@forward(ragged_sequences, refused={4: r"__getitem__ \(.*\) looks across the whole batch in the middle of RaggedToFlat"})
class RaggedToFlat(Layers):
    """Takes the valid steps of all rows as one list, works on them, and puts them back by the mask."""

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        mask = torch.arange(x.size(1)) < lengths[:, None]
        flat = self.fc2(torch.relu(self.fc1(x[mask])))
        h = torch.zeros(*x.shape[:2], 8)
        h[mask] = flat
        return self.fc3(h.sum(1))


@forward(ragged_sequences)
class FlattenedTime(Layers):
    """Joins rows and time in one dimension for its layers, and parts them again."""

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        B, T, D = x.size()  # noqa: N806 - as the field writes it
        h = self.fc1(x.view(B * T, D)).relu()
        h = self.fc2(h.view(-1, 8)).reshape(B, T, -1)
        h = h.transpose(0, 1).contiguous().view(T * B, 8)
        h = self.fc3(h).view(T, B, 4).permute(1, 0, 2)
        return (h * (torch.arange(T)[None] < lengths[:, None]).unsqueeze(2)).sum(1) / lengths.unsqueeze(1)


@forward(words)
class ManyIndices(Layers):
    """Indexes buffers and parameters by the batch, with several tensors at once."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("order", torch.randperm(8))
        self.table = nn.Parameter(torch.randn(20, 7, 6))
        self.scale = nn.Parameter(torch.ones(20))

    def forward(self, x: Tensor) -> Tensor:
        h = self.table[x, torch.arange(7)] * self.scale[x][..., None]
        h = self.fc1(h)[..., self.order]
        h = self.fc2(h)[:, torch.tensor([0, 2, 4])][:, [2, 0]]
        first = torch.arange(len(x))[:, None]
        return self.fc3(h)[first, torch.tensor([[0, 1]]), x[:, :2] % 4]


@forward(vectors)
class Rearranged(Layers):
    """Rearranges by hand what einops would: heads, windows, pairs."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc1(x).view(-1, 2, 2, 2).permute(0, 3, 1, 2).flatten(1)
        h = self.fc2(h).unflatten(1, (4, 2)).movedim(1, 2).reshape(x.shape[0], -1)
        h = h.reshape(len(x), 2, 4).swapaxes(1, 2).rot90(1, (1, 2)).contiguous().view(h.size())
        h = torch.einsum("bh,bk->bhk", h, h).diagonal(dim1=1, dim2=2) if h.dim() == 2 else h
        return self.fc3(h.repeat_interleave(2, dim=0).view(-1, 2, 8).mean(1) + h.expand_as(h).clone())
