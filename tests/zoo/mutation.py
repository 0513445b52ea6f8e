"""Forwards that write into tensors, and views that share their memory."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from typing_extensions import override

from tests.zoo.recipe import Regression


class FourLayers(Regression):
    """Owns four layers that the modules of this file join in their own ways."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(8, 16)
        self.fc2 = nn.Linear(16, 16)
        self.fc3 = nn.Linear(16, 16)
        self.fc4 = nn.Linear(16, 4)


class InPlaceCalls(FourLayers):
    """Changes hidden values in place and drops what the calls return."""

    @override
    def forward(self, x: Tensor) -> Tensor:
        h = self.fc1(x)
        h.add_(1.0)
        torch.relu_(h)
        h = self.fc2(h)
        h.mul_(0.5).sub_(0.1)
        h = torch.tanh(self.fc3(torch.tanh(h)))
        y: Tensor = self.fc4(h)
        y.clamp_(-3.0, 3.0)
        return y


class MaskedAssignment(FourLayers):
    """Overwrites values chosen by a mask, once from the input and once from hidden values."""

    @override
    def forward(self, x: Tensor) -> Tensor:
        h = self.fc1(x)
        outlier = (x.abs() > 1).repeat(1, 2)
        h[outlier] = 0.0
        h = self.fc2(h)
        h[h < 0] = 0.0
        y: Tensor = self.fc4(torch.tanh(self.fc3(h)))
        return y


class SliceAssignment(FourLayers):
    """Overwrites columns by slices: with a number, with input values, with hidden values."""

    @override
    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.fc1(x)).clone()
        h[:, :2] = 1.0
        h[:, 2:4] = x[:, :2]
        g = self.fc2(h)
        g[:, 8:] = h[:, 8:]
        y: Tensor = self.fc4(torch.tanh(self.fc3(g)))
        return y


class ViewsAcrossCut(FourLayers):
    """Keeps several views of one value alive over its layers, without writing to them."""

    @override
    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.fc1(x))
        left, right = h.chunk(2, dim=-1)
        grid = h.view(-1, 4, 4)
        g = torch.tanh(self.fc3(torch.tanh(self.fc2(h))))
        g = g + torch.cat([right, left], dim=-1) + grid.transpose(1, 2).flatten(1)
        y: Tensor = self.fc4(g)
        return y


class WrittenView(FourLayers):
    """Writes through a view after another layer ran, and reads the whole value later."""

    @override
    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.fc1(x)) + 0.0
        head = h[:, :4]
        g = torch.tanh(self.fc2(x.repeat(1, 2)))
        head.mul_(2.0)
        head += g[:, :4]
        g = torch.tanh(self.fc3(g + h))
        y: Tensor = self.fc4(g)
        return y


class InPlaceLayer(Regression):
    """Begins its second half with a layer that overwrites its input, which is read once more."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(8, 16)
        self.relu = nn.ReLU(inplace=True)
        self.fc2 = nn.Linear(16, 16)
        self.head = nn.Linear(16, 4)

    @override
    def forward(self, x: Tensor) -> Tensor:
        h = self.fc1(x)
        g = self.fc2(self.relu(h))
        y: Tensor = self.head(g + h)
        return y
