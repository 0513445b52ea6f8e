"""Trains a module under a strategy, writes down all that its user could observe, and compares two such records."""

from __future__ import annotations

import copy
import dataclasses
import functools
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from tests.zoo.case import Case
from tests.zoo.data import Loader

# Splitting a batch adds up the same float32 products in another order. A sum of n terms then differs by some n * 6e-8
# of its largest term; the loss, its gradient and three updates chain a few dozen such sums. A row left out, a wrong
# scale or a gradient counted twice shows in the first digits. Values that should be zero keep noise below 1e-6.
RTOL = 1e-4
ATOL = 1e-6

NUM_SHOWN = 8

# What Lightning remarks about small tests, about a step that chose to return nothing, and about its own use of torch.
REMARKS = (
    r"`isinstance\(treespec, LeafSpec\)` is deprecated",
    r"The '\w+_dataloader' does not have many workers",
    r"`training_step` returned `None`",
    r"\w+ \(\w+\) runs as one piece on each microbatch",  # ours, of what the zoo does on purpose
)


@dataclass
class RunRecord:
    """What a user could observe of one run.

    Attributes:
        steps: What each training step returned, detached.
        gradients: Before each optimizer step, the gradients by name; a parameter without one is absent.
        weights: The parameters by name after fit, tied ones under each of their names.
        buffers: The buffers by name after fit.
        optimizers: The state of each optimizer at the end of training, by parameter name, and its groups.
        metrics: ``callback_metrics`` at the end of each training epoch, and last after fit.
        validation: ``callback_metrics`` after a separate validation, if one was asked for.
        predictions: What ``trainer.predict`` returned, if it was asked for.
    """

    steps: list[dict[str, Tensor]] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    optimizers: list[dict[str, Any]] = field(default_factory=list)
    metrics: list[dict[str, Tensor]] = field(default_factory=list)
    validation: dict[str, Tensor] = field(default_factory=dict)
    predictions: list[Any] = field(default_factory=list)

    @property
    def losses(self) -> list[float]:
        """The training loss of each step that reported one."""
        return [step["loss"].item() for step in self.steps if "loss" in step]


class Recorder(Callback):
    """Fills a record while the Trainer runs."""

    def __init__(self, record: RunRecord) -> None:
        self.record = record

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        with whole_parameters(trainer.strategy):
            self.record.gradients.append(
                {
                    name: parameter.grad.detach().clone()
                    for name, parameter in pl_module.named_parameters(remove_duplicate=False)
                    if parameter.grad is not None
                }
            )

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        returned = outputs if isinstance(outputs, Mapping) else {}
        self.record.steps.append({name: value.detach().clone() for name, value in returned.items()})

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.record.metrics.append(dict(trainer.callback_metrics))

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.record.optimizers = [optimizer_by_name(trainer.strategy, pl_module, each) for each in trainer.optimizers]


def whole_parameters(strategy: Strategy) -> AbstractContextManager[Any]:
    """Makes parameters and their gradients readable for a while, wherever they live."""
    summon = getattr(strategy, "summon_parameters", None)
    return nullcontext() if summon is None else summon()


