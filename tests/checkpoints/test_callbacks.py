"""Lightning's own checkpoint callbacks, left as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_mgpu import PipelineStrategy
from tests.harness import ATOL, RTOL, repeatable
from tests.strategies.warm_workers import WarmWorkers
from tests.zoo import data
from tests.zoo.loops import EveryLoop


def fit(folder: Path, strategy: Any, devices: int, *callbacks: ModelCheckpoint) -> tuple[LightningModule, Trainer]:
    """Trains for two epochs with validation, and saves where the callbacks say."""
    with repeatable():
        module = EveryLoop()
        trainer = Trainer(
            accelerator="cpu",
            strategy=strategy,
            devices=devices,
            max_epochs=2,
            default_root_dir=folder,
            callbacks=[*callbacks],
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, data.vector_splits())
    return module, trainer


def check_weights(saved: dict[str, Any], module: LightningModule) -> None:
    """Checks a checkpoint's weights against a module's, bit by bit."""
    weights: dict[str, Tensor] = module.state_dict()
    assert saved["state_dict"].keys() == weights.keys()
    assert all(torch.equal(saved["state_dict"][name], value) for name, value in weights.items())


@pytest.mark.parametrize("num_stages", [2, 3])
def test_the_default_one(num_stages: int, warm_workers: WarmWorkers, tmp_path: Path) -> None:
    with warm_workers.lend(num_stages) as workers:
        module, _ = fit(tmp_path, PipelineStrategy(workers=workers), num_stages)
    [path] = tmp_path.glob("checkpoints/*.ckpt")
    assert path.name == "epoch=1-step=6.ckpt"
    check_weights(torch.load(path, weights_only=True), module)


def test_the_best_by_a_metric(warm_workers: WarmWorkers, tmp_path: Path) -> None:
    def best() -> ModelCheckpoint:
        return ModelCheckpoint(monitor="val_loss", save_top_k=2, save_last=True)

    one, cut = tmp_path / "one", tmp_path / "cut"
    fit(one, "auto", 1, best())
    with warm_workers.lend(2) as workers:
        module, trainer = fit(cut, PipelineStrategy(workers=workers), 2, best())
        names = ["epoch=0-step=3.ckpt", "epoch=1-step=6.ckpt", "last.ckpt"]
        for folder in (one, cut):
            assert sorted(path.name for path in folder.rglob("*.ckpt")) == names
        for name in names:
            paths = [next(folder.rglob(name)) for folder in (one, cut)]
            expected, saved = (torch.load(path, weights_only=True) for path in paths)
            torch.testing.assert_close(dict(saved["state_dict"]), dict(expected["state_dict"]), rtol=RTOL, atol=ATOL)
            assert saved["loops"] == expected["loops"]
        checkpoint = trainer.checkpoint_callback
        assert isinstance(checkpoint, ModelCheckpoint)
        best_score = checkpoint.best_model_score
        [results] = trainer.validate(module, data.vector_splits(), ckpt_path="best", weights_only=True, verbose=False)
        check_weights(torch.load(checkpoint.best_model_path, weights_only=True), module)
    assert best_score is not None
    assert results.keys() >= {"val_loss"}


def test_weights_only_files_and_ones_saved_after_fit(warm_workers: WarmWorkers, tmp_path: Path) -> None:
    with warm_workers.lend(2) as workers:
        module, trainer = fit(tmp_path, PipelineStrategy(workers=workers), 2, ModelCheckpoint(save_weights_only=True))
        trainer.save_checkpoint(tmp_path / "after.ckpt")
    [path] = tmp_path.glob("checkpoints/*.ckpt")
    light, after = (torch.load(each, weights_only=True) for each in (path, tmp_path / "after.ckpt"))
    assert "optimizer_states" not in light
    assert after["optimizer_states"]
    check_weights(light, module)
    check_weights(after, module)


def test_an_old_checkpoint_survives_one_that_cannot_be_written(warm_workers: WarmWorkers, tmp_path: Path) -> None:
    with warm_workers.lend(2) as workers:
        module, trainer = fit(tmp_path, PipelineStrategy(workers=workers), 2)
        path = tmp_path / "end.ckpt"
        trainer.save_checkpoint(path)
        written = path.read_bytes()
        module.hparams["lock"] = Unpicklable()
        with pytest.raises(TypeError, match="can't be saved"):
            trainer.save_checkpoint(path)
    assert path.read_bytes() == written
    assert [each.name for each in tmp_path.iterdir() if each.is_file()] == ["end.ckpt"]


class Unpicklable:
    """Refuses to be saved."""

    def __reduce__(self) -> str:
        raise TypeError("can't be saved")
