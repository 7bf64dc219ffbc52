"""Which rows form the batch of each step: deterministic, resumable, every row at most once per epoch."""

from __future__ import annotations

import math
import random
from collections.abc import Hashable, Iterator, Mapping
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
        return _epoch_order(self.num_rows, self.seed, epoch, self.shuffle)

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
        _require_same_order(self, state, {"num_rows": "rows of the training set", "seed": "seed", "shuffle": "data.shuffle"})
        self.epoch, self.rows_taken = state["epoch"], state["rows_taken"]
        self._order = self.order(self.epoch)


class GroupedBatchSampler:
    """Endless iterator over batches of row numbers in which the rows of a group are never parted, for groups that were logged.

    dataset: rows as mappings, or columns by name (`pyarrow.Table`, `datasets.Dataset`). Rows with equal values of `group_key` are a
    group, wherever they are. The order of the groups in an epoch depends on (seed, epoch) and nothing else; each in turn goes into the
    batch until the next one would make it more than `batch_size` rows. A batch holds its groups one after the other, the rows of each
    in the order of the dataset. Every row comes exactly once per epoch, so batches differ in size. Every rank runs the same sampler and
    gets the same batches. Raises ValueError for a dataset without rows or without that key, and for a group larger than a batch.
    """

    def __init__(self, dataset: Any, batch_size: int, group_key: str = "group_id", *, seed: int = 0, shuffle: bool = True) -> None:
        groups: dict[Hashable, list[int]] = {}
        for row, group in enumerate(_column(dataset, group_key)):
            groups.setdefault(group, []).append(row)
        if not groups:
            raise ValueError("the dataset has no rows to group")
        largest = max(groups, key=lambda group: len(groups[group]))
        if len(groups[largest]) > batch_size:
            raise ValueError(
                f"the group {group_key}={largest!r} has {len(groups[largest])} rows, which do not fit into a batch of {batch_size}; "
                f"set batch_size={len(groups[largest])} or more, or make the groups smaller"
            )
        self._groups = list(groups.values())
        self.num_rows, self.num_groups = sum(map(len, self._groups)), len(groups)
        self.batch_size, self.seed, self.shuffle = batch_size, seed, shuffle
        self.epoch, self.groups_taken = 0, 0
        self._order = self.order(0)

    def order(self, epoch: int) -> list[int]:
        """Group numbers, counted by their first rows, in the order of that epoch."""
        return _epoch_order(self.num_groups, self.seed, epoch, self.shuffle)

    def __iter__(self) -> Iterator[list[int]]:
        return self

    def __next__(self) -> list[int]:
        if self.groups_taken == self.num_groups:
            self.epoch, self.groups_taken = self.epoch + 1, 0
            self._order = self.order(self.epoch)
        batch: list[int] = []
        for group in self._order[self.groups_taken :]:
            if len(batch) + len(self._groups[group]) > self.batch_size:
                break
            batch += self._groups[group]
            self.groups_taken += 1
        return batch

    def state_dict(self) -> dict[str, Any]:
        """As for `PromptSampler`: plain values, and the batch size may differ after a resume."""
        names = ("epoch", "groups_taken", "num_rows", "num_groups", "seed", "shuffle")
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken. ValueError when the rows, the groups or their order are not the ones it counts in."""
        _require_same_order(self, state, {"num_rows": "rows", "num_groups": "groups", "seed": "seed", "shuffle": "shuffle"})
        self.epoch, self.groups_taken = state["epoch"], state["groups_taken"]
        self._order = self.order(self.epoch)


def _epoch_order(count: int, seed: int, epoch: int, shuffle: bool) -> list[int]:
    numbers = list(range(count))
    if shuffle:
        random.Random(f"{seed}/{epoch}").shuffle(numbers)
    return numbers


def _require_same_order(sampler: Any, state: Mapping[str, Any], words: Mapping[str, str]) -> None:
    """`words`: what the order depends on, in words."""
    for name, key in words.items():
        if state[name] != getattr(sampler, name):
            raise ValueError(
                f"cannot continue the data order: {key} was {state[name]} when it was saved and is {getattr(sampler, name)}; "
                "use the same files, limits and seed, or start a new run"
            )


def _column(dataset: Any, key: str) -> list[Hashable]:
    """Values of one column, none of them null."""
    if hasattr(dataset, "column_names"):
        column = dataset[key] if key in dataset.column_names else [None] * len(dataset)
        values = column.to_pylist() if hasattr(column, "to_pylist") else list(column)
    else:
        values = [row.get(key) for row in dataset]
    if None in values:
        raise ValueError(f"row {values.index(None)} of the dataset has no {key}; set group_key to a key that every row has")
    return values


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
