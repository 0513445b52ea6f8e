"""The training program: what it returns and writes, modules of one's own, and its command line."""

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from lightning_mgpu.app.train import train
from tests.app.composition import compose_train

SHORT = ("experiment=two_layer_linear", "trainer.max_epochs=2")


def logged(folder: Path, name: str) -> list[float]:
    """The values of one column of the run's metrics.csv."""
    [path] = folder.glob("lightning_logs/*/metrics.csv")
    with path.open() as file:
        return [float(row[name]) for row in csv.DictReader(file) if row.get(name)]


def test_returns_the_metric_to_optimize(tmp_path: Path) -> None:
    value = train(compose_train(tmp_path, *SHORT, "optimized_metric=val_loss"))
    assert value == pytest.approx(logged(tmp_path, "val_loss")[-1])


def test_tests_where_the_data_has_a_test(tmp_path: Path) -> None:
    value = train(compose_train(tmp_path, *SHORT, "optimized_metric=test_loss"))
    assert value == pytest.approx(logged(tmp_path, "test_loss")[-1])


def test_returns_nothing_unless_asked(tmp_path: Path) -> None:
    assert train(compose_train(tmp_path, *SHORT, "optimized_metric=null")) is None


def test_a_metric_that_was_not_logged_is_named_beside_those_that_were(tmp_path: Path) -> None:
    cfg = compose_train(tmp_path, *SHORT, "optimized_metric=val_acc")
    with pytest.raises(ValueError, match="'val_acc' was not logged; choose one of test_loss, train_loss, val_loss"):
        train(cfg)


def test_writes_the_resolved_configuration(tmp_path: Path) -> None:
    cfg = compose_train(tmp_path, *SHORT, "data.batch_size=${trainer.max_epochs}")
    train(cfg)
    written = OmegaConf.load(tmp_path / "config_resolved.yaml")
    assert OmegaConf.to_container(written, resolve=False) == OmegaConf.to_container(cfg, resolve=True)
    assert written.data.batch_size == 2


def test_the_seed_decides_all(tmp_path: Path) -> None:
    losses = []
    for folder, seed in (("first", 3), ("second", 3), ("other", 4)):
        train(compose_train(tmp_path / folder, *SHORT, f"seed={seed}"))
        losses.append(logged(tmp_path / folder, "train_loss"))
    first, second, other = losses
    assert first == second
    assert first != other


def test_a_pipeline_experiment_gives_the_numbers_of_one_device(tmp_path: Path) -> None:
    options = ("trainer.max_epochs=2", "optimized_metric=test_loss")
    single = train(compose_train(tmp_path / "single", "experiment=two_layer_linear", *options))
    pipeline = train(compose_train(tmp_path / "pipeline", "experiment=two_layer_linear_pipeline", *options))
    assert pipeline == pytest.approx(single, rel=1e-6)
    losses = [logged(tmp_path / folder, "train_loss") for folder in ("pipeline", "single")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_callbacks_come_by_name(tmp_path: Path) -> None:
    callback = "+callbacks.keep={_target_: lightning.pytorch.callbacks.ModelCheckpoint, filename: '{epoch}-kept'}"
    train(compose_train(tmp_path, *SHORT, callback.replace(": ", ":")))
    assert [path.name for path in tmp_path.rglob("*.ckpt")] == ["epoch=1-kept.ckpt"]


def test_own_module_and_own_data(tmp_path: Path) -> None:
    cfg = compose_train(
        tmp_path,
        "model=custom",
        "model._target_=tests.app.own_module.OwnModule",
        "+model.width=5",
        "+model.names=[a,b]",
        "data=custom",
        "data._target_=tests.app.own_module.OwnData",
        "trainer.max_epochs=1",
        "optimized_metric=own_loss",
    )
    assert train(cfg) == pytest.approx(logged(tmp_path, "own_loss")[-1])
    [path] = tmp_path.rglob("*.ckpt")
    checkpoint = torch.load(path, weights_only=True)  # a config node among the hyperparameters would be refused
    assert checkpoint["hyper_parameters"] == {"width": 5, "names": ["a", "b"]}
    assert checkpoint["state_dict"]["layer.weight"].shape == (5, 3)


def command_line(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Runs the program as the script ``mgpu-train`` would, which lies in a folder of its own."""
    script = cwd.parent / "mgpu-train"
    script.write_text("from lightning_mgpu.app.train import main\n\nif __name__ == '__main__':\n    main()\n")
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, str(script), *arguments, "+trainer.enable_progress_bar=false"]
    return subprocess.run(command, cwd=cwd, env=environment, check=False, capture_output=True, text=True, timeout=110)


@pytest.fixture
def working_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "working"
    folder.mkdir()
    return folder


def test_command_line_finds_a_module_in_the_working_folder(working_dir: Path) -> None:
    (working_dir / "nets.py").write_text("from lightning_mgpu.examples import Linear\nclass Net(Linear): ...\n")
    run = command_line(
        "model=custom",
        "model._target_=nets.Net",
        "data=random",
        "trainer.max_epochs=1",
        "hydra.run.dir=out",
        cwd=working_dir,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert OmegaConf.load(working_dir / "out" / "config_resolved.yaml").model._target_ == "nets.Net"
    assert len(logged(working_dir / "out", "test_loss")) == 1


def test_sweep_over_ddp_keeps_its_jobs_apart(working_dir: Path) -> None:
    """Lightning starts a job's second process as the whole sweep, and left variables that sent the next job astray."""
    run = command_line(
        "--multirun",
        *SHORT,
        "strategy=ddp",
        "trainer.devices=2,1",
        "hydra.sweep.dir='a sweep=here'",
        cwd=working_dir,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    for job, num_devices in ((0, 2), (1, 1)):
        folder = working_dir / "a sweep=here" / str(job)
        assert OmegaConf.load(folder / "config_resolved.yaml").trainer.devices == num_devices
        assert len(logged(folder, "train_loss")) == 4 // num_devices  # two epochs of two batches, or one on each device
    assert sorted(path.name for path in working_dir.iterdir()) == ["a sweep=here"]
