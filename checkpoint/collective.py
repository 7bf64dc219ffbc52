"""One decision on all ranks: what fails on one rank fails on every rank, with the same message."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

T = TypeVar("T")


def on_every_rank(action: Callable[[], T]) -> list[T]:
    """Run `action` on each rank and return what it gave there, by rank. Collective over the world.

    Where it raised OSError or ValueError, the error of the lowest such rank is raised on all ranks, so that nobody waits for a rank
    that gave up.
    """
    mine: tuple[T | None, OSError | ValueError | None]
    try:
        mine = action(), None
    except (OSError, ValueError) as error:
        mine = None, error
    gathered = [mine] * dist.get_world_size()
    dist.all_gather_object(gathered, mine)
    for _, failure in gathered:
        if failure is not None:
            raise failure
    return [value for value, _ in gathered]  # type: ignore[misc]


def on_rank_0(action: Callable[[], T]) -> T:
    """Run `action` on rank 0 alone and return its result, or raise its error, on every rank. Collective over the world."""
    return on_every_rank(lambda: action() if dist.get_rank() == 0 else None)[0]  # type: ignore[return-value]


@contextmanager
def writing_to(folder: Path) -> Iterator[None]:
    """Whatever goes wrong in the block becomes an OSError with the folder and the free space of its disk."""
    try:
        yield
    except Exception as error:  # torch reports a full disk as a RuntimeError
        where = next(path for path in (folder, *folder.parents) if path.exists())
        free = shutil.disk_usage(where).free
        raise OSError(f"cannot write the checkpoint to {folder} ({free:,} bytes free on its disk): {error}") from None
