"""Which rows form the batch of each step: deterministic, resumable, every row at most once per epoch."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping
from typing import Any


class PromptSampler:
    """Endless iterator over batches of row numbers. The order of an epoch depends on (seed, epoch) and nothing else.

    Every rank runs the same sampler and gets the same batches. With `drop_last=False` the last batch of an epoch may be short.
    Raises ValueError when an epoch would have no batch.
    """

    def __init__(self, num_rows: int, batch_size: int, *, seed: int, shuffle: bool = True, drop_last: bool = True) -> None:
        if num_rows < 1:
            raise ValueError("data.train_files: the training set has no rows")
        if drop_last and num_rows < batch_size:
            raise ValueError(
                f"data.train_batch_size={batch_size} with data.drop_last=true: the training set has {num_rows} rows, which never fill a "
                f"batch, so there would be no step; set data.train_batch_size={num_rows} or less, or data.drop_last=false"
            )
        self.num_rows, self.batch_size = num_rows, batch_size
        self.seed, self.shuffle, self.drop_last = seed, shuffle, drop_last
        self.epoch, self.rows_taken = 0, 0
        self._order = self.order(0)

    @property
    def dropped_per_epoch(self) -> int:
        """Rows that no batch of an epoch holds."""
        return self.num_rows % self.batch_size if self.drop_last else 0

    @property
    def steps_per_epoch(self) -> int:
        """Batches in an epoch."""
        used = self.num_rows - self.dropped_per_epoch
        return math.ceil(used / self.batch_size)

    def order(self, epoch: int) -> list[int]:
        """Row numbers in the order of that epoch."""
        rows = list(range(self.num_rows))
        if self.shuffle:
            random.Random(f"{self.seed}/{epoch}").shuffle(rows)
        return rows

    def __iter__(self) -> Iterator[list[int]]:
        return self

    def __next__(self) -> list[int]:
        left = self.num_rows - self.rows_taken
        if left == 0 or (self.drop_last and left < self.batch_size):
            self.epoch, self.rows_taken = self.epoch + 1, 0
            self._order = self.order(self.epoch)
        batch = self._order[self.rows_taken : self.rows_taken + self.batch_size]
        self.rows_taken += len(batch)
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Where the next batch starts, and what the order depends on. Plain values. The batch size may differ after a resume."""
        return {
            "epoch": self.epoch,
            "rows_taken": self.rows_taken,
            "num_rows": self.num_rows,
            "seed": self.seed,
            "shuffle": self.shuffle,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken. ValueError when the rows or their order are not the ones it counts in."""
        for name, key in (("num_rows", "rows of the training set"), ("seed", "seed"), ("shuffle", "data.shuffle")):
            if state[name] != getattr(self, name):
                raise ValueError(
                    f"cannot continue the data order: {key} was {state[name]} when it was saved and is {getattr(self, name)}; "
                    "use the same files, limits and seed, or start a new run"
                )
        self.epoch, self.rows_taken = state["epoch"], state["rows_taken"]
        self._order = self.order(self.epoch)


def planned_steps(total_steps: int | None, epochs: int | None, steps_per_epoch: int) -> tuple[int, str]:
    """How many steps the run has, and the limit that ends it, in words. At least one limit is given."""
    limits = []
    if total_steps is not None:
        limits.append((total_steps, f"trainer.total_steps={total_steps}"))
    if epochs is not None:
        limits.append((epochs * steps_per_epoch, f"trainer.epochs={epochs} of {steps_per_epoch} steps each"))
    return min(limits, key=lambda limit: limit[0])


def evaluation_batches(num_rows: int, batch_size: int | None) -> list[list[int]]:
    """Every row exactly once, in order; the last batch may be short. None: one batch."""
    size = batch_size or max(num_rows, 1)
    return [list(range(first, min(first + size, num_rows))) for first in range(0, num_rows, size)]
