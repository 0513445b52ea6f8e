"""Modules that torch.compile has wrapped, whole or in part: they run as written, and say so."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from tests.parity.layouts import Layouts, MakeTrainer, assert_equal_trees
from tests.parity.measured import Losses, left, loader
from tests.zoo.steps import Mlp

pytestmark = pytest.mark.filterwarnings(r"ignore:The \.grad attribute of a Tensor that is not a leaf")  # torch's own look


@pytest.fixture(autouse=True)
def _compiler() -> Iterator[None]:
    """Forgets what was compiled, so that no test uses up another's limit."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Plain(Mlp):
    """Does nothing in its steps that torch.compile minds."""

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return F.mse_loss(self(x), y)

    @override
    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return Plain.training_step(self, batch, batch_idx)

    @override
    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        forecast: Tensor = self(batch[0])
        return forecast


class WithCompiledChild(Plain):
    """Holds a compiled module in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.fc2 = torch.compile(nn.Sequential(nn.Linear(16, 16), nn.Tanh()), backend="eager")  # type: ignore[assignment]


class WithCompiledLayer(Plain):
    """Compiles a layer in place."""

    def __init__(self) -> None:
        super().__init__()
        self.fc2.compile(backend="eager")


class WithCompiledFunction(Plain):
    """Calls a compiled function in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.bend = torch.compile(bend, backend="eager")

    @override
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc3(self.bend(self.fc2(self.bend(self.fc1(x)))))
        return y


class WithCompiledStep(Plain):
    """Calls itself in a compiled function."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = torch.compile(self.loss_of, backend="eager")

    def loss_of(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self(x * 2), y) * 3

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.shared(*batch)
        return loss


def bend(x: Tensor) -> Tensor:
    return torch.tanh(x) * 2


def whole() -> Any:
    return torch.compile(Plain(), backend="eager")


CASES: dict[str, tuple[Callable[[], Any], str | None]] = {
    "the LightningModule": (whole, "Plain"),
    "a child": (WithCompiledChild, "fc2"),
    "a layer in place": (WithCompiledLayer, "fc2"),
    "a function": (WithCompiledFunction, None),
    "a function that calls the module": (WithCompiledStep, None),
}


@pytest.mark.parametrize(("module", "named"), CASES.values(), ids=CASES)
def test_runs_as_written(module: Callable[[], Any], named: str | None, layouts: Layouts) -> None:
    def observe(make: MakeTrainer) -> Any:
        made, losses = module(), Losses()
        trainer = make(max_epochs=2, callbacks=[losses])
        trainer.fit(made, loader(), loader(20))
        forecasts = trainer.predict(made, loader(20))
        own: LightningModule = getattr(made, "_orig_mod", made)
        return losses.kept, forecasts, left(own, trainer), {"training_step" in vars(own), "forward" in vars(own)}

    expected = layouts.one_device(observe)
    if named is None:
        ours = layouts.stages(observe)
    else:
        text = f"{named}: what torch.compile has made is not used where the forward is cut into stages; they run as written"
        with pytest.warns(UserWarning, match=text):
            ours = layouts.stages(observe)
    assert_equal_trees(expected, ours)
