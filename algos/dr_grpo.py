"""Dr. GRPO: GRPO done right (arXiv 2503.20783, section 3.2).

Advantage of every token of a sample: reward - group mean. Loss: the clipped ratio objective summed over a sample's tokens and divided by
the same length for all of them (`loss_aggregation=fixed-length`), then averaged over samples; no KL term (beta = 0). So neither the
spread of a group nor the length of a response changes how much it counts.

Deviations: none from the paper's code, which divides by the generation budget; its equation divides by nothing, which is
`loss_aggregation=seq-mean-token-sum`.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from tridentrl.algos.algorithm import Aggregation
from tridentrl.algos.groups import GroupAlgorithm, GroupConfig
from tridentrl.algos.registry import register
from tridentrl.kernels.advantages import group_normalized


@dataclass(frozen=True, kw_only=True)
class DrGRPOConfig(GroupConfig):
    beta: float | None = 0.0
    """Weight of the KL to the reference (the paper has none); None: `trainer.kl_coef`. With 0 no reference model is built."""
    loss_aggregation: Aggregation = "fixed-length"
    """The paper's: a sample's token losses are summed and divided by loss_length, then averaged over samples."""


@register("dr_grpo")
class DrGRPO(GroupAlgorithm):
    Config = DrGRPOConfig
    config: DrGRPOConfig

    def advantages(self, rewards: Tensor, group_ids: Tensor) -> Tensor:
        return group_normalized(rewards, group_ids, normalize_std=False)