def optimizer_by_name(strategy: Strategy, module: LightningModule, optimizer: Optimizer) -> dict[str, Any]:
    """Reads an optimizer's state and gives its numbered parameters their names."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    held = [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]
    saved: dict[str, Any] = copy.deepcopy(dict(strategy.optimizer_state(optimizer)))
    numbers = [number for group in saved["param_groups"] for number in group.pop("params")]
    name_of = dict(zip(numbers, held, strict=True))
    state = {name_of[number]: entry for number, entry in saved["state"].items()}
    return {"state": state, "groups": saved["param_groups"]}


@contextmanager
def repeatable() -> Iterator[None]:
    """Runs the block from seed 0 on one thread; afterwards seeds, threads and environment are as they were."""
    num_threads = torch.get_num_threads()
    seed_variables = ("PL_GLOBAL_SEED", "PL_SEED_WORKERS")
    environment = {name: os.environ.get(name) for name in seed_variables}
    with isolate_rng():
        try:
            torch.set_num_threads(1)
            seed_everything(0, verbose=False)
            yield
        finally:
            torch.set_num_threads(num_threads)
            for name, value in environment.items():
                os.environ.pop(name, None)
                if value is not None:
                    os.environ[name] = value


def run_fit(
    make_module: Callable[[], LightningModule],
    make_data: Callable[[], Loader | LightningDataModule],
    *,
    strategy: str | Strategy = "auto",
    devices: int = 1,
    max_steps: int = 3,
    validate: bool = False,
    predict: bool = False,
    **trainer_kwargs: Any,
) -> RunRecord:
    """Trains a module from seed 0 on the CPU and records the run.

    Args:
        make_module: Builds the module, after seeding.
        make_data: Builds the loader or the data module, after the module.
        strategy: The strategy, by name or as an object.
        devices: The number of devices.
        max_steps: Optimizer steps to take.
        validate: Whether to validate after fitting.
        predict: Whether to predict after fitting.
        **trainer_kwargs: Further arguments of the Trainer.

    Returns:
        The record of the run.
    """
    record = RunRecord()
    callbacks = [*trainer_kwargs.pop("callbacks", []), Recorder(record)]
    with repeatable(), warnings.catch_warnings():
        for remark in REMARKS:
            warnings.filterwarnings("ignore", message=remark)
        module, data = make_module(), make_data()
        trainer = Trainer(
            accelerator="cpu",
            strategy=strategy,
            devices=devices,
            max_steps=max_steps,
            callbacks=callbacks,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            **trainer_kwargs,
        )
        trainer.fit(module, data)
        record.metrics.append(dict(trainer.callback_metrics))
        record.weights = {
            name: parameter.detach().clone() for name, parameter in module.named_parameters(remove_duplicate=False)
        }
        record.buffers = {name: buffer.clone() for name, buffer in module.named_buffers(remove_duplicate=False)}
        if validate:
            trainer.validate(module, data, verbose=False)
            record.validation = dict(trainer.callback_metrics)
        if predict:
            record.predictions = trainer.predict(module, data) or []
    return record


def flatten(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the leaves of nested containers with the expression that reaches each.

    Args:
        value: Tensors and other leaves in any nest of dataclasses, mappings, lists and tuples.
        path: The expression that reaches ``value``.

    Yields:
        Pairs such as ``(".gradients[0]['fc1.weight']", tensor)``.
    """
    if dataclasses.is_dataclass(value):
        for item in dataclasses.fields(value):
            yield from flatten(getattr(value, item.name), f"{path}.{item.name}")
    elif isinstance(value, Mapping):
        for key, entry in value.items():
            yield from flatten(entry, f"{path}[{key!r}]")
    elif isinstance(value, list | tuple):
        for index, entry in enumerate(value):
            yield from flatten(entry, f"{path}[{index}]")
    else:
        yield path, value


def difference(expected: Any, actual: Any, *, exact: bool) -> str | None:
    """Says in a few words how a leaf differs from what was expected.

    Args:
        expected: The leaf of one device.
        actual: The leaf to check.
        exact: Whether every bit must match.

    Returns:
        The difference, or None where there is none.
    """
    if not (isinstance(expected, Tensor) and isinstance(actual, Tensor)):
        return None if type(expected) is type(actual) and expected == actual else f"{actual!r} is not {expected!r}"
    if (expected.shape, expected.dtype) != (actual.shape, actual.dtype):
        return f"{actual.dtype} {tuple(actual.shape)} is not {expected.dtype} {tuple(expected.shape)}"
    if exact:
        gap = (expected.double() - actual.double()).abs()
        return None if torch.equal(expected, actual) else f"not bit-equal, off by up to {gap.max().item():.3g}"
    try:
        torch.testing.assert_close(actual, expected, rtol=RTOL, atol=ATOL)
    except AssertionError as error:
        return " ".join(str(error).split())
    return None


def assert_same(expected: RunRecord, actual: RunRecord, *, exact: bool = False) -> None:
    """Compares two runs value by value, by name.

    Args:
        expected: The run on one device.
        actual: The run to check.
        exact: Whether every bit must match, instead of float32 rounding being allowed.

    Raises:
        AssertionError: If a name stands in one run only, or its values differ; the first such names are listed, in
            the order of the run, so that the earliest stands first.
    """
    ours, theirs = dict(flatten(actual)), dict(flatten(expected))
    faults = []
    for name, value in theirs.items():
        found = difference(value, ours[name], exact=exact) if name in ours else "is missing"
        if found is not None:
            faults.append(f"{name}: {found}")
    faults += [f"{name}: is unexpected" for name in ours if name not in theirs]
    if faults:
        shown = [*faults[:NUM_SHOWN], *(["..."] if len(faults) > NUM_SHOWN else [])]
        raise AssertionError(f"{len(faults)} of {len(theirs)} recorded values differ:\n" + "\n".join(shown))


@functools.cache
def run_on_one_device(case: Case) -> RunRecord:
    """Trains a case on one device, once however often it is asked for."""
    return run_fit(case.module, case.data, validate=case.validate, predict=case.predict, **case.trainer())
