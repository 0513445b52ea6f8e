"""Forwards that draw random numbers, compared with the module on the same microbatches and draws."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, distributions, nn
from torch.nn import functional as F

from tests.partition.forwards.case import forward, images, sequences, vectors

drawn = partial(forward, by_microbatch=True)


@drawn(vectors)
class DropoutOfEveryKind(nn.Module):
    """Drops values as layers and as functions."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(6, 16)
        self.drop = nn.Dropout(0.3)
        self.fc2 = nn.Linear(16, 16)
        self.alpha = nn.AlphaDropout(0.2)
        self.fc3 = nn.Linear(16, 4)
        self.p = 0.1

    def forward(self, x: Tensor) -> Tensor:
        h = self.drop(F.relu(self.fc1(x)))
        h = self.alpha(F.selu(self.fc2(F.dropout(h, p=self.p, training=self.training))))
        return self.fc3(F.feature_alpha_dropout(h, 0.1, self.training) + F.rrelu(h, training=self.training))


@drawn(images)
class DropoutOfChannels(nn.Module):
    """Drops channels, and weights by bernoulli."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3)
        self.drop1 = nn.Dropout2d(0.5)
        self.conv2 = nn.Conv1d(8, 8, 3)
        self.drop2 = nn.Dropout1d(0.5)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.drop1(self.conv1(x)).flatten(2)
        h = self.drop2(torch.relu(self.conv2(h))).mean(-1)
        if self.training:
            h = h * torch.bernoulli(torch.full_like(h, 0.8)) / 0.8
        return self.head(h)


@drawn(vectors)
class StochasticDepth(nn.Module):
    """Leaves blocks out, row by row."""

    class DropPath(nn.Module):
        def __init__(self, p: float) -> None:
            super().__init__()
            self.p = p

        def forward(self, x: Tensor) -> Tensor:
            if self.p == 0.0 or not self.training:
                return x
            keep = 1 - self.p
            shape = (x.shape[0],) + (1,) * (x.ndim - 1)
            mask = keep + torch.rand(shape, dtype=x.dtype, device=x.device)
            mask.floor_()
            return x.div(keep) * mask

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(6, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU()) for _ in range(3))
        self.paths = nn.ModuleList(self.DropPath(p) for p in (0.0, 0.3, 0.6))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.inp(x)
        for block, path in zip(self.blocks, self.paths, strict=True):
            h = h + path(block(h))
        return self.head(h)


@drawn(vectors)
class VariationalEncoder(nn.Module):
    """Draws a code by reparameterisation, and returns its divergence of each row."""

    def __init__(self) -> None:
        super().__init__()
        self.enc = nn.Linear(6, 16)
        self.mu, self.logvar = nn.Linear(16, 3), nn.Linear(16, 3)
        self.dec = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 6))

    def reparameterise(self, mu: Tensor, logvar: Tensor) -> Tensor:
        std = torch.exp(0.5 * logvar)
        return mu + torch.randn_like(std) * std if self.training else mu

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.relu(self.enc(x))
        mu, logvar = self.mu(h), self.logvar(h)
        kl = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp(), dim=1)
        return self.dec(self.reparameterise(mu, logvar)), kl


@drawn(vectors)
class Distributions(nn.Module):
    """Draws from torch.distributions, which check their arguments, and returns divergence and probabilities."""

    def __init__(self) -> None:
        super().__init__()
        self.enc = nn.Linear(6, 8)
        self.mean, self.scale = nn.Linear(8, 3), nn.Linear(8, 3)
        self.dec = nn.Linear(3, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = torch.tanh(self.enc(x))
        q = distributions.Normal(self.mean(h), F.softplus(self.scale(h)) + 1e-3)
        z = q.rsample()
        prior = distributions.Normal(torch.zeros_like(z), torch.ones_like(z))
        logits = self.dec(z)
        likelihood = distributions.Bernoulli(logits=logits)
        kl = distributions.kl_divergence(q, prior).sum(-1)
        return logits, kl, likelihood.log_prob((x > 0).float()).sum(-1)


@drawn(vectors)
class GumbelChoice(nn.Module):
    """Chooses softly and hard by Gumbel noise."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(6, 5)
        self.codes = nn.Embedding(5, 8)
        self.fc2 = nn.Linear(8, 5)
        self.fc3 = nn.Linear(5, 4)
        self.tau = 0.7

    def forward(self, x: Tensor) -> Tensor:
        soft = F.gumbel_softmax(self.fc1(x), tau=self.tau)
        h = torch.matmul(soft, self.codes.weight)
        hard = F.gumbel_softmax(self.fc2(h), tau=self.tau, hard=True, dim=-1)
        return self.fc3(hard)


