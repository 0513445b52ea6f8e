"""Two networks against each other, optimised by hand."""

from __future__ import annotations

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from typing_extensions import override


class Gan(LightningModule):
    """Alternates two optimizers in one step, calling each network several times."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 8))
        self.discriminator = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Tensor]:
        real, _ = batch
        generator_optimizer, discriminator_optimizer = self.optimizers()  # type: ignore[attr-defined]
        noise = torch.randn(len(real), 4, device=real.device)
        valid = torch.ones(len(real), 1, device=real.device)

        self.toggle_optimizer(generator_optimizer)
        verdict = self.discriminator(self.generator(noise))
        generator_loss = F.binary_cross_entropy_with_logits(verdict, valid)
        generator_optimizer.zero_grad()
        self.manual_backward(generator_loss)
        generator_optimizer.step()
        self.untoggle_optimizer(generator_optimizer)

        self.toggle_optimizer(discriminator_optimizer)
        fake = self.generator(noise).detach()
        discriminator_loss = F.binary_cross_entropy_with_logits(
            self.discriminator(real), valid
        ) + F.binary_cross_entropy_with_logits(self.discriminator(fake), torch.zeros_like(valid))
        discriminator_optimizer.zero_grad()
        self.manual_backward(discriminator_loss)
        discriminator_optimizer.step()
        self.untoggle_optimizer(discriminator_optimizer)

        self.log("generator_loss", generator_loss, on_epoch=True)
        return {"generator_loss": generator_loss.detach(), "discriminator_loss": discriminator_loss.detach()}

    @override
    def configure_optimizers(self) -> list[Optimizer]:
        return [
            torch.optim.Adam(self.generator.parameters(), lr=0.01, betas=(0.5, 0.999)),
            torch.optim.SGD(self.discriminator.parameters(), lr=0.1, momentum=0.9),
        ]
