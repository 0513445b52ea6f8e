"""Parts of a forward that run in another mode, or with a gradient of their own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from typing_extensions import override

from tests.zoo.recipe import Regression


class FrozenTeacher(Regression):
    """Asks a teacher under ``no_grad`` in the midst of its forward; the teacher must not train."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(8, 16)
        self.teacher = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
        self.fc2 = nn.Linear(16, 16)
        self.head = nn.Linear(16, 4)

    @override
    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.fc1(x))
        with torch.no_grad():
            hint = self.teacher(h)
        h = torch.tanh(self.fc2(h + hint))
        y: Tensor = self.head(h - 0.1 * h.detach().square())
        return y


class AutocastPart(Regression):
    """Computes its middle layers in bfloat16 and the rest in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(8, 16)
        self.fc2 = nn.Linear(16, 16)
        self.fc3 = nn.Linear(16, 16)
        self.head = nn.Linear(16, 4)

    @override
    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.fc1(x))
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            h = torch.tanh(self.fc3(torch.tanh(self.fc2(h))))
        y: Tensor = self.head(h.float())
        return y


class SignWithSlope(torch.autograd.Function):
    """Takes the sign on the way forward and pretends to be a clipped line on the way back."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sign()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        inside: Tensor = x.abs() < 1
        return grads[0] * inside


class CustomGradient(Regression):
    """Binarises hidden values through a function with a gradient of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(8, 16)
        self.fc2 = nn.Linear(16, 16)
        self.head = nn.Linear(16, 4)

    @override
    def forward(self, x: Tensor) -> Tensor:
        h = self.fc2(torch.tanh(self.fc1(x)))
        code: Tensor = SignWithSlope.apply(h)  # type: ignore[no-untyped-call]
        y: Tensor = self.head(code)
        return y
