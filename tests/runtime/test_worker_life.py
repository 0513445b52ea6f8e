"""How long worker processes live, and who they work for."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from lightning_mgpu import PipelineStrategy
from lightning_mgpu.errors import StageError
from tests.harness import repeatable
from tests.runtime.faulty_leads import FailsBeforeCall, loader
from tests.runtime.observing import Witness, assert_whole, make_trainer, on_stages, promptly, weights_of
from tests.runtime.spare_workers import SpareWorkers, kill, processes_of
from tests.zoo import data
from tests.zoo.loops import EveryLoop
from tests.zoo.steps import AdamWMlp

ROOT = Path(__file__).parents[2]


def start(script: str, *args: str, cwd: Path) -> subprocess.Popen[str]:
    """Runs one of the scripts beside this file under another Python."""
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", str(ROOT / "tests/runtime/scripts" / script), *args],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_one_trainer_keeps_its_workers_from_call_to_call() -> None:
    with repeatable():
        module, splits = EveryLoop(), data.vector_splits()
        strategy = PipelineStrategy(num_microbatches=4)
        trainer = make_trainer(strategy, devices=2)
        pids = []
        for call in (trainer.validate, trainer.fit, trainer.predict, trainer.validate):
            call(module, splits)  # type: ignore[operator]
            pids.append(strategy.workers.pids)
            assert_whole(module, weights_of(module))
    assert pids == pids[:1] * 4
    [process] = processes_of(strategy.workers)
    del trainer, strategy, module, splits, call
    gc.collect()
    process.wait(5)


def test_workers_end_with_the_trainer_that_failed() -> None:
    strategy = PipelineStrategy()
    with pytest.raises(ValueError, match="the user's own mistake"):
        make_trainer(strategy, devices=2).fit(FailsBeforeCall(), loader())
    [process] = processes_of(strategy.workers)
    assert process.is_running()
    del strategy
    gc.collect()
    process.wait(5)


def test_trainers_one_after_the_other() -> None:
    with repeatable():
        weights, pids = [], set()
        for _ in range(2):
            torch.manual_seed(0)
            module = AdamWMlp()
            trainer = make_trainer(PipelineStrategy(num_microbatches=4), devices=2)
            trainer.fit(module, loader())
            weights.append(weights_of(module))
            pids.update(trainer.strategy.workers.pids)
            assert_whole(module, weights[0])
    assert len(pids) == 2
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_runs_at_the_same_time_do_not_meet(tmp_path: Path) -> None:
    runs = [start("short_run.py", str(tmp_path), *names, cwd=tmp_path) for names in (("a", "b"), ("b", "a"))]
    outputs = [run.communicate(timeout=100) for run in runs]
    assert [run.returncode for run in runs] == [0, 0], outputs
    first, second = (json.loads(output) for output, _ in outputs)
    assert len(first["losses"]) == 6
    assert first["losses"] == second["losses"]
    assert not set(first["pids"]) & set(second["pids"])
    assert not any(psutil.pid_exists(pid) for pid in first["pids"] + second["pids"])


def test_an_exception_of_the_scripts_own_class(tmp_path: Path) -> None:
    run = start("own_error.py", cwd=tmp_path)
    output, errors = run.communicate(timeout=100)
    text = "stage 0 of 2 (cpu) failed in microbatch 2 (forward): MarkedError: 1 rows are marked"
    assert output == f"1 | {text} | 0 | 2\n", errors
    assert run.returncode == 1
    assert errors.rstrip().endswith(f"lightning_mgpu.errors.StageError: {text}")
    assert errors.count("raise MarkedError(num_marked)") == 1


def test_a_worker_killed_between_calls_is_replaced(spare_workers: SpareWorkers) -> None:
    workers = spare_workers.running(2)
    with repeatable():
        module, trainer = AdamWMlp(), on_stages(workers)
        trainer.fit(module, loader())
        kill(workers.pids)
        weights = weights_of(module)
        spare_workers.running(2)
        on_stages(workers).fit(module, loader())
    assert any(not torch.equal(weights[name], value) for name, value in weights_of(module).items())


class KillsAtTheEnd(Callback):
    """Kills the worker when training is over, before the module is whole."""

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        kill(trainer.strategy.workers.pids)  # type: ignore[attr-defined]


def test_a_worker_killed_before_the_module_is_whole(spare_workers: SpareWorkers) -> None:
    workers = spare_workers.running(2)
    module, witness = AdamWMlp(), Witness()
    with pytest.raises(StageError) as caught, promptly(witness):
        on_stages(workers, callbacks=[witness, KillsAtTheEnd()]).fit(module, loader())
    assert str(caught.value) == (
        "stage 0 of 2 (cpu) failed (gathering): its process was killed by SIGKILL (out of memory, perhaps); the values of "
        "2 tensors (fc1.weight, fc1.bias) went with it and are NaN now: load a checkpoint before going on"
    )
    assert_whole(module, weights_of(module), lost=frozenset({"fc1.weight", "fc1.bias"}))
