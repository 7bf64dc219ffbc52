"""Samples, splits and float64 loops that the tests of algorithms on table models share."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from ranks import run_ranks
from table_models import Sample, TableContext
from torch import Tensor

from tridentrl.algos import Algorithm

NAN = math.nan
# Two groups of four: unequal lengths, a tool token inside, a rejected sample, one with nothing to train, truncated ones.
SAMPLES = [
    Sample(0, [1, 2], [3, 4, 5], 1.0),
    Sample(0, [1, 2], [0, 5], 0.0),
    Sample(0, [1, 2], [3, 3, 1, 5], 0.0, mask=[1, 0, 1, 1]),
    Sample(0, [1, 2], [2], 1.0, truncated=True),
    Sample(1, [4], [1, 5], NAN),
    Sample(1, [4], [0, 0, 5], 0.5),
    Sample(1, [4], [5], 0.25, mask=[0]),
    Sample(1, [4], [2, 3, 2, 1, 0], 2.0, truncated=True, mask=[1, 1, 1, 1, 0]),
]
KEPT = [s for s in SAMPLES if not math.isnan(s.reward)]
SPLITS = [(1, 1), (2, 1), (100, 1), (1, 2), (100, 2)]
"""Samples per micro-batch, data-parallel ranks."""


def stepped(algorithm: Algorithm, samples: list[Sample] = SAMPLES, **settings: Any) -> TableContext:
    """The context after one step on one rank."""
    ctx = TableContext(samples, **settings)
    algorithm.step(ctx, prompts=[None] * len({sample.group for sample in samples}))
    return ctx


def _on_this_rank(algorithm: Algorithm, settings: dict[str, Any]) -> tuple[list[Tensor], list[Tensor], dict[str, float]]:
    ctx = stepped(algorithm, data_group=dist.group.WORLD, **settings)
    return [u.gradient for u in ctx.actor_updates], [u.gradient for u in ctx.critic_updates], ctx.logged


def gradients(algorithm: Algorithm, micro: int, ranks: int, **settings: Any) -> tuple[list[Tensor], list[Tensor], dict[str, float]]:
    """Gradients of every actor update, of every critic update, and the logs, for this split, with NaN at all that is not trained."""
    settings |= {"micro_batch": micro, "junk": NAN}
    if ranks > 1:
        first, second = run_ranks(ranks, _on_this_rank, algorithm, settings)
        assert first[2] == second[2]
        return first
    ctx = stepped(algorithm, **settings)
    return [u.gradient for u in ctx.actor_updates], [u.gradient for u in ctx.critic_updates], ctx.logged


class Float64:
    """Policy tables in float64 and the samples' log-probs and entropies under them, one Python loop at a time."""

    def __init__(self) -> None:
        ctx = TableContext(SAMPLES)
        self.actor, self.reference, self.critic = ctx.actor.double(), ctx.reference.double(), ctx.critic.double()

    @staticmethod
    def logprobs(weights: Tensor, sample: Sample) -> list[Tensor]:
        return [weights[p].log_softmax(0)[t] for p, t in zip(sample.previous, sample.response, strict=True)]

    @staticmethod
    def entropies(weights: Tensor, sample: Sample) -> list[Tensor]:
        return [-(weights[p].softmax(0) * weights[p].log_softmax(0)).sum() for p in sample.previous]


def sgd(weights: Tensor, loss: Callable[[Tensor, list[int]], Tensor], batches: list[list[int]]) -> list[Tensor]:
    """Gradient of each step of plain SGD with learning rate 1 over these batches of sample numbers."""
    found = []
    for batch in batches:
        leaf = weights.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(loss(leaf, batch), leaf)
        found.append(gradient)
        weights = weights - gradient
    return found


def clipped(ratio: Tensor, advantage: float, low: float, high: float) -> Tensor:
    return torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)


def assert_all_close(got: list[Tensor], expected: list[Tensor]) -> None:
    assert len(got) == len(expected) > 0
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-6)


def grpo_advantages() -> list[float]:
    """Group-normalised, of the kept samples."""
    advantages = []
    for sample in KEPT:
        rewards = [s.reward for s in KEPT if s.group == sample.group]
        advantages.append((sample.reward - statistics.mean(rewards)) / (statistics.stdev(rewards) + 1e-6))
    return advantages
