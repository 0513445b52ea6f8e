"""One job of a sweep, kept apart from the jobs before and after it in the same process.

Lightning's data parallelism starts its other processes by running the command line again. In a sweep that command is
the whole sweep, so each child would run the other jobs as well; and what Lightning leaves in the environment tells the
next job that it belongs to the processes of the last.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import torch.distributed as dist
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, read_write


@contextmanager
def isolated_job(config_file: Path) -> Iterator[None]:
    """Runs its body as the only job there is.

    In a sweep, processes that the body starts by running the command line again run this job alone. Afterwards the
    environment and the command line are as before, and no process group is left.

    Args:
        config_file: The file with the job's resolved configuration, written before any process is started.
    """
    environment = os.environ.copy()
    command_line = sys.argv
    try:
        if HydraConfig.initialized() and HydraConfig.get().mode is RunMode.MULTIRUN:
            sys.argv = [sys.argv[0], f"--config-path={config_file.parent}", f"--config-name={config_file.name}"]
            _run_where_this_job_runs()
        yield
    finally:
        sys.argv = command_line
        os.environ.clear()
        os.environ.update(environment)
        if dist.is_available() and dist.is_initialized():
            dist.destroy_process_group()


def _run_where_this_job_runs() -> None:
    """Gives the processes that Lightning starts this job's folder, where it would give them that of a single run."""
    hydra = cast("DictConfig", HydraConfig.get())  # typed as its schema, but a config node in truth
    with read_write(hydra):
        hydra.run.dir = hydra.runtime.output_dir
