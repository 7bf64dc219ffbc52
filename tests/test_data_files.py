"""Data files of every format become one table, whatever their order; what cannot be read says which file and which setting.

Not covered: files on remote storage, and columns of more than 2 GiB.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from datafiles import turn, write

from tridentrl.data.files import read_table, unify

ROWS = [
    {"prompt": "2 + 2", "data_source": "sum", "extra_info": {"level": 1}},
    {"prompt": "día \u2028 2024-01-01", "data_source": "sum", "extra_info": {"level": 2}},
]


@pytest.mark.parametrize("name", ["a.arrow", "a.stream.arrow", "a.parquet", "a.jsonl", "a.json"])
def test_every_format_gives_the_same_rows(tmp_path: Path, name: str) -> None:
    assert read_table(write(tmp_path / name, ROWS), key="data.train_files").to_pylist() == ROWS


def test_json_that_holds_one_object_a_line_and_dates_stay_text(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('{"answer": "2024-01-01"}\n\n{"answer": "x", "more": 1}\n')
    assert read_table(path, key="k").to_pylist() == [{"answer": "2024-01-01", "more": None}, {"answer": "x", "more": 1}]


def test_files_with_other_schemas_join_in_any_order(tmp_path: Path) -> None:
    large = pa.large_list(pa.struct([("content", pa.large_string()), ("role", pa.large_string())]))
    tables = [
        pa.table({"prompt": [[turn("user", "a")]], "note": pa.nulls(1), "level": pa.array([1], pa.int32())}),
        pa.table({"note": ["b"], "prompt": [[turn("user", "b", name="bob")]], "level": pa.array([2.5])}),
        pa.table({"prompt": [[turn("user", "c"), turn("assistant", "C")]], "note": ["c"]}),
        pa.table({"prompt": pa.array([[turn("user", "d")]], large), "note": pa.array(["d"]).dictionary_encode()}),
    ]
    paths = [write(tmp_path / f"{name}.parquet", table) for name, table in zip("abcd", tables, strict=True)]

    def plain(row: dict[str, Any]) -> str:
        prompt = [{name: text for name, text in message.items() if text is not None} for message in row["prompt"]]
        return json.dumps(row | {"prompt": prompt}, sort_keys=True)

    expected = {
        json.dumps({"level": level, "note": note, "prompt": prompt}, sort_keys=True)
        for level, note, prompt in [
            (1.0, None, [turn("user", "a")]),
            (2.5, "b", [turn("user", "b", name="bob")]),
            (None, "c", [turn("user", "c"), turn("assistant", "C")]),
            (None, "d", [turn("user", "d")]),
        ]
    }
    for order in itertools.permutations(paths):
        table = unify([read_table(path, key="k") for path in order], order)
        assert table.column_names == ["level", "note", "prompt"]
        assert {plain(row) for row in table.to_pylist()} == expected
        assert [row["prompt"][0]["content"] for row in table.to_pylist()] == [Path(path).stem for path in order]


def test_a_real_clash_of_types_names_both_files_the_column_and_both_types() -> None:
    tables = [pa.table({"x": [1], "y": ["a"]}), pa.table({"x": [2], "y": ["b"]}), pa.table({"x": [{"a": 1}], "y": ["c"]})]
    with pytest.raises(ValueError, match=r"^the column 'x' is int64 in a\.arrow and struct<a: int64> in c\.arrow; write both"):
        unify(tables, ["a.arrow", "b.arrow", "c.arrow"])
    with pytest.raises(ValueError, match=r"^the column 'x' is struct<a: int64> in c\.arrow and int64 in b\.arrow"):
        unify(tables[::-1], ["c.arrow", "b.arrow", "a.arrow"])


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.arrow", b"", "cannot read {path} (0 bytes)"),
        ("a.arrow", b"not arrow at all", "cannot read {path} (16 bytes)"),
        ("a.parquet", b"PAR1", "cannot read {path} (4 bytes)"),
        ("a.jsonl", b"", "the file {path} has no rows"),
        ("a.jsonl", b'{"a": 1}\n{"a": \n', "cannot read {path} (16 bytes): line 2: Expecting value"),
        ("a.jsonl", b'{"a": 1}\n"b"\n', 'row 1 is not an object with columns but "b"'),
        ("a.jsonl", b'{"a": 1}\n{"a": "x"}\n', "column 'a' does not have one type"),
        ("a.json", b'[{"a": 1},', "cannot read {path}"),
        ("a.jsonl", b"\xff\xfe", "cannot read {path}"),
        ("a.csv", b"a,b\n", "{path} is not a data file; its name must end in one of .arrow, .parquet, .jsonl, .json"),
        ("none.arrow", None, "the file {path} does not exist"),
    ],
)
def test_a_file_that_cannot_be_read_is_named_with_its_setting(tmp_path: Path, name: str, content: bytes | None, words: str) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError) as caught:
        read_table(path, key="data.val_files")
    assert str(caught.value).startswith("data.val_files: ") and words.format(path=path) in str(caught.value)


def test_a_truncated_arrow_file_is_refused_not_read_in_part(tmp_path: Path) -> None:
    table = pa.table({"prompt": [str(number) for number in range(1000)]})
    for name in ("a.arrow", "a.stream.arrow", "a.parquet"):
        path = Path(write(tmp_path / name, table))
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        with pytest.raises(ValueError, match="cannot read"):
            read_table(path, key="k")


def test_files_without_rows_and_folders_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", pa.table({"prompt": pa.array([], pa.string())}))
    with pytest.raises(ValueError, match=r"a\.parquet has no rows"):
        read_table(path, key="k")
    (tmp_path / "b.arrow").mkdir()
    with pytest.raises(ValueError, match=r"b\.arrow is a folder; list the files in it"):
        read_table(tmp_path / "b.arrow", key="k")
