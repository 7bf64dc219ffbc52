"""REINFORCE leave-one-out (Back to Basics, arXiv 2402.14740).

The whole response is one action. Its reward is R = r - beta log(pi_old(y) / pi_ref(y)), and its advantage is R less the mean R of the
other k - 1 responses to the prompt. Loss: -1/N sum_i A_i log pi(y_i), where log pi(y) is the sum over the response's tokens, so
`loss_aggregation=seq-mean-token-sum`.

Deviations: the loss is the clipped ratio objective, whose gradient is that of A log pi as long as pi = pi_old, which is so with one
epoch and one mini-batch; with more, the ratio is held token by token. beta is `trainer.kl_coef` unless given.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from tridentrl.algos.algorithm import Aggregation
from tridentrl.algos.groups import GroupAlgorithm, GroupConfig
from tridentrl.algos.policy_gradient import KLEstimator
from tridentrl.algos.registry import register
from tridentrl.kernels.advantages import leave_one_out


@dataclass(frozen=True, kw_only=True)
class RLOOConfig(GroupConfig):
    group_size: int | Mapping[int, int] = 4
    """Responses sampled for each prompt (the paper's k, 2 and 4); a mapping gives a size for each longest prompt in tokens."""
    kl_in: Literal["reward", "loss"] = "reward"
    """Whether the KL is taken off the rewards (the paper's) or is a term of the loss."""
    kl_estimator: KLEstimator = "k1"
    """k1 (the paper's), k2 or k3, see `kernels.losses.kl_estimate`. Under kl_in=loss k2 or k3."""
    loss_aggregation: Aggregation = "seq-mean-token-sum"
    """The paper's: the log-probability of a response is the sum over its tokens. See `BaseConfig` for the others."""


@register("rloo")
class RLOO(GroupAlgorithm):
    Config = RLOOConfig
    config: RLOOConfig

    def advantages(self, rewards: Tensor, group_ids: Tensor) -> Tensor:
        return leave_one_out(rewards, group_ids)
