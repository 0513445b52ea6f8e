"""Batch norm under microbatches: normalises each microbatch by itself, updates running statistics once, from the whole batch.

Known as deferred batch norm from torchgpipe (Kim et al. 2020, section 3.3). The statistics of the microbatches are taken from
the kernel itself, by letting it write into scratch buffers with momentum 1, and combined with the parallel formula of
Chan, Golub and LeVeque (1979).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

__all__ = ["DeferredStatistics", "by_any_momentum", "is_deferred_module"]

_FUNCTION_ARGUMENTS = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")


def is_deferred_module(module: nn.Module) -> bool:
    """Says whether a module is a batch norm that keeps running statistics."""
    return isinstance(module, _BatchNorm) and module.running_mean is not None


@contextmanager
def by_any_momentum(module: Any) -> Iterator[None]:
    """Lets a batch norm that averages over all batches (``momentum=None``) run while its count of them is no real number."""
    if not is_deferred_module(module) or module.momentum is not None:
        yield
        return
    module.momentum = 0.1
    try:
        yield
    finally:
        module.momentum = None


@dataclass
class _Moments:
    """Is the mean and the sum of squared deviations of some rows, per channel."""

    count: int
    mean: Tensor
    deviations: Tensor

    def joined(self, other: _Moments) -> _Moments:
        count = self.count + other.count
        delta = other.mean - self.mean
        mean = self.mean + delta * (other.count / count)
        deviations = self.deviations + other.deviations + delta.square() * (self.count * other.count / count)
        return _Moments(count, mean, deviations)


class DeferredStatistics:
    """Gathers the batch statistics of one call over its microbatches."""

    def __init__(self) -> None:
        self._moments: dict[str, _Moments] = {}
        self._commits: dict[str, Callable[[_Moments], None]] = {}

    def run(self, label: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs one batch norm, with its running statistics left as they are.

        Args:
            label: names the node; one module called twice in a forward is two nodes.
            target: the module, or ``torch.nn.functional.batch_norm``.
            args: positional arguments.
            kwargs: keyword arguments.

        Returns:
            The normalised microbatch.
        """
        return (
            self._module(label, target, args) if isinstance(target, nn.Module) else self._function(label, target, args, kwargs)
        )

    def _module(self, label: str, module: Any, args: tuple[Any, ...]) -> Any:
        if not module.training or not module.track_running_stats or module.running_mean is None:
            return module(*args)
        buffers, momentum = dict(module._buffers), module.momentum
        mean, var = buffers["running_mean"], buffers["running_var"]
        try:
            module._buffers.update(
                running_mean=torch.zeros_like(mean), running_var=torch.ones_like(var), num_batches_tracked=None
            )
            module.momentum = 1.0
            result = module(*args)
            self._observe(label, args[0], module._buffers["running_mean"], module._buffers["running_var"])
        finally:
            module._buffers.update(buffers)
            module.momentum = momentum
        tracked = buffers["num_batches_tracked"]

        def commit(moments: _Moments) -> None:
            if tracked is not None:
                tracked.add_(1)
            factor = momentum if momentum is not None else 1.0 / float(tracked)
            _update(moments, mean, var, factor)

        self._commits[label] = commit
        return result

    def _function(self, label: str, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = dict(zip(_FUNCTION_ARGUMENTS, args, strict=False)) | kwargs
        mean, var = given.get("running_mean"), given.get("running_var")
        if not given.get("training") or mean is None or var is None:
            return function(**given)
        factor = given.get("momentum", 0.1)
        scratch = given | {"running_mean": torch.zeros_like(mean), "running_var": torch.ones_like(var), "momentum": 1.0}
        result = function(**scratch)
        self._observe(label, given["input"], scratch["running_mean"], scratch["running_var"])
        self._commits[label] = lambda moments: _update(moments, mean, var, factor)
        return result

    def _observe(self, label: str, x: Tensor, mean: Tensor, unbiased_var: Tensor) -> None:
        count = x.numel() // x.shape[1]
        moments = _Moments(count, mean.detach(), unbiased_var.detach() * (count - 1))
        known = self._moments.get(label)
        self._moments[label] = moments if known is None else known.joined(moments)

    def moments(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Returns for each batch norm that ran the number of its rows, their mean, and the sum of squared deviations."""
        return [(torch.tensor([float(m.count)]), m.mean, m.deviations) for m in self._moments.values()]

    def join(self, others: Sequence[tuple[Tensor, Tensor, Tensor]]) -> None:
        """Adds what other rows made of the same batch norms, in the order of `moments`."""
        for label, (count, mean, deviations) in zip(self._moments, others, strict=True):
            self._moments[label] = _Moments(int(count), mean, deviations).joined(self._moments[label])

    def commit(self) -> None:
        """Updates the running statistics of every batch norm that ran, once, from all its microbatches."""
        with torch.no_grad():
            for label, commit in self._commits.items():
                commit(self._moments[label])
        self._moments.clear()
        self._commits.clear()


def _update(moments: _Moments, mean: Tensor, var: Tensor, factor: float) -> None:
    mean.mul_(1.0 - factor).add_(moments.mean, alpha=factor)
    var.mul_(1.0 - factor).add_(moments.deviations / max(moments.count - 1, 1), alpha=factor)
