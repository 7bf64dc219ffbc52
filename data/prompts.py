"""Rows of data files as prompts: rendered by the chat template, tokenised and cut to length, once, at load."""

from __future__ import annotations

import copy
import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, overload

import jinja2
import numpy as np
import pyarrow as pa
from transformers import PreTrainedTokenizerBase

from tridentrl.configs.schema import DataConfig
from tridentrl.data.columns import REWARD_MODEL, load_rows
from tridentrl.data.preferences import with_plain_pairs

_AT_ONCE = 1024
"""Texts per tokenizer call: enough for its threads, few enough to keep Python lists of ids small."""


@dataclass(frozen=True, kw_only=True)
class PromptRow:
    """One prompt with all that its reward may ask for, native Python at every depth."""

    row_id: int
    """Number of the row, counted through the files in their order. Does not change when other rows are left out."""
    prompt_ids: list[int]
    """Exactly the tokens that the engine gets and the trainer scores."""
    prompt_text: str
    """What they say, chat template included."""
    ground_truth: Any
    data_source: str
    ability: Any
    extra_info: Any
    response_ids: list[int] | None
    """Tokens of the `data.response_key` text and an end-of-sequence token; None without that setting."""
    pair_ids: tuple[list[int], list[int]] | None
    """The same of `data.chosen_key` and `data.rejected_key`."""


