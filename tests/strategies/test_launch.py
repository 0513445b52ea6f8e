"""However a program is started, it runs once, and trains in stages to the numbers of one device."""

from __future__ import annotations

import csv
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import nbformat
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from nbclient import NotebookClient
from omegaconf import OmegaConf
from torch.utils.data import RandomSampler
from typing_extensions import override

from lightning_mgpu import PipelineStrategy, Workers
from tests.harness import RunRecord, assert_same, run_fit, run_on_one_device
from tests.strategies.refused import Plain
from tests.strategies.warm_workers import WarmWorkers
from tests.zoo import data
from tests.zoo.case import Case

ROOT = Path(__file__).parents[2]
PROGRAM = (Path(__file__).parent / "program.py").read_text()
DEFINITIONS = PROGRAM.removesuffix("\nmain()\n")
RUN_ONCE = '{"one_device": '
PLAIN = Case(Plain, data.vectors)


def environment(**variables: str) -> dict[str, str]:
    """The variables of this process without what says how many threads to use, with the package on the path."""
    inherited = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    return {**inherited, "PYTHONPATH": str(ROOT), **variables}


def run(*command: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs Python to the end, and without a traceback."""
    ended = subprocess.run(
        [sys.executable, *command],
        cwd=cwd,
        env=environment(**variables),
        check=False,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "Traceback" not in ended.stderr
    return ended


def said_by(ended: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """Checks what the program printed, and that it did so once: workers print on standard error."""
    [line] = ended.stdout.splitlines()
    assert RUN_ONCE not in ended.stderr
    said: dict[str, Any] = json.loads(line)
    assert said["two_stages"] == pytest.approx(said["one_device"], rel=1e-5)
    assert said["elsewhere"]
    return said


# -- scripts, strings, packages ----------------------------------------------------------------------------------------


def test_a_script_without_a_guard(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(PROGRAM)
    said = said_by(run("script.py", cwd=tmp_path))
    assert not said["worker_has_lightning"]
    assert said["worker_threads"] == max(1, len(os.sched_getaffinity(0)) // 2)
    before, during, after = said["lead_threads"]
    assert during == min(before, said["worker_threads"])
    assert after == before


def test_a_script_with_a_guard(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(f"{DEFINITIONS}\nif __name__ == '__main__':\n    main()\n")
    num_cores = len(os.sched_getaffinity(0))
    said = said_by(run("script.py", cwd=tmp_path, OMP_NUM_THREADS=str(num_cores)))
    assert not said["worker_has_lightning"]
    assert said["worker_threads"] == num_cores
    assert said["lead_threads"] == [num_cores] * 3


def test_a_string(tmp_path: Path) -> None:
    assert not said_by(run("-c", PROGRAM, cwd=tmp_path))["worker_has_lightning"]


def test_a_package(tmp_path: Path) -> None:
    package = tmp_path / "own_package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "nets.py").write_text(DEFINITIONS)
    (package / "__main__.py").write_text("from own_package.nets import main\n\nmain()\n")
    said_by(run("-m", "own_package", cwd=tmp_path))


def test_a_script_in_another_folder_with_a_module_beside_it(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    (there / "nets.py").write_text(DEFINITIONS)
    (there / "script.py").write_text("from nets import main\n\nmain()\n")
    said_by(run("../there/script.py", cwd=here))
    assert list(here.iterdir()) == []


# -- a notebook --------------------------------------------------------------------------------------------------------


def test_a_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment(JUPYTER_PLATFORM_DIRS="1").items():  # the folders to come, without a warning about them
        monkeypatch.setenv(name, value)
    notebook = nbformat.v4.new_notebook()
    failing = nbformat.v4.new_code_cell("train_in_stages(spoiled=True)", metadata={"tags": ["raises-exception"]})
    cells = [DEFINITIONS, "main()", DEFINITIONS, "main()", failing, "main()"]
    notebook.cells = [nbformat.v4.new_code_cell(cell) if isinstance(cell, str) else cell for cell in cells]
    NotebookClient(notebook, timeout=100, resources={"metadata": {"path": str(tmp_path)}}).execute()

    printed = ["".join(output["text"] for output in cell.outputs if output.get("name") == "stdout") for cell in notebook.cells]
    [first, second, third] = [json.loads(text) for text in printed if text]
    for said in (first, second, third):
        assert said["two_stages"] == pytest.approx(said["one_device"], rel=1e-5)
        assert not said["worker_has_lightning"]
    assert first["two_stages"] == second["two_stages"] == third["two_stages"]

    outputs = [output for cell in notebook.cells for output in cell.outputs]
    [error] = [output for output in outputs if output.output_type == "error"]
    assert error in notebook.cells[4].outputs
    assert error.ename == "StageError"
    assert error.evalue == "stage 0 of 2 (cpu) failed in microbatch 0 (forward): ValueError: the gate got no number"
    shown = re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(error.traceback))
    assert re.search(r'RemoteTraceback: *\n(.*\n)* +File ".*", line \d+, in forward\n', shown), shown
    streams = "".join(output["text"] for output in outputs if output.output_type == "stream")
    assert "Traceback" not in streams
    assert "the gate got no number" not in streams


# -- Hydra -------------------------------------------------------------------------------------------------------------


def train_losses(folder: Path) -> list[float]:
    """Reads what the only run in a folder logged."""
    [path] = folder.glob("lightning_logs/*/metrics.csv")
    with path.open() as file:
        return [float(row["train_loss"]) for row in csv.DictReader(file) if row.get("train_loss")]


EXPERIMENTS = ("two_layer_linear", "two_layer_linear_pipeline", "two_layer_linear")
SHORT = ("trainer.max_epochs=2", "+trainer.enable_progress_bar=false")


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which a sweep over one device, two stages and one device ran."""
    folder = tmp_path_factory.mktemp("sweep")
    experiments = f"experiment={','.join(EXPERIMENTS)}"
    run("-m", "lightning_mgpu.app.train", "--multirun", experiments, *SHORT, "hydra.sweep.dir=jobs", cwd=folder)
    return folder


def test_a_hydra_sweep_runs_each_job_once_in_its_folder(sweep: Path) -> None:
    jobs = [sweep / "jobs" / str(number) for number in range(3)]
    configs = [OmegaConf.load(job / "config_resolved.yaml") for job in jobs]
    assert [config.strategy._target_ for config in configs] == [
        "lightning_mgpu.app.single.single_device",
        "lightning_mgpu.PipelineStrategy",
        "lightning_mgpu.app.single.single_device",
    ]
    losses = [train_losses(job) for job in jobs]
    assert len(losses[0]) == 4  # two epochs of two batches
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert losses[2] == losses[0]
    assert [path.name for path in sweep.iterdir()] == ["jobs"]
    assert sorted(path.name for path in (sweep / "jobs").iterdir()) == ["0", "1", "2", "multirun.yaml"]


def test_a_hydra_job(sweep: Path, tmp_path: Path) -> None:
    options = ("experiment=two_layer_linear", "strategy=pipeline", "trainer.devices=2", "hydra.run.dir=job")
    run("-m", "lightning_mgpu.app.train", *options, *SHORT, cwd=tmp_path)
    assert train_losses(tmp_path / "job") == train_losses(sweep / "jobs" / "1")
    assert [path.name for path in tmp_path.iterdir()] == ["job"]


# -- within this process -----------------------------------------------------------------------------------------------


def fit_plain(workers: Workers, **options: Any) -> RunRecord:
    """Trains the plainest module in two stages."""
    strategy = PipelineStrategy(workers=workers, num_microbatches=4)
    return run_fit(PLAIN.module, PLAIN.data, strategy=strategy, devices=2, **options)


def test_workers_outlive_the_thread_that_started_them() -> None:
    """Linux can end a process with the thread that started it, and once did, in the middle of the next training."""
    with closing(Workers(2)) as workers:
        with ThreadPoolExecutor(1) as pool:
            from_a_thread = pool.submit(fit_plain, workers).result()
        started = workers.pids
        assert_same(run_on_one_device(PLAIN), from_a_thread)
        assert_same(from_a_thread, fit_plain(workers), exact=True)
        assert workers.pids == started


@pytest.mark.parametrize("devices", [1, "1", "auto"])
@pytest.mark.parametrize("strategy", ["mgpu_pipeline", "MGPU_PIPELINE"])
def test_one_stage_needs_no_workers(devices: int | str, strategy: str) -> None:
    watch = Watch()
    ours = run_fit(PLAIN.module, PLAIN.data, strategy=strategy, devices=devices, callbacks=[watch])  # type: ignore[arg-type]
    assert isinstance(watch.strategy, PipelineStrategy)
    assert (watch.strategy.num_stages, watch.strategy.workers.pids) == (1, [])
    assert_same(run_on_one_device(PLAIN), ours)


class Watch(Callback):
    """Notes what surrounds the training, as it is in its middle."""

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        self.strategy = trainer.strategy
        self.world_size = trainer.world_size
        self.sampler = trainer.train_dataloader.sampler
        self.process_group = dist.is_initialized()
        self.environment = dict(os.environ)
        self.num_threads = torch.get_num_threads()


def test_to_lightning_it_is_one_device(warm_workers: WarmWorkers) -> None:
    before, watch = dict(os.environ), Watch()
    with warm_workers.lend(2) as workers:
        fit_plain(workers, callbacks=[watch])
    assert watch.world_size == 1
    assert type(watch.sampler) is RandomSampler
    assert not watch.process_group
    of_the_seed = {"PL_GLOBAL_SEED": "0", "PL_SEED_WORKERS": "0"}  # which the harness sets
    assert watch.environment == {**before, **of_the_seed}


@pytest.fixture
def three_threads() -> Iterator[None]:
    """Gives this process three threads, as a machine with more cores would."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(num_threads)


@pytest.mark.usefixtures("three_threads")
@pytest.mark.parametrize(
    ("omp_num_threads", "num_cores", "expected"),
    [
        pytest.param(None, 4, 2, id="its share of the cores"),
        pytest.param(None, 1, 1, id="at least one"),
        pytest.param(None, 16, 3, id="no more than it had"),
        pytest.param("3", 4, 3, id="what the user says"),
    ],
)
def test_threads_of_the_lead(
    omp_num_threads: str | None, num_cores: int, expected: int, monkeypatch: pytest.MonkeyPatch, warm_workers: WarmWorkers
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if omp_num_threads is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", omp_num_threads)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(num_cores)))
    watch = Watch()
    trainer = partial(
        Trainer, accelerator="cpu", devices=2, max_steps=1, callbacks=[watch], logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    with warm_workers.lend(2) as workers:
        trainer(strategy=PipelineStrategy(workers=workers)).fit(Plain(), data.vectors())
        assert watch.num_threads == expected
        assert torch.get_num_threads() == 3
        with pytest.raises(RuntimeError, match="does not go on"):
            trainer(strategy=PipelineStrategy(workers=workers)).fit(Stops(), data.vectors())
        assert torch.get_num_threads() == 3


class Stops(Plain):
    """Raises in its first step."""

    @override
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        raise RuntimeError("does not go on")
