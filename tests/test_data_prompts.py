"""Files to prompt rows to batches: templates, limits, missing columns, sampling, balance.

The tokenizer here is a word-level one made on the spot, whose ids can be counted by hand. Not covered: the templates of real models.
"""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from datafiles import turn, write
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from tridentrl.configs.schema import DataConfig
from tridentrl.data.balance import balanced_assignment, micro_batches
from tridentrl.data.prompts import PromptDataset
from tridentrl.data.sampler import PromptSampler, evaluation_batches, planned_steps

WORDS = ["<unk>", "<s>", "</s>", "<user>", "<assistant>", "<end>", "a", "b", "c", "d"]
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}> {{ m.content }} <end> {% if m.name is defined %}{{ m.name }} {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def tokenizer(*, template: str | None = TEMPLATE, start: bool = False, end: bool = False) -> PreTrainedTokenizerFast:
    """Words to their place in WORDS. start, end: add <s> and </s> around a plain text."""
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    single = f"{'<s> ' if start else ''}$A{' </s>' if end else ''}"
    core.post_processor = processors.TemplateProcessing(single=single, special_tokens=[("<s>", 1), ("</s>", 2)])
    fast = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    fast.chat_template = template
    return fast


def config(**changes: Any) -> DataConfig:
    return DataConfig(train_files=("unused",), **changes)


def dataset(paths: str | list[str], tok: PreTrainedTokenizerFast | None = None, **changes: Any) -> PromptDataset:
    options = {name: changes.pop(name) for name in ("split", "max_response_length") if name in changes}
    paths = [paths] if isinstance(paths, str) else paths
    return PromptDataset(paths, config(**changes), tok or tokenizer(), **{"split": "train", **options})


def rows_of(data: PromptDataset) -> list[Any]:
    return [data[i] for i in range(len(data))]


def flat(batches: list[list[int]]) -> list[int]:
    return list(itertools.chain.from_iterable(batches))


CHATS = [
    [turn("user", "a")],
    [turn("user", "b c")],
    [turn("user", "a"), turn("assistant", "b"), turn("user", "c")],
]


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "a.stream.arrow", "a.jsonl"])
def test_chats_of_unequal_turns_give_the_ids_of_plain_python_lists(tmp_path: Path, name: str) -> None:
    data = dataset(write(tmp_path / name, [{"prompt": chat, "extra_info": {"chat": chat, "tags": [["x"], []]}} for chat in CHATS]))
    plain = tokenizer()
    expected = [plain.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) for chat in CHATS]
    assert [row.prompt_ids for row in rows_of(data)] == expected
    assert expected[2] == [3, 6, 5, 4, 7, 5, 3, 8, 5, 4]
    for row, chat in zip(rows_of(data), CHATS, strict=True):
        assert row.extra_info == {"chat": chat, "tags": [["x"], []]}
        assert json.loads(json.dumps(row.extra_info)) == row.extra_info and type(row.prompt_ids[0]) is int
        assert row.prompt_text == plain.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)


def test_a_key_that_only_another_files_messages_have_does_not_show_in_the_template(tmp_path: Path) -> None:
    paths = [
        write(tmp_path / "a.parquet", [{"prompt": [turn("user", "a", name="d")]}]),
        write(tmp_path / "b.parquet", [{"prompt": [turn("user", "b")]}]),
    ]
    assert [row.prompt_ids for row in rows_of(dataset(paths))] == [[3, 6, 5, 9, 4], [3, 7, 5, 4]]
    assert [row.prompt_ids for row in rows_of(dataset(paths[::-1]))] == [[3, 7, 5, 4], [3, 6, 5, 9, 4]]


