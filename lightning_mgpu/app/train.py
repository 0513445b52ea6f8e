"""Trains by configuration: ``mgpu-train experiment=cnn_digits strategy=pipeline trainer.devices=2``.

A Hydra program over ``conf/``. Models and data sets of one's own come in by ``_target_``, either in a folder of configs
(``--config-dir``) or on the command line: ``mgpu-train model=custom model._target_=my_package.MyModule``. Modules in
the working folder are found, as they are by ``python -m``.
"""

from pathlib import Path
from typing import Any

import lightning as L
from hydra.utils import instantiate
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.model_helpers import is_overridden
from omegaconf import DictConfig, OmegaConf

from lightning_mgpu.app.command_line import command_line
from lightning_mgpu.app.job import isolated_job


def train(cfg: DictConfig) -> float | None:
    """Trains the configured model, and tests it where both the model and its data have a test.

    Args:
        cfg: The composed configuration, as in ``conf/train.yaml``.

    Returns:
        The logged value that ``optimized_metric`` names, or None if it names none.

    Raises:
        ValueError: If no value was logged under that name.
    """
    config_file = Path(cfg.output_dir) / "config_resolved.yaml"
    write_resolved(cfg, config_file)
    with isolated_job(config_file):
        metrics = _fit_and_test(cfg)
    return _choose(metrics, cfg.optimized_metric)


def _fit_and_test(cfg: DictConfig) -> dict[str, float]:
    """Builds what is configured, runs it, and returns all that was logged."""
    L.seed_everything(cfg.seed, workers=True)
    datamodule: L.LightningDataModule = _build(cfg.data)
    model: L.LightningModule = _build(cfg.model)
    callbacks = [_build(callback) for callback in cfg.callbacks.values()]
    trainer: L.Trainer = _build(cfg.trainer, _partial_=True)(
        strategy=_build(cfg.strategy),
        callbacks=callbacks,
    )

    trainer.fit(model, datamodule=datamodule)
    metrics = dict(trainer.callback_metrics)
    has_test = is_overridden("test_step", model) and is_overridden("test_dataloader", datamodule)
    if has_test:
        trainer.test(model, datamodule=datamodule)
        metrics.update(trainer.callback_metrics)
    return {name: value.item() for name, value in metrics.items()}


def _build(cfg: DictConfig, **kwargs: Any) -> Any:
    """Calls a ``_target_`` with plain lists and dicts, which checkpoints can hold, in place of config nodes."""
    return instantiate(cfg, _convert_="all", **kwargs)


@rank_zero_only
def write_resolved(cfg: DictConfig, path: Path) -> None:
    """Writes the configuration with every interpolation replaced by its value."""
    path.parent.mkdir(parents=True, exist_ok=True)
    OmegaConf.save(cfg, path, resolve=True)


def _choose(metrics: dict[str, float], name: str | None) -> float | None:
    """Picks the value that a sweep optimizes."""
    if name is None:
        return None
    if name not in metrics:
        message = f"optimized_metric {name!r} was not logged; choose one of {', '.join(sorted(metrics))}, or null"
        raise ValueError(message)
    return metrics[name]


main = command_line(train, "train")


if __name__ == "__main__":
    main()
