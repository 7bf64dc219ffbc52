"""REINFORCE++ and REINFORCE++ with baseline (arXiv 2501.03262): advantages normalised over the whole batch, no critic.

`reinforce_pp`: the advantage of token t is the score less beta times the sum of KL estimates (k1) from t to the end.
`reinforce_pp_baseline`: the advantage of every token is the score less the mean of the responses to the same prompt; the KL is a term of
the loss, with the k2 estimator.
Both then shift and scale advantages to mean 0 and std 1 over all trained tokens of the step (`whiten_advantages`), and minimise the
clipped ratio objective, averaged over tokens (`loss_aggregation=token-mean`).

Deviations: the std is the unbiased one, over tokens as in the authors' code. The loss is averaged over all tokens of an optimizer step, as
in the authors' code; the paper's objective averages over the tokens of a response first (`seq-mean-token-mean`). beta is `trainer.kl_coef`
unless given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tridentrl.algos.algorithm import rule
from tridentrl.algos.context import Context, Prompt
from tridentrl.algos.groups import GroupAlgorithm, GroupConfig
from tridentrl.algos.policy_gradient import KLEstimator, PolicyGradient, PolicyGradientConfig, without_excluded
from tridentrl.algos.registry import register
from tridentrl.kernels.advantages import group_normalized, last_trained_token, reward_to_go


@dataclass(frozen=True, kw_only=True)
class ReinforcePPConfig(PolicyGradientConfig):
    samples_per_prompt: int = 1
    """Responses sampled for each prompt."""
    kl_in: Literal["reward", "loss"] = "reward"
    """Whether the KL is taken off the rewards (the paper's) or is a term of the loss."""
    kl_estimator: KLEstimator = "k1"
    """k1 (the paper's), k2 or k3, see `kernels.losses.kl_estimate`. Under kl_in=loss k2 or k3."""
    whiten_advantages: bool = True
    """Shift and scale advantages to mean 0 and std 1 over all trained tokens of the step (the paper's global normalisation)."""

    def problems(self) -> list[str]:
        return [*super().problems(), *rule("samples_per_prompt", self.samples_per_prompt, self.samples_per_prompt >= 1, "set 1 or more")]


@register("reinforce_pp")
class ReinforcePP(PolicyGradient):
    Config = ReinforcePPConfig
    config: ReinforcePPConfig

    @property
    def samples_per_prompt(self) -> int:
        return self.config.samples_per_prompt

    def step(self, ctx: Context, prompts: Sequence[Prompt]) -> None:
        rollouts = ctx.generate(prompts, n=self.config.samples_per_prompt)
        rollouts, scores = without_excluded(rollouts, ctx.reward(rollouts))
        if len(rollouts) == 0:
            return  # there is nothing to learn from
        rollouts = self.scored(ctx, rollouts)
        mask, lengths = rollouts.response_mask_R, rollouts.lengths_n
        with ctx.timer("advantage"):
            rewards = torch.where(last_trained_token(mask, lengths), rollouts.per_token(scores), 0.0)
            advantages = reward_to_go(self.less_kl(rewards, rollouts), mask, lengths)
        self.update(ctx, rollouts, advantages)


@dataclass(frozen=True, kw_only=True)
class ReinforcePPBaselineConfig(GroupConfig):
    kl_estimator: KLEstimator = "k2"
    """k2 (the paper's), k3, or under kl_in=reward k1, see `kernels.losses.kl_estimate`."""
    whiten_advantages: bool = True
    """Shift and scale advantages to mean 0 and std 1 over all trained tokens of the step (the paper's global normalisation)."""


@register("reinforce_pp_baseline")
class ReinforcePPBaseline(GroupAlgorithm):
    Config = ReinforcePPBaselineConfig
    config: ReinforcePPBaselineConfig

    def advantages(self, rewards: Tensor, group_ids: Tensor) -> Tensor:
        return group_normalized(rewards, group_ids, normalize_std=False)
