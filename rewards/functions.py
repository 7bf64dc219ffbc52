"""The built-in rewards that need no other package, and the names of all built-in ones."""

from __future__ import annotations

BUILTIN = {
    "exact_match": "tridentrl.rewards.functions",
    "reasoning_gym": "tridentrl.rewards.verifiers",
}
"""Module of each built-in reward; the function has the name of the reward. Modules load in the worker processes only."""


def exact_match(response: str, ground_truth: object) -> float:
    """1.0 where the response equals the ground truth, both as text without white space around them, else 0.0."""
    if ground_truth is None:
        raise ValueError("exact_match needs a ground truth, this row has none; set data.answer_key to the column that holds it")
    return float(response.strip() == str(ground_truth).strip())
