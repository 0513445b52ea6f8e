"""Writes a file or a folder all or nothing: beside its target, flushed to the disk, then put in the target's place.

The partial one is named after its target, the host and the process, so that the leftover of a process that was killed is
found and removed when the same target is written again.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import re
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["replacing"]

_numbers = itertools.count()
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """Puts what the block writes in the place of a file or folder, if the block ends without an error.

    Whoever looks, even after the process was killed, finds either the old one or the new one, whole.

    Args:
        target: the file or folder; its parent is made.

    Yields:
        Where to write instead: a path beside the target, where there is nothing yet.
    """
    target = target.absolute()
    target.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(target)
    partial = target.with_name(f".{target.name}.{_host()}-{os.getpid()}-{next(_numbers)}.partial")
    try:
        yield partial
        _flush(partial)
        _put(partial, target)
        _flush_folder(target.parent)
    finally:
        _remove(partial)


def _host() -> str:
    return re.sub(r"[^A-Za-z0-9]", "", socket.gethostname())


def _remove_leftovers(target: Path) -> None:
    """Removes partial ones of the same target whose process on this host is no more."""
    ours = re.compile(rf"\.{re.escape(target.name)}\.{_host()}-(\d+)-\d+\.partial")
    for path in target.parent.iterdir():
        match = ours.fullmatch(path.name)
        if match is not None and not _is_alive(int(match[1])):
            _remove(path)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


# -- to the disk -------------------------------------------------------------------------------------------------------


def _flush(path: Path) -> None:
    if not path.is_dir():
        _fsync(path, os.O_RDONLY)
        return
    for child in path.iterdir():
        _flush(child)
    _flush_folder(path)


def _flush_folder(path: Path) -> None:
    with contextlib.suppress(OSError):  # some filesystems can't flush a folder
        _fsync(path, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))


def _fsync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# -- into the place of the old one -------------------------------------------------------------------------------------


def _put(partial: Path, target: Path) -> None:
    """Renames ``partial`` to ``target``, over what is there."""
    old_is_folder = target.is_dir() and not target.is_symlink()
    if not old_is_folder and not (partial.is_dir() and os.path.lexists(target)):
        partial.replace(target)
    elif not _exchange(partial, target):
        # no system call does this at once here, so there is a moment with the old one under the second name only
        aside = partial.with_suffix(".old")
        target.rename(aside)
        partial.rename(target)
        _remove(aside)


def _exchange(one: Path, other: Path) -> bool:
    """Swaps two names in one step where the system can, as Linux does; the old one is under the first name then."""
    renameat2: Callable[..., Any] | None = getattr(ctypes.CDLL(None), "renameat2", None)
    if renameat2 is None:
        return False
    return bool(renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0)
