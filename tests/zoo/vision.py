"""Networks for images: short and long skips, batch statistics."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from tests.zoo.recipe import Classification, Regression


class ResidualBlock(nn.Module):
    """Adds two normalised convolutions to what it receives."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm1 = nn.GroupNorm(2, channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm2 = nn.GroupNorm(2, channels)

    @override
    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.norm1(self.conv1(x)))
        return F.relu(x + self.norm2(self.conv2(out)))


class ResidualNet(Classification):
    """Skips over two convolutions in each block; a cut may fall inside a block."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.blocks = nn.Sequential(*[ResidualBlock(4) for _ in range(3)])
        self.head = nn.Linear(4, 10)

    @override
    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(F.relu(self.stem(x)))
        scores: Tensor = self.head(x.mean(dim=(2, 3)))
        return scores


class UNet(Regression):
    """Carries early feature maps over every cut to layers near the output."""

    def __init__(self) -> None:
        super().__init__()
        self.down1 = nn.Conv2d(1, 4, 3, padding=1)
        self.down2 = nn.Conv2d(4, 8, 3, padding=1)
        self.bottom = nn.Conv2d(8, 8, 3, padding=1)
        self.up2 = nn.ConvTranspose2d(8, 8, 2, stride=2)
        self.merge2 = nn.Conv2d(16, 4, 3, padding=1)
        self.up1 = nn.ConvTranspose2d(4, 4, 2, stride=2)
        self.merge1 = nn.Conv2d(8, 4, 3, padding=1)
        self.out = nn.Conv2d(5, 1, 1)

    @override
    def forward(self, x: Tensor) -> Tensor:
        fine = F.relu(self.down1(x))
        middle = F.relu(self.down2(F.max_pool2d(fine, 2)))
        h = F.relu(self.bottom(F.max_pool2d(middle, 2)))
        h = F.relu(self.merge2(torch.cat([self.up2(h), middle], dim=1)))
        h = F.relu(self.merge1(torch.cat([self.up1(h), fine], dim=1)))
        image: Tensor = self.out(torch.cat([h, x], dim=1))
        return image


class BatchNormFirst(Classification):
    """Normalises its input over the batch, so the statistics depend on the data alone."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(3)
        self.conv = nn.Conv2d(3, 4, 3)
        self.fc = nn.Linear(4 * 6 * 6, 16)
        self.head = nn.Linear(16, 10)

    @override
    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv(self.norm(x)))
        scores: Tensor = self.head(torch.tanh(self.fc(x.flatten(1))))
        return scores
