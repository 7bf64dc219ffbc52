"""The checkpoints of one run: each appears complete or not at all, and an old one goes only when a newer one is safe.

    checkpoints/step_N/actor/ ...      Megatron-Core's distributed checkpoint of each trained model (checkpoint.model)
                       trainer.pt      what all ranks share: data position, counters, algorithm state
                       ranks/R.pt      random states of rank R
                       config.yaml     the settings of the run that saved it
                       manifest.json   written last: every file above with size and checksum

A checkpoint is written as `.step_N.incomplete` and renamed when its manifest is on the disk. All methods are collective over the world
and raise the same error on every rank.
"""

from __future__ import annotations

import dataclasses
import logging
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tridentrl import __version__
from tridentrl.checkpoint.collective import on_every_rank, on_rank_0, writing_to
from tridentrl.checkpoint.manifest import (
    Manifest,
    check_contents,
    file_record,
    read_manifest,
    step_folder,
    steps_in,
    write_manifest,
)
from tridentrl.checkpoint.model import ModelSave
from tridentrl.engine.megatron import MegatronEngine
from tridentrl.weights.folders import sync

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Contents:
    """What goes into a checkpoint. Both states: tensors and plain values only."""

    models: Mapping[str, MegatronEngine]
    """By role; all on one grid."""
    shared_state: Mapping[str, Any]
    """Equal on all ranks."""
    rank_state: Mapping[str, Any]
    """This rank's own."""
    write_config: Callable[[Path], None]
    """Writes the settings of the run to a file."""


def verified(folder: Path) -> Manifest:
    """The manifest of the checkpoint in `folder`, after comparing every file's checksum. ValueError names the file that is wrong."""
    manifest = on_rank_0(lambda: read_manifest(folder))
    on_every_rank(lambda: check_contents(folder, manifest, share=dist.get_rank(), of=dist.get_world_size()))
    return manifest


class CheckpointStore:
    """Checkpoints below `root`. `keep_last`: complete ones that stay, None for all. `background`: write the files beside training."""

    def __init__(self, root: Path, *, keep_last: int | None = None, background: bool = False) -> None:
        self.root, self.keep_last, self.background = root, keep_last, background
        self._running: _Save | None = None

    def newest(self) -> tuple[Path, Manifest] | None:
        """The newest checkpoint that is complete and undamaged; each one skipped on the way is logged with the reason."""
        for step in on_rank_0(lambda: steps_in(self.root)):
            folder = step_folder(self.root, step)
            try:
                return folder, verified(folder)
            except ValueError as error:
                if dist.get_rank() == 0:
                    log.warning("skipped the checkpoint %s: %s", folder, error)
        return None

    def set_aside_after(self, step: int) -> None:
        """Rename the checkpoints of later steps to `skipped-...`: the run that goes on from `step` will write its own."""
        on_rank_0(lambda: _set_aside_after(self.root, step))

    def save(self, step: int, contents: Contents) -> None:
        """Write the checkpoint of `step`; with `background` it is complete only when `finish`, `poll` or a later `save` has said so.

        Raises OSError with path and free space; earlier checkpoints are then as they were.
        """
        self.finish()
        self._running = _Save(self.root, step, contents, copy=self.background)
        if self.background:
            self._running.start()
        else:
            self._running.write()
            self.finish()

    def poll(self) -> None:
        """Complete a save that has been written by now."""
        if self._running and all(on_every_rank(self._running.written)):
            self.finish()

    def finish(self) -> None:
        """Wait for the running save, complete it, and delete what `keep_last` leaves over."""
        if self._running:
            running, self._running = self._running, None
            running.finish()
            on_rank_0(self._delete_old)

    def _delete_old(self) -> None:
        kept = 0
        for step in steps_in(self.root):
            folder = step_folder(self.root, step)
            try:
                read_manifest(folder)
            except ValueError:
                continue  # a broken one protects nothing, and tells what went wrong
            kept += 1
            if self.keep_last is not None and kept > self.keep_last:
                try:
                    _delete(folder)
                except OSError as error:
                    log.warning("cannot delete the old checkpoint %s: %s", folder, error)


