"""The helper that runs a test on several ranks: results, failures and hangs."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks


def _sum_of_ranks(offset: float) -> tuple[int, float]:
    total = torch.tensor([dist.get_rank() + offset])
    dist.all_reduce(total)
    return int(os.environ["RANK"]), total.item()


def _second_rank_fails() -> None:
    if dist.get_rank() == 1:
        raise KeyError("the culprit")
    dist.all_reduce(torch.zeros(1))
    time.sleep(60)


def test_results_come_back_in_rank_order_after_a_collective() -> None:
    assert run_ranks(3, _sum_of_ranks, 10.0) == [(0, 33.0), (1, 33.0), (2, 33.0)]


def test_the_failing_ranks_traceback_comes_first_and_nobody_is_left() -> None:
    started = time.monotonic()
    with pytest.raises(RuntimeError, match=r"(?s)^rank 1 of 2:.*_second_rank_fails.*the culprit"):
        run_ranks(2, _second_rank_fails)
    assert time.monotonic() - started < 10
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


def test_a_rank_that_is_killed_or_hangs_is_named() -> None:
    with pytest.raises(RuntimeError, match="rank 0 of 1:\nended without a result"):
        run_ranks(1, lambda: os._exit(3))
    with pytest.raises(TimeoutError, match=r"ranks \[0\] of 1 did not end within 1 s"):
        run_ranks(1, time.sleep, 30, timeout_s=1)
