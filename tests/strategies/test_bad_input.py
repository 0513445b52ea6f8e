"""What can't be done is refused before training, with the numbers, the user's line and the remedy; nothing is left changed."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_mgpu import PipelineStrategy, Workers
from lightning_mgpu.errors import PartitionError, ShippingError
from lightning_mgpu.examples import CNN
from tests.harness import assert_same, repeatable, run_fit, run_on_one_device
from tests.strategies import refused
from tests.strategies.refusals import REFUSALS, Refusal
from tests.strategies.warm_workers import WarmWorkers, run_on_stages
from tests.zoo import data
from tests.zoo.case import Case

PLAIN = Case(refused.Plain, data.vectors)


def fit(module: LightningModule, *, devices: int, **options: Any) -> None:
    """Trains for one step on the CPU; options are the Trainer's."""
    trainer = Trainer(
        accelerator="cpu",
        devices=devices,
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(module, data.vectors())


@contextmanager
def left_unchanged(module: LightningModule) -> Iterator[None]:
    """Asserts that a block leaves a module whole, with the weights it had and nothing of ours on it."""
    before = {name: value.clone() for name, value in module.state_dict().items()}
    yield
    assert {type(parameter) for parameter in module.parameters()} == {nn.Parameter}
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert [name for name, child in module.named_modules() if "forward" in vars(child)] == []


def line_of(module: Any, text: str) -> str:
    """Finds the line of a module's forward that has a text in it, as ``file:number``."""
    lines, first = inspect.getsourcelines(module.forward)
    [number] = [first + i for i, line in enumerate(lines) if text in line]
    return f"{inspect.getsourcefile(module)}:{number} in forward"


# -- known from the arguments ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *[
            (
                {"num_microbatches": value},
                f'num_microbatches={value!r} is not possible; use a whole number of at least 1, or "auto"',
            )
            for value in (0, -1, 2.0, True, "4", None)
        ],
        (
            {"schedule": "2f2b"},
            (
                "schedule='2f2b' is not known; use one of 'gpipe', 'looped_bfs', '1f1b', 'interleaved_1f1b', "
                "'interleaved_zero_bubble', 'zbv', 'dualpipe_v'"
            ),
        ),
        ({"balance": "time"}, "balance='time' is not known; use one of 'flops', 'parameters'"),
        *[
            ({"self_check": value}, f'self_check={value!r} is not possible; use True, False or "auto"')
            for value in ("yes", None, 0, 1)
        ],
        (
            {"activation_checkpointing": "last"},
            "activation_checkpointing='last' is not possible; use True, False or \"all but last\"",
        ),
        (
            {"timeline": "trace.foo"},
            "timeline='trace.foo' is neither a picture (.png) nor a trace (.json); name one of these",
        ),
        ({"cuts": "fc2"}, "cuts='fc2' is one string; use a list of names, as in cuts=['fc2']"),
        ({"cuts": [3]}, 'cuts=[3] holds more than names; use names of modules, as in cuts=["fc1"]'),
    ],
)
def test_impossible_argument(options: dict[str, Any], message: str) -> None:
    with pytest.raises(PartitionError) as caught:
        PipelineStrategy(**options)
    assert str(caught.value) == message