class _Save:
    """One save. Making it brings this rank's share to host memory, `write` works on the disk alone, `finish` brings the ranks together."""

    def __init__(self, root: Path, step: int, contents: Contents, *, copy: bool) -> None:
        self.root, self.step, self.contents = root, step, contents
        self.folder = step_folder(root, step)
        self.temporary = root / f".{self.folder.name}.incomplete"
        self.records: dict[str, tuple[int, str]] = {}
        self.error: OSError | None = None
        self.thread: threading.Thread | None = None
        self.start_time = time.perf_counter()
        on_rank_0(self._begin)
        self.models = [ModelSave(engine, self.temporary / role, step=step, copy=copy) for role, engine in contents.models.items()]
        needed = sum(on_every_rank(lambda: sum(model.bytes for model in self.models)))
        on_rank_0(lambda: self._check_space(needed))

    def _begin(self) -> None:
        with writing_to(self.folder):
            self.root.mkdir(parents=True, exist_ok=True)
            for left_over in self.root.glob(".step_*"):  # of a save or a deletion that was killed
                shutil.rmtree(left_over)
            for name in (*self.contents.models, "ranks"):
                (self.temporary / name).mkdir(parents=True)

    def _check_space(self, needed: int) -> None:
        free = shutil.disk_usage(self.root).free
        if free < needed:
            self._clear()
            raise OSError(f"cannot write the checkpoint to {self.folder}: it needs {needed:,} bytes and {free:,} are free on its disk")

    def start(self) -> None:
        self.thread = threading.Thread(target=self.write, name="checkpoint")
        self.thread.start()

    def written(self) -> bool:
        return self.thread is None or not self.thread.is_alive()

    def write(self) -> None:
        """This rank's files, onto the disk. An error is kept for `finish`, where all ranks hear of it."""
        rank = dist.get_rank()
        mine = [Path("ranks") / f"{rank}.pt"]
        try:
            with writing_to(self.folder):
                for model in self.models:
                    model.write()
                    mine += [path.relative_to(self.temporary) for path in model.folder.glob(f"__{rank}_*")]
                torch.save(dict(self.contents.rank_state), self.temporary / mine[0])
                if rank == 0:
                    mine += [Path("trainer.pt"), Path("config.yaml")]
                    torch.save(dict(self.contents.shared_state), self.temporary / "trainer.pt")
                    self.contents.write_config(self.temporary / "config.yaml")
                self.records = {str(path): file_record(self.temporary / path) for path in mine}
        except OSError as error:
            self.error = error

    def finish(self) -> None:
        """Wait for all ranks' files, then index, manifest and final name."""
        try:
            records = on_every_rank(self._join)
            for model in self.models:
                model.finish()
            files = {name: record for part in records for name, record in part.items()}
            on_rank_0(lambda: self._complete(files))
        except OSError:
            if dist.get_rank() == 0:
                self._clear()
            raise
        if dist.get_rank() == 0:
            size, seconds = sum(size for size, _ in files.values()), time.perf_counter() - self.start_time
            log.info("checkpoint of step %d is complete: %s (%.1f MB, %.1f s)", self.step, self.folder, size / 1e6, seconds)

    def _join(self) -> dict[str, tuple[int, str]]:
        if self.thread:
            self.thread.join()
        if self.error:
            raise self.error
        return self.records

    def _complete(self, files: dict[str, tuple[int, str]]) -> None:
        with writing_to(self.folder):
            folders = [self.temporary, *(path for path in self.temporary.iterdir() if path.is_dir())]
            for path in (path for folder in folders for path in folder.iterdir() if path.is_file()):
                name = str(path.relative_to(self.temporary))
                files[name] = files.get(name) or file_record(path)
            manifest = Manifest(
                step=self.step,
                layout=dataclasses.asdict(next(iter(self.contents.models.values())).grid),
                roles=tuple(self.contents.models),
                versions={"tridentrl": __version__, **{name: version(name) for name in ("torch", "megatron-core")}},
                files=files,
            )
            write_manifest(self.temporary, manifest)
            read_manifest(self.temporary)  # that rank 0 sees all ranks' files: the folder may not be shared between machines
            for folder in folders:
                sync(folder)
            if self.folder.exists():
                _delete(self.folder)  # broken: a run never comes back to the step of a checkpoint that it could have gone on from
            self.temporary.rename(self.folder)
            sync(self.root)

    def _clear(self) -> None:
        shutil.rmtree(self.temporary, ignore_errors=True)


def _delete(folder: Path) -> None:
    """Under another name first, so that nobody takes the rest of a killed deletion for a checkpoint."""
    doomed = folder.with_name(f".{folder.name}.deleted")
    folder.rename(doomed)
    shutil.rmtree(doomed)


def _set_aside_after(root: Path, step: int) -> None:
    for later in (later for later in steps_in(root) if later > step):
        folder = step_folder(root, later)
        with writing_to(root):
            folder.rename(folder.with_name(f"skipped-{folder.name}-{time.strftime('%Y%m%d-%H%M%S')}"))
