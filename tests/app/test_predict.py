"""The prediction program: one file, in order, the same for every strategy; a report; its command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

from lightning_mgpu.app.config_dir import find_config_dir
from lightning_mgpu.app.predict import predict
from lightning_mgpu.app.train import train
from lightning_mgpu.examples import RandomLinearDataModule, TwoLayerLinear
from tests.app.composition import compose_train

SHORT = ("experiment=two_layer_linear", "data.batch_size=16")
ON_TWO = ("trainer.devices=2",)


def compose_predict(output_dir: Path, *overrides: str) -> DictConfig:
    quiet = "+trainer.enable_progress_bar=false"
    with initialize_config_dir(str(find_config_dir()), version_base="1.3"):
        return compose("predict", [f"output_dir='{output_dir}'", quiet, *overrides])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    train(compose_train(folder, *SHORT, "trainer.max_epochs=1"))
    [path] = folder.glob("**/*.ckpt")
    return path


def expected(checkpoint: Path) -> torch.Tensor:
    model = TwoLayerLinear.load_from_checkpoint(checkpoint)
    data = RandomLinearDataModule(num_targets=1)
    data.setup("predict")
    rows = torch.cat([x for x, _ in data.predict_dataloader()])
    with torch.no_grad():
        return model(rows)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param((), id="one device"),
        pytest.param(("strategy=pipeline", *ON_TWO), id="by layer"),
        pytest.param(("strategy=model_parallel", *ON_TWO), id="by layer in one process"),
        pytest.param(("strategy=data_parallel", *ON_TWO), id="by index"),
    ],
)
def test_predictions_are_those_of_one_device(overrides: tuple[str, ...], checkpoint: Path, tmp_path: Path) -> None:
    assert predict(compose_predict(tmp_path, *SHORT, f"ckpt_path='{checkpoint}'", *overrides)) is None
    found = torch.load(tmp_path / "predictions.pt", weights_only=True)["predictions"]
    torch.testing.assert_close(found, expected(checkpoint))


def test_a_report_is_printed_written_and_returned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    value = predict(compose_predict(tmp_path, *SHORT, "report=true", "predictions=made.npz"))
    report = json.loads((tmp_path / "report.json").read_text())
    assert value == report["rows_per_s"] > 0
    assert {"p50_ms", "p99_ms", "num_rows", "num_batches", "seconds", "rows_per_s"} == report.keys()
    assert f"{report['rows_per_s']:.1f} rows/s" in capsys.readouterr().out
    assert (tmp_path / "made.npz").exists()


def test_lightnings_data_parallelism_by_command_line(checkpoint: Path, tmp_path: Path) -> None:
    """Each process writes its rows, and the first one puts them in order."""
    command = [sys.executable, "-m", "lightning_mgpu.app.predict", *SHORT, "strategy=ddp", *ON_TWO, f"ckpt_path='{checkpoint}'"]
    command.append(f"hydra.run.dir='{tmp_path}/out'")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("predictions: ") == 1
    found = torch.load(tmp_path / "out" / "predictions.pt", weights_only=True)["predictions"]
    torch.testing.assert_close(found, expected(checkpoint))
