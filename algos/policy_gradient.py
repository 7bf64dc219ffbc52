"""What the algorithms share that learn from their own samples: surrogate, KL to the reference, entropy bonus, engine mismatch.

An algorithm samples and gives every token an advantage; `PolicyGradient.update` does the rest. Its loss is

    sum w_t u_t surrogate_t  +  kl_weight sum w_t KL_t  -  entropy_coef sum w_t H_t

with w by `loss_aggregation`, u by `importance_weights` (1 by default) and the KL term only under kl_in=loss. Under kl_in=reward the KL
of each token, times the weight, is taken off its reward instead.

Sources: clipped ratio 1707.06347 eq. 7; dual clip 1912.09729; adaptive KL weight 1909.08593 section 2.2, here per token instead of
per response; KL estimators: `kernels.losses.kl_estimate`; mismatch: `kernels.mismatch`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from tridentrl.algos.algorithm import Algorithm, BaseConfig, StepConfig, rule
from tridentrl.algos.context import Context, MicroBatch
from tridentrl.algos.rollouts import Rollouts
from tridentrl.kernels.advantages import masked_mean, masked_whiten, samplewise_sum
from tridentrl.kernels.losses import KL_ESTIMATORS, KL_LOSS_ESTIMATORS, kl_estimate, kl_loss, mean_over_batch, policy_loss
from tridentrl.kernels.masks import neutralise
from tridentrl.kernels.mismatch import LEVELS, mismatch_ratio

KL_GAIN, KL_ERROR_LIMIT = 0.1, 0.2
"""K_beta and the clip of the proportional error in arXiv 1909.08593, section 2.2."""

KLEstimator = Literal["k1", "k2", "k3"]
Level = Literal["none", "token", "sequence", "geometric"]


@dataclass(frozen=True, kw_only=True)
class PolicyGradientConfig(BaseConfig):
    """Keys of every algorithm that learns from its own samples."""

    clip_coef: float = 0.2
    """The probability ratio counts down to 1 - clip_coef (arXiv 1707.06347)."""
    clip_coef_high: float | None = None
    """The ratio counts up to 1 + clip_coef_high; None: the same as clip_coef."""
    dual_clip: float | None = None
    """Where the advantage is negative, the ratio counts up to this, above 1, usually 3 (arXiv 1912.09729); None: no bound."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus, per nat."""
    beta: float | None = None
    """Weight of the KL to the reference; None: `trainer.kl_coef`. With 0 no reference model is built."""
    kl_in: Literal["reward", "loss"] = "loss"
    """Whether the KL is taken off the rewards or is a term of the loss."""
    kl_estimator: KLEstimator = "k3"
    """k1, k2 or k3, see `kernels.losses.kl_estimate` for what each does. k1 only in the reward: as a loss it does nothing."""
    kl_target: float | None = None
    """Nats per token (`kl/mean`) that the KL weight is steered to after each step (arXiv 1909.08593); None: the weight stays."""
    whiten_advantages: bool = False
    """Shift and scale advantages to mean 0 and std 1 over all trained tokens of the step."""
    mask_truncated: bool = False
    """Do not train on responses that were cut for length: their tokens leave loss and denominators. Rewards and lengths still count."""
    importance_weights: Level = "none"
    """Weigh losses by pi_old / pi_engine, cut at importance_cap: of each token, of its whole response (sequence) or as geometric mean."""
    importance_cap: float = 2.0
    """Largest importance weight."""
    mismatch_mask: Level = "none"
    """Leave out of the loss what has pi_old / pi_engine outside mismatch_range: tokens, or whole responses by product (sequence) or by
    geometric mean."""
    mismatch_range: tuple[float, float] = (0.5, 2.0)
    """Lowest and highest pi_old / pi_engine that mismatch_mask lets through."""

    @property
    def clip_range(self) -> tuple[float, float]:
        """(low, high) distances from 1."""
        return self.clip_coef, self.clip_coef if self.clip_coef_high is None else self.clip_coef_high

    def problems(self) -> list[str]:
        (low, high), (lowest, highest), levels = self.clip_range, self.mismatch_range, ("none", *LEVELS)
        estimators = KL_LOSS_ESTIMATORS if self.kl_in == "loss" else KL_ESTIMATORS
        as_a_loss = " (as a loss, k1 has gradient 0 in expectation)" if self.kl_in == "loss" else ""
        return [
            *super().problems(),
            *rule("clip_coef", low, 0 < low <= 1, "a ratio cannot fall below 0; set it in (0, 1], usually 0.2"),
            *rule("clip_coef_high", high, high > 0, "set it above 0, or null for the value of clip_coef"),
            *rule("dual_clip", self.dual_clip, self.dual_clip is None or self.dual_clip > 1, "set it above 1, or null for no bound"),
            *rule("entropy_coef", self.entropy_coef, self.entropy_coef >= 0, "a negative bonus removes entropy; set 0 or more"),
            *rule(
                "beta",
                self.beta,
                self.beta is None or self.beta >= 0,
                "a negative weight would drive the policy from the reference; set 0 or more, or null for trainer.kl_coef",
            ),
            *rule("kl_in", self.kl_in, self.kl_in in ("reward", "loss"), "choose reward or loss"),
            *rule("kl_estimator", self.kl_estimator, self.kl_estimator in estimators, f"choose one of {', '.join(estimators)}{as_a_loss}"),
            *rule(
                "kl_target",
                self.kl_target,
                self.kl_target is None or (self.kl_target > 0 and self.beta != 0),
                "it steers the weight of the KL, from beta on; set it above 0 nats per token and beta above 0, or null for a fixed weight",
            ),
            *rule("importance_weights", self.importance_weights, self.importance_weights in levels, f"choose one of {', '.join(levels)}"),
            *rule("importance_cap", self.importance_cap, self.importance_cap >= 1, "it holds down weights above 1; set 1 or more"),
            *rule("mismatch_mask", self.mismatch_mask, self.mismatch_mask in levels, f"choose one of {', '.join(levels)}"),
            *rule(
                "mismatch_range",
                [lowest, highest],
                0 <= lowest < 1 < highest,
                "it must hold the ratio 1, that of an engine that agrees; set the first in [0, 1) and the second above 1",
            ),
        ]


