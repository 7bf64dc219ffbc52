"""Accuracy of a Hugging Face folder by plain transformers, greedy: the check of an export that shares nothing with the trainer."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from tridentrl.rewards.verifiers import reasoning_gym


def solved(score: float) -> bool:
    """reasoning-gym's verifiers give a part of the score to an answer that only contains the right one; accuracy does not."""
    return score == 1.0


def hf_accuracy(folder: Path, rows: Sequence[dict[str, Any]], *, max_response_length: int) -> float:
    """Share of `rows` that the model in `folder` solves. Prompts of one length share a batch, so nothing is padded."""
    logging.disable_progress_bar()
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), AutoTokenizer.from_pretrained(folder)
    scores = []
    for _, batch in groupby(sorted(rows, key=lambda row: len(row["prompt"])), key=lambda row: len(row["prompt"])):
        some = list(batch)
        prompts = tokenizer([row["prompt"] for row in some], return_tensors="pt")
        ids = model.generate(**prompts, do_sample=False, max_new_tokens=max_response_length)
        answers = tokenizer.batch_decode(ids[:, prompts["input_ids"].shape[1] :], skip_special_tokens=False)
        scores += [_score(row, re.split("<eos>|<pad>", answer)[0]) for row, answer in zip(some, answers, strict=True)]
    return sum(map(solved, scores)) / len(scores)


def _score(row: dict[str, Any], answer: str) -> float:
    return reasoning_gym(row["prompt"], answer, row["reward_model"]["ground_truth"], row["extra_info"])
