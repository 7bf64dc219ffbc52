"""Writes small data files in every format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet


def write(path: Path, rows: list[dict[str, Any]] | pa.Table) -> str:
    """Write rows in the format of the file's name; `.stream.arrow` is Arrow's stream format."""
    table = rows if isinstance(rows, pa.Table) else pa.Table.from_pylist(rows)
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(table, path)
    elif path.suffix == ".arrow":
        new = pa.ipc.new_stream if ".stream" in path.name else pa.ipc.new_file
        with pa.OSFile(str(path), "wb") as sink, new(sink, table.schema) as writer:
            writer.write_table(table)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in table.to_pylist()), encoding="utf-8")
    else:
        path.write_text(json.dumps(table.to_pylist()), encoding="utf-8")
    return str(path)


def turn(role: str, content: str, **more: str) -> dict[str, str]:
    return {"role": role, "content": content, **more}
