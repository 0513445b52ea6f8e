"""Trainers for small runs, and what has to be true after one failed."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from typing_extensions import override

from lightning_mgpu import PipelineStrategy, Workers
from tests.harness import ATOL, RTOL

LIMIT_S = 10.0


class Witness(Callback):
    """Writes down what happens in a run.

    Attributes:
        exceptions: The exceptions that Lightning's hook was told of.
        num_batches: The batches that were trained on to the end.
        last_start_s: When the last one began, on the monotonic clock.
    """

    def __init__(self) -> None:
        self.exceptions: list[BaseException] = []
        self.num_batches = 0
        self.last_start_s = time.monotonic()

    @override
    def on_train_batch_start(self, *_: Any) -> None:
        self.last_start_s = time.monotonic()

    @override
    def on_train_batch_end(self, *_: Any) -> None:
        self.num_batches += 1

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.exceptions.append(exception)


def make_trainer(strategy: str | Strategy = "auto", *, devices: int = 1, **kwargs: Any) -> Trainer:
    """Makes a quiet Trainer for one epoch on the CPU."""
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    return Trainer(accelerator="cpu", strategy=strategy, devices=devices, **{"max_epochs": 1, **quiet, **kwargs})


def on_stages(workers: Workers, **kwargs: Any) -> Trainer:
    """Makes a quiet Trainer for a pipeline of three-layer networks, cut behind its first layers."""
    cuts = ["fc2", "fc3"][: workers.num_processes - 1]
    strategy = PipelineStrategy(num_microbatches=4, cuts=cuts, workers=workers)
    return make_trainer(strategy, devices=workers.num_processes, **kwargs)


@contextmanager
def promptly(witness: Witness) -> Iterator[None]:
    """Fails unless the block ends in time after its last batch began, with whatever exception."""
    try:
        yield
    finally:
        took_s = time.monotonic() - witness.last_start_s
        assert took_s < LIMIT_S, f"the failure took {took_s:.1f} s to arrive"


def weights_of(module: nn.Module) -> dict[str, Tensor]:
    """Copies the parameters by name."""
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


def assert_whole(module: nn.Module, weights: Mapping[str, Tensor], *, lost: frozenset[str] = frozenset()) -> None:
    """Checks that a module is an ordinary one again, with these weights.

    Args:
        module: The module.
        weights: Its parameters by name, up to rounding.
        lost: The parameters that have to be NaN instead.
    """
    parameters = dict(module.named_parameters())
    assert parameters.keys() == weights.keys()
    for name, parameter in parameters.items():
        assert type(parameter) is nn.Parameter
        assert parameter.is_contiguous()
        assert parameter.requires_grad
        if name in lost:
            assert parameter.isnan().all(), name
        else:
            torch.testing.assert_close(
                parameter.detach(), weights[name], rtol=RTOL, atol=ATOL, msg=lambda text, name=name: f"{name}: {text}"
            )
    for child in module.modules():
        covered = {"forward", "state_dict", "load_state_dict", "zero_grad"} & vars(child).keys()
        assert not covered, f"{type(child).__name__} keeps {covered}"
    assert copy.deepcopy(module.state_dict()).keys() == module.state_dict().keys()
