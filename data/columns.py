"""The columns a run reads, from several files as one table, checked before anything else is built."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import pyarrow as pa
import pyarrow.compute as pc

from tridentrl.configs.schema import DataConfig
from tridentrl.data.files import read_table, unify

REWARD_MODEL = "reward_model"
"""Column of structs whose field `ground_truth` counts when `data.answer_key` is null."""
PASSED_ON = ("ability", "extra_info")
"""Columns that go to the reward as they are, where files have them."""
_DEFAULT_SOURCE = next(field.default for field in fields(DataConfig) if field.name == "reward_fn_key")


@dataclass(frozen=True)
class Rows:
    """The rows of several files, and which file each came from."""

    table: pa.Table
    paths: tuple[str, ...]
    ends: tuple[int, ...]
    """For each file, the number of rows in it and all files before."""

    def where(self, row: int) -> str:
        """A row in words, counted from 0 in its own file."""
        file = bisect_right(self.ends, row)
        return f"row {row - (self.ends[file - 1] if file else 0)} of {self.paths[file]}"

    def has(self, *path: str) -> bool:
        """Whether there is such a column or, below it, such a struct field."""
        kind = pa.struct(self.table.schema)
        for name in path:
            if not pa.types.is_struct(kind) or kind.get_field_index(name) < 0:
                return False
            kind = kind.field(name).type
        return True


def load_rows(paths: Sequence[str], config: DataConfig, *, key: str) -> Rows:
    """Read the files of setting `key` and keep the columns that `config` names. Rows follow each other in the order of the files.

    Raises ValueError listing, for each file, missing columns with the columns found and the setting to change; and for the first null
    in a column that must not have one, with its file and row.
    """
    tables = [read_table(path, key=key) for path in paths]
    pairs = config.chosen_key is not None
    named = {
        # Conversations hold their prompts themselves.
        "prompt_key": None if pairs and not any(config.prompt_key in table.column_names for table in tables) else config.prompt_key,
        "answer_key": config.answer_key,
        "response_key": config.response_key,
        "chosen_key": config.chosen_key,
        "rejected_key": config.rejected_key,
    }
    if config.reward_fn_key != _DEFAULT_SOURCE or any(_DEFAULT_SOURCE in table.column_names for table in tables):
        named["reward_fn_key"] = config.reward_fn_key
    needed = {setting: column for setting, column in named.items() if column is not None}
    problems = list(_missing(needed, tables, paths))
    if problems:
        raise ValueError(f"{key}: " + "\n".join(problems))
    wanted = {*needed.values(), *PASSED_ON, *([REWARD_MODEL] if config.answer_key is None else [])}
    kept = [table.select([name for name in table.column_names if name in wanted]) for table in tables]
    ends = itertools.accumulate(table.num_rows for table in tables)
    rows = Rows(unify(kept, paths), tuple(paths), tuple(ends))
    for setting, column in needed.items():
        _refuse_null(rows, rows.table.column(column), column, f"data.{setting}")
    if config.answer_key is None and rows.has(REWARD_MODEL, "ground_truth"):
        truths = pc.struct_field(rows.table.column(REWARD_MODEL), "ground_truth")
        _refuse_null(rows, truths, f"{REWARD_MODEL}.ground_truth", "data.answer_key")
    return rows


def _missing(needed: dict[str, str], tables: Sequence[pa.Table], paths: Sequence[str]) -> Iterator[str]:
    for table, path in zip(tables, paths, strict=True):
        for setting, column in needed.items():
            if column not in table.column_names:
                found = ", ".join(table.column_names)
                yield f"{path} has no column {column!r}; its columns are {found}; set data.{setting} to the right one"


def _refuse_null(rows: Rows, column: pa.ChunkedArray, name: str, setting: str) -> None:
    nulls = pc.is_null(column)
    count = pc.sum(nulls).as_py()
    if count:
        first = rows.where(pc.index(nulls, True).as_py())
        raise ValueError(
            f"the column {name!r} ({setting}) is null in {count} of {len(column)} rows, first in {first}; "
            "fill in these rows or take them out of the file"
        )
