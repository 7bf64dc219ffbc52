"""Folders that appear complete or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def new_folder(folder: Path, *, overwrite: bool) -> Iterator[Path]:
    """A folder to write into, which takes the name `folder` when the block ends and goes away when it fails."""
    temporary = begin_folder(folder, overwrite=overwrite)
    try:
        yield temporary
        complete_folder(temporary, folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def begin_folder(folder: Path, *, overwrite: bool) -> Path:
    """An empty folder beside `folder` to write into. Raises ValueError when `folder` exists and may not be replaced.

    Only a model folder (or an empty one) is ever replaced: the name may be a slip, and what it names somebody's work.
    """
    if folder.exists() and not overwrite:
        raise ValueError(f"{folder} exists already; give another folder, remove it, or ask to overwrite it")
    if folder.exists() and not (folder.is_dir() and ((folder / "config.json").is_file() or not any(folder.iterdir()))):
        raise ValueError(f"{folder} is no model folder (it has no config.json), so it is not overwritten; give another folder or remove it")
    folder = folder.resolve()  # where a link leads to is replaced, not the link
    temporary = folder.with_name(f".{folder.name}.incomplete")
    shutil.rmtree(temporary, ignore_errors=True)  # what a killed writer left
    temporary.mkdir(parents=True)
    return temporary


def complete_folder(temporary: Path, folder: Path) -> None:
    """Force everything in `temporary` onto the disk and give it its name."""
    folder = folder.resolve()
    for path in temporary.rglob("*"):
        sync(path)
    sync(temporary)
    old = folder.with_name(f".{folder.name}.replaced")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    temporary.rename(folder)
    sync(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def sync(path: Path) -> None:
    """Force a file, or a folder's list of names, onto the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
