"""A worker that dies without a word: what is lost is NaN and named, the rest is whole, and all can be used again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from typing_extensions import override

from lightning_mgpu import Workers
from lightning_mgpu.errors import StageError
from tests.harness import repeatable
from tests.runtime import faults, fuses
from tests.runtime.faults import FaultyMlp, batches
from tests.runtime.observing import Witness, assert_whole, make_trainer, on_stages, promptly, weights_of
from tests.runtime.spare_workers import SpareWorkers, kill, processes_of

# The fuse looks at numbers, so it can't be recorded and runs as one piece.
pytestmark = pytest.mark.filterwarnings(r"ignore:fuse \(Fuse\) runs as one piece")

BY_KILL = "its process was killed by SIGKILL (out of memory, perhaps)"
FIRST = ("fc1.weight", "fc1.bias")
MIDDLE = ("fc2.weight", "fc2.bias")
LOSSES = [
    pytest.param(2, (0,), FIRST, id="the only worker"),
    pytest.param(3, (0,), FIRST, id="stage 0 of 3"),
    pytest.param(3, (1,), MIDDLE, id="stage 1 of 3"),
    pytest.param(3, (0, 1), FIRST + MIDDLE, id="both workers"),
]


class Killer(Callback):
    """Kills workers, at once or after a while, when the third batch begins.

    Args:
        stages: The stages of the workers.
        after_s: Seconds to wait before the workers die; with 0 they die before they hear of the batch.
    """

    def __init__(self, stages: Sequence[int], *, after_s: float = 0.0) -> None:
        self.stages = stages
        self.after_s = after_s

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        pids = [trainer.strategy.workers.pids[stage] for stage in self.stages]  # type: ignore[attr-defined]
        if batch_idx == faults.MARKED_STEP:
            if self.after_s:
                threading.Timer(self.after_s, kill, (pids,)).start()
            else:
                kill(pids)


def faulty_mlp(layer: int = 0, break_: Callable[[], None] = fuses.raise_error) -> LightningModule:
    """Builds the network with the weights of seed 0."""
    with repeatable():
        return FaultyMlp(layer, "forward", break_)


def weights_after(num_steps: int) -> dict[str, Tensor]:
    """Trains on one device for so many steps."""
    with repeatable():
        module = faulty_mlp()
        make_trainer(max_steps=num_steps).fit(module, batches(marked=False))
    return weights_of(module)


def text(num_stages: int, stage: int, how: str, lost: Sequence[str]) -> str:
    named = ", ".join(lost[:3]) + (", ..." if len(lost) > 3 else "")
    return (
        f"stage {stage} of {num_stages} (cpu) failed (forward): {how}; "
        f"the values of {len(lost)} tensors ({named}) went with it and are NaN now: load a checkpoint before going on"
    )


def check_death(
    workers: Workers, module: LightningModule, callbacks: list[Callback], message: str, stage: int, lost: Sequence[str]
) -> None:
    """Lets a run end by a death, and checks what the user sees, finds and can do afterwards."""
    processes = processes_of(workers)
    witness = Witness()
    trainer = on_stages(workers, callbacks=[witness, *callbacks])
    with repeatable(), pytest.raises(StageError) as caught, promptly(witness):
        trainer.fit(module, batches(marked=True))
    error = caught.value
    assert str(error) == message
    assert (error.stage, error.microbatch) == (stage, None)
    assert error.__suppress_context__
    assert witness.exceptions == [error]
    assert witness.num_batches == faults.MARKED_STEP
    assert not any(process.is_running() for process in processes)
    assert_whole(module, weights_after(faults.MARKED_STEP), lost=frozenset(lost))


def check_fits_again(workers: Workers, module: LightningModule) -> None:
    """Loads what was lost, and checks that the module trains on as if nothing had been."""
    module.load_state_dict(faulty_mlp().state_dict())
    with repeatable():
        on_stages(workers, max_steps=2).fit(module, batches(marked=False))
    assert_whole(module, weights_after(2))


@pytest.mark.parametrize(("num_stages", "stages", "lost"), LOSSES)
def test_killed_while_idle(
    num_stages: int, stages: tuple[int, ...], lost: tuple[str, ...], spare_workers: SpareWorkers
) -> None:
    workers, module = spare_workers.running(num_stages), faulty_mlp(break_=fuses.do_nothing)
    message = text(num_stages, stages[0], BY_KILL, lost)
    check_death(workers, module, [Killer(stages)], message, stages[0], lost)
    spare_workers.running(num_stages)
    check_fits_again(workers, module)


@pytest.mark.parametrize(("num_stages", "stages", "lost"), LOSSES)
def test_killed_while_busy(
    num_stages: int, stages: tuple[int, ...], lost: tuple[str, ...], spare_workers: SpareWorkers
) -> None:
    workers, module = spare_workers.running(num_stages), faulty_mlp(stages[0], fuses.sleep_a_minute)
    message = text(num_stages, stages[0], BY_KILL, lost)
    check_death(workers, module, [Killer(stages, after_s=1.0)], message, stages[0], lost)


@pytest.mark.parametrize(("num_stages", "stages", "lost"), LOSSES[:3])
def test_ended_by_itself(num_stages: int, stages: tuple[int, ...], lost: tuple[str, ...], spare_workers: SpareWorkers) -> None:
    workers, module = spare_workers.running(num_stages), faulty_mlp(stages[0], fuses.exit_with_3)
    message = text(num_stages, stages[0], "its process ended with exit code 3", lost)
    check_death(workers, module, [], message, stages[0], lost)
