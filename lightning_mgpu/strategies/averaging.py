"""Averages of weights: Lightning's callbacks and torch's averaged models see the values of all stages when they look."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from torch import nn
from torch.optim.swa_utils import AveragedModel

from lightning_mgpu.runtime.lead import Lead

__all__ = ["cover_averaging"]

_WRITE = {
    WeightAveraging: ("_swap_models", "_copy_average_to_current"),
    StochasticWeightAveraging: ("transfer_weights", "reset_batch_norm_and_save_state"),
}


def cover_averaging(lead: Lead, root: nn.Module, callbacks: Iterable[pl.Callback]) -> None:
    """Brings the values to the lead for the length of whatever reads or writes all of them.

    Args:
        lead: the lead of the Trainer call.
        root: the user's module.
        callbacks: those of the Trainer.
    """
    callbacks = list(callbacks)
    for callback in callbacks:
        for kind, names in _WRITE.items():
            for name in names if isinstance(callback, kind) else ():
                lead.patches.put(callback, name, _inside(lead.summoned))
        if isinstance(callback, StochasticWeightAveraging):
            lead.patches.put(callback, "update_parameters", _inside(lead.shown))
    for model in _averaged_models(root, callbacks):
        lead.patches.put(model, "update_parameters", _inside(_readable(lead, model)))


def _averaged_models(root: nn.Module, callbacks: Iterable[pl.Callback]) -> Iterator[AveragedModel]:
    held = [*root.modules(), *(value for owner in (root, *callbacks) for value in vars(owner).values())]
    yield from {id(model): model for model in held if isinstance(model, AveragedModel)}.values()


def _readable(lead: Lead, model: AveragedModel) -> Callable[[], AbstractContextManager[None]]:
    """Chooses how values come: for reading, or also for writing where the average itself is in stages."""
    return lambda: lead.summoned() if lead.is_placed(model) else lead.shown()


def _inside(context: Callable[[], AbstractContextManager[None]]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def make(plain: Callable[..., Any]) -> Callable[..., Any]:
        def method(*args: Any, **kwargs: Any) -> Any:
            with context():
                return plain(*args, **kwargs)

        return method

    return make
