"""Group sequence policy optimisation (arXiv 2507.18071).

Advantage of a sample: (reward - group mean) / (group std + 1e-6) (eq. 6). The importance ratio is the whole response's,
s = (pi(y) / pi_old(y))^(1 / |y|) = exp(mean over its tokens of log pi - log pi_old) (eq. 7), and so is the clip. Loss: eq. 5 with its
sign turned: -mean over samples of min(s A, clip(s, 1 - clip_coef, 1 + clip_coef_high) A). Each token's loss is that of its response, and
`loss_aggregation=seq-mean-token-mean` makes them the paper's mean over samples.

Deviations: the std is the unbiased one, and 1e-6 is added to it. |y| counts trained tokens. The mean over samples is over
all samples of an optimizer step. The clip range is the paper's (section 5.1); ratios of this kind lie far closer to 1 than those of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from tridentrl.algos.algorithm import Aggregation
from tridentrl.algos.context import MicroBatch
from tridentrl.algos.groups import GroupAlgorithm, GroupConfig
from tridentrl.algos.registry import register
from tridentrl.kernels.advantages import group_normalized


@dataclass(frozen=True, kw_only=True)
class GSPOConfig(GroupConfig):
    clip_coef: float = 3e-4
    """The ratio of a response counts down to 1 - clip_coef (the paper's value)."""
    clip_coef_high: float | None = 4e-4
    """The ratio of a response counts up to 1 + clip_coef_high (the paper's value); None: the same as clip_coef."""
    beta: float | None = 0.0
    """Weight of the KL to the reference (the paper leaves it out); None: `trainer.kl_coef`. With 0 no reference model is built."""
    loss_aggregation: Aggregation = "seq-mean-token-mean"
    """The paper's: every sample counts the same. See `BaseConfig` for the others."""


@register("gspo")
class GSPO(GroupAlgorithm):
    Config = GSPOConfig
    config: GSPOConfig

    def advantages(self, rewards: Tensor, group_ids: Tensor) -> Tensor:
        return group_normalized(rewards, group_ids)

    def surrogate(self, logprobs: Tensor, batch: MicroBatch, weights: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return self.clipped_ratio(logprobs, batch, weights, of_sequences=True)
