"""Training steps: what they call, what they add to the loss, how they optimise."""

from __future__ import annotations

import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from typing_extensions import override

from tests.zoo.recipe import Classification, Regression


class Mlp(Regression):
    """Three layers in a row, the plainest network there is."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(8, 16)
        self.fc2 = nn.Linear(16, 16)
        self.fc3 = nn.Linear(16, 4)

    @override
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc3(torch.tanh(self.fc2(torch.tanh(self.fc1(x)))))
        return y


class ChildModel(Regression):
    """Has no forward of its own; its step calls ``self.model``."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return F.mse_loss(self.model(x), y)


class TwoChildren(Regression):
    """Calls one child, works on its output, and calls another child with that."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16))
        self.decoder = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 8))

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, _ = batch
        z = F.normalize(self.encoder(x), dim=-1)
        return F.mse_loss(self.decoder(z), x) + 0.01 * z.abs().mean()


class LayersAroundModel(Classification):
    """Trains an embedding before and a head after the model, and penalises the head's weights."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 16)
        self.model = nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 16))
        self.head = nn.Linear(16, 20)

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        words, label = batch
        scores = self.head(torch.tanh(self.model(self.words(words))))
        loss = F.cross_entropy(scores.flatten(0, 1), label.flatten())
        return loss + 0.01 * self.head.weight.square().sum()


class NoisyStep(Mlp):
    """Augments the batch with noise drawn inside the step."""

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        x = x + 0.1 * torch.rand(x.shape, device=x.device)
        return F.mse_loss(self(x), y)


class Contrastive(Regression):
    """Tells each sample from all others of the batch, whichever microbatch they were in."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(16, 16)
        self.fc2 = nn.Linear(16, 12)

    @override
    def forward(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.fc1(torch.cat([left, right], dim=-1)))
        first, second = self.fc2(h).chunk(2, dim=-1)
        return F.normalize(first, dim=-1), F.normalize(second, dim=-1)

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        first, second = self(*batch)
        similarity = first @ second.T / 0.5
        loss = F.cross_entropy(similarity, torch.arange(len(first), device=first.device))
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss


class WeightPenalty(Mlp):
    """Adds the square of the last layer's weights to the loss, past the forward."""

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + 0.1 * self.fc3.weight.square().sum()


class FrozenFirst(Mlp):
    """Trains all but its first layer, which alone makes up the first stage."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1.requires_grad_(requires_grad=False)

    @override
    def configure_optimizers(self) -> Optimizer:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1, momentum=0.9)


class FrozenLast(Mlp):
    """Trains all but its last layer, through which the gradient still has to flow."""

    def __init__(self) -> None:
        super().__init__()
        self.fc3.requires_grad_(requires_grad=False)


class DropoutMlp(Mlp):
    """Drops hidden values at random in each of its layers, and returns its scores beside the loss."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__()
        self.lr = lr

    @override
    def forward(self, x: Tensor) -> Tensor:
        h = F.dropout(torch.tanh(self.fc1(x)), 0.3, training=self.training)
        h = F.dropout(torch.tanh(self.fc2(h)), 0.3, training=self.training)
        y: Tensor = self.fc3(h)
        return y

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Tensor]:  # type: ignore[override]
        x, y = batch
        scores = self(x)
        return {"loss": F.mse_loss(scores, y), "scores": scores.detach()}

    @override
    def configure_optimizers(self) -> Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class AdamWMlp(Mlp):
    """Optimises with AdamW, whose decay and moments live beside each parameter."""

    @override
    def configure_optimizers(self) -> Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01, weight_decay=0.1)


class ParameterGroups(Mlp):
    """Gives groups their own learning rate and decay, under a schedule that moves at every step."""

    @override
    def configure_optimizers(self) -> OptimizerLRScheduler:
        optimizer = torch.optim.AdamW(
            [
                {"params": self.fc3.parameters(), "lr": 0.02},
                {"params": self.fc1.parameters(), "weight_decay": 0.5},
                {"params": self.fc2.parameters(), "lr": 0.001, "betas": (0.5, 0.9)},
            ],
            lr=0.01,
        )
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class StepReturnsDict(Mlp):
    """Returns its loss in a dict, beside the scores."""

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Tensor]:  # type: ignore[override]
        x, y = batch
        scores = self(x)
        return {"loss": F.mse_loss(scores, y), "scores": scores.detach()}


class SkippedStep(Mlp):
    """Computes its second batch and then returns nothing, which skips the step."""

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor | None:  # type: ignore[override]
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx == 1 else loss
