"""Forwards that return more than a tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.utils.generic import ModelOutput
from typing_extensions import override

from tests.zoo.recipe import Regression


class TwoHeads(Regression):
    """Owns a body and two heads that the modules of this file return in their own containers."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 16)
        self.deeper = nn.Linear(16, 16)
        self.mean = nn.Linear(16, 4)
        self.spread = nn.Linear(16, 4)

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = torch.tanh(self.body(x))
        deep = torch.tanh(self.deeper(hidden))
        return self.mean(deep), F.softplus(self.spread(deep)), hidden

    def negative_log_likelihood(self, mean: Tensor, spread: Tensor, y: Tensor) -> Tensor:
        return ((y - mean).square() / (1 + spread) + torch.log1p(spread)).mean()


class TupleOutput(TwoHeads):
    """Returns a tuple with a list inside, and None."""

    @override
    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor], None]:
        mean, spread, hidden = self.heads(x)
        return mean, [spread, hidden], None

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        mean, (spread, hidden), nothing = self(x)
        assert nothing is None
        penalty: Tensor = 0.01 * hidden.square().mean()
        return self.negative_log_likelihood(mean, spread, y) + penalty


class DictOutput(TwoHeads):
    """Returns a nested dict that holds a name and a number beside its tensors."""

    @override
    def forward(self, x: Tensor) -> dict[str, Any]:
        mean, spread, hidden = self.heads(x)
        return {"mean": mean, "rest": {"spread": spread, "hidden": hidden}, "kind": "normal", "num_heads": 2}

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        out = self(x)
        assert (out["kind"], out["num_heads"]) == ("normal", 2)
        return self.negative_log_likelihood(out["mean"], out["rest"]["spread"], y)


@dataclass
class Forecast:
    """A forecast with its uncertainty, (batch, 4) each."""

    mean: Tensor
    spread: Tensor
    unit: str = "metre"


class DataclassOutput(TwoHeads):
    """Returns a dataclass of its own."""

    @override
    def forward(self, x: Tensor) -> Forecast:
        mean, spread, _ = self.heads(x)
        return Forecast(mean, spread)

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        out = self(x)
        assert isinstance(out, Forecast)
        assert out.unit == "metre"
        return self.negative_log_likelihood(out.mean, out.spread, y)


@dataclass
class NormalOutput(ModelOutput):
    """The output class a transformers model would define; its keys are the fields that are set."""

    mean: Tensor | None = None
    spread: Tensor | None = None
    hidden: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None


class ModelOutputOutput(TwoHeads):
    """Returns a ``ModelOutput`` with a tuple of tensors inside and one field left out."""

    @override
    def forward(self, x: Tensor) -> NormalOutput:
        mean, spread, hidden = self.heads(x)
        return NormalOutput(mean=mean, spread=spread, hidden=(hidden, x))

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        out = self(x)
        assert isinstance(out, NormalOutput)
        assert list(out.keys()) == ["mean", "spread", "hidden"]
        assert out.mean is not None
        penalty: Tensor = 0.01 * out[2][0].square().mean()
        return self.negative_log_likelihood(out.mean, out["spread"], y) + penalty
