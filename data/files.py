"""Data files to Arrow tables: `.arrow` (stream and file format), `.parquet`, `.jsonl`, `.json`."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet

_FORMATS = (".arrow", ".parquet", ".jsonl", ".json")


def read_table(path: str | os.PathLike[str], *, key: str) -> pa.Table:
    """All rows of one file. `.json` holds one list of objects or, like `.jsonl`, one object a line. Arrow files are memory-mapped.

    Raises ValueError naming the file and `key`, the setting it came from, when the file is missing, broken, of another format or empty.
    """
    path = Path(path)
    if path.suffix not in _FORMATS:
        raise ValueError(f"{key}: {path} is not a data file; its name must end in one of {', '.join(_FORMATS)}")
    if not path.is_file():
        what = "is a folder; list the files in it" if path.is_dir() else "does not exist"
        raise ValueError(f"{key}: the file {path} {what} (relative paths start at {Path.cwd()})")
    try:
        table = _read(path)
    except (OSError, pa.ArrowException, UnicodeDecodeError, _BrokenJson) as error:
        raise ValueError(f"{key}: cannot read {path} ({path.stat().st_size} bytes): {error}; write the file again or remove it") from error
    if table.num_rows == 0:
        raise ValueError(f"{key}: the file {path} has no rows; write the file again or remove it")
    return table


def unify(tables: Sequence[pa.Table], paths: Sequence[str | os.PathLike[str]]) -> pa.Table:
    """One table with the rows of all, in this order, and the columns by name. What one file lacks is null.

    Types that mean the same are joined: null with anything, string with large_string, list with large_list, integers and floats of
    any width, structs field by field. ValueError for a real clash, with the column, both files and both types.
    """
    tables = [_without_dictionaries(table) for table in tables]
    try:
        table = pa.concat_tables(tables, promote_options="permissive")
    except pa.ArrowException:
        for column in sorted({name for table in tables for name in table.column_names}):
            _explain_clash(column, tables, paths)
        raise
    return table.select(sorted(table.column_names))


def _explain_clash(column: str, tables: Sequence[pa.Table], paths: Sequence[str | os.PathLike[str]]) -> None:
    """Raise for the first pair of files whose types of `column` do not join."""
    having = [(path, table.schema.field(column)) for path, table in zip(paths, tables, strict=True) if column in table.column_names]
    for i, (path, field) in enumerate(having):
        for other_path, other in having[:i]:
            try:
                pa.unify_schemas([pa.schema([other]), pa.schema([field])], promote_options="permissive")
            except pa.ArrowException as error:
                raise ValueError(
                    f"the column {column!r} is {other.type} in {other_path} and {field.type} in {path}; "
                    "write both files with one type for it, or train on one of them"
                ) from error


def _without_dictionaries(table: pa.Table) -> pa.Table:
    """Dictionary-encoded columns as their plain values."""
    for i, field in enumerate(table.schema):
        if pa.types.is_dictionary(field.type):
            table = table.set_column(i, field.name, table.column(i).cast(field.type.value_type))
    return table


class _BrokenJson(Exception):
    """Says which line is wrong."""


def _read(path: Path) -> pa.Table:
    if path.suffix == ".parquet":
        return pyarrow.parquet.read_table(path)
    if path.suffix == ".arrow":
        source = pa.memory_map(str(path))
        try:
            return pa.ipc.open_file(source).read_all()
        except pa.ArrowInvalid:
            source.seek(0)
            return pa.ipc.open_stream(source).read_all()
    text = path.read_text(encoding="utf-8")
    rows = _json_list(text) if text.lstrip().startswith("[") else _json_lines(text)
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            raise _BrokenJson(f"row {number} is not an object with columns but {json.dumps(row)[:80]}")
    columns = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        try:
            # pyarrow's own JSON reader would turn a text that looks like a date into a timestamp.
            columns[name] = pa.array([row.get(name) for row in rows])
        except (pa.ArrowException, OverflowError) as error:
            raise _BrokenJson(f"column {name!r} does not have one type: {error}") from error
    return pa.table(columns)


def _json_list(text: str) -> list[Any]:
    try:
        rows = json.loads(text)
    except json.JSONDecodeError as error:
        raise _BrokenJson(f"line {error.lineno}: {error.msg}") from error
    assert isinstance(rows, list)
    return rows


def _json_lines(text: str) -> list[Any]:
    rows = []
    # Not splitlines: a text may hold characters such as U+2028 that end a line for Python but not in JSON.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError as error:
                raise _BrokenJson(f"line {number}: {error.msg}: {line[:80]}") from error
    return rows
