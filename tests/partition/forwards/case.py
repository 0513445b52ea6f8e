"""One forward to compare: a module, batches for it, and what may be asked of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lightning_mgpu import tree

Batch = Callable[[int], tuple[Any, ...]]
ModuleType = TypeVar("ModuleType", bound=type[nn.Module])


@dataclass(frozen=True)
class Forward:
    """Names a module, and says how its stages are compared with it.

    Attributes:
        module: Builds the module; its class names the case.
        batch: Draws the arguments for so many rows; a dict at the end holds keyword arguments.
        loss: Makes one number of what the forward returns.
        by_microbatch: Whether to compare with the module called on each microbatch, as random numbers and statistics of the
            batch ask for.
        buffers: Whether buffers are those of the module on the whole batch, or on each microbatch.
        microbatches: In how many microbatches the first batch runs when 4 are asked for.
        promoted: Modules that run as one piece.
        warns: What the plans for several microbatches warn of.
        refused: What the error says, by the microbatches asked for.
        rows: Rows of the batches, one after the other.
        tolerance: Relative to the largest number of a tensor.
    """

    module: type[nn.Module]
    batch: Batch
    loss: Callable[[Any], Tensor] | None = None
    by_microbatch: bool = False
    buffers: bool = True
    microbatches: int = 4
    promoted: tuple[str, ...] = ()
    warns: str = ""
    refused: dict[int, str] = field(default_factory=dict)
    rows: tuple[int, ...] = (8, 8, 5)
    tolerance: float = 1e-5

    @property
    def name(self) -> str:
        return self.module.__name__


FORWARDS: list[Forward] = []


def forward(batch: Batch, **options: Any) -> Callable[[ModuleType], ModuleType]:
    """Adds the decorated module to the cases."""

    def add(module: ModuleType) -> ModuleType:
        FORWARDS.append(Forward(module, batch, **options))
        return module

    return add


def weighted_sum(output: Any) -> Tensor:
    """Makes one number of all tensors of a tree that carry gradient, each element with its own weight."""
    total = torch.zeros((), dtype=torch.float64)
    for tensor in tree.tensors_in(output):
        if tensor.requires_grad:
            part = torch.view_as_real(tensor) if tensor.is_complex() else tensor
            weights = torch.sin(torch.arange(part.numel(), dtype=torch.float64) * 1.7 + 0.3)
            total = total + (part.double().flatten() * weights).sum()
    return total


# -- batches -------------------------------------------------------------------------------------------------------------


def vectors(rows: int) -> tuple[Tensor]:
    """Draws ``(rows, 6)``."""
    return (torch.randn(rows, 6),)


def pairs(rows: int) -> tuple[Tensor, Tensor]:
    """Draws two times ``(rows, 6)``."""
    return torch.randn(rows, 6), torch.randn(rows, 6)


def labelled(rows: int) -> tuple[Tensor, Tensor]:
    """Draws ``(rows, 6)`` and a class from 0 to 3 for each row."""
    return torch.randn(rows, 6), torch.randint(4, (rows,))


def images(rows: int) -> tuple[Tensor]:
    """Draws ``(rows, 3, 8, 8)``."""
    return (torch.randn(rows, 3, 8, 8),)


def sequences(rows: int) -> tuple[Tensor]:
    """Draws ``(rows, 7, 6)``."""
    return (torch.randn(rows, 7, 6),)


def ragged_sequences(rows: int) -> tuple[Tensor, Tensor]:
    """Draws ``(rows, 7, 6)`` and a length from 1 to 7 for each row; the first is the longest."""
    lengths = torch.randint(1, 7, (rows,))
    lengths[0] = 7
    return torch.randn(rows, 7, 6), lengths


def words(rows: int) -> tuple[Tensor]:
    """Draws ``(rows, 7)`` words from 1 to 19."""
    return (torch.randint(1, 20, (rows, 7)),)


def padded_words(rows: int) -> tuple[Tensor, Tensor]:
    """Draws ``(rows, 7)`` words, padded by 0 towards the end, and the mask of what is no padding."""
    mask = torch.arange(7) < torch.randint(2, 8, (rows, 1))
    return torch.randint(1, 20, (rows, 7)) * mask, mask
