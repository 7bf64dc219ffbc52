"""Proximal policy optimisation (arXiv 1707.06347) with a critic, as used for language models (arXiv 1909.08593).

Reward of a token: -kl_coef (log pi_old - log pi_ref), and the score of the response on its last trained token (1909.08593, eq. 2).
Advantages and value targets: generalised advantage estimation (arXiv 1506.02438, eq. 16), then whitened over the whole step.
Policy loss: clipped ratio (1707.06347, eq. 7) minus `entropy_coef` times the entropy (eq. 9). Value loss: `vf_coef` times the squared
error (eq. 9), clipped around the old value by `value_clip`.

Deviations: actor and critic are two models with an optimizer each, so eq. 9 is two losses, and `vf_coef` matters only through gradient
clipping. Whitening and the clip of the value are not in the PPO paper but usual in implementations. The KL weight is fixed unless
`kl_target` is set. A response that was cut for length ends like any other: the value after its last token is 0, there is no bootstrap from
the critic (set `mask_truncated` to leave such responses out of both losses).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tridentrl.algos.algorithm import rule
from tridentrl.algos.context import Context, MicroBatch, Prompt
from tridentrl.algos.policy_gradient import KLEstimator, PolicyGradient, PolicyGradientConfig, without_excluded
from tridentrl.algos.registry import register
from tridentrl.kernels.advantages import gae, last_trained_token, masked_mean
from tridentrl.kernels.losses import value_loss


@dataclass(frozen=True, kw_only=True)
class PPOConfig(PolicyGradientConfig):
    samples_per_prompt: int = 1
    """Responses sampled for each prompt."""
    gamma: float = 1.0
    """Discount per trained token; 1 as the reward is for the whole response."""
    lam: float = 0.95
    """Lambda of GAE: 1 is the reward to go minus the value, 0 the one-step error."""
    vf_coef: float = 0.5
    """Weight of the value loss (a squared error without a factor 1/2)."""
    value_clip: float | None = 0.2
    """The new value counts within +-value_clip (in units of reward) of the old one; null: no clip."""
    kl_in: Literal["reward", "loss"] = "reward"
    """Whether the KL is taken off the rewards (the paper's) or is a term of the loss."""
    kl_estimator: KLEstimator = "k1"
    """k1 (the paper's), k2 or k3, see `kernels.losses.kl_estimate`. Under kl_in=loss k2 or k3."""
    whiten_advantages: bool = True
    """Shift and scale advantages to mean 0 and std 1 over all trained tokens of the step."""

    def problems(self) -> list[str]:
        return [
            *super().problems(),
            *rule("samples_per_prompt", self.samples_per_prompt, self.samples_per_prompt >= 1, "set 1 or more"),
            *rule("gamma", self.gamma, 0 <= self.gamma <= 1, "a discount lies in [0, 1]"),
            *rule("lam", self.lam, 0 <= self.lam <= 1, "lambda of GAE lies in [0, 1]"),
            *rule("vf_coef", self.vf_coef, self.vf_coef > 0, "with 0 the critic would not learn; set it above 0"),
            *rule("value_clip", self.value_clip, self.value_clip is None or self.value_clip > 0, "set it above 0, or null for no clip"),
        ]


@register("ppo")
class PPO(PolicyGradient):
    Config = PPOConfig
    config: PPOConfig

    def roles(self, *, kl_coef: float) -> tuple[str, ...]:
        return (*super().roles(kl_coef=kl_coef), "critic")

    @property
    def samples_per_prompt(self) -> int:
        return self.config.samples_per_prompt

    def step(self, ctx: Context, prompts: Sequence[Prompt]) -> None:
        config = self.config
        rollouts = ctx.generate(prompts, n=config.samples_per_prompt)
        rollouts, scores = without_excluded(rollouts, ctx.reward(rollouts))
        if len(rollouts) == 0:
            return  # there is nothing to learn from
        rollouts = self.scored(ctx, rollouts)
        values, mask, lengths = ctx.values(rollouts), rollouts.response_mask_R, rollouts.lengths_n
        rewards = torch.where(last_trained_token(mask, lengths), rollouts.per_token(scores), 0.0)
        with ctx.timer("advantage"):
            advantages, returns = gae(self.less_kl(rewards, rollouts), values, mask, lengths, gamma=config.gamma, lam=config.lam)
            means = {"advantage/mean": advantages, "advantage/return_mean": returns, "advantage/value_mean": values}
            ctx.log({name: masked_mean(tensor, mask, group=ctx.data_group) for name, tensor in means.items()})
        learned = rollouts.with_fields(old_values=values, returns=returns)
        ctx.update_critic(learned, self.critic_loss, epochs=config.epochs, mini_batch_size=config.mini_batch_size)
        self.update(ctx, rollouts, advantages)

    def critic_loss(self, values: Tensor, batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        loss, metrics = value_loss(
            values,
            batch.fields["old_values"],
            batch.fields["returns"],
            batch.response_mask,
            self.weights(batch),
            clip=self.config.value_clip,
            tokens=batch.denominators.tokens,
        )
        return self.config.vf_coef * loss, metrics
