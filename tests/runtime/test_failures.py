"""An exception anywhere in a run: one exception reaches the user, nothing is left, and all can be used again."""

from __future__ import annotations

import functools
import traceback
from pathlib import Path
from typing import Literal

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_mgpu import PipelineStrategy
from lightning_mgpu.errors import StageError
from lightning_mgpu.runtime.failure import RemoteTraceback
from tests.harness import ATOL, RTOL, repeatable
from tests.runtime import faults, fuses
from tests.runtime.faults import FaultyMlp, Words, batches, sentences_with_unknown_word
from tests.runtime.observing import Witness, assert_whole, make_trainer, on_stages, promptly, weights_of
from tests.runtime.spare_workers import SpareWorkers, processes_of

# The fuse looks at numbers, so it can't be recorded and runs as one piece.
pytestmark = pytest.mark.filterwarnings(r"ignore:fuse \(Fuse\) runs as one piece")

Pass = Literal["forward", "backward"]

STAGES = [(2, 0), (2, 1), (3, 0), (3, 1), (3, 2)]
LAYER_OF = {(2, 0): 0, (2, 1): 2, (3, 0): 0, (3, 1): 1, (3, 2): 2}


@functools.cache
def on_one_device() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Lets one device fail in the same step, and fit again; returns the weights after each."""
    with repeatable():
        module, trainer = FaultyMlp(0, "forward"), make_trainer()
        with pytest.raises(ValueError, match=fuses.TEXT):
            trainer.fit(module, batches(marked=True))
        after_failure = weights_of(module)
        trainer.fit(module, batches(marked=False))
        return after_failure, weights_of(module)


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize(("num_stages", "stage"), STAGES)
def test_an_exception_in_a_stage(
    num_stages: int, stage: int, where: Pass, spare_workers: SpareWorkers, capfd: pytest.CaptureFixture[str]
) -> None:
    workers = spare_workers.running(num_stages)
    processes = processes_of(workers)
    after_failure, after_second_fit = on_one_device()
    witness = Witness()
    with repeatable():
        module, trainer = FaultyMlp(LAYER_OF[num_stages, stage], where), on_stages(workers, callbacks=[witness])
        with pytest.raises(StageError) as caught, promptly(witness):
            trainer.fit(module, batches(marked=True))

        error = caught.value
        assert str(error) == f"stage {stage} of {num_stages} (cpu) failed in microbatch 2 ({where}): ValueError: {fuses.TEXT}"
        assert (error.stage, error.microbatch) == (stage, faults.MARKED_MICROBATCH)
        assert witness.exceptions == [error]
        assert witness.num_batches == faults.MARKED_STEP
        cause = error.__cause__
        assert type(cause) is ValueError
        assert str(cause) == fuses.TEXT
        users_line = fuses.line_of("raise ValueError(TEXT)")
        if stage == num_stages - 1:
            assert users_line in "".join(traceback.format_tb(cause.__traceback__))
        else:
            assert isinstance(cause.__cause__, RemoteTraceback)
            assert users_line in str(cause.__cause__)
        assert "Traceback" not in capfd.readouterr().err
        assert not any(process.is_running() for process in processes)
        assert_whole(module, after_failure)

        spare_workers.running(num_stages)
        trainer.fit(module, batches(marked=False))
        assert_whole(module, after_second_fit)
        on_stages(workers).fit(module, batches(marked=False))


def test_the_whole_story_is_told(spare_workers: SpareWorkers) -> None:
    """What Python prints of the exception: the user's line, the stage that ran it, and the user's own call."""
    workers = spare_workers.running(2)
    with pytest.raises(StageError) as caught:
        on_stages(workers).fit(FaultyMlp(0, "forward"), batches(marked=True))
    story = "".join(traceback.format_exception(caught.value))
    remote, line, summary = (
        story.index(fuses.line_of("raise ValueError(TEXT)")),
        story.index("raised by fuse ("),
        story.index("StageError: stage 0 of 2 (cpu) failed in microbatch 2 (forward): ValueError: this row is marked"),
    )
    assert remote < line < summary
    assert "faults.py:" in story[line : story.index("\n", line)]
    assert "CommunicationError" not in story
    assert "During handling" not in story


@pytest.mark.parametrize(("num_stages", "stage"), [(2, 0), (3, 1)])
def test_an_exception_that_cannot_be_pickled(num_stages: int, stage: int, spare_workers: SpareWorkers) -> None:
    workers = spare_workers.running(num_stages)
    module = FaultyMlp(LAYER_OF[num_stages, stage], "forward", fuses.raise_unpicklable)
    witness = Witness()
    with pytest.raises(StageError) as caught, promptly(witness):
        on_stages(workers, callbacks=[witness]).fit(module, batches(marked=True))
    assert str(caught.value) == (
        f"stage {stage} of {num_stages} (cpu) failed in microbatch 2 (forward): LockedError: {fuses.TEXT}"
    )
    cause = caught.value.__cause__
    assert cause is not None
    assert str(cause) == f"LockedError: {fuses.TEXT}"
    assert fuses.line_of("raise LockedError(TEXT)") in str(cause.__cause__)


def test_a_failure_in_a_call_of_torchs_names_the_users_line(spare_workers: SpareWorkers) -> None:
    """The worker replays calls without the user's Python around them, so the recording has to know their lines."""
    workers = spare_workers.running(2)
    strategy = PipelineStrategy(num_microbatches=4, cuts=["fc2"], workers=workers)
    with pytest.raises(StageError) as caught:
        make_trainer(strategy, devices=2).fit(Words(), sentences_with_unknown_word())
    assert str(caught.value) == ("stage 0 of 2 (cpu) failed in microbatch 2 (forward): IndexError: index out of range in self")
    lines = Path(faults.__file__).read_text().splitlines()
    [number] = [number for number, line in enumerate(lines, start=1) if "F.embedding(" in line]
    story = "".join(traceback.format_exception(caught.value))
    assert f"raised by embedding ({faults.__file__}:{number} in forward)" in story


