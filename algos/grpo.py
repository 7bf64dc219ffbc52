"""Group relative policy optimisation (DeepSeekMath, arXiv 2402.03300, section 4.1, algorithm 1).

Advantage of every token of a sample: (reward - group mean) / (group std + 1e-6), outcome supervision (section 4.1.2).
Loss: eq. 3 with its sign turned: the clipped ratio objective plus beta times a KL estimate (k3, eq. 4) to the reference policy, averaged
over the tokens of a sample, then over samples (`loss_aggregation=seq-mean-token-mean`).

Deviations: the std is the unbiased one (the paper does not say which), and 1e-6 is added to it. The clip range is PPO's (the paper names
none). The reference is the initial policy throughout (the paper's outer loop renews it). The mean over samples is over all samples of an
optimizer step. Everything that `algos.groups` and `algos.policy_gradient` add is off by default.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from tridentrl.algos.algorithm import Aggregation
from tridentrl.algos.groups import GroupAlgorithm, GroupConfig
from tridentrl.algos.registry import register
from tridentrl.kernels.advantages import group_normalized


@dataclass(frozen=True, kw_only=True)
class GRPOConfig(GroupConfig):
    beta: float | None = 0.04
    """Weight of the KL to the reference (the paper's value, section 4.2); None: `trainer.kl_coef`. With 0 no reference model is built."""
    loss_aggregation: Aggregation = "seq-mean-token-mean"
    """The paper's: mean over a sample's tokens, then over samples. See `BaseConfig` for the others."""


@register("grpo")
class GRPO(GroupAlgorithm):
    Config = GRPOConfig
    config: GRPOConfig

    def advantages(self, rewards: Tensor, group_ids: Tensor) -> Tensor:
        return group_normalized(rewards, group_ids)
