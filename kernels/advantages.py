"""Advantages and token rewards on packed sequences, in plain torch.

Shape legend: R response tokens of the n samples held by this rank, packed one after the other; N samples of the step over all ranks,
equal on every rank; G groups among them. A mask is 1 where a token is trained; values where it is 0 (NaN, inf) are never read.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from tridentrl.kernels.masks import neutralise, sample_index, sum_per_sample


def last_trained_token(mask_R: Tensor, lengths_n: Tensor) -> Tensor:
    """bool [R], True at the last trained token of each sample: where a reward for the whole response belongs.

    A sample without a trained token has none.
    """
    trained_R = mask_R.bool()
    position_R = torch.arange(len(mask_R), device=mask_R.device)
    last_n = torch.full_like(lengths_n, -1).scatter_reduce(0, sample_index(lengths_n)[trained_R], position_R[trained_R], "amax")
    last_R = torch.zeros_like(trained_R)
    last_R[last_n[last_n >= 0]] = True
    return last_R


def gae(rewards_R: Tensor, values_R: Tensor, mask_R: Tensor, lengths_n: Tensor, *, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (arXiv 1506.02438, eq. 16) -> advantages [R], returns [R] = advantages + values, 0 where masked.

    delta_t = r_t + gamma V_next - V_t;  A_t = delta_t + gamma lam A_next, where "next" is the sample's next *trained* token: masked
    tokens are skipped, they cost no discount and their rewards are not seen. After the last one V and A are 0: the end is terminal.
    """
    trained_R = mask_R.bool()
    rewards_C, values_C = rewards_R[trained_R], values_R[trained_R]  # C: trained tokens only, packed
    sample_C = sample_index(lengths_n)[trained_R]
    goes_on_C = torch.zeros_like(rewards_C)  # 1 where the same sample has a next token
    goes_on_C[:-1] = (sample_C[1:] == sample_C[:-1]).to(goes_on_C.dtype)
    next_values_C = torch.zeros_like(values_C)
    next_values_C[:-1] = torch.where(goes_on_C[:-1] > 0, values_C[1:], 0.0)
    deltas_C = rewards_C + gamma * next_values_C - values_C
    advantages_C = _reverse_scan(deltas_C, gamma * lam * goes_on_C, longest=int(lengths_n.max()) if len(lengths_n) else 0)
    advantages_R, returns_R = torch.zeros_like(rewards_R), torch.zeros_like(rewards_R)
    advantages_R[trained_R] = advantages_C
    returns_R[trained_R] = advantages_C + values_C
    return advantages_R, returns_R


def _reverse_scan(x_C: Tensor, carry_C: Tensor, *, longest: int) -> Tensor:
    """y_t = x_t + carry_t y_{t+1} over runs of at most `longest` that end where carry is 0.

    Doubling: after the pass with `step`, y_t holds the terms up to 2 step - 1 places ahead and carry_t the product of 2 step carries.
    The number of passes is log2(longest), and a run's result does not depend on its neighbours, bit for bit.
    """
    y_C, carry_C, step = x_C.clone(), carry_C.clone(), 1
    while step < min(longest, len(x_C)):
        y_C[:-step] += carry_C[:-step] * y_C[step:].clone()
        carry_C[:-step] *= carry_C[step:].clone()
        step *= 2
    return y_C


@dataclass(frozen=True)
class GroupStatistics:
    """What `group_statistics` found. NaN rewards (excluded samples) count nowhere."""

    index_N: Tensor
    """int64. The group of each sample, numbered in ascending order of the group ids."""
    counts_G: Tensor
    """int64. Samples with a reward."""
    centred_N: Tensor
    """float64. Reward minus its group's mean, exactly 0 where all rewards of a group are equal or the sample is excluded."""
    std_G: Tensor
    """float64. Unbiased standard deviation (divisor count - 1), 0 for a group of one."""


def group_statistics(rewards_N: Tensor, group_ids_N: Tensor) -> GroupStatistics:
    """Mean and spread of each group's rewards. Groups are told apart by id alone; their samples need not be neighbours."""
    ids_G, index_N = group_ids_N.unique(return_inverse=True)
    valid_N = ~rewards_N.isnan()
    counts_G = torch.zeros_like(ids_G).index_add_(0, index_N, valid_N.to(ids_G.dtype))
    rewards_N = torch.where(valid_N, rewards_N, 0.0).double()
    per_group_G = rewards_N.new_zeros(len(ids_G))
    # Counting from the group's smallest reward makes equal rewards exact zeros before any sum can round.
    lowest_G = per_group_G.scatter_reduce(0, index_N[valid_N], rewards_N[valid_N], "amin", include_self=False)
    above_N = torch.where(valid_N, rewards_N - lowest_G[index_N], 0.0)
    mean_G = per_group_G.index_add(0, index_N, above_N) / counts_G.clamp(min=1)
    centred_N = torch.where(valid_N, above_N - mean_G[index_N], 0.0)
    std_G = (per_group_G.index_add(0, index_N, centred_N.square()) / (counts_G - 1).clamp(min=1)).sqrt()
    return GroupStatistics(index_N, counts_G, centred_N, std_G)