@pytest.fixture
def _no_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails a test that gets as far as starting a worker."""

    def start(workers: Workers) -> None:
        raise AssertionError("a worker would have been started")

    monkeypatch.setattr(Workers, "start", start)


@pytest.mark.usefixtures("_no_workers")
@pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")
@pytest.mark.parametrize(
    ("module", "devices", "options", "trainer_options", "message"),
    [
        (CNN, 5, {}, {}, "cannot cut 4 layers of CNN into 5 stages; use at most 4 stages (devices=4)"),
        (refused.Plain, 2, {"cuts": ["fc"]}, {}, "cut 'fc' names no module; the nearest names are 'fc4', 'fc3', 'fc2'"),
        (
            refused.Plain,
            3,
            {"cuts": ["fc2"]},
            {},
            "1 cut would make 2 stages of 3 devices; name 2 cuts or use devices=2",
        ),
        (
            refused.Plain,
            2,
            {"cuts": ["fc2", "fc3"]},
            {},
            "2 cuts would make 3 stages of 2 devices; name 1 cut or use devices=3",
        ),
        (refused.Plain, 3, {"cuts": ["fc2", "fc2"]}, {}, "cut 'fc2' is named 2 times; name each cut once"),
        (refused.Plain, 2, {"module": "fc9"}, {}, "module='fc9' names no module; the nearest names are 'fc4', 'fc3', 'fc2'"),
        (refused.WithLbfgs, 2, {"module": "fc1"}, {}, "cannot cut 1 layer of Linear into 2 stages; use at most 1 stage"),
        (
            refused.Plain,
            2,
            {"workers": Workers(3)},
            {},
            "workers=3 devices do not fit a Trainer with devices=2; use Workers(devices=2)",
        ),
        (
            refused.Plain,
            2,
            {"workers": Workers(["cuda:0", "cuda:1"])},
            {},
            "workers on cuda:1, cuda:0 do not fit a Trainer whose devices are cpu, cpu; use Workers(devices=['cpu', 'cpu'])",
        ),
        (refused.Plain, 2, {}, {"num_nodes": 2}, "num_nodes=2 is not possible: a pipeline runs on one host; use num_nodes=1"),
        (
            refused.Plain,
            2,
            {},
            {"sync_batchnorm": True},
            "sync_batchnorm=True is not possible: batch norm normalises each microbatch by itself, and its running statistics",
        ),
    ],
)
def test_known_before_workers_start(
    module: type[LightningModule], devices: int, options: dict[str, Any], trainer_options: dict[str, Any], message: str
) -> None:
    made, strategy = module(), PipelineStrategy(**options)
    with left_unchanged(made), pytest.raises(PartitionError) as caught:
        fit(made, devices=devices, strategy=strategy, **trainer_options)
    assert str(caught.value).startswith(message)
    assert not strategy.workers.started


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_gpu_where_there_is_none() -> None:
    with pytest.raises(MisconfigurationException, match="No supported gpu backend found!"):
        Trainer(accelerator="gpu", devices=2, strategy="mgpu_pipeline")


@pytest.mark.gpu
def test_more_gpus_than_there_are() -> None:
    with pytest.raises(MisconfigurationException, match="You requested gpu"):
        Trainer(accelerator="gpu", devices=torch.cuda.device_count() + 1, strategy="mgpu_pipeline")


# -- known from the first call -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("refusal", [pytest.param(refusal, id=refusal.name) for refusal in REFUSALS])
def test_known_before_training_starts(refusal: Refusal, warm_workers: WarmWorkers) -> None:
    with repeatable():
        module = refusal.module()
        with warm_workers.lend(refusal.num_stages) as workers:
            strategy = PipelineStrategy(workers=workers, **refusal.strategy)
            with left_unchanged(module), pytest.raises(refusal.error) as caught:
                fit(module, devices=refusal.num_stages, strategy=strategy)
    text, position = str(caught.value), 0
    for part in refusal.says:
        assert part in text[position:], text
        position = text.index(part, position) + len(part)
    if refusal.line:
        assert line_of(type(module), refusal.line) in text
    assert_same(run_on_one_device(PLAIN), run_on_stages(PLAIN, 2, warm_workers))


@pytest.mark.parametrize(
    "make_held", [pytest.param(threading.Lock, id="lock"), pytest.param(lambda: (i for i in ()), id="generator")]
)
def test_a_part_that_cannot_be_pickled(make_held: Callable[[], Any]) -> None:
    module = refused.WithOnePiece(make_held)
    with Workers(2) as workers:
        strategy = PipelineStrategy(workers=workers, cuts=["fc2"])
        with (
            left_unchanged(module),
            pytest.warns(UserWarning, match=r"part \(ChecksNumbers\) runs as one piece on each microbatch by itself"),
            pytest.raises(ShippingError) as caught,
        ):
            fit(module, devices=2, strategy=strategy)
        assert "cannot send modules to its stage, since attribute 'held' of ChecksNumbers in 'part' can't be" in str(
            caught.value
        )
        strategy = PipelineStrategy(workers=workers, num_microbatches=4)
        assert_same(run_on_one_device(PLAIN), run_fit(PLAIN.module, PLAIN.data, strategy=strategy, devices=2))
