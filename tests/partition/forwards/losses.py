"""Losses inside the model, exact over the whole batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.partition.forwards.case import forward, labelled, padded_words, pairs, sequences, vectors


class Encoder(nn.Module):
    """Owns three layers, the last of which makes four scores."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(6, 32)
        self.fc2 = nn.Linear(32, 32)
        self.fc3 = nn.Linear(32, 4)

    def scores(self, x: Tensor) -> Tensor:
        return self.fc3(torch.relu(self.fc2(torch.relu(self.fc1(x)))))


@forward(labelled)
class LossIfLabelled(Encoder):
    """Returns a loss with label smoothing, if there are labels, and the scores."""

    def __init__(self) -> None:
        super().__init__()
        self.loss = nn.CrossEntropyLoss(label_smoothing=0.1, weight=torch.tensor([1.0, 2.0, 1.0, 0.5]))

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Any]:
        logits = self.scores(x)
        loss = self.loss(logits, labels) if labels is not None else None
        return {"loss": loss, "logits": logits}


def ragged_labels(rows: int) -> tuple[Tensor, Tensor]:
    labels = torch.randint(4, (rows, 7))
    labels[torch.rand(rows, 7) > 0.4] = -100
    labels[:, 0] = 1
    return torch.randn(rows, 7, 6), labels


@forward(ragged_labels)
class IgnoredLabels(Encoder):
    """Averages over the labels that count, of which each row has another number; shifted by one."""

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.scores(x)
        shifted = logits[..., :-1, :].contiguous()
        loss = F.cross_entropy(shifted.view(-1, 4), labels[..., 1:].contiguous().view(-1), ignore_index=-100)
        by_hand = -(logits.log_softmax(-1).gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1) * (labels >= 0)).sum()
        return loss + by_hand / (labels != -100).sum(), logits


@forward(padded_words)
class MaskedMean(nn.Module):
    """Averages a loss over what a mask leaves, chosen by ``masked_select`` and by index."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 8)
        self.fc = nn.Linear(8, 8)
        self.head = nn.Linear(8, 20)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        logits = self.head(torch.relu(self.fc(self.words(x))))
        losses = F.cross_entropy(logits.transpose(1, 2), x, reduction="none")
        return losses.masked_select(mask).mean() + F.cross_entropy(logits[mask], x[mask])


@forward(pairs)
class ContrastivePairs(nn.Module):
    """Two towers whose similarities over the whole batch make the loss, scaled by a trained temperature, as in CLIP."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8))
        self.right = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8))
        self.logit_scale = nn.Parameter(torch.ones([]) * 0.7)

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        a = F.normalize(self.left(a), dim=-1)
        b = F.normalize(self.right(b), dim=-1)
        logits = self.logit_scale.exp() * a @ b.t()
        labels = torch.arange(logits.shape[0], device=logits.device)
        loss = (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)) / 2
        return loss, logits


@forward(pairs, refused={4: "looks across the rows of the batch"})
class TwoViews(Encoder):
    """Puts both views of the batch in one, and compares all rows with all, as SimCLR does."""

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        z = F.normalize(self.scores(torch.cat([a, b], dim=0)), dim=1)
        similarity = z @ z.T / 0.5
        similarity = similarity.masked_fill(torch.eye(len(z), dtype=torch.bool), -9e15)
        half = z.shape[0] // 2
        positive = torch.cat([torch.diag(similarity, half), torch.diag(similarity, -half)])
        return (-positive + torch.logsumexp(similarity, dim=-1)).mean()


@forward(vectors)
class RedundancyReduction(Encoder):
    """Correlates features over the batch, and returns sums and means of every kind."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = torch.relu(self.fc1(x))
        z = self.fc3(torch.relu(self.fc2(h)))
        n = (z - z.mean(0)) / z.std(0)
        c = n.T @ n / x.size(0)
        off = c.flatten()[:-1].view(3, 5)[:, 1:].pow(2).sum()
        sparsity = h.abs().mean()
        loss = torch.diagonal(c).add(-1).pow(2).sum() + 0.1 * off
        return {"loss": loss, "l1": sparsity, "z": z, "max": z.max(), "total": z.sum()}


@forward(labelled)
class SeveralLosses(Encoder):
    """Adds losses of many kinds, some of which look at their arguments first."""

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        z = self.scores(x)
        code = F.one_hot(labels, 4).float()
        target = torch.where(code > 0, 1.0, -1.0)
        parts = {
            "mse": F.mse_loss(z, code),
            "huber": F.smooth_l1_loss(z, code, beta=0.5) + F.huber_loss(z, code, reduction="sum"),
            "bce": F.binary_cross_entropy_with_logits(z, code, pos_weight=torch.tensor([2.0])),
            "bce2": F.binary_cross_entropy(z.sigmoid(), code),
            "kl": F.kl_div(z.log_softmax(-1), code.softmax(-1), reduction="batchmean"),
            "nll": F.nll_loss(z.log_softmax(-1), labels),
            "hinge": F.hinge_embedding_loss(z, target) + F.soft_margin_loss(z, target),
            "gaussian": F.gaussian_nll_loss(z, code, F.softplus(z) + 0.1),
            "poisson": F.poisson_nll_loss(z, code),
            "cosine": F.cosine_embedding_loss(z, code, target[:, 0]),
            "margin": F.multi_margin_loss(z, labels) + F.multilabel_soft_margin_loss(z, code),
            "triplet": F.triplet_margin_loss(z, code, -code),
        }
        return {**parts, "all": torch.stack(list(parts.values())).sum(), "accuracy": (z.argmax(-1) == labels).float().mean()}


def speech(rows: int) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(rows, 12, 6), torch.randint(1, 5, (rows, 4)), torch.randint(1, 5, (rows,))


@forward(speech)
class ConnectionistLoss(nn.Module):
    """Aligns unaligned targets (CTC)."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(6, 8, 3, padding=1)
        self.gru = nn.GRU(8, 8, batch_first=True)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor, targets: Tensor, target_lengths: Tensor) -> Tensor:
        h, _ = self.gru(torch.relu(self.conv(x.transpose(1, 2))).transpose(1, 2))
        log_probs = self.head(h).log_softmax(-1).transpose(0, 1)
        lengths = torch.full((x.size(0),), x.size(1), dtype=torch.long)
        return F.ctc_loss(log_probs, targets, lengths, target_lengths, zero_infinity=True)


@forward(sequences)
class BalancedExperts(nn.Module):
    """Weighs all experts by a gate that keeps the best two, with a loss that balances them over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(6, 8)
        self.gate = nn.Linear(8, 3, bias=False)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.inp(x)
        probabilities = self.gate(h).softmax(-1)
        weights, chosen = probabilities.topk(2, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        mask = F.one_hot(chosen, num_classes=3)
        combined = (mask * weights.unsqueeze(-1)).sum(-2)
        y = sum(combined[..., i : i + 1] * expert(h) for i, expert in enumerate(self.experts))
        balance = 3 * (mask.float().mean((0, 1, 2)) * probabilities.mean((0, 1))).sum()
        return self.head(torch.relu(y)), balance