class SavesOnException(Callback):
    """Saves a checkpoint when the run fails, as Lightning's own callbacks do on demand."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        trainer.save_checkpoint(self.path)


def test_a_checkpoint_on_exception_has_the_last_good_values_when_a_stage_fails(
    spare_workers: SpareWorkers, tmp_path: Path
) -> None:
    workers = spare_workers.running(2)
    for number, make in enumerate((make_trainer, functools.partial(on_stages, workers))):
        with repeatable():
            module = FaultyMlp(0, "backward")
            trainer = make(callbacks=[SavesOnException(tmp_path / f"{number}.ckpt")])
            with pytest.raises((ValueError, StageError)):
                trainer.fit(module, batches(marked=True))
    one, cut = (torch.load(tmp_path / f"{number}.ckpt", weights_only=True) for number in range(2))
    assert one["global_step"] == cut["global_step"] == faults.MARKED_STEP
    for part in ("state_dict", "optimizer_states", "loops"):
        torch.testing.assert_close(cut[part], one[part], rtol=RTOL, atol=ATOL)


def test_an_exception_of_the_systems_in_the_leads_stage(spare_workers: SpareWorkers) -> None:
    """An ``OSError`` of the user's own is no sign that a worker is gone."""
    workers = spare_workers.running(2)
    with pytest.raises(StageError) as caught:
        on_stages(workers).fit(FaultyMlp(2, "forward", fuses.raise_os_error), batches(marked=True))
    assert str(caught.value) == (f"stage 1 of 2 (cpu) failed in microbatch 2 (forward): FileNotFoundError: {fuses.TEXT}")
    assert type(caught.value.__cause__) is FileNotFoundError


class BadlyOptimized(FaultyMlp):
    """Has an optimizer that breaks in its third step, on the stage that holds one layer."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__(0, "forward")
        self.shape = shape

    @override
    def configure_optimizers(self) -> Optimizer:
        return fuses.FaultySgd(self.parameters(), self.shape)


@pytest.mark.parametrize(("stage", "shape"), [(0, (16, 8)), (1, (4, 16))])
def test_an_exception_in_an_optimizers_step(stage: int, shape: tuple[int, ...], spare_workers: SpareWorkers) -> None:
    workers = spare_workers.running(2)
    module, witness = BadlyOptimized(shape), Witness()
    with pytest.raises((StageError, ValueError)) as caught, promptly(witness):
        on_stages(workers, callbacks=[witness]).fit(module, batches(marked=False))
    assert str(caught.value) == (
        fuses.TEXT
        if stage == 1
        else f"stage 0 of 2 (cpu) failed (optimizer step): ValueError: {fuses.TEXT}; other stages may have made the step, so "
        "the weights of the stages may be one step apart: load a checkpoint before going on"
    )
    assert witness.exceptions == [caught.value]
    assert_whole(module, weights_of(module))
    assert all(parameter.isfinite().all() for parameter in module.parameters())
    on_stages(spare_workers.running(2)).fit(FaultyMlp(0, "forward"), batches(marked=False))
