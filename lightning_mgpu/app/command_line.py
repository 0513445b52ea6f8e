"""What the programs have in common on the command line."""

import os
import sys
from collections.abc import Callable
from typing import Any

import hydra
from omegaconf import DictConfig

from lightning_mgpu.app.config_dir import find_config_dir


def command_line(task: Callable[[DictConfig], Any], config_name: str) -> Callable[[], None]:
    """Makes a program of a function of a configuration.

    Args:
        task: The function.
        config_name: The name of its configuration in ``conf/``.

    Returns:
        What runs it with what the command line says; modules in the working folder are found, as they are by ``python -m``.
    """
    run = hydra.main(version_base="1.3", config_path=str(find_config_dir()), config_name=config_name)(task)

    def main() -> None:
        """Runs the command line."""
        working_dir = os.getcwd()  # noqa: PTH109  sys.path holds strings
        if working_dir not in sys.path:
            sys.path.insert(0, working_dir)
        run()

    return main
