"""A stage that runs out of memory: one error with a remedy, a last checkpoint, everything whole, and all goes on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lightning_mgpu.errors import StageError
from tests.harness import repeatable
from tests.runtime import faults, fuses
from tests.runtime.faults import FaultyMlp, batches
from tests.runtime.observing import Witness, assert_whole, make_trainer, on_stages, promptly, weights_of
from tests.runtime.spare_workers import SpareWorkers, processes_of
from tests.runtime.test_deaths import faulty_mlp, weights_after
from tests.runtime.test_failures import SavesOnException

pytestmark = [
    pytest.mark.filterwarnings(r"ignore:fuse \(Fuse\) runs as one piece"),
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended"),
]


@pytest.mark.parametrize("layer", [pytest.param(0, id="a worker"), pytest.param(1, id="the lead")])
def test_out_of_memory(layer: int, spare_workers: SpareWorkers, tmp_path: Path) -> None:
    with repeatable():
        module = FaultyMlp(layer, "forward", fuses.need_too_much_memory)
    workers, witness = spare_workers.running(2), Witness()
    processes = processes_of(workers)
    last = tmp_path / "last.ckpt"
    with repeatable(), pytest.raises(StageError) as caught, promptly(witness):
        on_stages(workers, callbacks=[witness, SavesOnException(last)]).fit(module, batches(marked=True))
    text, microbatch = str(caught.value), faults.MARKED_MICROBATCH
    assert text.startswith(f"stage {layer} of 2 (cpu) failed in microbatch {microbatch} (forward): RuntimeError: ")
    assert "can't allocate memory" in text
    assert "to need less memory use activation_checkpointing=True" in text
    assert not any(process.is_running() for process in processes)
    assert_whole(module, weights_after(faults.MARKED_STEP))

    saved = torch.load(last, weights_only=True)
    assert saved["global_step"] == faults.MARKED_STEP
    cut, whole = (faulty_mlp(break_=fuses.do_nothing) for _ in range(2))
    for again, trainer in ((cut, on_stages(spare_workers.running(2))), (whole, make_trainer())):
        with repeatable():
            trainer.fit(again, batches(marked=False), ckpt_path=last)
        assert trainer.global_step == faults.NUM_BATCHES
    assert_whole(cut, weights_of(whole))
