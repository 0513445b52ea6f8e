"""Every notebook runs from top to bottom, shows what it promises, and is committed without outputs."""

from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"


def outputs_of(notebook: nbformat.NotebookNode) -> list[dict[str, Any]]:
    return [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]


@pytest.fixture
def run_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Executes a notebook in a kernel of its own, in an empty folder."""
    monkeypatch.setenv("PYTHONPATH", str(NOTEBOOKS.parent))
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")  # the folders to come, without a warning about them

    def run(name: str) -> list[dict[str, Any]]:
        notebook = nbformat.read(NOTEBOOKS / name, as_version=4)
        client = NotebookClient(notebook, timeout=100, resources={"metadata": {"path": str(tmp_path)}})
        client.execute()
        return outputs_of(notebook)

    return run


def test_pipeline_on_two_processes(run_notebook) -> None:
    outputs = run_notebook("pipeline_on_two_processes.ipynb")
    printed = "".join(output["text"] for output in outputs if output.get("name") == "stdout")
    assert printed.count(" on one device, ") == 3
    [picture] = [output["data"]["image/png"] for output in outputs if "image/png" in output.get("data", {})]
    assert picture


@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.stem)
def test_is_committed_without_outputs(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    assert outputs_of(notebook) == []
    assert all(cell.execution_count is None for cell in notebook.cells if cell.cell_type == "code")
