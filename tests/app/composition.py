"""Composes the app's configuration as its command line would."""

from pathlib import Path

from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

from lightning_mgpu.app.config_dir import find_config_dir

QUIET = ("+trainer.enable_progress_bar=false",)


def compose_train(output_dir: Path, *overrides: str) -> DictConfig:
    """Composes ``train.yaml`` with the overrides, without Hydra's own settings.

    Args:
        output_dir: The run's folder, which Hydra would choose.
        overrides: As on the command line.

    Returns:
        The configuration.
    """
    with initialize_config_dir(str(find_config_dir()), version_base="1.3"):
        return compose("train", [f"output_dir='{output_dir}'", *QUIET, *overrides])


def choices(group: str) -> list[str]:
    """The names of a group's configs."""
    return sorted(path.stem for path in (find_config_dir() / group).glob("*.yaml"))
