"""Sharing sequences among ranks and micro-batches by their number of tokens. Pure functions: every rank computes the same."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def balanced_assignment(lengths: Sequence[int], parts: int) -> list[int]:
    """Part of each sequence: the longest first, each to the part with the fewest tokens, then fewest sequences, then lowest number.

    The fullest part is at most 4/3 - 1/(3 parts) of the best possible (Graham 1969, "Bounds on multiprocessing timing anomalies").
    """
    assignment = [0] * len(lengths)
    loads = [(0, 0, part) for part in range(parts)]
    for index in _longest_first(lengths):
        tokens, count, part = loads[0]
        heapq.heapreplace(loads, (tokens + lengths[index], count + 1, part))
        assignment[index] = part
    return assignment


def micro_batches(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Sequence numbers packed into few batches of at most `max_tokens` tokens; a longer sequence is a batch of its own.

    First fit, longest first. Numbers ascend inside a batch, and batches are ordered by their first number.
    """
    batches: list[list[int]] = []
    room: list[int] = []
    for index in _longest_first(lengths):
        fitting = next((i for i, free in enumerate(room) if free >= lengths[index]), None)
        if fitting is None:
            batches.append([])
            room.append(max_tokens)
            fitting = -1
        batches[fitting].append(index)
        room[fitting] -= lengths[index]
    return sorted(sorted(batch) for batch in batches)


def _longest_first(lengths: Sequence[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
