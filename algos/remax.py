"""ReMax (arXiv 2310.10505): REINFORCE with the reward of the greedy response as the baseline, no critic.

For each prompt one more response is generated greedily (algorithm 1 of the paper). Advantage of token t of a sampled response:
sum over t' >= t of the token rewards, less the greedy response's reward, where a token's reward is -beta (log pi_old - log pi_ref), and
on the last token the score as well (the paper's full-step form of the KL, appendix B). With beta = 0 it is r(x, y) - r(x, y_greedy) for
every token, as in the paper's gradient estimator.
Loss: -1/N sum_i sum_t A_t log pi(y_t), so `loss_aggregation=seq-mean-token-sum`.

Deviations: the loss is the clipped ratio objective, whose gradient is that of A log pi as long as pi = pi_old, which is so with one
epoch and one mini-batch. The authors' code averages over tokens, and takes from a token's advantage its own KL only. The KL of the greedy
response is not part of the baseline. beta is `trainer.kl_coef` unless given. A prompt whose greedy response has no reward
(`reward/excluded`) is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from tridentrl.algos.algorithm import Aggregation, rule
from tridentrl.algos.context import Context, Prompt
from tridentrl.algos.policy_gradient import KLEstimator, PolicyGradient, PolicyGradientConfig, without_excluded
from tridentrl.algos.registry import register
from tridentrl.kernels.advantages import last_trained_token, reward_to_go


@dataclass(frozen=True, kw_only=True)
class ReMaxConfig(PolicyGradientConfig):
    samples_per_prompt: int = 1
    """Responses sampled for each prompt, beside the greedy one."""
    kl_in: Literal["reward", "loss"] = "reward"
    """Whether the KL is taken off the rewards (the paper's) or is a term of the loss."""
    kl_estimator: KLEstimator = "k1"
    """k1 (the paper's), k2 or k3, see `kernels.losses.kl_estimate`. Under kl_in=loss k2 or k3."""
    loss_aggregation: Aggregation = "seq-mean-token-sum"
    """The paper's: the log-probability of a response is the sum over its tokens. See `BaseConfig` for the others."""

    def problems(self) -> list[str]:
        return [*super().problems(), *rule("samples_per_prompt", self.samples_per_prompt, self.samples_per_prompt >= 1, "set 1 or more")]


@register("remax")
class ReMax(PolicyGradient):
    Config = ReMaxConfig
    config: ReMaxConfig

    @property
    def samples_per_prompt(self) -> int:
        return self.config.samples_per_prompt

    def step(self, ctx: Context, prompts: Sequence[Prompt]) -> None:
        baselines = ctx.reward(ctx.generate(prompts, n=1, greedy=True), name="greedy_reward")
        rollouts = ctx.generate(prompts, n=self.config.samples_per_prompt)
        scores = ctx.reward(rollouts)
        rollouts, gains = without_excluded(rollouts, scores - baselines[rollouts.group_ids_N])
        if len(rollouts) == 0:
            return  # there is nothing to learn from
        rollouts = self.scored(ctx, rollouts)
        mask, lengths = rollouts.response_mask_R, rollouts.lengths_n
        with ctx.timer("advantage"):
            rewards = torch.where(last_trained_token(mask, lengths), rollouts.per_token(gains), 0.0)
            advantages = reward_to_go(self.less_kl(rewards, rollouts), mask, lengths)
        self.update(ctx, rollouts, advantages)
