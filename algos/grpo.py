"""Group relative policy optimisation (DeepSeekMath, arXiv 2402.03300, section 4.1, algorithm 1).

Advantage of every token of a sample: (reward - group mean) / (group std + 1e-6), outcome supervision (section 4.1.2).
Loss: eq. 3 with its sign turned: the clipped ratio objective plus beta times a KL estimate (k3, eq. 4) to the reference policy, averaged
over the tokens of a sample, then over samples (`loss_aggregation=seq-mean-token-mean`).

Deviations: the std is the unbiased one (the paper does not say which). The reference is the initial policy throughout (the paper's outer
loop renews it). The mean over samples is over all samples of an optimizer step. `top_k`, `clip_coef_high`, `mask_truncated`,
`normalize_std=false` and the other aggregations are extensions, off by default. Dr. GRPO (arXiv 2503.20783) is normalize_std=false,
loss_aggregation=fixed-length, loss_length=<longest response>, beta=0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from tridentrl.algos.algorithm import Aggregation, Algorithm, PolicyGradientConfig, rule, without_truncated
from tridentrl.algos.context import Context, MicroBatch
from tridentrl.algos.registry import register
from tridentrl.kernels.advantages import GroupStatistics, group_normalized, group_statistics, masked_mean, top_k_per_group
from tridentrl.kernels.losses import KL_LOSS_ESTIMATORS, kl_estimate, kl_loss, mean_over_batch, policy_loss


@dataclass(frozen=True, kw_only=True)
class GRPOConfig(PolicyGradientConfig):
    group_size: int = 8
    """Responses sampled for each prompt (the paper's G, which uses 64)."""
    beta: float = 0.04
    """Weight of the KL term in the loss (the paper's value). With 0 no reference model is built. `trainer.kl_coef` is not used."""
    kl_estimator: Literal["k2", "k3"] = "k3"
    """k3 (the paper's) or k2, whose gradient is that of the KL itself; see `kernels.losses.kl_estimate`."""
    top_k: int | None = None
    """Samples of each group that are trained, by reward, highest first, chosen after the group was normalised; None: all."""
    normalize_std: bool = True
    """Divide by the group's standard deviation."""
    loss_aggregation: Aggregation = "seq-mean-token-mean"
    """The paper's: mean over a sample's tokens, then over samples. See `BaseConfig` for the others."""

    def problems(self) -> list[str]:
        return [
            *super().problems(),
            *rule("group_size", self.group_size, self.group_size >= 2, "a sample is compared with the others of its group; set 2 or more"),
            *rule("beta", self.beta, self.beta >= 0, "a negative weight would drive the policy from the reference; set 0 or more"),
            *rule(
                "kl_estimator",
                self.kl_estimator,
                self.kl_estimator in KL_LOSS_ESTIMATORS,
                f"choose one of {', '.join(KL_LOSS_ESTIMATORS)} (as a loss, k1 has gradient 0 in expectation)",
            ),
            *rule(
                "top_k",
                self.top_k,
                self.top_k is None or 1 <= self.top_k <= self.group_size,
                f"it counts samples of a group of group_size={self.group_size}; set 1 to {self.group_size}, or null for all",
            ),
        ]


@register("grpo")
class GRPO(Algorithm):
    Config = GRPOConfig
    config: GRPOConfig

    def roles(self, *, kl_coef: float) -> tuple[str, ...]:
        return ("actor", "reference") if self.config.beta > 0 else ("actor",)

    @property
    def samples_per_prompt(self) -> int:
        return self.config.group_size

    def step(self, ctx: Context, prompts: Any) -> None:
        config = self.config
        rollouts = ctx.generate(prompts, n=config.group_size)
        rewards = ctx.reward(rollouts)
        with ctx.timer("advantage"):
            advantages = group_normalized(rewards, rollouts.group_ids_N, normalize_std=config.normalize_std)
            keep = ~rewards.isnan()
            if config.top_k is not None:
                keep = top_k_per_group(rewards, rollouts.group_ids_N, config.top_k)
        ctx.log(_group_metrics(group_statistics(rewards, rollouts.group_ids_N)))
        rollouts, advantages = rollouts[keep], advantages[keep]
        if len(rollouts) == 0:
            return  # every sample was excluded: there is nothing to learn from
        if config.mask_truncated:
            rollouts = without_truncated(rollouts)
        rollouts = rollouts.with_fields(old_logprobs=ctx.actor_logprobs(rollouts), advantages=rollouts.per_token(advantages))
        if config.beta > 0:
            rollouts = rollouts.with_fields(ref_logprobs=ctx.reference_logprobs(rollouts))
            kl = kl_estimate(rollouts.fields["old_logprobs"], rollouts.fields["ref_logprobs"], config.kl_estimator)
            ctx.log({"kl/mean": masked_mean(kl, rollouts.response_mask_R, group=ctx.data_group)})
        ctx.update_actor(rollouts, self.loss, epochs=config.epochs, mini_batch_size=config.mini_batch_size)

    def loss(self, logprobs: Tensor, entropy: Tensor, batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        mask, fields, tokens, weights = batch.response_mask, batch.fields, batch.denominators.tokens, self.weights(batch)
        low, high = self.config.clip_range
        loss, metrics = policy_loss(
            logprobs, fields["old_logprobs"], fields["advantages"], mask, weights, clip_low=low, clip_high=high, tokens=tokens
        )
        if self.config.beta > 0:
            penalty, kl_metrics = kl_loss(logprobs, fields["ref_logprobs"], mask, weights, kind=self.config.kl_estimator, tokens=tokens)
            loss, metrics = loss + self.config.beta * penalty, metrics | kl_metrics
        return loss, metrics | {"entropy": mean_over_batch(entropy, mask, tokens=tokens)}


def _group_metrics(groups: GroupStatistics) -> dict[str, float]:
    """Groups that teach nothing, as counts: `single` has one sample left, `equal` several with the same reward."""
    single_G = groups.counts_G == 1
    equal_G = (groups.counts_G > 1) & (groups.std_G == 0)
    return {"advantage/groups_single": float(single_G.sum()), "advantage/groups_equal": float(equal_G.sum())}
