"""One observation, made twice: on one device, and in a pipeline; and the comparison of the two."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias

import pytest
from lightning.pytorch import Trainer

from lightning_mgpu import PipelineStrategy
from tests.harness import NUM_SHOWN, REMARKS, difference, flatten, repeatable
from tests.strategies.warm_workers import WarmWorkers

MakeTrainer: TypeAlias = Callable[..., Trainer]
Observe: TypeAlias = Callable[[MakeTrainer], Any]

QUIET = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "log_every_n_steps": 1,
}
_OF_LIGHTNING = (
    r"You defined a `validation_step` but have no `val_dataloader`",
    r"Found \d+ module\(s\) in eval mode at the start of training",
)


def make_trainer(**kwargs: Any) -> Trainer:
    """Makes a Trainer on the CPU that is quiet where it is not told otherwise."""
    quiet = {} if kwargs.get("barebones") else QUIET
    return Trainer(**{"accelerator": "cpu", **quiet, **kwargs})


def assert_equal_trees(expected: Any, actual: Any, *, exact: bool = False) -> None:
    """Compares two nests of tensors and other values leaf by leaf.

    Args:
        expected: What one device gave.
        actual: What to check.
        exact: Whether every bit must match, instead of float32 rounding being allowed.

    Raises:
        AssertionError: With the first leaves that differ.
    """
    ours, theirs = dict(flatten(actual)), dict(flatten(expected))
    assert theirs, "nothing was observed"
    faults = []
    for name, value in theirs.items():
        found = _leaf_difference(value, ours[name], exact=exact) if name in ours else "is missing"
        if found is not None:
            faults.append(f"{name}: {found}")
    faults += [f"{name}: is unexpected" for name in ours if name not in theirs]
    assert not faults, f"{len(faults)} of {len(theirs)} observed values differ:\n" + "\n".join(faults[:NUM_SHOWN])


def _leaf_difference(expected: Any, actual: Any, *, exact: bool) -> str | None:
    if type(expected) is type(actual) is float and not exact:
        return None if actual == pytest.approx(expected, rel=1e-4, abs=1e-6, nan_ok=True) else f"{actual} is not {expected}"
    return difference(expected, actual, exact=exact)


class Layouts:
    """Makes observations on one device and on stages.

    Args:
        warm_workers: Where to get workers.
        replicas: Whether devices hold whole copies of the module instead of stages.
    """

    def __init__(self, warm_workers: WarmWorkers, *, replicas: bool = False) -> None:
        self._warm_workers = warm_workers
        self._replicas = replicas

    def one_device(self, observe: Observe) -> Any:
        """Makes an observation on one device."""
        with _quietly(), repeatable():
            return observe(partial(make_trainer, devices=1))

    @contextmanager
    def lent(self, num_stages: int = 2, **strategy: Any) -> Iterator[MakeTrainer]:
        """Lends what makes Trainers of a pipeline.

        Args:
            num_stages: The number of stages.
            **strategy: Arguments of the strategy; four microbatches unless it says otherwise.
        """
        with self._warm_workers.lend(num_stages) as workers, _quietly(), repeatable():
            copies = {"num_microbatches": 2, "data_parallel_size": num_stages}
            options = copies if self._replicas else {"num_microbatches": 4}

            def make(**kwargs: Any) -> Trainer:
                pipeline = PipelineStrategy(workers=workers, **{**options, **strategy})
                return make_trainer(strategy=pipeline, devices=num_stages, **kwargs)

            yield make

    def stages(self, observe: Observe, num_stages: int = 2, **strategy: Any) -> Any:
        """Makes an observation on stages."""
        with self.lent(num_stages, **strategy) as make:
            return observe(make)

    def same(self, observe: Observe, num_stages: int = 2, *, exact: bool = False, **strategy: Any) -> Any:
        """Makes an observation on one device and on stages, and checks that they are the same.

        Args:
            observe: Takes what makes a Trainer, and returns what it saw.
            num_stages: The number of stages.
            exact: Whether every bit must match.
            **strategy: Arguments of the strategy.

        Returns:
            What one device gave.
        """
        expected = self.one_device(observe)
        assert_equal_trees(expected, self.stages(observe, num_stages, **strategy), exact=exact)
        return expected


@contextmanager
def _quietly() -> Iterator[None]:
    """Silences what Lightning remarks about small tests; every other warning stays an error."""
    with warnings.catch_warnings():
        for remark in (*REMARKS, *_OF_LIGHTNING):
            warnings.filterwarnings("ignore", message=remark)
        yield


@pytest.fixture(scope="session", params=["stages", "replicas"])
def layouts_of_any_kind(request: pytest.FixtureRequest, warm_workers: WarmWorkers) -> Layouts:
    """Makes observations on one device, and on stages or on replicas."""
    return Layouts(warm_workers, replicas=request.param == "replicas")


@pytest.fixture(scope="session")
def layouts(warm_workers: WarmWorkers) -> Layouts:
    """Makes observations on one device and on stages."""
    return Layouts(warm_workers)