@drawn(vectors)
class NoiseAndSamples(nn.Module):
    """Adds noise, draws indices from probabilities, and permutes features."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(6, 8)
        self.sigma = nn.Parameter(torch.tensor(0.1))
        self.fc2 = nn.Linear(8, 8)
        self.fc3 = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.fc1(x)
        h = h + self.sigma * torch.randn(h.shape) + torch.empty_like(h).uniform_(-0.1, 0.1)
        h = torch.relu(self.fc2(h[:, torch.randperm(8)]))
        scores = self.fc3(h)
        choice = torch.multinomial(scores.softmax(-1), 1).squeeze(-1)
        return scores + torch.normal(0.0, 0.1, size=scores.shape), choice


@drawn(images)
class DiffusionStep(nn.Module):
    """Noises its input to a time drawn for each row, and predicts the noise."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("alphas", torch.cumprod(1 - torch.linspace(1e-4, 0.02, 10), 0))
        self.time = nn.Embedding(10, 8)
        self.inp = nn.Conv2d(3, 8, 3, padding=1)
        self.mid = nn.Sequential(nn.GroupNorm(2, 8), nn.SiLU(), nn.Conv2d(8, 8, 3, padding=1))
        self.out = nn.Conv2d(8, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        t = torch.randint(0, 10, (x.size(0),), device=x.device)
        noise = torch.randn_like(x)
        a = self.alphas.gather(-1, t).view(-1, *([1] * (x.dim() - 1)))
        h = self.inp(a.sqrt() * x + (1 - a).sqrt() * noise)
        h = self.mid(h + self.time(t)[:, :, None, None])
        return F.mse_loss(self.out(h), noise, reduction="none").flatten(1).mean(1)


@drawn(sequences)
class MaskedAutoencoder(nn.Module):
    """Keeps a random part of each row's steps, and puts a trained token in the place of the others."""

    def __init__(self) -> None:
        super().__init__()
        self.enc = nn.Linear(6, 8)
        self.mask_token = nn.Parameter(torch.zeros(1, 1, 8))
        self.dec = nn.Linear(8, 8)
        self.out = nn.Linear(8, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        N, L, D = x.shape  # noqa: N806 - as the field writes it
        kept = int(L * 0.5)
        shuffle = torch.argsort(torch.rand(N, L, device=x.device), dim=1)
        restore = torch.argsort(shuffle, dim=1)
        h = self.enc(torch.gather(x, 1, shuffle[:, :kept].unsqueeze(-1).repeat(1, 1, D)))
        mask = torch.ones([N, L], device=x.device)
        mask[:, :kept] = 0
        mask = torch.gather(mask, 1, restore)
        tokens = self.mask_token.repeat(N, L - kept, 1)
        h = torch.cat([h, tokens], dim=1)
        h = torch.gather(h, 1, restore.unsqueeze(-1).repeat(1, 1, h.shape[2]))
        return self.out(torch.relu(self.dec(h))), mask


@drawn(sequences)
class DroppedRecurrence(nn.Module):
    """A recurrent network with dropout between layers, and one mask for all steps."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 8, num_layers=2, dropout=0.4, batch_first=True)
        self.attn = nn.MultiheadAttention(8, 2, dropout=0.3, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h, _ = self.lstm(x)
        mask = F.dropout(h.new_ones(h.size(0), 1, 8), 0.3, self.training)
        h = h * mask.expand_as(h)
        h = h + self.attn(h, h, h, need_weights=False)[0]
        return self.head(F.scaled_dot_product_attention(h, h, h, dropout_p=0.2 if self.training else 0.0))
