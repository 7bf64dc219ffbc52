"""The manifest of a checkpoint: every file with its size and checksum. A folder without a valid one is not a checkpoint."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
FORMAT = 1
_NAME = re.compile(r"step_(\d+)")


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a complete checkpoint says about itself."""

    step: int
    layout: Mapping[str, int]
    """Sizes of the axes of the training grid that saved it."""
    roles: tuple[str, ...]
    """The models in it, each in the folder of its name."""
    versions: Mapping[str, str]
    """Of the packages that wrote it."""
    files: Mapping[str, tuple[int, str]]
    """Path in the folder: bytes and SHA-256."""


def step_folder(root: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return root / f"step_{step}"


def steps_in(root: Path) -> list[int]:
    """Steps that have a folder in `root`, complete or not, newest first. A folder that is being written has another name."""
    names = [match for path in root.glob("step_*") if (match := _NAME.fullmatch(path.name))]
    return sorted((int(match[1]) for match in names), reverse=True)


def file_record(path: Path) -> tuple[int, str]:
    """Bytes and SHA-256 of a file, after forcing it onto the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        return path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest()


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """The last file of a checkpoint; on the disk when this returns."""
    content = {"format": FORMAT, **dataclasses.asdict(manifest)}
    with (folder / MANIFEST).open("w") as file:
        json.dump({**content, "digest": _digest(content)}, file, indent=1, sort_keys=True)
        file.flush()
        os.fsync(file.fileno())


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint all of whose files are there with the right sizes. ValueError names the file that is wrong."""
    path = folder / MANIFEST
    try:
        content = json.loads(path.read_bytes())
        digest = content.pop("digest")
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(f"{folder} is not a complete checkpoint: it has no {MANIFEST}") from None
    except (ValueError, KeyError, AttributeError, TypeError):
        raise ValueError(f"{path} is damaged: it cannot be read") from None
    if digest != _digest(content):
        raise ValueError(f"{path} is damaged: its checksum does not fit its content")
    if content.pop("format") != FORMAT:
        raise ValueError(f"{path} is of another format than {FORMAT}, the only one this version reads")
    files = {name: (int(size), str(checksum)) for name, (size, checksum) in content["files"].items()}
    for name, (size, _) in files.items():
        file = folder / name
        if not file.is_file():
            raise ValueError(f"{file} is missing, so the checkpoint is broken")
        if file.stat().st_size != size:
            raise ValueError(f"{file} has {file.stat().st_size} bytes instead of {size}, so the checkpoint is broken")
    return Manifest(**{**content, "files": files, "roles": tuple(content["roles"])})


def check_contents(folder: Path, manifest: Manifest, *, share: int = 0, of: int = 1) -> None:
    """Compare the checksums of every `of`-th file from number `share` on. ValueError names the first file that differs."""
    for name in sorted(manifest.files)[share::of]:
        if file_record(folder / name) != manifest.files[name]:
            raise ValueError(f"{folder / name} is damaged: its checksum is not the one in {MANIFEST}")


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
