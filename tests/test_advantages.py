"""Advantages, whitening and token rewards on packed sequences, against hand numbers and step-by-step float64 loops."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor

from tridentrl.kernels.advantages import (
    gae,
    group_normalized,
    group_statistics,
    last_trained_token,
    masked_mean,
    masked_whiten,
    top_k_per_group,
)

NAN = float("nan")


def ids(*values: int) -> Tensor:
    return torch.tensor(values)


def gae_by_hand(rewards: list[float], values: list[float], mask: list[int], gamma: float, lam: float) -> list[float]:
    """One sample, from its end to its start, in Python floats."""
    advantages, next_value, next_advantage = [0.0] * len(mask), 0.0, 0.0
    for t in reversed(range(len(mask))):
        if mask[t]:
            delta = rewards[t] + gamma * next_value - values[t]
            advantages[t] = next_advantage = delta + gamma * lam * next_advantage
            next_value = values[t]
    return advantages


@pytest.mark.parametrize("junk", [100.0, NAN, float("inf")])
def test_gae_never_reads_masked_slots(junk: float) -> None:
    advantages, returns = gae(
        torch.tensor([0, 1.0, junk]), torch.tensor([0, 0, junk]), torch.tensor([1.0, 1, 0]), ids(3), gamma=1.0, lam=0.95
    )
    assert advantages.tolist() == pytest.approx([0.95, 1.0, 0.0])
    assert returns.tolist() == pytest.approx([0.95, 1.0, 0.0])


def test_gae_passes_a_masked_token_without_a_discount() -> None:
    advantages, _ = gae(torch.tensor([0, NAN, 1.0]), torch.tensor([0, NAN, 0]), torch.tensor([1.0, 0, 1]), ids(3), gamma=1.0, lam=0.5)
    assert advantages.tolist() == pytest.approx([0.5, 0.0, 1.0])


def test_gae_of_packed_samples_equals_a_loop_over_each_alone() -> None:
    generator = torch.Generator().manual_seed(3)
    lengths = [5, 1, 0, 33, 2, 8, 4]
    total = sum(lengths)
    rewards, values = torch.randn(total, generator=generator), torch.randn(total, generator=generator)
    mask = (torch.rand(total, generator=generator) > 0.3).float()
    mask[-4:] = 0  # a sample with nothing to train
    advantages, returns = gae(rewards, values, mask, ids(*lengths), gamma=0.9, lam=0.8)
    start = 0
    for length in lengths:
        part = slice(start, start + length)
        expected = gae_by_hand(rewards[part].tolist(), values[part].tolist(), mask[part].int().tolist(), 0.9, 0.8)
        assert advantages[part].tolist() == pytest.approx(expected, abs=1e-5)
        alone, _ = gae(rewards[part], values[part], mask[part], ids(length), gamma=0.9, lam=0.8)
        assert torch.equal(alone, advantages[part])  # the split over ranks changes no bit
        start += length
    torch.testing.assert_close(returns, torch.where(mask > 0, advantages + values, 0.0))


def test_gae_of_nothing_is_nothing() -> None:
    empty = torch.zeros(0)
    advantages, returns = gae(empty, empty, empty, torch.zeros(0, dtype=torch.int64), gamma=1.0, lam=1.0)
    assert advantages.tolist() == returns.tolist() == []


def test_an_end_reward_lies_on_the_last_trained_token_of_each_sample() -> None:
    mask = torch.tensor([1.0, 1, 0, 0, 0, 1, 0, 1])
    expected = [False, True, False, False, False, True, False, True]
    assert last_trained_token(mask, ids(3, 2, 0, 1, 2)).tolist() == expected
    assert last_trained_token(torch.zeros(0), torch.zeros(0, dtype=torch.int64)).tolist() == []


def test_group_advantages_by_hand() -> None:
    assert group_normalized(torch.tensor([1.0, 0, 0, 1]), ids(0, 0, 0, 0)).tolist() == pytest.approx(
        [0.866024, -0.866024, -0.866024, 0.866024], abs=1e-6
    )
    assert group_normalized(torch.tensor([1.0, 0, 0, 1]), ids(0, 0, 0, 0), normalize_std=False).tolist() == [0.5, -0.5, -0.5, 0.5]


@pytest.mark.parametrize("rewards", [[1.0] * 4, [0.7] * 8, [0.1] * 8, [1 / 3] * 7, [-5e3] * 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_rewards_have_advantage_exactly_zero(rewards: list[float], dtype: torch.dtype) -> None:
    advantages = group_normalized(torch.tensor(rewards, dtype=dtype), torch.zeros(len(rewards), dtype=torch.int64))
    assert advantages.tolist() == [0.0] * len(rewards)


def test_groups_are_told_apart_by_id_wherever_their_samples_lie() -> None:
    interleaved = group_normalized(torch.tensor([1.0, 5, 0, 7, 0, 6, 1, 6]), ids(42, 7, 42, 7, 42, 7, 42, 7))
    # Group 7: deviations -1, 1, 0, 0 and unbiased std sqrt(2 / 3).
    assert interleaved.tolist() == pytest.approx([0.866024, -1.224743, -0.866024, 1.224743, -0.866024, 0, 0.866024, 0], abs=2e-6)


def test_excluded_samples_count_nowhere_and_a_group_of_one_gets_zero() -> None:
    rewards, groups = torch.tensor([1.0, NAN, 0, 0.25, NAN, NAN]), ids(0, 0, 0, 1, 1, 2)
    assert group_normalized(rewards, groups).tolist() == pytest.approx([0.707106, 0, -0.707106, 0, 0, 0], abs=2e-6)
    assert group_statistics(rewards, groups).counts_G.tolist() == [2, 1, 0]


def test_the_best_k_of_each_group_are_kept_and_ties_go_to_the_earlier_sample() -> None:
    scores, groups = torch.tensor([1.0, 5, 3, 5, NAN, 5, 2, NAN]), ids(4, 2, 4, 2, 4, 2, 4, 9)
    assert top_k_per_group(scores, groups, 2).tolist() == [False, True, True, True, False, False, True, False]
    assert top_k_per_group(scores, groups, 9).tolist() == [True, True, True, True, False, True, True, False]
    with pytest.raises(ValueError, match="k is 0"):
        top_k_per_group(scores, groups, 0)


def test_whitening_uses_trained_tokens_and_the_unbiased_variance() -> None:
    for junk in (100.0, NAN, float("inf")):
        assert masked_whiten(torch.tensor([2.0, 4, 6, junk]), torch.tensor([1.0, 1, 1, 0]), group=None).tolist() == [-1, 0, 1, 0]
    assert masked_whiten(torch.tensor([3.0, NAN]), torch.tensor([1.0, 0]), group=None).tolist() == [0, 0]
    assert masked_whiten(torch.tensor([3.0, NAN]), torch.tensor([0.0, 0]), group=None).tolist() == [0, 0]


def _whiten_parts(parts: list[tuple[list[float], list[float]]]) -> tuple[list[float], float]:
    x, mask = (torch.tensor(values) for values in parts[dist.get_rank()])
    group = dist.group.WORLD
    return masked_whiten(x, mask, group=group).tolist(), masked_mean(x, mask, group=group)


def test_whitening_and_means_over_two_ranks_equal_one_rank() -> None:
    parts = [([2.0, NAN, 4.0], [1.0, 0, 1]), ([6.0], [1.0])]
    assert run_ranks(2, _whiten_parts, parts) == [([-1, 0, 0], 4.0), ([1], 4.0)]


def test_a_rank_without_trained_tokens_takes_part_in_the_collectives() -> None:
    assert run_ranks(2, _whiten_parts, [([2.0, 4, 6], [1.0, 1, 1]), ([NAN], [0.0])]) == [([-1, 0, 1], 4.0), ([0], 4.0)]
    assert run_ranks(2, _whiten_parts, [([], []), ([NAN], [0.0])]) == [([], 0.0), ([0], 0.0)]
