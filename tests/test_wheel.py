"""The wheel holds the package, its configs and nothing else, and the app finds its configs in it."""

import os
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import lightning_mgpu

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel made from the source distribution, so that the latter is known to be complete."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    build = subprocess.run(command, check=False, capture_output=True, text=True, timeout=100)
    assert build.returncode == 0, build.stdout + build.stderr
    [path] = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def members(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_holds_every_config_and_module(members: set[str]) -> None:
    configs = {f"lightning_mgpu/{path.relative_to(ROOT).as_posix()}" for path in (ROOT / "conf").rglob("*.yaml")}
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "lightning_mgpu").rglob("*.py")}
    assert len(configs) > 10
    assert {name for name in members if ".dist-info/" not in name} == configs | modules | {"lightning_mgpu/py.typed"}


def test_describes_itself(wheel: Path, members: set[str]) -> None:
    [metadata] = [name for name in members if name.endswith(".dist-info/METADATA")]
    [entry_points] = [name for name in members if name.endswith(".dist-info/entry_points.txt")]
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in members)
    with zipfile.ZipFile(wheel) as archive:
        fields = Parser().parsestr(archive.read(metadata).decode())
        scripts = archive.read(entry_points).decode().split()
    assert (fields["Name"], fields["License-Expression"], fields["Requires-Python"]) == (
        "lightning_mgpu",
        "Apache-2.0",
        ">=3.11",
    )
    assert fields["Version"] == lightning_mgpu.__version__
    assert "mgpu-train=lightning_mgpu.app.train:main" in "".join(scripts)
    assert {"torch>=2.11", "lightning<2.7,>=2.6", "hydra-core>=1.3"} <= set(fields.get_all("Requires-Dist"))


def test_app_finds_the_configs_of_an_installed_wheel(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    working_dir = tmp_path / "elsewhere"
    working_dir.mkdir()
    run = subprocess.run(
        [sys.executable, "-m", "lightning_mgpu.app.train", "experiment=cnn_digits", "--info", "searchpath"],
        cwd=working_dir,
        env={**os.environ, "PYTHONPATH": str(site)},
        check=False,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert f"file://{site / 'lightning_mgpu' / 'conf'}" in run.stdout.replace("\n", "")
