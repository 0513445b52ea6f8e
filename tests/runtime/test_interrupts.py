"""Ctrl-C in a session that goes on, such as a notebook: the run ends soon, and the module is whole."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from tests.harness import repeatable
from tests.runtime import faults, fuses
from tests.runtime.faults import FaultyMlp, batches
from tests.runtime.observing import Witness, assert_whole, make_trainer, on_stages, promptly, weights_of
from tests.runtime.spare_workers import SpareWorkers, processes_of

pytestmark = pytest.mark.filterwarnings(r"ignore:fuse \(Fuse\) runs as one piece")


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Puts back what Lightning switches off for good after a first Ctrl-C."""
    handler = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, handler)


class CtrlC(Callback):
    """Interrupts this process some seconds after the third batch began.

    Args:
        after_s: The seconds, once for each interrupt.
    """

    def __init__(self, *after_s: float) -> None:
        self.after_s = after_s

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx == faults.MARKED_STEP:
            for after_s in self.after_s:
                threading.Timer(after_s, os.kill, (os.getpid(), signal.SIGINT)).start()


@pytest.mark.parametrize("after_s", [pytest.param((1.0,), id="once"), pytest.param((1.0, 1.2), id="twice")])
@pytest.mark.parametrize("num_stages", [2, 3])
def test_ctrl_c_while_a_worker_is_busy(after_s: tuple[float, ...], num_stages: int, spare_workers: SpareWorkers) -> None:
    workers = spare_workers.running(num_stages)
    processes = processes_of(workers)
    witness = Witness()
    with repeatable():
        whole = FaultyMlp(0, "forward")
        make_trainer(max_steps=faults.MARKED_STEP).fit(whole, batches(marked=False))
    with repeatable():
        module = FaultyMlp(0, "forward", fuses.sleep_a_minute)
        trainer = on_stages(workers, callbacks=[witness, CtrlC(*after_s)])
        with pytest.raises(SystemExit) as caught, promptly(witness):
            trainer.fit(module, batches(marked=True))
    assert caught.value.code == 1
    assert [type(exception) for exception in witness.exceptions] == [KeyboardInterrupt]
    assert not any(process.is_running() for process in processes)
    assert_whole(module, weights_of(whole))
