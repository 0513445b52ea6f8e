"""Microbatches: how a batch is dealt out, and how results become one batch again.

Tensors whose first dimension is the batch's are split along it; all others, and whatever is no tensor, go to every
microbatch as they are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from lightning_mgpu.errors import PartitionError

__all__ = ["batch_sizes_of", "check_num_microbatches", "deal", "num_microbatches_for", "sizes_of"]

MICROBATCHES_PER_STAGE = 4


def check_num_microbatches(num_microbatches: int | Literal["auto"]) -> int | Literal["auto"]:
    """Returns the argument when it is ``"auto"`` or a positive whole number.

    Raises:
        PartitionError: for anything else, with the value.
    """
    if num_microbatches == "auto":
        return "auto"
    if type(num_microbatches) is not int or num_microbatches < 1:
        raise PartitionError(
            f'num_microbatches={num_microbatches!r} is not possible; use a whole number of at least 1, or "auto"'
        )
    return num_microbatches


def num_microbatches_for(
    num_microbatches: int | Literal["auto"], num_stages: int, batch_size: int, *, num_replicas: int = 1
) -> int:
    """Chooses the number of microbatches of one batch: never more than it has rows.

    Args:
        num_microbatches: microbatches of each replica. ``"auto"`` means four per stage, the number from which GPipe (Huang et
            al. 2019, section 2.3) found the bubble negligible; and one where there is but one stage.
        num_stages: stages that follow each other.
        batch_size: rows of the batch.
        num_replicas: copies of the pipeline that share the batch.
    """
    automatic = MICROBATCHES_PER_STAGE * num_stages if num_stages > 1 else 1
    wanted = automatic if num_microbatches == "auto" else num_microbatches
    return max(1, min(wanted * num_replicas, batch_size))


def sizes_of(batch_size: int, num_microbatches: int) -> tuple[int, ...]:
    """Deals ``batch_size`` rows out as evenly as possible, larger microbatches first, as 10 in 4: (3, 3, 2, 2)."""
    least, more = divmod(batch_size, num_microbatches)
    return tuple(least + 1 if i < more else least for i in range(num_microbatches))


def batch_sizes_of(tensors: Sequence[Tensor]) -> list[int]:
    """Finds the number of rows of a batch.

    Returns:
        The first dimension most of its tensors share, the earliest on a tie; then that of the first tensor, if it is
        another. Nothing where no tensor has a dimension.
    """
    counts = Counter(t.shape[0] for t in tensors if t.ndim > 0)
    return list(dict.fromkeys([max(counts, key=lambda size: counts[size]), next(iter(counts))])) if counts else []


def deal(tensor: Tensor, sizes: Sequence[int], dim: int | None) -> list[Tensor]:
    """Splits a tensor of ``sum(sizes)`` rows, or any multiple or part of them, along ``dim``.

    Args:
        tensor: the tensor of the whole batch.
        sizes: rows of each microbatch.
        dim: the dimension to split, or ``None`` to give the whole tensor to each microbatch.

    Returns:
        One tensor per microbatch; views of the whole.
    """
    if dim is None:
        return [tensor] * len(sizes)
    length, total = tensor.shape[dim], sum(sizes)
    return list(torch.split(tensor, [size * length // total for size in sizes], dim=dim))