def group_normalized(rewards_N: Tensor, group_ids_N: Tensor, *, eps: float = 1e-6, normalize_std: bool = True) -> Tensor:
    """(reward - group mean) / (group std + eps), float32 [N]; without the division if not `normalize_std`.

    0 for excluded samples (reward NaN), for a group of one and, exactly, for a group of equal rewards.
    """
    statistics = group_statistics(rewards_N, group_ids_N)
    scale_G = statistics.std_G + eps if normalize_std else torch.ones_like(statistics.std_G)
    return (statistics.centred_N / scale_G[statistics.index_N]).float()


def leave_one_out(rewards_N: Tensor, group_ids_N: Tensor) -> Tensor:
    """Reward minus the mean reward of the *other* samples of its group (RLOO, arXiv 2402.14740), float32 [N].

    0 for excluded samples (reward NaN), for a group of one and, exactly, for a group of equal rewards.
    """
    statistics = group_statistics(rewards_N, group_ids_N)
    scale_G = statistics.counts_G / (statistics.counts_G - 1).clamp(min=1)  # r - mean of others = (r - mean) count / (count - 1)
    return (statistics.centred_N * scale_G[statistics.index_N]).float()


def top_k_per_group(scores_N: Tensor, group_ids_N: Tensor, k: int) -> Tensor:
    """bool [N], True for the k highest scores of each group; of equal scores the earlier sample wins; NaN is never kept."""
    if k < 1:
        raise ValueError(f"k is {k}, at least 1 sample of a group must be kept")
    order_N = scores_N.nan_to_num(nan=-torch.inf).sort(descending=True, stable=True).indices
    order_N = order_N[group_ids_N[order_N].sort(stable=True).indices]  # by group, then by score
    _, counts_G = group_ids_N.unique(return_counts=True)
    starts_G = counts_G.cumsum(0) - counts_G
    place_N = torch.arange(len(scores_N), device=scores_N.device) - starts_G.repeat_interleave(counts_G)
    keep_N = torch.zeros_like(group_ids_N, dtype=torch.bool)
    keep_N[order_N[place_N < k]] = True
    return keep_N & ~scores_N.isnan()


def reward_to_go(rewards_R: Tensor, mask_R: Tensor, lengths_n: Tensor) -> Tensor:
    """Sum of each token's and its sample's later rewards, [R], over trained tokens only; 0 where masked."""
    return gae(rewards_R, torch.zeros_like(rewards_R), mask_R, lengths_n, gamma=1.0, lam=1.0)[0]


def samplewise_sum(
    x_R: Tensor, mask_R: Tensor, lengths_n: Tensor, rows_n: Tensor, *, samples: int, group: dist.ProcessGroup | None
) -> Tensor:
    """Sum over the trained tokens of each of the step's samples, on all ranks of `group`: [R] -> [N]. A collective."""
    (x_R,) = neutralise(mask_R, x_R)
    sums_N = x_R.new_zeros(samples).index_add_(0, rows_n, sum_per_sample(x_R, lengths_n))
    return _sum_over_ranks(sums_N, group)


def masked_mean(x_R: Tensor, mask_R: Tensor, *, group: dist.ProcessGroup | None) -> float:
    """Mean over the trained tokens of all ranks of `group` (None: this rank alone); 0 when there are none. A collective."""
    (x_R,) = neutralise(mask_R, x_R)
    total, count = _sum_over_ranks(torch.stack([x_R.double().sum(), mask_R.double().sum()]), group)
    return float(total / count.clamp(min=1))


def masked_whiten(x_R: Tensor, mask_R: Tensor, *, group: dist.ProcessGroup | None, eps: float = 1e-8) -> Tensor:
    """(x - mean) / (std + eps) with mean and unbiased std over the trained tokens of all ranks of `group`; 0 where masked.

    The mean is always removed. A single trained token gives 0; a rank without any takes part in the collectives like the others.
    """
    trained_R = mask_R.bool()
    (x_R,) = neutralise(mask_R, x_R)
    total, count = _sum_over_ranks(torch.stack([x_R.double().sum(), trained_R.double().sum()]), group)
    centred_R = torch.where(trained_R, x_R.double() - total / count.clamp(min=1), 0.0)
    squares = _sum_over_ranks(centred_R.square().sum(), group)
    std = (squares / (count - 1).clamp(min=1)).sqrt()
    return (centred_R / (std + eps)).to(x_R.dtype)


def _sum_over_ranks(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    if group is not None:
        dist.all_reduce(x, group=group)
    return x


def reward_metrics(rewards_N: Tensor) -> dict[str, float]:
    """Number of excluded samples (NaN), and mean, min, max and std (of the population) of the others, where there are any."""
    valid_N = rewards_N[~rewards_N.isnan()]
    metrics = {"excluded": float(len(rewards_N) - len(valid_N))}
    if len(valid_N):
        metrics |= {"mean": valid_N.mean().item(), "min": valid_N.min().item(), "max": valid_N.max().item()}
        metrics["std"] = valid_N.std(correction=0).item()
    return metrics
