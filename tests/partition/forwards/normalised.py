"""Normalisation layers, with and without statistics that they keep, and normalised weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize

from tests.partition.forwards.case import forward, images, sequences, vectors


@forward(images)
class NormsOfRows(nn.Module):
    """Normalises each row by itself, in every way."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList([nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), nn.Conv2d(8, 4, 3)])
        self.norms = nn.ModuleList([nn.GroupNorm(2, 8), nn.InstanceNorm2d(8, affine=True), nn.LocalResponseNorm(2)])

    def forward(self, x: Tensor) -> Tensor:
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = F.leaky_relu(norm(conv(x)), 0.2)
        return F.instance_norm(F.layer_norm(x, x.shape[1:]) + F.group_norm(x, 1))


@forward(images, by_microbatch=True, buffers=False, rows=(8, 8, 8), warns=r"has batch norms")
class BatchNorms(nn.Module):
    """Batch norms as layers, as functions, and without statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 8, 3, bias=False)
        self.bn2 = nn.BatchNorm2d(8, track_running_stats=False)
        self.fc = nn.Linear(8, 6)
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("var", torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.bn1(self.conv1(x)))
        h = F.relu(self.bn2(self.conv2(h))).mean((2, 3))
        return F.batch_norm(self.fc(h), self.mean, self.var, training=self.training, momentum=0.2)


@forward(sequences, by_microbatch=True, warns=r"changes the buffers norm.running_mean, norm.running_var in its forward")
class InstanceStatistics(nn.Module):
    """Instance norm that keeps running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(6, 8, 3)
        self.norm = nn.InstanceNorm1d(8, track_running_stats=True, affine=True)
        self.head = nn.Conv1d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.norm(self.conv(x.mT)))).mT


@forward(vectors)
class OldWeightNorm(nn.Module):
    """Weight norm by a hook before forward, which stores the weight as a plain tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = torch.nn.utils.weight_norm(nn.Linear(6, 8))
        self.fc2 = torch.nn.utils.weight_norm(nn.Linear(8, 8), dim=None)
        self.fc3 = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc3(torch.tanh(self.fc2(torch.tanh(self.fc1(x)))))


@forward(images)
class NewWeightNorm(nn.Module):
    """Weight norm by parametrization."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            parametrizations.weight_norm(nn.Conv2d(3, 4, 3)),
            nn.ELU(),
            parametrizations.weight_norm(nn.Conv2d(4, 4, 3), dim=1),
            nn.Flatten(),
            parametrizations.weight_norm(nn.Linear(64, 3)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


@forward(vectors, by_microbatch=True, tolerance=1e-4, warns=r"buffers fc1.weight_u, fc1.weight_v, fc2.weight_u")
class OldSpectralNorm(nn.Module):
    """Spectral norm by a hook, which improves its vectors at every call while training."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.utils.spectral_norm(nn.Linear(6, 8))
        self.fc2 = nn.utils.spectral_norm(nn.Linear(8, 8), n_power_iterations=2)
        self.fc3 = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc3(F.leaky_relu(self.fc2(F.leaky_relu(self.fc1(x)))))


@forward(vectors)
class NewSpectralNorm(nn.Module):
    """Spectral norm by parametrization, which improves its vectors once per batch."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = parametrizations.spectral_norm(nn.Linear(6, 8))
        self.fc2 = parametrizations.spectral_norm(nn.Linear(8, 8), n_power_iterations=3)
        self.fc3 = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc3(F.leaky_relu(self.fc2(F.leaky_relu(self.fc1(x)))))


class Symmetric(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).transpose(-1, -2)


@forward(vectors)
class OwnParametrization(nn.Module):
    """Parametrizations of the user's own and of torch, one cached over two calls."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(6, 8)
        self.sym = nn.Linear(8, 8)
        parametrize.register_parametrization(self.sym, "weight", Symmetric())
        self.rot = parametrizations.orthogonal(nn.Linear(8, 8, bias=False), orthogonal_map="cayley")
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        with parametrize.cached():
            h = torch.tanh(self.sym(torch.tanh(self.inp(x))))
            h = torch.tanh(self.sym(self.rot(h)))
        return self.head(h)


@forward(images)
class StandardisedWeights(nn.Module):
    """Convolutions whose weights are standardised in forward, by a subclass of torch's layer."""

    class Conv(nn.Conv2d):
        def forward(self, x: Tensor) -> Tensor:
            w = self.weight
            w = w - w.mean(dim=(1, 2, 3), keepdim=True)
            w = w / (w.view(w.size(0), -1).std(dim=1).view(-1, 1, 1, 1) + 1e-5)
            return self._conv_forward(x, w, self.bias)

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = self.Conv(3, 4, 3)
        self.conv2 = self.Conv(4, 4, 3, stride=2)
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.conv2(F.relu(self.conv1(x)))).flatten(1))


@forward(vectors)
class HyperNetwork(nn.Module):
    """Computes the weights of one layer from each row, and another's from a parameter alone."""

    def __init__(self) -> None:
        super().__init__()
        self.code = nn.Parameter(torch.randn(3))
        self.make = nn.Linear(3, 8 * 6)
        self.rows = nn.Linear(6, 8 * 8)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        w = self.make(self.code).view(8, 6)
        h = torch.tanh(F.linear(x, w))
        v = self.rows(x).view(-1, 8, 8) / 8
        h = torch.bmm(v, h.unsqueeze(-1)).squeeze(-1)
        return self.head(h) + (w**2).mean()


@forward(images, by_microbatch=True, buffers=False, rows=(8, 8, 8), warns=r"has batch norms")
class NormCalledByForward(nn.Module):
    """Calls a batch norm by its ``forward``, another one twice, and freezes a third."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.bn = nn.BatchNorm2d(4)
        self.frozen = nn.BatchNorm2d(4)
        self.conv2 = nn.Conv2d(4, 4, 3)
        self.head = nn.Linear(4, 3)

    def train(self, mode: bool = True) -> NormCalledByForward:
        super().train(mode)
        self.frozen.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        h = self.frozen(self.bn.forward(self.conv(x)))
        return self.head(self.conv2(h).relu().mean((-2, -1)))
