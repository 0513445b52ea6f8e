"""Runs that end early: an interrupt, an exception anywhere, a stop. The module is whole, and the process goes on."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from torch import Tensor, nn
from typing_extensions import override

from lightning_mgpu.errors import PlacementError
from tests.parity.layouts import Layouts, MakeTrainer
from tests.parity.measured import Measured, left, loader

TEXT = "the user's own mistake"
pytestmark = pytest.mark.filterwarnings("ignore:You have overridden `on_after_batch_transfer` in `LightningModule` but")


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    """Puts back what Lightning switches off for good after a Ctrl-C."""
    handler = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, handler)


class Raises(Callback):
    """Raises in one hook, after the first batch has been trained on, and keeps what Lightning tells it of that.

    Args:
        hook: The name of the hook.
        error: What to raise.
    """

    def __init__(self, hook: str, error: BaseException) -> None:
        self.told: list[str] = []
        self.raised = False

        def fail(trainer: Trainer, *_: Any, **__: Any) -> None:
            if not self.raised and (trainer.global_step > 0 or hook in EARLY):
                self.raised = True
                raise error

        setattr(self, hook, fail)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.told.append(f"{type(exception).__name__} {trainer.state.status.value}")


EARLY = {"setup", "on_fit_start", "on_sanity_check_start", "on_train_start", "on_validation_batch_end"}
HOOKS = [
    "setup", "on_fit_start", "on_sanity_check_start", "on_validation_batch_end", "on_train_start", "on_train_batch_start",
    "on_before_backward", "on_after_backward", "on_before_optimizer_step", "on_train_batch_end", "on_train_epoch_end",
    "on_train_end", "on_fit_end", "teardown",
]  # fmt: skip


def fail_and_go_on(make: MakeTrainer, callback: Any, expected: type[BaseException], module: Measured, data: Any) -> Any:
    """Fits until something is raised, and goes on with the module in another Trainer."""
    first = make(max_epochs=2, callbacks=[callback])
    with pytest.raises(expected) as caught:
        first.fit(module, data)
    code = caught.value.code if isinstance(caught.value, SystemExit) else str(caught.value)
    assert all(type(parameter) is nn.Parameter for parameter in module.parameters())
    assert not {"forward", "state_dict", "log", "zero_grad"} & vars(module).keys()
    broken = left(module, first)
    module.noted.clear()
    module.train()
    second = make(max_epochs=1)
    second.fit(module, loader(), loader(20))
    return code, callback.told, broken, left(module, second)


class Both(LightningDataModule):
    """Serves rows to train and validate on; reading may fail.

    Args:
        fails: Whether the second batch can't be read.
        num_workers: Processes that read.
    """

    def __init__(self, *, fails: bool = False, num_workers: int = 0) -> None:
        super().__init__()
        self.fails = fails
        self.num_workers = num_workers

    def train_dataloader(self) -> Any:
        return loader(num_workers=self.num_workers, collate_fn=Fragile(fails=self.fails))

    def val_dataloader(self) -> Any:
        return loader(20)


class Fragile:
    """Puts rows together, and fails on the second batch."""

    def __init__(self, *, fails: bool) -> None:
        self.fails = fails
        self.calls = 0

    def __call__(self, rows: list[Any]) -> Any:
        self.calls += 1
        if self.fails and self.calls == 2:
            raise ValueError(TEXT)
        return torch.utils.data.default_collate(rows)


@pytest.mark.parametrize("hook", HOOKS)
def test_exception_in_a_callback(hook: str, layouts: Layouts) -> None:
    def observe(make: MakeTrainer) -> Any:
        return fail_and_go_on(make, Raises(hook, ValueError(TEXT)), ValueError, Measured(), Both())

    text, told, _, _ = layouts.same(observe)
    assert text == TEXT
    assert told == ["ValueError interrupted"]


@pytest.mark.parametrize("hook", ["on_sanity_check_start", "on_train_batch_start", "on_after_backward", "on_train_batch_end"])
@pytest.mark.parametrize("num_stages", [2, 3])
def test_ctrl_c_in_a_hook(hook: str, num_stages: int, layouts: Layouts) -> None:
    def observe(make: MakeTrainer) -> Any:
        return fail_and_go_on(make, Raises(hook, KeyboardInterrupt()), SystemExit, Measured(), Both())

    code, told, _, _ = layouts.same(observe, num_stages)
    assert code == 1
    assert told == ["KeyboardInterrupt interrupted"]


class StopsItself(Measured):
    """Raises in one of its own methods, in the second step.

    Args:
        where: The name of the method.
    """

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def fail(self, where: str) -> None:
        """Raises once, in the method it was told."""
        if where == self.where and self.global_step == 1:
            self.where = ""
            raise ValueError(TEXT)

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        self.fail("before the call")
        loss = super().training_step(batch, batch_idx)
        self.fail("after the call")
        return loss

    @override
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        self.fail("before the backward")
        super().backward(loss, *args, **kwargs)
        self.fail("after the backward")

    @override
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.fail("transfer")
        return batch


@pytest.mark.parametrize(
    "where", ["transfer", "before the call", "after the call", "before the backward", "after the backward"]
)
def test_exception_in_the_module(where: str, layouts: Layouts) -> None:
    def observe(make: MakeTrainer) -> Any:
        return fail_and_go_on(make, Raises("setup_of_nothing", ValueError()), ValueError, StopsItself(where), Both())

    assert layouts.same(observe)[0] == TEXT


def test_exception_in_a_loader(layouts: Layouts) -> None:
    def observe(make: MakeTrainer) -> Any:
        return fail_and_go_on(make, Raises("setup_of_nothing", ValueError()), ValueError, Measured(), Both(fails=True))

    assert layouts.same(observe)[0] == TEXT


def test_exception_in_an_evaluation(layouts: Layouts) -> None:
    class Breaks(Callback):
        def on_predict_batch_end(self, *_: Any) -> None:
            raise ValueError(TEXT)

    def observe(make: MakeTrainer) -> Any:
        module = Measured()
        with pytest.raises(ValueError, match=TEXT):
            make(callbacks=[Breaks()]).predict(module, loader())
        return make().predict(module, loader()), left(module, make())

    layouts.same(observe)


def test_a_backward_after_the_end_says_so(layouts: Layouts) -> None:
    kept: list[Tensor] = []

    class Keeps(Measured):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            kept.append(self(batch[0]).sum())

    with layouts.lent() as make:
        make(max_epochs=1).fit(Keeps(), loader())
        with pytest.raises(PlacementError, match="comes after the end of the Trainer call it was made in"):
            kept[-1].backward()
