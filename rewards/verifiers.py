"""Rewards by the verifiers of reasoning-gym."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from typing import Any

from reasoning_gym import get_score_answer_fn
from reasoning_gym.utils import extract_answer


@functools.cache
def _verifier(source: str) -> Callable[[str, dict[str, Any]], float]:
    verifier: Callable[[str, dict[str, Any]], float] = get_score_answer_fn(source)
    return verifier


def reasoning_gym(prompt: str, response: str, ground_truth: object, extra_info: Mapping[str, Any] | None) -> float:
    """Score of a reasoning-gym row by the verifier of the data set that made it, between 0 and 1.

    `extra_info` carries `metadata` (a mapping, or the same as JSON text, which keeps the columns of mixed sets simple), the data set's
    name as `source_dataset` there or in the metadata, and may carry the bare `question`. What is scored is the text in the last
    <answer> tags as reasoning-gym's prompts ask for them, or the whole response, without white space around it.
    """
    info = dict(extra_info or {})
    metadata = info.get("metadata") or {}
    if isinstance(metadata, str):
        metadata = json.loads(metadata)
    source = info.get("source_dataset") or metadata.get("source_dataset")
    if not source:
        raise ValueError(
            "reward reasoning_gym needs extra_info.source_dataset, the name of the data set that made the row;"
            f" extra_info has {', '.join(sorted(info)) or 'nothing'}"
        )
    tagged = extract_answer(response)
    answer = response.strip() if tagged is None else tagged
    truth = None if ground_truth is None else str(ground_truth)
    return float(_verifier(source)(answer, {"question": info.get("question", prompt), "answer": truth, "metadata": metadata}))
