"""CISPO: clipped importance weights (MiniMax-M1, arXiv 2506.13585, section 3.1).

Advantage of every token of a sample: (reward - group mean) / (group std + 1e-6) (eq. 2). Loss: eq. 4 with its sign turned,
-sum_t w_t held(rho_t) A log pi(y_t) over all tokens of the batch (`loss_aggregation=token-mean`), where held(rho) = clip(rho,
1 - clip_coef, 1 + clip_coef_high) is a constant for the gradient (eq. 5). Unlike under PPO's clip, every token keeps a gradient. No KL
term (beta = 0).

Deviations: the std is the unbiased one, and 1e-6 is added to it. The mean over tokens is over all tokens of an optimizer step. The paper
has no lower bound, which is clip_coef = 1, and tunes the upper one without naming a value; the default lets weights up to 5 through. Its
dynamic sampling and length penalty, both taken from DAPO, are left out.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from tridentrl.algos.algorithm import rule
from tridentrl.algos.context import MicroBatch
from tridentrl.algos.groups import GroupAlgorithm, GroupConfig
from tridentrl.algos.registry import register
from tridentrl.kernels.advantages import group_normalized
from tridentrl.kernels.losses import clipped_weight_loss


@dataclass(frozen=True, kw_only=True)
class CISPOConfig(GroupConfig):
    clip_coef: float = 1.0
    """A token's importance weight is at least 1 - clip_coef. The paper has no lower bound, which is 1."""
    clip_coef_high: float | None = 4.0
    """A token's importance weight is at most 1 + clip_coef_high; None: the same as clip_coef."""
    beta: float | None = 0.0
    """Weight of the KL to the reference (the paper has none); None: `trainer.kl_coef`. With 0 no reference model is built."""

    def problems(self) -> list[str]:
        return [
            *super().problems(),
            *rule("dual_clip", self.dual_clip, self.dual_clip is None, "the weights are bounded by clip_coef_high already; set null"),
        ]


@register("cispo")
class CISPO(GroupAlgorithm):
    Config = CISPOConfig
    config: CISPOConfig

    def advantages(self, rewards: Tensor, group_ids: Tensor) -> Tensor:
        return group_normalized(rewards, group_ids)

    def surrogate(self, logprobs: Tensor, batch: MicroBatch, weights: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        low, high = self.config.clip_range
        return clipped_weight_loss(
            logprobs,
            batch.fields["old_logprobs"],
            batch.fields["advantages"],
            batch.response_mask,
            weights,
            clip_low=low,
            clip_high=high,
            tokens=batch.denominators.tokens,
        )