def test_strings_are_taken_as_they_are_or_as_a_user_message(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", [{"prompt": "a b"}])
    assert dataset(path)[0].prompt_ids == [6, 7]
    assert dataset(path, tokenizer(start=True))[0].prompt_ids == [1, 6, 7]
    assert dataset(path, tokenizer(start=True, end=True))[0].prompt_ids == [1, 6, 7]  # a prompt never ends the text
    row = dataset(path, tokenizer(start=True), apply_chat_template=True)[0]
    assert (row.prompt_ids, row.prompt_text) == ([3, 6, 7, 5, 4], "<user> a b <end> <assistant>")


def test_a_template_that_is_missing_or_not_wanted_is_an_error_with_the_setting(tmp_path: Path) -> None:
    chats, numbers = write(tmp_path / "a.parquet", [{"prompt": CHATS[0]}]), write(tmp_path / "b.parquet", [{"prompt": 3}])
    with pytest.raises(ValueError, match=r"no chat template.*model\.tokenizer_name_or_path"):
        dataset(chats, tokenizer(template=None))
    with pytest.raises(ValueError, match=r"^data\.apply_chat_template=false: the column 'prompt' holds lists"):
        dataset(chats, apply_chat_template=False)
    with pytest.raises(ValueError, match=r"'prompt' holds int64; a prompt is a string or a list"):
        dataset(numbers)
    with pytest.raises(ValueError, match=r"does not take the prompt in row 0 of .*a\.parquet: roles must alternate"):
        dataset(chats, tokenizer(template="{{ raise_exception('roles must alternate') }}"))


LONG = [{"prompt": [turn("user", " ".join(["a"] * (count - 4) + ["b"]))]} for count in (15, 16, 17)]
"""Prompts of so many tokens after the template, which adds three."""


def test_prompts_up_to_the_limit_are_kept_and_a_longer_one_is_an_error(tmp_path: Path) -> None:
    paths = [write(tmp_path / "a.parquet", LONG[:1]), write(tmp_path / "b.parquet", LONG[1:])]
    assert [len(row.prompt_ids) for row in rows_of(dataset(paths[0], max_prompt_length=16))] == [15]
    with pytest.raises(ValueError) as caught:
        dataset(paths, max_prompt_length=16)
    assert str(caught.value) == (
        f"data.max_prompt_length=16: 1 of 3 prompts are longer, first in row 1 of {paths[1]} with 17 tokens; "
        "set data.max_prompt_length=17, or data.truncation to filter, left or right"
    )


def test_longer_prompts_are_dropped_and_counted_or_cut_to_the_limit(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", LONG[::-1])
    whole = [row.prompt_ids for row in rows_of(dataset(path))]
    kept = dataset(path, max_prompt_length=16, truncation="filter")
    assert [row.prompt_ids for row in rows_of(kept)] == whole[1:]
    assert [row.row_id for row in rows_of(kept)] == [1, 2]
    assert kept.dropped == {"prompt longer than data.max_prompt_length=16": 1}
    left, right = (dataset(path, max_prompt_length=16, truncation=side) for side in ("left", "right"))
    assert [row.prompt_ids for row in rows_of(left)] == [whole[0][1:], *whole[1:]]
    assert [row.prompt_ids for row in rows_of(right)] == [whole[0][:16], *whole[1:]]
    assert left[0].prompt_text.split() == ["a"] * 13 + ["b", "<end>", "<assistant>"] and not left.dropped
    with pytest.raises(ValueError, match=r"^data\.train_files: no row is left of 3: 3 with a prompt longer than data\.max_prompt_length=2"):
        dataset(path, max_prompt_length=2, truncation="filter")


@pytest.mark.parametrize(
    ("prompts", "words"),
    [
        (["a", "", "b"], "the prompt in row 1 of {path} has no token"),
        (["a", "  "], "the prompt in row 1 of {path} has no token"),
        ([CHATS[0], []], "the prompt in row 1 of {path} is an empty list of messages"),
        ([CHATS[0], None], "the column 'prompt' (data.prompt_key) is null in 1 of 2 rows, first in row 1 of {path}"),
        ([None, None], "the column 'prompt' (data.prompt_key) is null in 2 of 2 rows, first in row 0 of {path}"),
    ],
)
def test_a_prompt_without_tokens_is_an_error_with_its_row(tmp_path: Path, prompts: list[Any], words: str) -> None:
    first, path = (
        write(tmp_path / "first.parquet", [{"prompt": prompts[0] or "a"}]),
        write(tmp_path / "a.parquet", [{"prompt": p} for p in prompts]),
    )
    with pytest.raises(ValueError) as caught:
        dataset([first, path])
    assert words.format(path=path).replace("1 of 2 rows", "1 of 3 rows").replace("2 of 2 rows", "2 of 3 rows") in str(caught.value)


def test_empty_content_that_renders_to_tokens_is_allowed(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", [{"prompt": [turn("user", "")]}, {"prompt": [turn("user", "   ")]}])
    assert [row.prompt_ids for row in rows_of(dataset(path))] == [[3, 5, 4], [3, 5, 4]]
    assert dataset(write(tmp_path / "b.parquet", [{"prompt": ""}]), tokenizer(start=True))[0].prompt_ids == [1]


def test_missing_columns_are_told_for_every_file_with_the_setting(tmp_path: Path) -> None:
    good = write(tmp_path / "good.parquet", [{"prompt": "a", "truth": "1", "data_source": "s"}])
    bad = write(tmp_path / "bad.parquet", [{"question": "a", "answer": "1"}])
    with pytest.raises(ValueError) as caught:
        dataset([good, bad], answer_key="truth", split="val")
    lines = str(caught.value).splitlines()
    assert lines[0].startswith(f"data.val_files: {bad} has no column 'prompt'; its columns are question, answer; set data.prompt_key")
    assert [line.rpartition("set ")[2].split()[0] for line in lines] == ["data.prompt_key", "data.answer_key", "data.reward_fn_key"]
    row = dataset(bad, prompt_key="question", answer_key="answer")[0]
    assert (row.prompt_ids, row.ground_truth, row.data_source) == ([6], "1", "default")
    with pytest.raises(ValueError, match=r"good\.parquet has no column 'source'.*set data\.reward_fn_key"):
        dataset(good, reward_fn_key="source")


def test_ground_truth_and_what_the_reward_may_ask_for(tmp_path: Path) -> None:
    rows = [
        {"prompt": "a", "data_source": "s", "ability": "math", "reward_model": {"style": "rule", "ground_truth": ["4", "four"]}, "alt": 5}
    ]
    path = write(tmp_path / "a.parquet", rows)
    row = dataset(path)[0]
    assert (row.ground_truth, row.data_source, row.ability, row.extra_info, row.response_ids) == (["4", "four"], "s", "math", None, None)
    assert dataset(path, answer_key="alt")[0].ground_truth == 5
    assert dataset(write(tmp_path / "b.parquet", [{"prompt": "a"}]))[0].ground_truth is None
    broken = write(tmp_path / "c.parquet", [{**rows[0], "reward_model": {"style": "rule", "ground_truth": None}}])
    with pytest.raises(
        ValueError, match=r"'reward_model\.ground_truth' \(data\.answer_key\) is null in 1 of 2 rows, first in row 0 of .*c\.parquet"
    ):
        dataset([path, broken])
    assert dataset([path, broken], answer_key="alt")[1].ground_truth == 5


def test_responses_end_with_the_end_token_and_obey_the_same_limit_rule(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", [{"prompt": "a", "r": "b c"}, {"prompt": "b", "r": "c c c </s>"}])
    tok = tokenizer(start=True)
    assert [row.response_ids for row in rows_of(dataset(path, tok, response_key="r"))] == [[7, 8, 2], [8, 8, 8, 2]]
    options: dict[str, Any] = {"response_key": "r", "max_response_length": 3}
    with pytest.raises(
        ValueError, match=r"^rollout\.max_response_length=3: 1 of 2 responses are longer, first in row 1 of .* with 4 tokens"
    ):
        dataset(path, tok, **options)
    kept = dataset(path, tok, truncation="filter", **options)
    assert (len(kept), kept[0].response_ids, sum(kept.dropped.values())) == (1, [7, 8, 2], 1)
    assert dataset(path, tok, truncation="left", **options)[1].response_ids == [8, 8, 8]


def test_evaluation_rows_are_limited_and_every_row_is_scored_once(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", [{"prompt": "a", "reward_model": {"ground_truth": reward}} for reward in (0, 0, 0, 0, 1)])
    data = dataset(path, split="val")
    batches = evaluation_batches(len(data), 2)
    assert [len(batch) for batch in batches] == [2, 2, 1]
    scored = [row for batch in batches for row in data[batch]]
    assert [row.row_id for row in scored] == [0, 1, 2, 3, 4]
    assert sum(row.ground_truth for row in scored) / len(scored) == 0.2
    assert evaluation_batches(5, None) == [[0, 1, 2, 3, 4]]
    assert len(dataset(path, split="val", val_max_rows=3)) == 3 and len(dataset(path, split="train", val_max_rows=3)) == 5


def test_a_share_of_the_rows_is_held_out_by_seed(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", [{"prompt": text, "data_source": text} for text in ("a", "b", "a b", "c", "d", "a c", "b c")])
    rest, held_out = dataset(path).split(0.4, 1)
    assert len(held_out) == 3 and len(rest) == 4  # 2.8 rounded up
    assert sorted([row.row_id for row in rows_of(rest)] + [row.row_id for row in rows_of(held_out)]) == list(range(7))
    for part in (rest, held_out):
        rows = rows_of(part)
        assert [row.prompt_text for row in rows] == part.data_sources and rows == sorted(rows, key=lambda row: row.row_id)
    again, other = dataset(path).split(0.4, 1)[1], dataset(path).split(0.4, 2)[1]
    assert rows_of(again) == rows_of(held_out) != rows_of(other)


def test_an_epoch_holds_every_row_once_in_an_order_from_seed_and_epoch() -> None:
    sampler = PromptSampler(10, 3, seed=1, drop_last=False)
    first, second = (list(itertools.islice(sampler, 4)) for _ in range(2))
    assert [len(batch) for batch in first] == [3, 3, 3, 1] and sorted(flat(first)) == list(range(10)) == sorted(flat(second))
    assert flat(first) == PromptSampler(10, 5, seed=1).order(0) and flat(second) == PromptSampler(10, 10, seed=1).order(1)
    assert len({tuple(PromptSampler(10, 3, seed=seed).order(epoch)) for seed in range(3) for epoch in range(3)}) == 9
    assert list(itertools.islice(PromptSampler(4, 2, seed=1, shuffle=False), 3)) == [[0, 1], [2, 3], [0, 1]]


def test_rows_that_fill_no_batch_are_counted_and_come_in_other_epochs() -> None:
    sampler = PromptSampler(10, 4, seed=1)
    assert (sampler.steps_per_epoch, sampler.dropped_per_epoch) == (2, 2)
    seen = Counter(row for batch in itertools.islice(sampler, 40) for row in batch)
    assert set(seen) == set(range(10)) and sum(seen.values()) == 160
    assert (
        PromptSampler(10, 4, seed=1, drop_last=False).steps_per_epoch,
        PromptSampler(10, 4, seed=1, drop_last=False).dropped_per_epoch,
    ) == (3, 0)


def test_a_set_smaller_than_the_batch_is_an_error_unless_short_batches_are_allowed() -> None:
    with pytest.raises(
        ValueError, match=r"^data\.train_batch_size=8 with data\.drop_last=true: the training set has 3 rows.*train_batch_size=3 or less"
    ):
        PromptSampler(3, 8, seed=1)
    assert sorted(next(PromptSampler(3, 8, seed=1, drop_last=False))) == [0, 1, 2]


def test_the_limit_that_ends_the_run_is_told() -> None:
    assert planned_steps(100, 1, PromptSampler(8, 8, seed=1).steps_per_epoch) == (1, "trainer.epochs=1 of 1 steps each")
    assert planned_steps(100, None, 3) == (100, "trainer.total_steps=100")
    assert planned_steps(None, 2, 3) == (6, "trainer.epochs=2 of 3 steps each")


@pytest.mark.parametrize("drop_last", [True, False])
def test_a_resumed_sampler_goes_on_where_the_other_stopped(drop_last: bool) -> None:
    for stop in range(12):
        whole, resumed = (PromptSampler(10, 3, seed=5, drop_last=drop_last) for _ in range(2))
        list(itertools.islice(whole, stop))
        resumed.load_state_dict(json.loads(json.dumps(whole.state_dict())))
        assert list(itertools.islice(resumed, 9)) == list(itertools.islice(whole, 9))
    with pytest.raises(ValueError, match="rows of the training set was 10 when it was saved and is 11"):
        PromptSampler(11, 3, seed=5).load_state_dict(whole.state_dict())
    with pytest.raises(ValueError, match="seed was 5"):
        PromptSampler(10, 3, seed=6).load_state_dict(whole.state_dict())


def test_sequences_are_shared_by_tokens_the_longest_first() -> None:
    # By hand: 9 -> 0, 8 -> 1, 5 -> 1 (8 < 9), 4 -> 0 (9 < 13), 4 -> 0 (13 = 13, fewer? both hold two: lowest), 1 -> 1.
    assert balanced_assignment([4, 9, 5, 1, 8, 4], 2) == [0, 0, 1, 1, 1, 0]
    assert balanced_assignment([], 2) == [] and balanced_assignment([0, 0, 0, 0], 2) == [0, 1, 0, 1]
    rng = random.Random(0)
    for parts in (1, 2, 3, 8):
        lengths = [rng.randint(1, 500) for _ in range(64)]
        part_of = balanced_assignment(lengths, parts)
        loads = [sum(length for length, part in zip(lengths, part_of, strict=True) if part == wanted) for wanted in range(parts)]
        assert max(loads) <= (4 / 3) * max(sum(lengths) / parts, max(lengths)) and sum(loads) == sum(lengths)


def test_micro_batches_hold_every_sequence_once_within_the_budget() -> None:
    assert micro_batches([6, 5, 4, 3, 2], 10) == [[0, 2], [1, 3, 4]]
    assert micro_batches([3, 12, 3], 10) == [[0, 2], [1]] and micro_batches([], 10) == []
    rng = random.Random(0)
    lengths = [rng.randint(1, 100) for _ in range(200)]
    batches = micro_batches(lengths, 128)
    assert sorted(flat(batches)) == list(range(200)) and all(batch == sorted(batch) for batch in batches)
    assert all(sum(lengths[i] for i in batch) <= 128 for batch in batches)
    assert len(batches) <= 1.3 * sum(lengths) / 128
