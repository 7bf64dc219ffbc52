"""Safe RLHF by PPO-Lagrangian (Beaver, arXiv 2310.12773): reward as high as the mean cost stays at its limit.

max over the policy, min over lambda >= 0 of  E[reward] - lambda (E[cost] - cost_limit).

Two critics: one learns the rewards less half the KL penalty, the other the costs plus half of it. Both advantages are GAE. The policy's is
(A_reward - lambda A_cost) / (1 + lambda), in PPO's clipped loss, so that the KL counts with half its weight, whatever lambda is. The
multiplier moves in log space, before the policy, so that it stays above 0 (eq. 31):
ln lambda <- ln lambda + lambda_lr * lambda * (mean cost - cost_limit).

Deviations: the mean cost is that of the step's samples; the authors' code takes a moving average. The halves of the KL are the paper's; the
authors' code takes the whole on both sides. The combined advantage is whitened unless `whiten_advantages=false`. `cost_limit` stands for
the paper's threshold d. The supervised loss on pretraining data (PTX) is left out. What is said of PPO's deviations in `algos.ppo` holds
here too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tridentrl.algos.algorithm import StepConfig, rule
from tridentrl.algos.context import Context, Prompt
from tridentrl.algos.policy_gradient import without_excluded
from tridentrl.algos.ppo import PPO, PPOConfig
from tridentrl.algos.registry import register
from tridentrl.kernels.advantages import gae, last_trained_token, masked_mean


@dataclass(frozen=True, kw_only=True)
class SafeRLHFConfig(PPOConfig):
    cost_limit: float = 0.0
    """Mean cost per response that is allowed. 0 fits cost models whose sign says safe or unsafe."""
    lambda_init: float = 1.0
    """First value of the multiplier."""
    lambda_lr: float = 0.1
    """Step size of the multiplier, per unit of cost over the limit."""
    lambda_max: float | None = None
    """The multiplier stays at or below it, so that the reward is not forgotten; null: no bound."""

    def problems(self) -> list[str]:
        highest = self.lambda_max
        return [
            *super().problems(),
            *rule("lambda_init", self.lambda_init, self.lambda_init > 0, "it moves in log space; set it above 0, usually 1"),
            *rule("lambda_lr", self.lambda_lr, self.lambda_lr > 0, "with 0 nothing would hold the limit; set it above 0"),
            *rule("lambda_max", highest, highest is None or highest >= self.lambda_init, "it bounds lambda_init too; raise it, or null"),
        ]


@register("safe_rlhf")
class SafeRLHF(PPO):
    Config = SafeRLHFConfig
    config: SafeRLHFConfig
    sections = ("reward", "cost")

    def __init__(self, config: StepConfig | None = None) -> None:
        super().__init__(config)
        self.log_lambda = math.log(self.config.lambda_init)

    def roles(self, *, kl_coef: float) -> tuple[str, ...]:
        return (*super().roles(kl_coef=kl_coef), "cost_critic")

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"log_lambda": self.log_lambda}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.log_lambda = state["log_lambda"]

    def step(self, ctx: Context, prompts: Sequence[Prompt]) -> None:
        config = self.config
        rollouts = ctx.generate(prompts, n=config.samples_per_prompt)
        rewards, costs = ctx.reward(rollouts), ctx.cost(rollouts)
        excluded = rewards.isnan() | costs.isnan()
        rollouts, rewards = without_excluded(rollouts, rewards.where(~excluded, torch.nan))
        costs = costs[~excluded]
        if len(rollouts) == 0:
            return  # there is nothing to learn from, and nothing is known of the cost
        ctx.log(
            {
                "safe_rlhf/lambda": self.move_lambda(costs.mean().item()),
                "safe_rlhf/cost_over_limit": costs.mean().item() - config.cost_limit,
            }
        )
        rollouts = self.scored(ctx, rollouts)
        mask, lengths = rollouts.response_mask_R, rollouts.lengths_n
        penalty = 0.5 * rollouts.fields.get("kl_penalty", torch.zeros_like(mask))
        advantages = {}
        for role, scores, sign in (("critic", rewards, -1), ("cost_critic", costs, 1)):
            values = ctx.values(rollouts, role=role)
            with ctx.timer("advantage"):
                given = torch.where(last_trained_token(mask, lengths), rollouts.per_token(scores), 0.0) + sign * penalty
                advantages[role], returns = gae(given, values, mask, lengths, gamma=config.gamma, lam=config.lam)
                ctx.log({f"advantage/{role}_return_mean": masked_mean(returns, mask, group=ctx.data_group)})
            learned = rollouts.with_fields(old_values=values, returns=returns)
            ctx.update_critic(learned, self.critic_loss, role=role, epochs=config.epochs, mini_batch_size=config.mini_batch_size)
        self.update(ctx, rollouts, self.combined(advantages["critic"], advantages["cost_critic"]))

    def move_lambda(self, mean_cost: float) -> float:
        """One step of the multiplier; its new value. A cost that is not finite leaves it as it is."""
        multiplier = math.exp(self.log_lambda)
        if math.isfinite(mean_cost):
            self.log_lambda += self.config.lambda_lr * multiplier * (mean_cost - self.config.cost_limit)
            if self.config.lambda_max is not None:
                self.log_lambda = min(self.log_lambda, math.log(self.config.lambda_max))
        return math.exp(self.log_lambda)

    def combined(self, reward_advantages: torch.Tensor, cost_advantages: torch.Tensor) -> torch.Tensor:
        """(A_reward - lambda A_cost) / (1 + lambda)."""
        multiplier = math.exp(self.log_lambda)
        return (reward_advantages - multiplier * cost_advantages) / (1 + multiplier)
