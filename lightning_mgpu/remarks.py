"""Warnings that point to the user's line, however deep in the package they are raised."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from types import FrameType

__all__ = ["remark"]

_PACKAGE = str(Path(__file__).parent)


def remark(message: str) -> None:
    """Warns, as if from the line that called into this package: the user's, past torch's calls of modules."""
    frame: FrameType | None = sys._getframe(1)
    level = 2
    while frame is not None and frame.f_back is not None and _is_ours(frame.f_code.co_filename):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


def _is_ours(filename: str) -> bool:
    in_between = ("torch/nn/modules/module.py", "contextlib.py", "torch/utils/_contextlib.py")
    return filename.startswith(_PACKAGE) or filename.endswith(in_between)
