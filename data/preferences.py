"""Preference pairs: which response to a prompt was chosen and which was rejected, in the forms that data files have them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa

from tridentrl.configs.schema import DataConfig
from tridentrl.data.columns import Rows


def with_plain_pairs(rows: Rows, config: DataConfig) -> Rows:
    """The rows with both responses as strings, and with the prompt in its column.

    A response is a string, a list with the answering message, or the whole conversation, whose last message is the answer; the messages
    before it are then the prompt, whatever the prompt column says. Raises ValueError with the row and what is wrong with it.
    """
    assert config.chosen_key and config.rejected_key
    columns: dict[str, list[Any]] = {config.prompt_key: [], config.chosen_key: [], config.rejected_key: []}
    has_prompts = config.prompt_key in rows.table.column_names
    table = rows.table.select([name for name in columns if name in rows.table.column_names])
    for number, row in enumerate(table.to_pylist(maps_as_pydicts="strict")):
        try:
            chosen, before = _answer(row[config.chosen_key])
            rejected, before_too = _answer(row[config.rejected_key])
            if before != before_too:
                raise ValueError("the messages before the two answers differ, so they are no pair")
            if not before and not has_prompts:
                raise ValueError(f"there is no prompt: neither messages before the answer nor a column {config.prompt_key!r}")
        except ValueError as error:
            keys = f"{config.chosen_key!r} (data.chosen_key) and {config.rejected_key!r} (data.rejected_key)"
            raise ValueError(f"the columns {keys} in {rows.where(number)}: {error}") from None
        for name, value in zip(columns, (before or row[config.prompt_key], chosen, rejected), strict=True):
            columns[name].append(value)
    table = rows.table
    for name, values in columns.items():
        column = pa.array(values)
        place = table.schema.get_field_index(name)
        table = table.append_column(name, column) if place < 0 else table.set_column(place, name, column)
    return replace(rows, table=table)


def _answer(response: Any) -> tuple[str, list[Mapping[str, Any]]]:
    """Text of the answer, and the messages before it."""
    if isinstance(response, str):
        text, before = response, []
    elif isinstance(response, Sequence) and response and isinstance(response[-1], Mapping):
        *before, last = response
        if last.get("role") != "assistant":
            raise ValueError(f"the last message must be the assistant's, and is of role {last.get('role')!r}")
        text = last.get("content")
    else:
        raise ValueError(f"a response is a string or a list of messages, got {response!r}")
    if not isinstance(text, str) or not text:
        raise ValueError(f"a response must have text, got {text!r}; fill it in or take the row out")
    return text, before
