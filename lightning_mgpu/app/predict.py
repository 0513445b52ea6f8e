"""Predicts by configuration: ``mgpu-predict experiment=cnn_digits ckpt_path=last.ckpt strategy=pipeline trainer.devices=2``.

The program that goes with `lightning_mgpu.app.train`, over the same groups of configs. Predictions go to one file, each row of
the data once and in its order; with ``report=true`` it says how many rows a second there were, and how long batches took.
"""

import json
import warnings
from pathlib import Path
from typing import Any

import lightning as L
from hydra.utils import instantiate
from omegaconf import DictConfig
from rich.console import Console

from lightning_mgpu.app.command_line import command_line
from lightning_mgpu.app.job import isolated_job
from lightning_mgpu.app.train import write_resolved
from lightning_mgpu.callbacks.latency import Latency
from lightning_mgpu.callbacks.prediction_file import PredictionFile


def predict(cfg: DictConfig) -> float | None:
    """Predicts with the configured model on the configured data.

    Args:
        cfg: The composed configuration, as in ``conf/predict.yaml``.

    Returns:
        With ``report=true``, the rows predicted in a second, for a sweep to maximize.

    Raises:
        ValueError: If predictions can't be written to the configured file.
    """
    config_file = Path(cfg.output_dir) / "config_resolved.yaml"
    write_resolved(cfg, config_file)
    with isolated_job(config_file):
        return _predict(cfg)


def _predict(cfg: DictConfig) -> float | None:
    L.seed_everything(cfg.seed, workers=True)
    path, latency = Path(cfg.output_dir) / cfg.predictions, Latency()
    file = PredictionFile(path)
    datamodule: L.LightningDataModule = _build(cfg.data)
    model: L.LightningModule = _build(cfg.model)
    callbacks = [file, *([latency] if cfg.report else [])]
    make_trainer = _build(cfg.trainer, _partial_=True)
    trainer: L.Trainer = make_trainer(
        strategy=_build(cfg.strategy), callbacks=callbacks, logger=False, enable_checkpointing=False
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Be aware that when using `ckpt_path`, callbacks")  # those were for training
        trainer.predict(model, datamodule=datamodule, ckpt_path=cfg.ckpt_path, return_predictions=False)
    if not trainer.is_global_zero:
        return None
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"predictions: {path}")
    if not cfg.report:
        return None
    report = latency.report()
    console.print(str(report))
    (Path(cfg.output_dir) / "report.json").write_text(json.dumps(report.as_dict(), indent=2), encoding="utf-8")
    return report.rows_per_s


def _build(cfg: DictConfig, **kwargs: Any) -> Any:
    """Calls a ``_target_`` with plain lists and dicts."""
    return instantiate(cfg, _convert_="all", **kwargs)


main = command_line(predict, "predict")


if __name__ == "__main__":
    main()
