"""A training step by microbatches, as Lightning sees it: one batch in, one output and one set of logged values out."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_mgpu import tree
from lightning_mgpu.errors import PartitionError
from lightning_mgpu.microbatch import batch_sizes_of, sizes_of

__all__ = ["LoggedValues", "deal_batch", "join_outputs"]

_microbatch: ContextVar[int | None] = ContextVar("microbatch", default=None)


def deal_batch(batch: Any, count: Callable[[int], int]) -> tuple[list[Any], tuple[int, ...]]:
    """Splits what the loader gave into microbatches.

    Args:
        batch: the batch: any tree of tensors and other values. Tensors with the batch's rows are split along the first
            dimension, and so are lists with one entry for each row that hold no tensor; the rest goes to each microbatch.
        count: the number of microbatches for a number of rows.

    Returns:
        The microbatches, and the rows of each.

    Raises:
        PartitionError: for a batch without a tensor that has rows.
    """
    sizes_found = batch_sizes_of(tree.tensors_in(batch))
    if not sizes_found:
        raise PartitionError(
            "the batch holds no tensor with rows, so it can't be split into microbatches for training_step; use "
            'schedule="gpipe", which splits what the module is called with'
        )
    batch_size = sizes_found[0]
    sizes = sizes_of(batch_size, count(batch_size))
    ends = list(itertools.accumulate(sizes))
    parts = []
    for i, end in enumerate(ends):
        rows = slice(end - sizes[i], end)
        parts.append(_part(batch, batch_size, rows))
    return parts, sizes


def _part(batch: Any, batch_size: int, rows: slice) -> Any:
    if isinstance(batch, list) and len(batch) == batch_size and not tree.tensors_in(batch):
        return batch[rows]
    if type(batch) in (list, tuple):
        return type(batch)(_part(value, batch_size, rows) for value in batch)
    if type(batch) is dict:
        return {key: _part(value, batch_size, rows) for key, value in batch.items()}
    return tree.map_tensors(lambda t: t[rows] if t.ndim > 0 and t.shape[0] == batch_size else t, batch)


def join_outputs(outputs: Sequence[Any], sizes: Sequence[int], loss: Tensor | None) -> Any:
    """Makes one output of what `training_step` returned for the microbatches.

    Args:
        outputs: what it returned, for each microbatch.
        sizes: the rows of each.
        loss: the loss of the batch.

    Returns:
        The loss, or a dict with it. Of the other entries, numbers are averaged by rows, tensors with a microbatch's rows are
        put together, and others are listed.
    """
    if loss is None:
        return None
    first = next(output for output in outputs if output is not None)
    if not isinstance(first, Mapping):
        return loss
    joined = {}
    for key in first:
        values = [output[key] for output in outputs if output is not None and key in output]
        joined[key] = loss if key == "loss" else _joined(values, sizes)
    return joined


def _joined(values: Sequence[Any], sizes: Sequence[int]) -> Any:
    if len(values) == len(sizes) and all(isinstance(v, Tensor) for v in values):
        if all(v.ndim == 0 and v.is_floating_point() for v in values):
            return _mean(values, sizes)
        if all(v.ndim > 0 and v.shape[0] == rows for v, rows in zip(values, sizes, strict=True)):
            return torch.cat([v.detach() for v in values])
    return values[0] if all(type(v) in (str, int, bool, type(None)) and v == values[0] for v in values) else list(values)


def _mean(values: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    total = float(sum(weights))
    stacked = torch.stack([v.detach() for v in values])
    return (stacked * torch.tensor([w / total for w in weights], dtype=stacked.dtype, device=stacked.device)).sum()


class LoggedValues:
    """Gathers what the microbatches of a step log, and logs it once for the batch.

    Args:
        sizes: the rows of each microbatch.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = sizes
        self._calls: dict[str, dict[int, tuple[Any, dict[str, Any]]]] = {}

    @contextmanager
    def of(self, microbatch: int) -> Iterator[None]:
        """Takes what a block logs as that of one microbatch."""
        token = _microbatch.set(microbatch)
        try:
            yield
        finally:
            _microbatch.reset(token)

    def take(self, name: str, value: Any, kwargs: dict[str, Any]) -> bool:
        """Keeps one logged value, where a microbatch logs it.

        Returns:
            Whether it was kept.
        """
        microbatch = _microbatch.get()
        if microbatch is None:
            return False
        self._calls.setdefault(name, {})[microbatch] = (_kept(value), kwargs)
        return True

    def log(self, log: Callable[..., None]) -> None:
        """Logs the values of the batch with the module's own method."""
        for name, calls in self._calls.items():
            kwargs = next(iter(calls.values()))[1]
            rows = [k.get("batch_size") or self.sizes[i] for i, (_, k) in calls.items()]
            if kwargs.get("batch_size") is not None:
                kwargs = kwargs | {"batch_size": sum(rows)}
            log(name, _combined([value for value, _ in calls.values()], rows, kwargs.get("reduce_fx", "mean")), **kwargs)


def _combined(values: Sequence[Any], rows: Sequence[int], reduce_fx: Any) -> Any:
    """Makes one value of those of the microbatches, as ``reduce_fx`` makes one of those of an epoch's batches."""
    if isinstance(values[0], Mapping):
        return {key: _combined([value[key] for value in values], rows, reduce_fx) for key in values[0]}
    if isinstance(values[0], Metric):
        return values[-1]  # it has seen them all
    name = reduce_fx if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", "")
    if name in ("mean", "avg"):
        return _mean([value.mean() for value in values], rows)
    stacked = torch.stack([value.reshape(()) for value in values])
    by_name = {"sum": torch.sum, "min": torch.min, "max": torch.max}
    return by_name.get(name, reduce_fx)(stacked)


def _kept(value: Any) -> Any:
    """Returns a logged value without its history, numbers as tensors of the dtype that is the default where it is logged."""
    if isinstance(value, Mapping):
        return {key: _kept(entry) for key, entry in value.items()}
    if isinstance(value, Metric):
        return value
    if not isinstance(value, Tensor):
        return torch.tensor(float(value), dtype=torch.get_default_dtype())
    return value.detach() if value.is_floating_point() else value.detach().to(torch.get_default_dtype())
