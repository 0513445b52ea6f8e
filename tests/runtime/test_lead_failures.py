"""An exception in the user's own process: it arrives as on one device, and the workers go on serving."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from typing_extensions import override

from tests.harness import ATOL, RTOL, optimizer_by_name, repeatable
from tests.runtime.faulty_leads import MISTAKES, TEXT, Mistake, loader
from tests.runtime.observing import Witness, assert_whole, make_trainer, on_stages, promptly, weights_of
from tests.runtime.spare_workers import SpareWorkers, processes_of


class KeepsState(Callback):
    """Reads weights and optimizer when the run fails, as a checkpoint on exception does."""

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.weights = {name: value.clone() for name, value in pl_module.state_dict().items()}
        self.optimizer = optimizer_by_name(trainer.strategy, pl_module, trainer.optimizers[0])


@dataclass
class Outcome:
    """What a run that failed, and a second one of the same Trainer, left to the user.

    Attributes:
        module: The module, after the second run.
        failed: The weights after the first run.
        state: The weights and the optimizer's state in the moment of the failure.
        steps: The optimizer steps of the first run.
    """

    module: LightningModule
    failed: dict[str, Tensor]
    state: KeepsState
    steps: int


def fail_and_fit_again(mistake: Mistake, make: Callable[..., Trainer]) -> Outcome:
    """Fits twice with one Trainer; the first time fails."""
    state, witness = KeepsState(), Witness()
    with repeatable():
        module = mistake.module()
        trainer = make(callbacks=[state, witness, *mistake.callbacks()])
        rest = (loader(),) if mistake.validates else ()
        with pytest.raises(ValueError, match=TEXT) as caught, promptly(witness):
            trainer.fit(module, mistake.loader(), *rest)
        assert witness.exceptions == [caught.value]
        assert caught.value.__cause__ is None
        assert caught.value.__context__ is None
        witness.exceptions.clear()  # its frames hold the loader's process
        del caught
        gc.collect()
        failed, steps = weights_of(module), trainer.global_step
        assert_whole(module, state.weights)
        module.train()  # Lightning leaves it as the failure found it
        trainer.fit(module, loader(), *rest)
        return Outcome(module, failed, state, steps)


@functools.cache
def on_one_device(mistake: Mistake) -> Outcome:
    return fail_and_fit_again(mistake, make_trainer)


@pytest.mark.parametrize(
    ("mistake", "num_stages"), [pytest.param(each, n, id=f"{each.name}-{n}") for each in MISTAKES for n in each.num_stages]
)
def test_the_users_own_exception(mistake: Mistake, num_stages: int, spare_workers: SpareWorkers) -> None:
    whole = on_one_device(mistake)
    workers = spare_workers.running(num_stages)
    processes = processes_of(workers)
    ours = fail_and_fit_again(mistake, functools.partial(on_stages, workers))
    assert ours.steps == whole.steps == mistake.num_steps
    close: dict[str, Any] = {"rtol": RTOL, "atol": ATOL}
    torch.testing.assert_close(ours.failed, whole.failed, **close)
    torch.testing.assert_close(ours.state.weights, whole.state.weights, **close)
    torch.testing.assert_close(ours.state.optimizer["state"], whole.state.optimizer["state"], **close)
    assert ours.state.optimizer["groups"] == whole.state.optimizer["groups"]
    assert_whole(ours.module, weights_of(whole.module))
    assert processes_of(workers) == processes
    assert workers.alive
