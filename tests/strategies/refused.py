"""Modules that a pipeline can't train, each for one reason, and ones on the border that it can."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from tests.zoo.mutation import FourLayers
from tests.zoo.recipe import Regression


class Plain(FourLayers):
    """Does nothing that could be refused."""

    @override
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc4(torch.tanh(self.fc3(torch.tanh(self.fc2(torch.tanh(self.fc1(x)))))))
        return y

    def rest(self, h: Tensor) -> Tensor:
        """Goes on behind the first layer."""
        y: Tensor = self.fc4(torch.tanh(self.fc3(torch.tanh(self.fc2(torch.tanh(h))))))
        return y


class WithSpareLayers(Plain):
    """Owns two layers that nobody calls."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))


# -- forwards that look across the batch -------------------------------------------------------------------------------


class EarlyMean(Plain):
    """Centers hidden values over the batch, with most of the work behind it."""

    @override
    def forward(self, x: Tensor) -> Tensor:
        h = self.fc1(x)
        return self.rest(h - h.mean(0))


class SoftmaxOverRows(Plain):
    @override
    def forward(self, x: Tensor) -> Tensor:
        return self.rest(self.fc1(x).softmax(dim=0))


class FlippedRows(Plain):
    @override
    def forward(self, x: Tensor) -> Tensor:
        return self.rest(self.fc1(x).flip(0))


class SumOverEarlierRows(Plain):
    @override
    def forward(self, x: Tensor) -> Tensor:
        return self.rest(self.fc1(x).cumsum(0))


# -- forwards that a recording can't follow ----------------------------------------------------------------------------


class GuardOnWeights(Plain):
    @override
    def forward(self, x: Tensor) -> Tensor:
        h = self.fc1(x)
        if h.sum() > 0:
            h = h * 2
        return self.rest(h)


class ThroughNumpy(Plain):
    @override
    def forward(self, x: Tensor) -> Tensor:
        h = self.fc1(x)
        scale = torch.from_numpy(h.detach().numpy()).std()
        return self.rest(h * scale)


class InputThroughNumpy(Plain):
    """Takes a detour over NumPy that follows from the batch alone, so that it can be repeated for every batch."""

    @override
    def forward(self, x: Tensor) -> Tensor:
        return self.rest(self.fc1(torch.from_numpy(np.sort(x.numpy(), axis=1))))


class TensorFromNumpy(Plain):
    """Makes the same tensor anew in each forward, by a call that torch can't show."""

    @override
    def forward(self, x: Tensor) -> Tensor:
        return self.rest(self.fc1(x) + torch.from_numpy(np.linspace(0, 1, 16, dtype=np.float32)))


class PythonsRandom(Plain):
    @override
    def forward(self, x: Tensor) -> Tensor:
        return self.rest(self.fc1(x) * random.random())


class NumpysRandom(Plain):
    @override
    def forward(self, x: Tensor) -> Tensor:
        return self.rest(self.fc1(x) * float(np.random.rand()))


class CountsItsCalls(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0

    @override
    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        return self.rest(self.fc1(x))


class ListsItsShapes(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[torch.Size] = []

    @override
    def forward(self, x: Tensor) -> Tensor:
        self.shapes.append(x.shape)
        return self.rest(self.fc1(x))


class HooksAValue(Plain):
    @override
    def forward(self, x: Tensor) -> Tensor:
        h = self.fc1(x)
        h.register_hook(lambda gradient: gradient * 2)
        return self.rest(h)


class ChangesItsArgument(Plain):
    @override
    def forward(self, x: Tensor) -> Tensor:
        x.mul_(2)
        return self.rest(self.fc1(x))


class StoresAValue(Plain):
    """Keeps a hidden value on itself, which its step reads."""

    @override
    def forward(self, x: Tensor) -> Tensor:
        h = self.fc1(x)
        self.last = h
        return self.rest(h)

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        x, y = batch
        forecast = self(x)
        return {"loss": F.mse_loss(forecast, y) + 0.1 * self.last.square().mean(), "last": self.last.detach()}


# -- steps that call it in impossible ways -----------------------------------------------------------------------------


class NoTensorInTheCall(Plain):
    @override
    def forward(self, x: list[list[float]]) -> Tensor:  # type: ignore[override]
        return self.rest(self.fc1(torch.tensor(x)))

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return F.mse_loss(self(x.tolist()), y)


class BackToTheEncoder(Regression):
    """Goes from the decoder's end back to the encoder, by a child of its own that holds both."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16))
        self.decoder = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 8))
        self.cycle = nn.Sequential(self.decoder, self.encoder)

    @override
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.decoder(self.encoder(x))
        return y

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, _ = batch
        code = torch.zeros(len(x), 16)
        return F.mse_loss(self(x), x) + F.mse_loss(self.cycle(code), code)


class OnlySingleLayers(Regression):
    """Calls its layers one by one from its step, each too small to cut."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(8, 16)
        self.fc2 = nn.Linear(16, 4)

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return F.mse_loss(self.fc2(torch.tanh(self.fc1(x))), y)


class GradientPenalty(Plain):
    """Differentiates a gradient."""

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x = batch[0].clone().requires_grad_()
        [slope] = torch.autograd.grad(self(x).sum(), x, create_graph=True)
        return slope.square().mean()


class SaliencyMap(Plain):
    """Takes the gradient of its input beside the loss."""

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        x, y = batch
        x = x.clone().requires_grad_()
        forecast = self(x)
        [saliency] = torch.autograd.grad(forecast.sum(), x, retain_graph=True)
        return {"loss": F.mse_loss(forecast, y), "saliency": saliency}


class TwoBackwards(Plain):
    """Goes backward twice through one call.

    Args:
        retain: Whether the first backward keeps what the second one needs.
    """

    def __init__(self, *, retain: bool) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.retain = retain

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss = self(batch[0]).sum()
        self.manual_backward(loss, retain_graph=self.retain)
        self.manual_backward(loss)
        optimizer.step()
        return {"loss": loss.detach()}


class WithLbfgs(Plain):
    @override
    def configure_optimizers(self) -> OptimizerLRScheduler:
        return torch.optim.LBFGS(self.parameters())


# -- modules that have to travel as one piece --------------------------------------------------------------------------


class ChecksNumbers(nn.Module):
    """Looks at the numbers it gets, so that its inside can't be recorded, and holds something more.

    Args:
        held: What it holds.
    """

    def __init__(self, held: Any) -> None:
        super().__init__()
        self.fc = nn.Linear(16, 16)
        self.held = held

    @override
    def forward(self, h: Tensor) -> Tensor:
        if h.isnan().any():
            raise ValueError("not a number")
        y: Tensor = self.fc(h)
        return y


class WithOnePiece(Plain):
    """Has a part behind its first layer that holds what ``make_held`` makes."""

    def __init__(self, make_held: Callable[[], Any]) -> None:
        super().__init__()
        self.part = ChecksNumbers(make_held())

    @override
    def forward(self, x: Tensor) -> Tensor:
        return self.rest(self.part(self.fc1(x)))
