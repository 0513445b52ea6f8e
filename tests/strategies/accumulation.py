"""What a schedule by microbatches has to equal bit for bit: gradients accumulated over the same microbatches in one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_mgpu.microbatch import sizes_of


class _InTurn(torch.autograd.Function):
    """Is the loss of a batch whose backward runs those of its microbatches in their order."""

    @staticmethod
    def forward(ctx: Any, _: Tensor, losses: list[Tensor]) -> Tensor:
        ctx.losses = losses
        return torch.stack([loss.detach() for loss in losses]).sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        for loss in ctx.losses:
            if loss.requires_grad:
                torch.autograd.backward(loss, gradients[0])
        return None, None


def accumulating(make: Callable[[], LightningModule], num_microbatches: int) -> Callable[[], LightningModule]:
    """Gives a module a training step that runs its own on one microbatch after the other."""

    def make_accumulating() -> LightningModule:
        module = make()
        plain = module.training_step
        anchor = torch.zeros((), requires_grad=True)

        def training_step(batch: Any, *args: Any) -> Any:
            num_rows = _num_rows(batch)
            sizes = sizes_of(num_rows, min(num_microbatches, num_rows))
            losses, start = [], 0
            for size in sizes:
                output = plain(_rows(batch, num_rows, slice(start, start + size)), *args)
                start += size
                if output is not None:
                    loss = output["loss"] if isinstance(output, Mapping) else output
                    losses.append(loss * (size / num_rows))
            return _InTurn.apply(anchor, losses) if losses else None  # type: ignore[no-untyped-call]

        module.training_step = training_step  # type: ignore[method-assign]
        return module

    return make_accumulating


def _num_rows(batch: Any) -> int:
    while not isinstance(batch, Tensor):
        batch = next(iter(batch.values() if isinstance(batch, Mapping) else batch))
    return len(batch)


def _rows(batch: Any, num_rows: int, rows: slice) -> Any:
    if isinstance(batch, Tensor):
        return batch[rows] if batch.ndim and len(batch) == num_rows else batch
    if isinstance(batch, Mapping):
        return type(batch)({key: _rows(value, num_rows, rows) for key, value in batch.items()})  # type: ignore[call-arg]
    if isinstance(batch, list | tuple):
        return type(batch)(_rows(value, num_rows, rows) for value in batch)
    return batch
