"""Training of a reward model on preference pairs (Bradley-Terry; arXiv 2203.02155, eq. 1).

Loss of a pair: -log sigma(r(x, y_w) - r(x, y_l)), with r the model's value behind the last token of prompt and response. Plus
`center_coef` (r(x, y_w) + r(x, y_l))^2 (arXiv 2312.09244, eq. 2): the comparison alone leaves the rewards' level open.

The loss is the mean over pairs. Deviation: eq. 1 averages over all pairs of one prompt in one batch element; here each row is one pair.
The model is saved as a Hugging Face sequence classification model with one label.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from tridentrl.algos.algorithm import Algorithm, PairConfig, rule
from tridentrl.algos.context import Context, MicroBatch, Prompt
from tridentrl.algos.registry import register


@dataclass(frozen=True, kw_only=True)
class RewardModelConfig(PairConfig):
    center_coef: float = 0.0
    """Weight of the squared sum of a pair's rewards, which keeps them around 0."""

    def problems(self) -> list[str]:
        return [
            *super().problems(),
            *rule("center_coef", self.center_coef, self.center_coef >= 0, "set 0 or more, usually 0.01"),
        ]


@register("reward_model")
class RewardModel(Algorithm):
    Config = RewardModelConfig
    config: RewardModelConfig
    online = False
    data_keys = ("chosen_key", "rejected_key")

    def roles(self, *, kl_coef: float) -> tuple[str, ...]:
        return ("reward_model",)

    @property
    def samples_per_prompt(self) -> int:
        return 2

    def step(self, ctx: Context, prompts: Sequence[Prompt]) -> None:
        wholes = ctx.preferences(prompts).as_wholes()
        ctx.update_critic(
            wholes, self.loss, role="reward_model", epochs=self.config.epochs, mini_batch_size=self.config.mini_batch_size, together=2
        )

    def loss(self, values: Tensor, batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        chosen, rejected = values.view(-1, 2).unbind(1)
        pairs = batch.denominators.sequences / 2
        losses = -F.logsigmoid(chosen - rejected) + self.config.center_coef * (chosen + rejected).square()
        means = {
            "score_chosen": chosen,
            "score_rejected": rejected,
            "margin": chosen - rejected,
            "accuracy": (chosen > rejected).float(),
        }
        return losses.sum() / pairs, {name: values.detach().sum() / pairs for name, values in means.items()}
