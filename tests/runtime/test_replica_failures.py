"""What is lost where there are replicas: nothing, as long as one copy lives; and the error says whose copy failed."""

from __future__ import annotations

from typing import Any

import pytest
from lightning.pytorch import LightningModule, Trainer
from typing_extensions import override

from lightning_mgpu import PipelineStrategy, Workers
from lightning_mgpu.errors import StageError
from tests.harness import repeatable
from tests.runtime import faults, fuses
from tests.runtime.faults import FaultyMlp, batches
from tests.runtime.observing import Witness, assert_whole, make_trainer, promptly, weights_of
from tests.runtime.spare_workers import SpareWorkers, processes_of
from tests.runtime.test_deaths import BY_KILL, Killer, faulty_mlp, weights_after

pytestmark = pytest.mark.filterwarnings(r"ignore:fuse \(Fuse\) runs as one piece")


class KillerAtRest(Killer):
    """Kills workers that have done all they were told, so that none is killed in the middle of an optimizer's step."""

    @override
    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        trainer.strategy.workers.settle()  # type: ignore[attr-defined]
        super().on_train_batch_start(trainer, *args)


def on_replicas(workers: Workers, **kwargs: Any) -> Trainer:
    """Makes a Trainer for two replicas of two stages."""
    strategy = PipelineStrategy(num_microbatches=2, cuts=["fc2"], data_parallel_size=2, workers=workers)
    return make_trainer(strategy, devices=4, **kwargs)


@pytest.mark.parametrize(
    ("killed", "place"),
    [
        pytest.param((0,), "stage 0 of 2 (cpu) of replica 0 of 2", id="of another replica"),
        pytest.param((2,), "stage 0 of 2 (cpu) of replica 1 of 2", id="of the lead's replica"),
        pytest.param((0, 1), "stage 0 of 2 (cpu) of replica 0 of 2", id="a whole replica"),
    ],
)
def test_nothing_is_lost_with_one_copy(killed: tuple[int, ...], place: str, spare_workers: SpareWorkers) -> None:
    workers, module, witness = spare_workers.running(4), faulty_mlp(break_=fuses.do_nothing), Witness()
    processes = processes_of(workers)
    trainer = on_replicas(workers, callbacks=[witness, KillerAtRest(killed)])
    with repeatable(), pytest.raises(StageError) as caught, promptly(witness):
        trainer.fit(module, batches(marked=True))
    assert str(caught.value) == f"{place} failed (forward): {BY_KILL}"
    assert not any(process.is_running() for process in processes)
    assert_whole(module, weights_after(faults.MARKED_STEP))


def test_what_is_lost_with_all_copies_is_named(spare_workers: SpareWorkers) -> None:
    workers, module = spare_workers.running(4), faulty_mlp(break_=fuses.do_nothing)
    with repeatable(), pytest.raises(StageError) as caught:
        on_replicas(workers, callbacks=[KillerAtRest((0, 2))]).fit(module, batches(marked=True))
    assert "the values of 2 tensors (fc1.weight, fc1.bias) went with it and are NaN now" in str(caught.value)
    assert_whole(module, weights_after(faults.MARKED_STEP), lost=frozenset({"fc1.weight", "fc1.bias"}))


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("layer", [0, 1])
def test_an_error_names_its_replica_and_the_microbatch_of_the_batch(
    layer: int, where: str, spare_workers: SpareWorkers
) -> None:
    with repeatable():
        module: LightningModule = FaultyMlp(layer, where)  # type: ignore[arg-type]
    workers = spare_workers.running(4)
    with repeatable(), pytest.raises(StageError) as caught:
        on_replicas(workers).fit(module, batches(marked=True))
    place = f"stage {layer} of 2 (cpu) of replica 1 of 2 failed in microbatch {faults.MARKED_MICROBATCH} ({where}): "
    assert str(caught.value).startswith(place + f"ValueError: {fuses.TEXT}")
    assert (caught.value.stage, caught.value.microbatch) == (layer, faults.MARKED_MICROBATCH)
    assert_whole(module, weights_after(faults.MARKED_STEP))

    with repeatable():
        again = faulty_mlp(break_=fuses.do_nothing)
        on_replicas(spare_workers.running(4), max_steps=2).fit(again, batches(marked=False))
    assert weights_of(again).keys() == weights_of(module).keys()
    assert_whole(again, weights_after(2))
