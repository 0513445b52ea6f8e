"""Makes one file of a sharded checkpoint: ``python -m lightning_mgpu.runtime.consolidate FOLDER FILE``.

The file is an ordinary Lightning checkpoint, which one device resumes from. The whole checkpoint has to fit into memory.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from lightning_mgpu.errors import CheckpointError
from lightning_mgpu.runtime.replacing import replacing
from lightning_mgpu.runtime.sharded_folder import read_sharded

__all__ = ["consolidate"]


def consolidate(folder: str | Path, file: str | Path, *, weights_only: bool = True) -> None:
    """Writes a sharded checkpoint to one file.

    Args:
        folder: the sharded checkpoint.
        file: the file, which must not be there yet.
        weights_only: as in ``torch.load``; ``False`` for a checkpoint that holds objects of your own, and that you trust.

    Raises:
        CheckpointError: where ``folder`` is no sharded checkpoint.
        FileExistsError: where ``file`` is there.
    """
    folder, file = Path(folder), Path(file)
    if file.exists():
        raise FileExistsError(f"{file} is there already; name another file")
    if not folder.is_dir():
        raise CheckpointError(f"{str(folder)!r} is no folder; name one that was saved with save_distributed_checkpoint=True")
    checkpoint = read_sharded(folder, weights_only=weights_only)
    with replacing(file) as partial:
        torch.save(checkpoint, partial)


def main() -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(description="Makes one file of a sharded checkpoint.")
    parser.add_argument("folder", help="the sharded checkpoint")
    parser.add_argument("file", help="the file to write")
    parser.add_argument("--trust", action="store_true", help="read objects of any class, which may run code, from it")
    options = parser.parse_args()
    try:
        consolidate(options.folder, options.file, weights_only=not options.trust)
    except (CheckpointError, FileExistsError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(f"wrote {options.file}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
