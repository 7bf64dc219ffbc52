"""Pairs of a right and a wrong sum, and how models rank them, by plain transformers."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from transformers.utils import logging

WRONG_BY = (-3, -2, -1, 1, 2, 3)


def write_pairs(path: Path, problems: Iterable[Mapping[str, Any]], *, seed: int) -> None:
    """JSON lines of `prompt`, `chosen` (the right sum) and `rejected` (up to 3 away from it)."""
    generator = random.Random(seed)
    with path.open("w") as file:
        for row in problems:
            rejected = str(int(row["answer"]) + generator.choice(WRONG_BY))
            file.write(json.dumps({"prompt": row["prompt"], "chosen": row["answer"], "rejected": rejected}) + "\n")


@torch.no_grad()
def pair_log_ratios(folder: Path, pairs: Path) -> list[float]:
    """log pi(chosen) - log pi(rejected) of each pair, end-of-sequence token included."""
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    rows = [json.loads(line) for line in pairs.read_text().splitlines()]
    chosen, rejected = (_logprobs(model, _ids(folder, rows, key)) for key in ("chosen", "rejected"))
    return (chosen - rejected).tolist()


@torch.no_grad()
def pair_scores(folder: Path, pairs: Path) -> list[float]:
    """Score of chosen less score of rejected of each pair, by a reward model."""
    logging.disable_progress_bar()
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    rows = [json.loads(line) for line in pairs.read_text().splitlines()]
    scores = []
    for key in ("chosen", "rejected"):
        ids, mask, _ = _ids(folder, rows, key)
        scores.append(model(input_ids=ids, attention_mask=mask).logits[:, 0])
    return (scores[0] - scores[1]).tolist()


def _ids(folder: Path, rows: Sequence[Mapping[str, str]], key: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Token ids, mask of what is no padding, and mask of what is of the response, all [rows, longest], padded on the right."""
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="right")
    both = tokenizer([f"{row['prompt']}{row[key]}{tokenizer.eos_token}" for row in rows], return_tensors="pt", padding=True)
    prompts = torch.tensor([len(tokenizer(row["prompt"])["input_ids"]) for row in rows])
    positions = torch.arange(both["input_ids"].shape[1])
    return both["input_ids"], both["attention_mask"], both["attention_mask"].bool() & (positions >= prompts[:, None])


def _logprobs(model: Any, inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Of each response, [rows]."""
    ids, mask, response = inputs
    logprobs = model(input_ids=ids, attention_mask=mask).logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    return (logprobs * response[:, 1:]).sum(1)
