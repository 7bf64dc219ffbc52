"""Direct preference optimisation (arXiv 2305.18290), with its relatives IPO and conservative DPO.

With h = beta [(log pi(y_w|x) - log pi_ref(y_w|x)) - (log pi(y_l|x) - log pi_ref(y_l|x))] for a chosen y_w and a rejected y_l, log-probs
summed over the tokens of a response:
dpo: -(1 - s) log sigma(h) - s log sigma(-h), eq. 7 for s = 0; with `label_smoothing` s, the labels are taken to be wrong with
probability s (conservative DPO, eq. 3 of E. Mitchell, A note on DPO with noisy preferences & relationship to IPO, 2023).
ipo: (h / beta - 1 / (2 beta))^2, eq. 17 of arXiv 2310.12036 with its tau called beta.
`reference_free`: log pi_ref is taken to be 0.

The loss is the mean over pairs. Deviations: none known; implementations elsewhere may average log-probs over tokens for IPO, this does not.
The reference's log-probs of a row are computed once and kept, so that later epochs do without its forward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from tridentrl.algos.algorithm import Algorithm, PairConfig, StepConfig, rule
from tridentrl.algos.context import Context, MicroBatch, Prompt
from tridentrl.algos.registry import register
from tridentrl.algos.rollouts import Rollouts
from tridentrl.kernels.advantages import samplewise_sum
from tridentrl.kernels.masks import neutralise, sum_per_sample


@dataclass(frozen=True, kw_only=True)
class DPOConfig(PairConfig):
    beta: float = 0.1
    """How strongly the policy is held to the reference; larger is closer. For ipo, the tau of its paper."""
    loss_type: Literal["dpo", "ipo"] = "dpo"
    """dpo: logistic loss of the margin. ipo: squared distance of the margin from 1 / (2 beta), which does not push it without end."""
    label_smoothing: float = 0.0
    """Probability that a label is wrong, in [0, 0.5). Of dpo only."""
    reference_free: bool = False
    """Compare log-probs themselves; no reference model is built."""

    def problems(self) -> list[str]:
        smoothing = self.label_smoothing
        return [
            *super().problems(),
            *rule("beta", self.beta, self.beta > 0, "with 0 the margin would not count; set it above 0, usually 0.1"),
            *rule("loss_type", self.loss_type, self.loss_type in ("dpo", "ipo"), "choose dpo or ipo"),
            *rule("label_smoothing", smoothing, 0 <= smoothing < 0.5, "from 0.5 on the labels would mean the opposite; set it in [0, 0.5)"),
            *rule("label_smoothing", smoothing, not smoothing or self.loss_type == "dpo", "ipo has no such term; set 0, or loss_type=dpo"),
        ]


@register("dpo")
class DPO(Algorithm):
    Config = DPOConfig
    config: DPOConfig
    online = False
    data_keys = ("chosen_key", "rejected_key")

    def __init__(self, config: StepConfig | None = None) -> None:
        super().__init__(config)
        self._references: dict[int, Tensor] = {}
        """By row id: the reference's log-probs of its chosen and its rejected response, [2]."""

    def roles(self, *, kl_coef: float) -> tuple[str, ...]:
        return ("actor",) if self.config.reference_free else ("actor", "reference")

    @property
    def samples_per_prompt(self) -> int:
        return 2

    def step(self, ctx: Context, prompts: Sequence[Prompt]) -> None:
        pairs = ctx.preferences(prompts)
        if not self.config.reference_free:
            pairs = pairs.with_fields(reference=pairs.per_token(self._reference_of(ctx, pairs, prompts)))
        ctx.update_actor(pairs, self.loss, epochs=self.config.epochs, mini_batch_size=self.config.mini_batch_size, together=2)

    def _reference_of(self, ctx: Context, pairs: Rollouts, prompts: Sequence[Prompt]) -> Tensor:
        """log pi_ref of every response, [N]."""
        if not all(row.row_id in self._references for row in prompts):
            logprobs = ctx.reference_logprobs(pairs)
            sums = samplewise_sum(logprobs, pairs.response_mask_R, pairs.lengths_n, pairs.rows_n, samples=len(pairs), group=ctx.data_group)
            self._references |= {row.row_id: both for row, both in zip(prompts, sums.view(-1, 2), strict=True)}
        return torch.cat([self._references[row.row_id] for row in prompts])

    def loss(self, logprobs: Tensor, entropy: Tensor, batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        (logprobs,) = neutralise(batch.response_mask, logprobs)
        sums = sum_per_sample(logprobs, batch.lengths)
        log_ratios = sums
        if "reference" in batch.fields:
            log_ratios = sums - batch.fields["reference"][batch.lengths.cumsum(0) - 1]
        chosen, rejected = log_ratios.view(-1, 2).unbind(1)
        beta, smoothing, pairs = self.config.beta, self.config.label_smoothing, batch.denominators.sequences / 2
        margins = beta * (chosen - rejected)
        if self.config.loss_type == "ipo":
            losses = (margins / beta - 1 / (2 * beta)).square()
        else:
            losses = -(1 - smoothing) * F.logsigmoid(margins) - smoothing * F.logsigmoid(-margins)
        means = {
            "reward_chosen": beta * chosen,
            "reward_rejected": beta * rejected,
            "reward_margin": margins,
            "reward_accuracy": (margins > 0).float(),
            "logprob_chosen": sums[::2],
            "logprob_rejected": sums[1::2],
        }
        return losses.sum() / pairs, {name: values.detach().sum() / pairs for name, values in means.items()}
