"""A file or folder is written all or nothing, whenever the process that writes it is killed."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_mgpu.runtime import replacing as module
from lightning_mgpu.runtime.replacing import replacing

KILLED = """
import os, signal, sys
from pathlib import Path
from lightning_mgpu.runtime.replacing import replacing

with replacing(Path(sys.argv[1])) as partial:
    if sys.argv[2] == "folder":
        partial.mkdir()
        partial = partial / "a"
    with partial.open("w") as file:
        file.write("half of it")
        file.flush()
        os.kill(os.getpid(), signal.SIGKILL)
"""


def make(kind: str, path: Path, content: str) -> None:
    """Writes a file, or a folder with one file."""
    if kind == "folder":
        path.mkdir()
        path = path / "a"
    path.write_text(content)


def content_of(path: Path) -> str:
    return (path / "a" if path.is_dir() else path).read_text()


@pytest.mark.parametrize("old", [None, "file", "folder"])
@pytest.mark.parametrize("new", ["file", "folder"])
def test_takes_the_place_of_what_was_there(old: str | None, new: str, tmp_path: Path) -> None:
    target = tmp_path / "below" / "x.ckpt"
    if old is not None:
        target.parent.mkdir()
        make(old, target, "old")
    with replacing(target) as partial:
        make(new, partial, "new")
        assert target.exists() == (old is not None)
    assert content_of(target) == "new"
    assert target.is_dir() == (new == "folder")
    assert list(target.parent.iterdir()) == [target]


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_leaves_the_old_one_after_an_error(kind: str, tmp_path: Path) -> None:
    target = tmp_path / "x.ckpt"
    make(kind, target, "old")

    def write() -> None:
        with replacing(target) as partial:
            make(kind, partial, "half of it")
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write()
    assert content_of(target) == "old"
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_leaves_the_old_one_after_a_kill_and_cleans_up_the_next_time(kind: str, tmp_path: Path) -> None:
    target = tmp_path / "x.ckpt"
    make(kind, target, "old")
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, target, kind], check=False, env={**os.environ, "LIGHTNING_MGPU_ROLE": "worker"}
    )
    assert killed.returncode == -signal.SIGKILL
    assert content_of(target) == "old"
    assert len(list(tmp_path.iterdir())) == 2
    with replacing(target) as partial:
        make(kind, partial, "new")
    assert content_of(target) == "new"
    assert list(tmp_path.iterdir()) == [target]


def test_does_not_touch_what_another_process_is_writing(tmp_path: Path) -> None:
    target = tmp_path / "x.ckpt"
    with replacing(target) as one, replacing(target) as other:
        one.write_text("one")
        other.write_text("other")
        assert one != other
    assert target.read_text() == "one"


def test_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, done = tmp_path / "x.ckpt", []
    flush: Callable[..., None] = module._flush
    put: Callable[..., None] = module._put
    monkeypatch.setattr(module, "_flush", lambda path: (done.append("flush"), flush(path)))
    monkeypatch.setattr(module, "_put", lambda *paths: (done.append("put"), put(*paths)))
    with replacing(target) as partial:
        partial.write_text("new")
    assert done == ["flush", "put"]


def test_replaces_a_folder_where_the_system_has_no_call_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _: object())
    target = tmp_path / "x.ckpt"
    make("folder", target, "old")
    with replacing(target) as partial:
        make("folder", partial, "new")
    assert content_of(target) == "new"
    assert list(tmp_path.iterdir()) == [target]
