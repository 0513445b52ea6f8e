"""Forwards under modes of torch: precision, gradients, checkpoints, training and evaluation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from tests.partition.forwards.case import forward, images, pairs, sequences, vectors


class Blocks(nn.Module):
    """Owns three blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(6, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)) for _ in range(2))
        self.head = nn.Linear(8, 4)


@forward(vectors)
class CheckpointedBlocks(Blocks):
    """Recomputes blocks in backward, in both of torch's ways."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.inp(x)
        h = h + checkpoint(self.blocks[0], h, use_reentrant=False)
        h = h + checkpoint(self.blocks[1], h, use_reentrant=True)
        return self.head(h)


@forward(vectors)
class CheckpointedFunctions(Blocks):
    """Recomputes closures and sequences in backward."""

    def forward(self, x: Tensor) -> Tensor:
        def inner(h: Tensor, scale: float) -> tuple[Tensor, Tensor]:
            y = self.blocks[0](h)
            return y * scale, y.detach()

        h = self.inp(x)
        a, b = checkpoint(inner, h, 0.5, use_reentrant=False, preserve_rng_state=False)
        h = checkpoint_sequential(self.blocks[1], 2, a + b, use_reentrant=False)
        return self.head(h)


@forward(vectors, tolerance=3e-2)
class Autocast(Blocks):
    """Computes a part in bfloat16, and the head in float32 again."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = self.inp(x)
            h = self.blocks[0](h) + h
            with torch.autocast("cpu", enabled=False):
                h = self.blocks[1](h.float())
        return self.head(h)


def low_precision(rows: int) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 6).half(), torch.randint(256, (rows, 6), dtype=torch.uint8)


@forward(low_precision)
class ConvertedInputs(Blocks):
    """Takes halves and bytes, and converts them in every way."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = x.to(self.inp.weight.dtype) + y / 255.0 + y.float().div(255).type(torch.float32)
        h = self.inp(x.to(next(self.parameters()).device, non_blocking=True))
        h = self.blocks[0](h).to(torch.float64).to(h)
        return self.head(self.blocks[1](h).type_as(self.head.bias).clone().cpu())


def doubles(rows: int) -> tuple[Tensor]:
    return (torch.randn(rows, 6, dtype=torch.float64),)


@forward(doubles, tolerance=1e-10)
class DoublePrecision(Blocks):
    """Lives in float64, with one parameter in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.double()
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        h = self.blocks[0](self.inp(x)) * self.scale
        return self.head(self.blocks[1](h))


@forward(sequences)
class FourierLayers(nn.Module):
    """Mixes in frequency space by complex weights."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(6, 8)
        self.weight = nn.Parameter(torch.randn(3, 8, 8, dtype=torch.cfloat) / 8)
        self.skip = nn.Conv1d(8, 8, 1)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.inp(x).transpose(1, 2)
        f = torch.fft.rfft(h, norm="ortho")
        low = torch.einsum("bim,mio->bom", f[..., :3], self.weight)
        out = torch.zeros(f.shape, dtype=torch.cfloat)
        out[:, :, :3] = low
        h = torch.fft.irfft(out, n=h.size(-1), norm="ortho") + F.gelu(self.skip(h))
        return self.head(h.transpose(1, 2)), low.abs() + low.real * low.conj().imag


@forward(vectors)
class PartlyWithoutGradient(Blocks):
    """Stops gradients: by detach, by no_grad as context and decorator, by set_grad_enabled and data."""

    @torch.no_grad()
    def statistics(self, h: Tensor) -> Tensor:
        return h.abs().mean(dim=-1, keepdim=True)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            h = self.inp(x)
        h = self.blocks[0](h)
        scale = self.statistics(h)
        with torch.set_grad_enabled(not self.training):
            offset = self.blocks[1](h.detach())
        with torch.enable_grad():
            g = self.head(h / scale + offset)
        return g + g.data.tanh()


class Reverse(torch.autograd.Function):
    """Turns the gradient around, and scales it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return -ctx.scale * gradient, None


class StraightThrough(torch.autograd.Function):
    """Rounds to signs forward, passes the gradient backward, with saved tensors and several results."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, y)
        ctx.mark_non_differentiable(mask := x > 0)
        return torch.sign(x) * y, mask

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
        x, y = ctx.saved_tensors
        return gradient * (x.abs() < 1) * y, gradient * torch.sign(x)


@forward(vectors)
class CustomGradients(Blocks):
    """Uses autograd functions of its own."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = self.blocks[0](self.inp(x))
        q, mask = StraightThrough.apply(h, torch.sigmoid(h))
        domain = self.head(Reverse.apply(h, 0.3))
        return {"y": self.head(self.blocks[1](q)), "domain": domain, "mask": mask}


@forward(vectors)
class DifferentInEvaluation(Blocks):
    """Returns scores while training, and probabilities with a class otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.auxiliary = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Any:
        h = self.blocks[0](self.inp(x))
        if self.training:
            return self.head(self.blocks[1](h)), self.auxiliary(h)
        p = self.head(self.blocks[1](h)).softmax(dim=-1)
        return {"p": p, "top": p.argmax(-1), "auxiliary": None}


@forward(vectors)
class CountersAndAverages(Blocks):
    """Updates buffers that do not depend on the batch: a counter, a decay, a mirror of weights."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("num_calls", torch.tensor(0))
        self.register_buffer("temperature", torch.tensor(1.0))
        self.register_buffer("average", torch.zeros(8, 6))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.num_calls += 1
            self.temperature = self.temperature * 0.9
            with torch.no_grad():
                self.average.mul_(0.9).add_(self.inp.weight, alpha=0.1)
        h = self.inp(x) + F.linear(x, self.average)
        return self.head(self.blocks[1](self.blocks[0](h))) / self.temperature


@forward(images)
class ChannelsLast(nn.Module):
    """Asks for another memory format, and views what it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 4, 3, padding=1).to(memory_format=torch.channels_last)
        self.conv2 = nn.Conv2d(4, 4, 3, padding=1)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv1(x.contiguous(memory_format=torch.channels_last))
        h = self.conv2(h.to(memory_format=torch.channels_last)).permute(0, 2, 3, 1)
        return self.head(h.contiguous().view(x.size(0), -1, 4).mean(1))


@forward(pairs, refused={4: r"sum \(.*\) looks across the whole batch in the middle of EnergyAndForces"})
class EnergyAndForces(nn.Module):
    """Differentiates its own result by its input, and lets the derivative train."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Linear(6, 6)
        self.head = nn.Linear(6, 3)
        self.fc1 = nn.Linear(6, 8)
        self.fc2 = nn.Linear(8, 1)

    def forward(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        with torch.enable_grad():
            positions = positions.clone().requires_grad_(True)
            energy = self.fc2(torch.tanh(self.fc1(positions)))
            (forces,) = torch.autograd.grad(energy.sum(), positions, create_graph=True)
        return energy, -forces, self.head(torch.tanh(self.scale(x)))
