"""The check in conftest.py that a test leaves nothing behind: that it sees each kind of leak, and nothing else."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS_THAT_LEAK = """
import os
import signal
import subprocess
import sys

import pytest
import torch

@pytest.fixture(scope="session")
def held_process(held_processes):
    with held_processes.starting():
        process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.communicate(b"\\n")

def test_clean(monkeypatch):
    monkeypatch.setenv("GONE_AFTERWARDS", "1")
    subprocess.run([sys.executable, "-c", ""], check=True)

def test_variable_added():
    os.environ["LEAKED"] = "1"

def test_variable_was_restored():
    assert "LEAKED" not in os.environ

def test_variable_removed():
    del os.environ["HOME"]

def test_process():
    test_process.child = subprocess.Popen([sys.executable, "-c", "input()  # orphan"], stdin=subprocess.PIPE)

def test_process_of_session(request):
    request.getfixturevalue("held_process")
    test_process.child.communicate(b"\\n")

def test_threads():
    torch.set_num_threads(torch.get_num_threads() + 1)

def test_dtype():
    torch.set_default_dtype(torch.float64)

def test_module_call(monkeypatch):
    torch.nn.Module.__call__ = lambda self: None

def test_signal():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)

@pytest.mark.gpu
def test_gpu():
    assert torch.cuda.is_available()
"""

LEAKS = {
    "test_variable_added": "environment variable LEAKED='1' (was None)",
    "test_variable_removed": "environment variable HOME=None (was '/somewhere')",
    "test_process": "# orphan)",
    "test_threads": "num_threads",
    "test_dtype": "default_dtype torch.float64 (was torch.float32)",
    "test_module_call": "module_call",
    "test_signal": "handlers",
}


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What pytest says of the tests above, under this suite's conftest."""
    folder = tmp_path_factory.mktemp("leaks")
    conftest = (Path(__file__).parent / "conftest.py").read_text()
    (folder / "conftest.py").write_text(conftest.replace("_GRACE_S = 10.0", "_GRACE_S = 0.5"))
    (folder / "test_leaks.py").write_text(TESTS_THAT_LEAK)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = gpu: needs one\n")
    environment = {**os.environ, "HOME": "/somewhere", "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "500"}
    command = [sys.executable, "-m", "pytest", "-rA", "-p", "no:cacheprovider", str(folder)]
    run = subprocess.run(command, cwd=folder, env=environment, check=False, capture_output=True, text=True, timeout=100)
    assert run.returncode == 1, run.stdout + run.stderr
    return run.stdout


@pytest.mark.parametrize(("test", "leak"), LEAKS.items())
def test_a_leak_fails_its_test(report: str, test: str, leak: str) -> None:
    [line] = [line for line in report.splitlines() if line.startswith(f"ERROR test_leaks.py::{test} ")]
    assert "the test left behind: " in line
    assert leak in line


def test_nothing_else_fails(report: str) -> None:
    wrong = {line.split("::")[1].split()[0] for line in report.splitlines() if line.startswith(("ERROR", "FAILED"))}
    assert wrong == set(LEAKS)


def test_gpu_tests_are_skipped_without_one(report: str) -> None:
    assert "needs a CUDA device" in report
