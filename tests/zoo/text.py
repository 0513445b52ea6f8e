"""Networks for sequences: several inputs, keyword arguments, recurrence, attention, losses over ragged targets."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from tests.zoo.recipe import Classification


class EncoderDecoder(Classification):
    """Reads two inputs; the second attends to the encoding of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.source_words = nn.Embedding(20, 16)
        self.encoder = nn.Linear(16, 16)
        self.target_words = nn.Embedding(20, 16)
        self.query = nn.Linear(16, 16)
        self.head = nn.Linear(32, 20)

    @override
    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory = torch.tanh(self.encoder(self.source_words(source)))
        query = self.query(self.target_words(target))
        weights = torch.softmax(query @ memory.transpose(1, 2) / 4, dim=-1)
        scores: Tensor = self.head(torch.cat([query, weights @ memory], dim=-1))
        return scores

    @override
    def training_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> Tensor:
        source, target, label = batch
        scores: Tensor = self(source, target)
        return F.cross_entropy(scores.flatten(0, 1), label.flatten())


class KeywordArguments(Classification):
    """Takes a dict batch apart into keyword arguments, one of them a plain number."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 16)
        self.body = nn.Linear(16, 16)
        self.head = nn.Linear(16, 4)

    @override
    def forward(self, *, words: Tensor, mask: Tensor, temperature: float = 1.0) -> Tensor:
        h = torch.tanh(self.body(self.words(words)))
        pooled = (h * mask[..., None]).sum(dim=1) / mask.sum(dim=1, keepdim=True)
        scores: Tensor = self.head(pooled)
        return scores / temperature

    @override
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        scores = self(mask=batch["mask"], words=batch["words"], temperature=2.0)
        return F.cross_entropy(scores, batch["label"])


class RaggedTargets(Classification):
    """Averages over the targets that count, which are more in one row than in another."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 16)
        self.body = nn.Linear(16, 16)
        self.head = nn.Linear(16, 20)

    @override
    def forward(self, words: Tensor) -> Tensor:
        scores: Tensor = self.head(torch.tanh(self.body(self.words(words))))
        return scores


class LanguageModel(nn.Module):
    """Returns its own loss beside the scores when it is given labels."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 16)
        self.body = nn.Linear(16, 16)
        self.head = nn.Linear(16, 20)

    @override
    def forward(self, words: Tensor, labels: Tensor | None = None) -> tuple[Tensor | None, Tensor]:
        scores = self.head(torch.tanh(self.body(self.words(words))))
        if labels is None:
            return None, scores
        return F.cross_entropy(scores.flatten(0, 1), labels.flatten(), ignore_index=-100), scores


class LossInsideModel(Classification):
    """Trains on the loss that its model computed, over ragged targets."""

    def __init__(self) -> None:
        super().__init__()
        self.model = LanguageModel()

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        words, labels = batch
        loss: Tensor
        loss, scores = self.model(words, labels=labels)
        self.log("largest_score", scores.detach().max(), on_step=True)
        return loss


class RecurrentReader(Classification):
    """Reads with two LSTMs, whose states keep the batch in their second dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 12)
        self.first = nn.LSTM(12, 12, batch_first=True)
        self.second = nn.LSTM(12, 12, batch_first=True)
        self.head = nn.Linear(12, 20)

    @override
    def forward(self, words: Tensor) -> Tensor:
        h, state = self.first(self.words(words))
        h, (last, _) = self.second(h, state)
        scores: Tensor = self.head(h + last[-1][:, None])
        return scores


class AttentiveReader(Classification):
    """Attends with a causal mask built in forward and adds up the attention weights."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 16)
        self.first = nn.MultiheadAttention(16, 2, batch_first=True)
        self.second = nn.MultiheadAttention(16, 2, batch_first=True)
        self.head = nn.Linear(16, 20)

    @override
    def forward(self, words: Tensor) -> Tensor:
        h = self.words(words)
        length = words.shape[1]
        future = torch.ones(length, length, dtype=torch.bool, device=words.device).triu(1)
        h = h + self.first(h, h, h, attn_mask=future, need_weights=False)[0]
        mixed, weights = self.second(h, h, h, attn_mask=future)
        scores: Tensor = self.head(h + mixed + weights.square().sum(dim=-1, keepdim=True))
        return scores


class SequenceFirst(Classification):
    """Turns the batch into the second dimension for its middle layers."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 16)
        layer = nn.TransformerEncoderLayer(16, 2, dim_feedforward=24, dropout=0.0)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 20)

    @override
    def forward(self, words: Tensor) -> Tensor:
        h = self.encoder(self.words(words).transpose(0, 1))
        scores: Tensor = self.head(h.transpose(0, 1))
        return scores
