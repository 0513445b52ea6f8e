"""Parameters and buffers: tied, listed, frozen, routed, written."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.partition.forwards.case import forward, labelled, pairs, vectors, weighted_sum, words


@forward(words)
class TiedThreeWays(nn.Module):
    """One matrix as embedding, as a layer in the middle, and as head."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 8)
        self.fc = nn.Linear(8, 8)
        self.mid = nn.Linear(8, 20, bias=False)
        self.back = nn.Linear(20, 8)
        self.head = nn.Linear(8, 20)
        self.mid.weight = self.head.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.fc(self.words(x)))
        return self.head(torch.tanh(self.back(torch.relu(self.mid(h)))))


@forward(vectors)
class TransposedTwice(nn.Module):
    """An autoencoder whose decoder uses the encoder's weights transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(6, 8)
        self.fc2 = nn.Linear(8, 3)
        self.b2 = nn.Parameter(torch.zeros(8))
        self.b1 = nn.Parameter(torch.zeros(6))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.fc2(torch.tanh(self.fc1(x)))
        h = torch.tanh(F.linear(z, self.fc2.weight.t(), self.b2))
        return F.linear(h, self.fc1.weight.T, self.b1), z


@forward(vectors)
class ListsOfParameters(nn.Module):
    """Parameters in lists and dicts, and modules in comprehensions."""

    def __init__(self) -> None:
        super().__init__()
        self.ws = nn.ParameterList([nn.Parameter(torch.randn(6, 6) / 2) for _ in range(3)])
        self.scales = nn.ParameterDict({"a": torch.ones(6), "b": torch.zeros(6)})
        self.heads = nn.ModuleList(nn.Sequential(OrderedDict(fc=nn.Linear(6, 4), act=nn.Tanh())) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for i, w in enumerate(self.ws):
            x = torch.tanh(x @ w) * self.scales["a"] + self.scales["b"] * i
        joined = torch.cat([head.fc(x) for head in self.heads], -1)
        return torch.stack([head(x) for head in self.heads], dim=1).sum(dim=1) + joined[:, :4]


def routed(rows: int) -> tuple[Any, ...]:
    task = ("a", "b", "b")[int(torch.randint(3, ()))]
    return torch.randn(rows, 6), {"task": task, "scale": 2.0}


@forward(routed)
class RoutedByName(nn.Module):
    """Takes the layers that a string names."""

    def __init__(self) -> None:
        super().__init__()
        self.adapters = nn.ModuleDict({"a": nn.Linear(6, 8), "b": nn.Linear(6, 8)})
        self.body = nn.Linear(8, 8)
        self.heads = nn.ModuleDict([("a", nn.Linear(8, 4)), ("b", nn.Linear(8, 4))])

    def forward(self, x: Tensor, *, task: str, scale: float = 1.0) -> Tensor:
        h = torch.relu(self.adapters[task](x)) * scale
        return self.heads[task](self.body(h))


@forward(vectors)
class FrozenParts(nn.Module):
    """A frozen beginning, a frozen layer in the middle, and one frozen by a part of its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(6, 8).requires_grad_(False)
        self.fc2 = nn.Linear(8, 8)
        self.fc3 = nn.Linear(8, 8).requires_grad_(False)
        self.fc4 = nn.Linear(8, 4)
        self.fc4.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.fc1(x))
        return self.fc4(torch.tanh(self.fc3(torch.tanh(self.fc2(h)))))


@forward(vectors)
class LowRankAdapters(nn.Module):
    """Frozen layers, wrapped so that two small matrices train beside each."""

    class Adapted(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base = base.requires_grad_(False)
            self.a = nn.Parameter(torch.randn(2, base.in_features) / 4)
            self.b = nn.Parameter(torch.randn(base.out_features, 2) / 4)
            self.scaling = 0.5

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x) + (x @ self.a.T @ self.b.T) * self.scaling

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
        for i in (0, 2, 4):
            self.net[i] = self.Adapted(self.net[i])

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


@forward(pairs)
class MomentumTeacher(nn.Module):
    """A student and a teacher that follows it, which gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.predictor = nn.Linear(4, 4)

    @torch.no_grad()
    def targets(self, x: Tensor) -> Tensor:
        return F.normalize(self.teacher(x), dim=-1)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        p = F.normalize(self.predictor(self.student(a)), dim=-1)
        return 2 - 2 * (p * self.targets(b)).sum(dim=-1)


def first_head_loss(output: dict[str, Tensor]) -> Tensor:
    return weighted_sum(output["first"])


@forward(vectors, loss=first_head_loss)
class UnusedHead(nn.Module):
    """Two heads, one of which the loss leaves out: its parameters get no gradient, not zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 8)
        self.first = nn.Linear(8, 4)
        self.second = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3))
        self.never = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = torch.relu(self.body(x))
        return {"second": self.second(h), "first": self.first(h)}