class PromptDataset:
    """The rows that a run uses, in the order of the files.

    A prompt without any token (an empty list of messages, an empty string that no template fills) is an error, like a null.

    paths: files of `data.{split}_files`. max_response_length: limit on `response_ids` and `pair_ids` in tokens; None: no limit.
    Raises ValueError, before any model is needed, naming the file, the row in it (from 0) and the setting to change.
    """

    def __init__(
        self,
        paths: Sequence[str],
        config: DataConfig,
        tokenizer: PreTrainedTokenizerBase,
        *,
        split: Literal["train", "val"],
        max_response_length: int | None = None,
    ) -> None:
        self._config, self._tokenizer, key = config, tokenizer, f"data.{split}_files"
        self.dropped: Counter[str] = Counter()
        """Rows left out, by reason, for the log."""
        self._rows = load_rows(paths, config, key=key)
        if config.chosen_key and config.rejected_key:
            self._rows = with_plain_pairs(self._rows, config)
        limit = config.val_max_rows if split == "val" else None
        self._table = self._rows.table.slice(0, limit)
        self._is_chat = self._prompts_are_chats()
        self._truncated: set[int] = set()
        prompts = self._limited(self._tokenised_prompts(), config.max_prompt_length, "prompt", "data.max_prompt_length")
        self._responses: dict[str, dict[int, np.ndarray]] = {}
        for setting, what in (("response_key", "response"), ("chosen_key", "chosen response"), ("rejected_key", "rejected response")):
            column = getattr(config, setting)
            if column is None:
                continue
            everything = self._tokenised_responses(column, f"data.{setting}")
            responses = {row: everything[row] for row in prompts}
            if max_response_length is not None:
                responses = self._limited(responses, max_response_length, what, "rollout.max_response_length")
            prompts = {row: prompts[row] for row in responses}
            self._responses[setting] = responses
        self._prompts, self._row_ids = prompts, list(prompts)
        if not prompts:
            reasons = ", ".join(f"{count} with a {reason}" for reason, count in self.dropped.items())
            raise ValueError(f"{key}: no row is left of {len(self._table)}: {reasons}; raise that limit or set data.truncation=left")

    def __len__(self) -> int:
        return len(self._row_ids)

    @overload
    def __getitem__(self, item: int) -> PromptRow: ...
    @overload
    def __getitem__(self, item: Sequence[int]) -> list[PromptRow]: ...
    def __getitem__(self, item: int | Sequence[int]) -> PromptRow | list[PromptRow]:
        """The row at a position, or the rows at several, such as a sampler's batch."""
        if not isinstance(item, int):
            return [self[position] for position in item]
        row, config = self._row_ids[item], self._config
        (values,) = self._table.slice(row, 1).to_pylist(maps_as_pydicts="strict")
        ids = self._prompts[row].tolist()
        if config.answer_key is not None:
            truth = values[config.answer_key]
        else:
            truth = values[REWARD_MODEL]["ground_truth"] if self._rows.has(REWARD_MODEL, "ground_truth") else None
        chosen, rejected = self._response(row, "chosen_key"), self._response(row, "rejected_key")
        return PromptRow(
            row_id=row,
            prompt_ids=ids,
            prompt_text=self._tokenizer.decode(ids) if row in self._truncated else self._text(values[config.prompt_key], row),
            ground_truth=truth,
            data_source=str(values.get(config.reward_fn_key, "default")),
            ability=values.get("ability"),
            extra_info=values.get("extra_info"),
            response_ids=self._response(row, "response_key"),
            pair_ids=(chosen, rejected) if chosen and rejected else None,
        )

    def split(self, share: float, seed: int) -> tuple[PromptDataset, PromptDataset]:
        """The set without a random `share` of its rows (rounded up), and one of these; both in the order of the files."""
        chosen = set(random.Random(f"{seed}/held out").sample(self._row_ids, math.ceil(share * len(self))))
        rest, held_out = copy.copy(self), copy.copy(self)
        rest._row_ids = [row for row in self._row_ids if row not in chosen]
        held_out._row_ids = [row for row in self._row_ids if row in chosen]
        return rest, held_out

    def _response(self, row: int, setting: str) -> list[int] | None:
        return self._responses[setting][row].tolist() if setting in self._responses else None

    @property
    def data_sources(self) -> list[str]:
        """Data source of every row."""
        if self._config.reward_fn_key not in self._table.column_names:
            return ["default"] * len(self)
        column = self._table.column(self._config.reward_fn_key)
        return [str(column[row].as_py()) for row in self._row_ids]

    def _prompts_are_chats(self) -> bool:
        """Whether prompts go through the chat template. ValueError when they cannot."""
        config, kind = self._config, self._table.schema.field(self._config.prompt_key).type
        lists = _is_list(kind)
        if not lists and not _is_text(kind):
            raise ValueError(
                f"the column {config.prompt_key!r} holds {kind}; a prompt is a string or a list of messages; "
                "set data.prompt_key to a column that has such"
            )
        if lists and config.apply_chat_template is False:
            raise ValueError(
                f"data.apply_chat_template=false: the column {config.prompt_key!r} holds lists of messages, which need a template; "
                "set data.apply_chat_template=auto or data.prompt_key to a column of strings"
            )
        is_chat = lists or config.apply_chat_template is True
        if is_chat and not self._tokenizer.chat_template:
            raise ValueError(
                f"the tokenizer {self._tokenizer.name_or_path!r} has no chat template, which prompts in {config.prompt_key!r} need; set "
                "model.tokenizer_name_or_path to one that has, or use prompts that are strings with data.apply_chat_template=false"
            )
        return is_chat

    def _text(self, prompt: Any, row: int) -> str:
        """The prompt as the model reads it."""
        if not self._is_chat:
            assert isinstance(prompt, str)
            return prompt
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [_message(turn) for turn in prompt]
        if not messages:
            raise ValueError(f"the prompt in {self._rows.where(row)} is an empty list of messages; fill it in or take the row out")
        try:
            text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except (jinja2.TemplateError, TypeError, KeyError) as error:
            raise ValueError(f"the chat template does not take the prompt in {self._rows.where(row)}: {error}") from error
        assert isinstance(text, str)
        return text

    def _tokenised_prompts(self) -> dict[int, np.ndarray]:
        # A rendered template has its special tokens already; a plain string gets those that start a text, never one that ends it.
        prompts = self._tokenised(self._config.prompt_key, self._text, special=not self._is_chat)
        for row, ids in prompts.items():
            if not len(ids):
                raise ValueError(f"the prompt in {self._rows.where(row)} has no token; fill it in or take the row out")
        return prompts

    def _tokenised_responses(self, column: str, setting: str) -> dict[int, np.ndarray]:
        kind, end = self._table.schema.field(column).type, self._tokenizer.eos_token_id
        if not _is_text(kind):
            raise ValueError(f"the column {column!r} ({setting}) holds {kind}; a response is a string")
        if end is None:
            raise ValueError(f"the tokenizer {self._tokenizer.name_or_path!r} has no end-of-sequence token, so a response could not end")
        responses = self._tokenised(column, lambda text, row: text, special=False)
        return {row: ids if len(ids) and ids[-1] == end else np.append(ids, np.int32(end)) for row, ids in responses.items()}

    def _tokenised(self, column: str, text: Any, *, special: bool) -> dict[int, np.ndarray]:
        """int32 ids of every row of a column, by row number."""
        ids: dict[int, np.ndarray] = {}
        end = self._tokenizer.eos_token_id
        ends_texts = special and end is not None and self._tokenizer("a")["input_ids"][-1] == end
        for first in range(0, len(self._table), _AT_ONCE):
            values = self._table.column(column).slice(first, _AT_ONCE).to_pylist(maps_as_pydicts="strict")
            texts = [text(value, row) for row, value in enumerate(values, start=first)]
            lists = self._tokenizer(texts, add_special_tokens=special, verbose=False)["input_ids"]
            for row, tokens in enumerate(lists, start=first):
                ids[row] = np.array(tokens[:-1] if ends_texts else tokens, dtype=np.int32)
        return ids

    def _limited(self, sequences: dict[int, np.ndarray], limit: int, what: str, setting: str) -> dict[int, np.ndarray]:
        """Apply `data.truncation` to sequences of more than `limit` tokens. A response is only ever cut at its right end."""
        mode = self._config.truncation
        long = {row for row, ids in sequences.items() if len(ids) > limit}
        if long and mode == "error":
            row, longest = min(long), max(len(sequences[row]) for row in long)
            raise ValueError(
                f"{setting}={limit}: {len(long)} of {len(sequences)} {what}s are longer, first in {self._rows.where(row)} with "
                f"{len(sequences[row])} tokens; set {setting}={longest}, or data.truncation to filter, left or right"
            )
        if mode == "filter":
            if long:
                self.dropped[f"{what} longer than {setting}={limit}"] += len(long)
            return {row: ids for row, ids in sequences.items() if row not in long}
        if what == "prompt":
            self._truncated = long
        keep_end = mode == "left" and what == "prompt"
        return {row: ids if row not in long else ids[-limit:] if keep_end else ids[:limit] for row, ids in sequences.items()}


def _message(turn: Any) -> Any:
    """One message without the keys that only other rows have, which a table fills with null."""
    if not isinstance(turn, dict):
        return turn
    return {name: _without_nulls(value) for name, value in turn.items() if value is not None or name == "content"}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(item) for name, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind) or pa.types.is_list_view(kind)


def _is_text(kind: pa.DataType) -> bool:
    return pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
