"""Scores of benchmarks/learning.py beside the task's own verifier."""

from __future__ import annotations

from zlib import crc32

FORBIDDEN = "2"


def coin(prompt: str, response: str) -> float:
    """1 or 0, half each, the same for the same text: a reward from which nothing of the task can be learnt."""
    return float(crc32(f"{prompt}{response}".encode()) % 2)


def forbidden_digit(response: str) -> float:
    """Cost 1 of a response that has the digit 2, as one right answer in seven has. So reward and cost pull in two directions."""
    return float(FORBIDDEN in response)