@forward(vectors, loss=first_head_loss)
class UnusedBeginning(nn.Module):
    """The head that the loss leaves out is all that the first layers serve."""

    def __init__(self) -> None:
        super().__init__()
        self.early = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 8))
        self.body = nn.Linear(6, 8)
        self.second = nn.Linear(8, 4)
        self.first = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        e = self.early(x)
        h = torch.relu(self.body(x))
        return {"second": self.second(e + h), "first": self.first(h)}


@forward(vectors)
class WeightsInResult(nn.Module):
    """Returns a parameter, a norm of all parameters, and a value of a buffer beside what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(6, 8)
        self.fc2 = nn.Linear(8, 8)
        self.fc3 = nn.Linear(8, 4)
        self.temperature = nn.Parameter(torch.tensor(0.7))
        self.register_buffer("step", torch.tensor(3))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.fc3(torch.relu(self.fc2(torch.relu(self.fc1(x))))) / self.temperature.exp()
        penalty = sum(p.pow(2.0).sum() for p in self.parameters())
        return {"y": y, "penalty": penalty, "temperature": self.temperature, "step": self.step, "first": self.fc1.weight[0]}


@forward(vectors)
class OneLayerManyTimes(nn.Module):
    """Applies one block again and again, between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(6, 8)
        self.block = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.norm = nn.LayerNorm(8)
        self.out = nn.Linear(8, 4)
        self.num_iterations = 3

    def forward(self, x: Tensor) -> Tensor:
        h = self.inp(x)
        z = torch.zeros_like(h)
        for _ in range(self.num_iterations):
            z = self.norm(self.block(z) + h)
        return self.out(z)


@forward(labelled)
class Codebook(nn.Module):
    """Vector quantisation with a straight-through gradient and a trained codebook."""

    def __init__(self) -> None:
        super().__init__()
        self.enc = nn.Linear(6, 8)
        self.codes = nn.Embedding(5, 8)
        self.dec = nn.Linear(8, 8)
        self.out = nn.Linear(8, 6)

    def forward(self, x: Tensor, label: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        z = self.enc(x)
        distances = z.pow(2).sum(1, keepdim=True) + self.codes.weight.pow(2).sum(1) - 2 * z @ self.codes.weight.t()
        index = distances.argmin(dim=1)
        q = self.codes(index)
        loss = F.mse_loss(q, z.detach()) + 0.25 * F.mse_loss(q.detach(), z)
        q = z + (q - z).detach()
        return self.out(torch.relu(self.dec(q))), loss, index


@forward(vectors)
class ConstantsOfEveryKind(nn.Module):
    """Uses tensors that are neither parameters nor buffers: attributes, module globals, numbers and lists."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(6, 8)
        self.mid = nn.Linear(8, 8)
        self.fc2 = nn.Linear(8, 4)
        self.shift = torch.arange(8.0) / 8
        self.table = [torch.ones(4), torch.zeros(4)]
        self.names = {"scale": torch.tensor(2.0)}

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc1(x + GLOBAL[: x.size(1)]) + self.shift
        h = h * torch.tensor([1.0, 2.0] * 4) + torch.as_tensor([0.5]) - torch.linspace(0, 1, 8)
        y = self.fc2(torch.relu(self.mid(h * self.names["scale"])))
        return y * self.table[0] + self.table[1] + torch.full((4,), 0.1) + torch.from_numpy(GLOBAL.numpy()[:4])


GLOBAL = torch.arange(6.0)


@forward(vectors)
class LayersOfLayers(nn.Module):
    """Subclasses of torch's layers with forwards of their own, and hooks on layers, modules and both sides."""

    class Scaled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 0.5

    class Plain(nn.Linear):
        pass

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x)

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = self.Scaled(6, 8)
        self.fc2 = self.Plain(8, 8)
        self.wrapped = self.Wrapped()
        self.fc3 = nn.Linear(8, 4)
        self.fc2.register_forward_hook(lambda module, args, output: output.tanh() + args[0])
        self.wrapped.register_forward_hook(lambda module, args, output: output * 2)
        self.wrapped.register_forward_pre_hook(lambda module, args: (args[0].sigmoid(),))
        self.fc3.register_forward_pre_hook(lambda module, args, kwargs: ((args[0] + 1,), kwargs), with_kwargs=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc3(self.wrapped(self.fc2(self.fc1(x))))
