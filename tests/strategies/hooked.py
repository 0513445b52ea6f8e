"""Modules with hooks that their users registered."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from tests.strategies.refused import Plain
from tests.zoo.recipe import Regression


class HookedLayers(Plain):
    """Changes what layers of torch get and return, in the first and the last stage."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1.register_forward_hook(lambda module, args, result: result * 2)
        self.fc2.register_forward_hook(lambda module, args, kwargs, result: result + args[0], with_kwargs=True)
        self.fc4.register_forward_pre_hook(lambda module, args: (args[0] + 1,))


class Halves(Regression):
    """Calls two containers, one of the user's and one of torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Half()
        self.second = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))

    @override
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(self.first(torch.tanh(x)))
        return y


class Half(nn.Module):
    """Joins two layers by a function."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(8, 16)
        self.fc2 = nn.Linear(16, 16)

    @override
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc2(torch.tanh(self.fc1(x)))
        return y


class HookedContainers(Halves):
    """Changes what containers get and return, and what the whole module returns."""

    def __init__(self) -> None:
        super().__init__()
        self.first.register_forward_hook(lambda module, args, result: torch.tanh(result))
        self.second.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
        self.second.register_forward_hook(lambda module, args, result: result.mul_(0.5))
        self.register_forward_hook(lambda module, args, result: result + args[0][:, :4])


class HookStoresOnTheModule(Plain):
    """Keeps what a layer returned, where its step reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1.register_forward_hook(self.keep)

    def keep(self, module: nn.Module, args: Any, result: Tensor) -> None:
        self.hidden = result

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return {"loss": loss + 0.1 * self.hidden.square().mean(), "hidden": self.hidden.detach()}


class HookedLayerGradients(Plain):
    """Doubles the gradient that goes through a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.fc2.register_full_backward_hook(lambda module, into, out: (into[0] * 2,))


class HookedContainerGradients(Halves):
    """Doubles the gradient that goes through a container of either kind, at its end and at its beginning."""

    def __init__(self) -> None:
        super().__init__()
        self.first.register_full_backward_pre_hook(lambda module, out: (out[0] * 2,))
        self.second.register_full_backward_hook(lambda module, into, out: (into[0] * 2,))


class HookedParameter(Plain):
    """Doubles the gradient of one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1.weight.register_hook(lambda gradient: gradient * 2)


class HookAfterAccumulation(Plain):
    """Doubles the gradient of one parameter once it is added up."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1.weight.register_post_accumulate_grad_hook(double_gradient)


def double_gradient(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(2)


class DoublesAfterBackward(Plain):
    """Does what `HookedParameter` does, the way its refusal proposes."""

    @override
    def on_after_backward(self) -> None:
        with self.trainer.strategy.summon_parameters():  # type: ignore[attr-defined]
            double_gradient(self.fc1.weight)