class PolicyGradient(Algorithm):
    """Base of these algorithms. A subclass writes `step`, and `surrogate` where it has a loss of its own."""

    Config = PolicyGradientConfig
    config: PolicyGradientConfig

    def __init__(self, config: StepConfig | None = None) -> None:
        super().__init__(config)
        self.kl_weight: float | None = self.config.beta
        """Present weight of the KL; None until the first step tells `trainer.kl_coef`."""
        self._kl = 0.0
        """Mean over the step's tokens, nats."""

    def roles(self, *, kl_coef: float) -> tuple[str, ...]:
        weight = kl_coef if self.config.beta is None else self.config.beta
        return ("actor", "reference") if weight > 0 else ("actor",)

    def state_dict(self) -> dict[str, Any]:
        return {} if self.config.kl_target is None else {"kl_weight": self.kl_weight}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self.config.kl_target is not None and "kl_weight" in state:
            self.kl_weight = state["kl_weight"]

    # Parts of a step, in order

    def scored(self, ctx: Context, rollouts: Rollouts) -> Rollouts:
        """With `old_logprobs`, and with `kl_penalty` for the reward or `ref_logprobs` for the loss. Cut responses are masked."""
        if self.config.mask_truncated:
            rollouts = without_truncated(rollouts)
        rollouts = rollouts.with_fields(old_logprobs=ctx.actor_logprobs(rollouts))
        if self.kl_weight is None:
            self.kl_weight = ctx.kl_coef
        if self.kl_weight == 0:
            return rollouts
        ref_logprobs = ctx.reference_logprobs(rollouts)
        kl = kl_estimate(rollouts.fields["old_logprobs"], ref_logprobs, self.config.kl_estimator)
        self._kl = masked_mean(kl, rollouts.response_mask_R, group=ctx.data_group)
        ctx.log({"kl/mean": self._kl})
        if self.config.kl_in == "reward":
            return rollouts.with_fields(kl_penalty=self.kl_weight * kl)
        return rollouts.with_fields(ref_logprobs=ref_logprobs)

    def less_kl(self, rewards_R: Tensor, rollouts: Rollouts) -> Tensor:
        """Token rewards less the weighted KL of each token, where the KL belongs there. `rollouts` are scored."""
        return rewards_R - rollouts.fields["kl_penalty"] if "kl_penalty" in rollouts.fields else rewards_R

    def less_kl_of_response(self, ctx: Context, rewards_N: Tensor, rollouts: Rollouts) -> Tensor:
        """Rewards of whole responses less the weighted sum of their tokens' KL, where the KL belongs there. A collective."""
        if "kl_penalty" not in rollouts.fields:
            return rewards_N
        mask, penalty = rollouts.response_mask_R, rollouts.fields["kl_penalty"]
        return rewards_N - samplewise_sum(penalty, mask, rollouts.lengths_n, rollouts.rows_n, samples=len(rollouts), group=ctx.data_group)

    def update(self, ctx: Context, rollouts: Rollouts, advantages_R: Tensor) -> None:
        """All optimizer steps of the actor on scored rollouts."""
        if self.config.whiten_advantages:
            with ctx.timer("advantage"):
                advantages_R = masked_whiten(advantages_R, rollouts.response_mask_R, group=ctx.data_group)
        rollouts = self.trusted(ctx, rollouts).with_fields(advantages=advantages_R)
        ctx.update_actor(rollouts, self.loss, epochs=self.config.epochs, mini_batch_size=self.config.mini_batch_size)
        self._steer_kl_weight(ctx)

    def trusted(self, ctx: Context, rollouts: Rollouts) -> Rollouts:
        """With what the engine and the trainer disagree on weighed or left out, as the settings say."""
        config, mask = self.config, rollouts.response_mask_R

        def ratio(level: str) -> Tensor:
            fields = rollouts.fields
            return mismatch_ratio(fields["old_logprobs"], fields["engine_logprobs"], mask, rollouts.lengths_n, level=level)

        if config.mismatch_mask != "none":
            lowest, highest = config.mismatch_range
            ratios = ratio(config.mismatch_mask)
            inside = (ratios >= lowest) & (ratios <= highest)
            ctx.log({"rollout/mismatch_dropped_share": masked_mean((~inside).float(), mask, group=ctx.data_group)})
            rollouts = replace(rollouts, response_mask_R=torch.where(inside, mask, 0.0))
        if config.importance_weights != "none":
            ratios = ratio(config.importance_weights)
            weights = ratios.clamp(max=config.importance_cap)
            means = {"rollout/importance_weight_mean": weights, "rollout/importance_capped_share": (ratios > weights).float()}
            ctx.log({name: masked_mean(x, rollouts.response_mask_R, group=ctx.data_group) for name, x in means.items()})
            rollouts = rollouts.with_fields(importance_weights=weights)
        return rollouts

    def _steer_kl_weight(self, ctx: Context) -> None:
        if self.config.kl_target is None or not self.kl_weight:
            return
        ctx.log({"kl/weight": self.kl_weight})
        error = self._kl / self.config.kl_target - 1
        self.kl_weight *= 1 + KL_GAIN * max(-KL_ERROR_LIMIT, min(error, KL_ERROR_LIMIT))

    # The loss

    def loss(self, logprobs: Tensor, entropy: Tensor, batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        mask, fields, tokens, weights = batch.response_mask, batch.fields, batch.denominators.tokens, self.weights(batch)
        (importance,) = neutralise(mask, fields.get("importance_weights", torch.ones_like(mask)))
        loss, metrics = self.surrogate(logprobs, batch, weights * importance)
        if self.kl_weight and self.config.kl_in == "loss":
            penalty, kl_metrics = kl_loss(logprobs, fields["ref_logprobs"], mask, weights, kind=self.config.kl_estimator, tokens=tokens)
            loss, metrics = loss + self.kl_weight * penalty, metrics | kl_metrics
        if self.config.entropy_coef > 0:
            (trained_entropy,) = neutralise(mask, entropy)
            loss = loss - self.config.entropy_coef * (weights * trained_entropy).sum()
        return loss, metrics | {"entropy": mean_over_batch(entropy, mask, tokens=tokens)}

    def surrogate(self, logprobs: Tensor, batch: MicroBatch, weights: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """What raises the probability of tokens with a positive advantage: by default PPO's clipped ratio of each token."""
        return self.clipped_ratio(logprobs, batch, weights)

    def clipped_ratio(
        self, logprobs: Tensor, batch: MicroBatch, weights: Tensor, *, of_sequences: bool = False
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """`kernels.losses.policy_loss` with the settings' clips; the ratio is each token's or its whole response's."""
        low, high = self.config.clip_range
        return policy_loss(
            logprobs,
            batch.fields["old_logprobs"],
            batch.fields["advantages"],
            batch.response_mask,
            weights,
            clip_low=low,
            clip_high=high,
            tokens=batch.denominators.tokens,
            dual_clip=self.config.dual_clip,
            sequence_lengths_s=batch.lengths if of_sequences else None,
        )


def without_excluded(rollouts: Rollouts, rewards_N: Tensor) -> tuple[Rollouts, Tensor]:
    """The samples that have a reward, and those rewards."""
    keep_N = ~rewards_N.isnan()
    return rollouts[keep_N], rewards_N[keep_N]


def without_truncated(rollouts: Rollouts) -> Rollouts:
    """The same samples with nothing to train in those that were cut for length."""
    finished_R = rollouts.per_token(~rollouts.truncated_N)
    return replace(rollouts, response_mask_R=torch.where(finished_R, rollouts.response_mask_R, 0.0))
