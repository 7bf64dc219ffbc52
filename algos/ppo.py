"""Proximal policy optimisation (arXiv 1707.06347) with a critic, as used for language models (arXiv 1909.08593).

Reward of a token: -kl_coef (log pi_old - log pi_ref), and the score of the response on its last trained token (1909.08593, eq. 2).
Advantages and value targets: generalised advantage estimation (arXiv 1506.02438, eq. 16), then whitened over the whole step.
Policy loss: clipped ratio (1707.06347, eq. 7) minus `entropy_coef` times the entropy (eq. 9). Value loss: `vf_coef` times the squared
error (eq. 9), clipped around the old value by `value_clip`.

Deviations: actor and critic are two models with an optimizer each, so eq. 9 is two losses, and `vf_coef` matters only through gradient
clipping. The KL weight is fixed. A response that was cut for length ends like any other: the value after its last token is 0, there is no
bootstrap from the critic (set `mask_truncated` to leave such responses out of both losses).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tridentrl.algos.algorithm import Algorithm, PolicyGradientConfig, rule, without_truncated
from tridentrl.algos.context import Context, MicroBatch
from tridentrl.algos.registry import register
from tridentrl.kernels.advantages import gae, last_trained_token, masked_mean, masked_whiten
from tridentrl.kernels.losses import kl_estimate, mean_over_batch, policy_loss, value_loss
from tridentrl.kernels.masks import neutralise


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
    entropy_coef: float = 0.0
    """Weight of the entropy bonus, per nat."""
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
            *rule("entropy_coef", self.entropy_coef, self.entropy_coef >= 0, "a negative bonus removes entropy; set 0 or more"),
        ]


@register("ppo")
class PPO(Algorithm):
    Config = PPOConfig
    config: PPOConfig

    def roles(self, *, kl_coef: float) -> tuple[str, ...]:
        return ("actor", "critic", "reference") if kl_coef > 0 else ("actor", "critic")

    @property
    def samples_per_prompt(self) -> int:
        return self.config.samples_per_prompt

    def step(self, ctx: Context, prompts: Any) -> None:
        config = self.config
        rollouts = ctx.generate(prompts, n=config.samples_per_prompt)
        scores = ctx.reward(rollouts)
        keep = ~scores.isnan()
        rollouts, scores = rollouts[keep], scores[keep]
        if len(rollouts) == 0:
            return  # every sample was excluded: there is nothing to learn from
        if config.mask_truncated:
            rollouts = without_truncated(rollouts)
        mask, lengths = rollouts.response_mask_R, rollouts.lengths_n
        rollouts = rollouts.with_fields(old_logprobs=ctx.actor_logprobs(rollouts), old_values=ctx.values(rollouts))
        rewards = torch.where(last_trained_token(mask, lengths), rollouts.per_token(scores), 0.0)
        if ctx.kl_coef > 0:
            kl = kl_estimate(rollouts.fields["old_logprobs"], ctx.reference_logprobs(rollouts), "k1")
            ctx.log({"kl/mean": masked_mean(kl, mask, group=ctx.data_group)})
            rewards = rewards - ctx.kl_coef * kl
        with ctx.timer("advantage"):
            values = rollouts.fields["old_values"]
            advantages, returns = gae(rewards, values, mask, lengths, gamma=config.gamma, lam=config.lam)
            means = {"advantage/mean": advantages, "advantage/return_mean": returns, "advantage/value_mean": values}
            ctx.log({name: masked_mean(tensor, mask, group=ctx.data_group) for name, tensor in means.items()})
            if config.whiten_advantages:
                advantages = masked_whiten(advantages, mask, group=ctx.data_group)
        rollouts = rollouts.with_fields(advantages=advantages, returns=returns)
        ctx.update_critic(rollouts, self.critic_loss, epochs=config.epochs, mini_batch_size=config.mini_batch_size)
        ctx.update_actor(rollouts, self.actor_loss, epochs=config.epochs, mini_batch_size=config.mini_batch_size)

    def actor_loss(self, logprobs: Tensor, entropy: Tensor, batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        mask, fields, tokens, weights = batch.response_mask, batch.fields, batch.denominators.tokens, self.weights(batch)
        low, high = self.config.clip_range
        loss, metrics = policy_loss(
            logprobs, fields["old_logprobs"], fields["advantages"], mask, weights, clip_low=low, clip_high=high, tokens=tokens
        )
        if self.config.entropy_coef > 0:
            (trained_entropy,) = neutralise(mask, entropy)
            loss = loss - self.config.entropy_coef * (weights * trained_entropy).sum()
        return loss, metrics | {"entropy": mean_over_batch(entropy, mask, tokens=tokens)}

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
