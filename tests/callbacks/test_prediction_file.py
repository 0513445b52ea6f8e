"""Predictions in a file: each row once, in the order of the data, whatever the strategy, and nothing half-written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_mgpu import PipelineStrategy
from lightning_mgpu.callbacks.columns import Columns, merged
from lightning_mgpu.callbacks.prediction_file import PredictionFile
from tests.harness import repeatable
from tests.strategies.warm_workers import WarmWorkers

NUM_ROWS = 23
ROWS = torch.randn(NUM_ROWS, 8, generator=torch.Generator().manual_seed(0))


class Predictor(LightningModule):
    """Returns what it is told to make of its layers' results."""

    def __init__(self, what: str = "tensor") -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
        self.what = what

    def predict_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> Any:
        scores = self.model(batch)
        classes = scores.argmax(1)
        return {
            "tensor": scores,
            "dict": {"scores": scores, "classes": classes},
            "tuple": (scores, classes),
            "half": scores.bfloat16(),
            "text": ["a"] * len(batch),
            "number": scores.sum(),
            "uneven": {"scores": scores, "some": scores[:1]},
            "changing": scores[:, : 1 + (batch_idx > 0)],
        }[self.what]


def built(what: str = "tensor") -> Predictor:
    with repeatable():
        return Predictor(what)


def loader() -> DataLoader[Tensor]:
    return DataLoader(ROWS, batch_size=4)  # type: ignore[arg-type]


def predict(path: Path, module: LightningModule, loaders: Any = None, **trainer: Any) -> None:
    Trainer(accelerator="cpu", callbacks=[PredictionFile(path)], logger=False, enable_progress_bar=False, **trainer).predict(
        module, loader() if loaders is None else loaders, return_predictions=False
    )


def expected(module: Predictor) -> Tensor:
    with torch.no_grad():
        return module.model(ROWS)  # type: ignore[no-any-return]


def read(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    """Reads a file with what its readers are told to use."""
    if path.suffix == ".pt":
        return {name: value.numpy() for name, value in torch.load(path, weights_only=True).items()}
    if path.suffix == ".npz":
        with np.load(path) as file:
            return dict(file)
    parquet = pytest.importorskip("pyarrow.parquet")
    table = parquet.read_table(path)
    return {name: np.array(table[name].to_pylist(), dtype=None) for name in table.column_names}


@pytest.mark.parametrize("ending", [".pt", ".npz", ".parquet"])
@pytest.mark.parametrize("what", ["tensor", "dict", "tuple", "half"])
def test_every_kind_of_file(ending: str, what: str, tmp_path: Path) -> None:
    module, path = built(what), tmp_path / f"made{ending}"
    predict(path, module)
    scores = expected(module)
    wanted = {
        "tensor": {"predictions": scores},
        "dict": {"scores": scores, "classes": scores.argmax(1)},
        "tuple": {"0": scores, "1": scores.argmax(1)},
        "half": {"predictions": scores.bfloat16().float()},
    }[what]
    found = read(path)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(torch.tensor(found[name]).to(value.dtype), value)
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("options", [{}, {"data_parallel_size": 2}], ids=["stages", "replicas"])
def test_rows_come_once_and_in_order_from_several_processes(
    options: dict[str, Any], tmp_path: Path, warm_workers: WarmWorkers
) -> None:
    module, path = built(), tmp_path / "made.npz"
    with warm_workers.lend(2) as workers:
        predict(path, module, strategy=PipelineStrategy(workers=workers, **options), devices=2)
    torch.testing.assert_close(torch.from_numpy(read(path)["predictions"]), expected(module))


def test_several_loaders_make_several_files(tmp_path: Path) -> None:
    module = built()
    predict(tmp_path / "made.pt", module, [loader(), DataLoader(ROWS[:3], batch_size=2)])  # type: ignore[arg-type]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["made_0.pt", "made_1.pt"]
    torch.testing.assert_close(torch.load(tmp_path / "made_1.pt")["predictions"], expected(module)[:3])


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("text", r"predict_step returned a str as '0'; return a tensor with a row for each row of the batch"),
        ("number", r"predict_step returned a tensor without rows as 'predictions'"),
        ("uneven", r"tensors of different numbers of rows, \{'scores': 4, 'some': 1\}"),
        ("changing", r"predictions of one batch are .*\(2,\).* where those before were .*\(1,\)"),
    ],
)
def test_what_makes_no_table_is_refused(what: str, text: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=text):
        predict(tmp_path / "made.pt", built(what))


def test_an_earlier_file_stays_until_the_new_one_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "made.pt"
    predict(path, built())
    before = path.read_bytes()
    with pytest.raises(ValueError, match="returned a str"):
        predict(path, built("text"))
    assert path.read_bytes() == before
    predict(path, built("dict"))
    assert read(path).keys() == {"scores", "classes"}
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


def test_another_ending_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match=r"can't be written to 'made.csv'; name a file that ends in .pt, .npz, .parquet"):
        PredictionFile("made.csv")


# -- rows of several processes -----------------------------------------------------------------------------------------


def columns(folder: Path, *places: int) -> Path:
    written = Columns(folder)
    if places:
        indices = np.array(places)
        written.append({"x": indices * 10, "y": np.stack([indices, -indices], 1).astype(np.float32)}, indices)
    written.close()
    return folder


def test_rows_are_merged_by_their_places(tmp_path: Path) -> None:
    parts = [columns(tmp_path / "0", 0, 2, 4), columns(tmp_path / "1", 3, 1), columns(tmp_path / "2")]
    found = merged(parts, tmp_path / "merged")
    assert found["x"].tolist() == [0, 10, 20, 30, 40]
    assert found["y"].tolist() == [[i, -i] for i in range(5)]


@pytest.mark.parametrize("second", [(1, 2), (1, 5)])
def test_rows_that_are_missing_or_there_twice_are_an_error(second: tuple[int, ...], tmp_path: Path) -> None:
    text = r"no prediction for row 3, and two for another of 5|a prediction for row 5, but only 5"
    with pytest.raises(ValueError, match=text):
        merged([columns(tmp_path / "0", 0, 2, 4), columns(tmp_path / "1", *second)], tmp_path / "merged")
