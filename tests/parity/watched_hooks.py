"""Modules and callbacks that write down every hook that Lightning calls, and what can be read in it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from lightning.pytorch import Callback, LightningDataModule
from lightning.pytorch.core import hooks
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from tests.zoo.data import Loader, rows
from tests.zoo.steps import Mlp

Made = TypeVar("Made", bound=type)
Note = Callable[[Any, str], None]

OF_BOTH = ("prepare_data", "setup", "teardown")
OF_DATA = ("train_dataloader", "val_dataloader", "test_dataloader", "predict_dataloader", "transfer_batch_to_device",
    "on_before_batch_transfer", "on_after_batch_transfer")  # fmt: skip
OF_STEPS = ("training_step", "validation_step", "test_step", "predict_step", "backward", "optimizer_step",
    "optimizer_zero_grad", "configure_gradient_clipping", "lr_scheduler_step", "configure_optimizers", "configure_callbacks",
    "configure_model", "on_load_checkpoint", "on_save_checkpoint")  # fmt: skip


def hooks_of(made: type) -> list[str]:
    """Lists the hooks that Lightning may call on an object of a class.

    Args:
        made: a LightningModule, a LightningDataModule or a Callback.
    """
    if issubclass(made, Callback):
        return [name for name, _ in inspect.getmembers(Callback, inspect.isfunction) if not name.startswith("_")]
    if issubclass(made, LightningDataModule):
        return [*OF_BOTH, *OF_DATA, "state_dict", "load_state_dict", "on_exception"]
    of_model = [name for name in vars(hooks.ModelHooks) if name.startswith("on_")]
    return [*of_model, *OF_BOTH, *OF_STEPS]


def watched(note: Note) -> Callable[[Made], Made]:
    """Lets every hook of a class tell of itself before it does what it does.

    Args:
        note: takes the object and the name of the hook.
    """

    def watch(made: Made) -> Made:
        for name in hooks_of(made):
            setattr(made, name, _telling(getattr(made, name), name, note))
        return made

    return watch


def _telling(plain: Any, name: str, note: Note) -> Any:
    def hook(self: Any, *args: Any, **kwargs: Any) -> Any:
        note(self, name)
        return plain(self, *args, **kwargs)

    hook.__name__ = name
    hook.__signature__ = inspect.signature(plain)  # type: ignore[attr-defined]  # Lightning looks at names of arguments
    return hook


class Everything(Mlp):
    """Trains, validates, tests and predicts, with a schedule, over four layers."""

    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Linear(16, 16)

    @override
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc3(torch.tanh(self.more(torch.tanh(self.fc2(torch.tanh(self.fc1(x)))))))
        return y

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return F.mse_loss(self(x), y)

    @override
    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = Everything.training_step(self, batch, batch_idx)
        self.log("val_loss", loss)
        return loss

    @override
    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = Everything.training_step(self, batch, batch_idx)
        self.log("test_loss", loss)
        return loss

    @override
    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        forecast: Tensor = self(batch[0])
        return forecast

    @override
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


class Sets(LightningDataModule):
    """Serves two batches of 8 rows to each loop."""

    def train_dataloader(self) -> Loader:
        generator = torch.Generator().manual_seed(7)
        return rows(torch.randn(16, 8, generator=generator), torch.randn(16, 4, generator=generator))

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"epoch": 1}

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader


def copied(module: nn.Module) -> dict[str, Any]:
    """Copies the parameters and gradients of a module."""
    found: dict[str, Any] = {}
    for name, parameter in module.named_parameters():
        found[name] = parameter.detach().clone()
        found[f"{name}.grad"] = None if parameter.grad is None else parameter.grad.detach().clone()
    return found
