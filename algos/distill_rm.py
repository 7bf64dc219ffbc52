"""Distillation of a reward model into a smaller one: the student's score of a text is trained to the teacher's.

L = mean over texts of ((s - t) / std)^2  +  margin_coef  mean over pairs of  -(p log sigma(m) + (1 - p) log sigma(-m))

s and t are the scores of student and teacher behind the last token, std is the standard deviation of the teacher's scores of all training
texts seen so far (the scores standardised by the teacher's mean and std, of which the mean drops out), so the student keeps the teacher's
level and scale: regression on the teacher's outputs (arXiv 1312.6184, section 2.2). Where rows are pairs, m = s_1 - s_2 is the student's
margin and p = sigma(t_1 - t_2) the probability that the teacher gives to the first: the cross-entropy with soft targets at temperature 1
(arXiv 1503.02531, section 2) on the choice of Bradley-Terry. Which of the two was chosen does not enter.

Deviations: the papers distil classifiers and the regression there is on logits that are not scaled; here it is on one score.
The teacher scores each row once; later epochs do without its forward pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tridentrl.algos.algorithm import Algorithm, StepConfig, rule, whole_pairs
from tridentrl.algos.context import Context, MicroBatch, Prompt
from tridentrl.algos.registry import register
from tridentrl.algos.rollouts import Rollouts
from tridentrl.kernels.advantages import samplewise_sum


@dataclass(frozen=True, kw_only=True)
class DistillRMConfig(StepConfig):
    pairs: bool = True
    """Texts come in pairs (`data.chosen_key`, `data.rejected_key`), whose margins are matched too. false: one text a row
    (`data.response_key`)."""
    margin_coef: float = 1.0
    """Weight of the cross-entropy between the margins of teacher and student, of pairs only. 1: it counts like the squared error."""

    def problems(self) -> list[str]:
        return [
            *super().problems(),
            *rule("margin_coef", self.margin_coef, self.margin_coef >= 0, "set 0 or more, usually 1"),
            *(whole_pairs(self.mini_batch_size) if self.pairs else []),
        ]


@register("distill_rm")
class DistillRM(Algorithm):
    Config = DistillRMConfig
    config: DistillRMConfig
    online = False

    def __init__(self, config: StepConfig | None = None) -> None:
        super().__init__(config)
        self.data_keys = ("chosen_key", "rejected_key") if self.config.pairs else ("response_key",)
        self._teacher: dict[int, list[float]] = {}
        """By row id: the teacher's scores of its texts."""
        self._std = 1.0

    def roles(self, *, kl_coef: float) -> tuple[str, ...]:
        return ("reward_model", "teacher")

    @property
    def samples_per_prompt(self) -> int:
        return 2 if self.config.pairs else 1

    def step(self, ctx: Context, prompts: Sequence[Prompt]) -> None:
        texts = self.texts(ctx, prompts)
        targets = self._targets(ctx, texts, prompts)
        ctx.update_critic(
            texts.with_fields(teacher=texts.per_token(targets)),
            self.loss,
            role="reward_model",
            epochs=self.config.epochs,
            mini_batch_size=self.config.mini_batch_size,
            together=self.samples_per_prompt,
        )

    def texts(self, ctx: Context, prompts: Sequence[Prompt]) -> Rollouts:
        """The rows' texts as they are scored, `samples_per_prompt` for each row."""
        rollouts = ctx.preferences(prompts) if self.config.pairs else ctx.demonstrations(prompts)
        return rollouts.as_wholes()

    @staticmethod
    def scores(ctx: Context, texts: Rollouts, role: str) -> Tensor:
        """Of the model `role`, for all texts on all ranks, float32 [N]."""
        values = ctx.values(texts, role=role)
        return samplewise_sum(values, texts.response_mask_R, texts.lengths_n, texts.rows_n, samples=len(texts), group=ctx.data_group)

    def _targets(self, ctx: Context, texts: Rollouts, prompts: Sequence[Prompt]) -> Tensor:
        """The teacher's scores [N]; brings their standard deviation up to date."""
        if not all(row.row_id in self._teacher for row in prompts):
            of_rows = self.scores(ctx, texts, "teacher").view(len(prompts), -1).tolist()
            self._teacher |= {row.row_id: given for row, given in zip(prompts, of_rows, strict=True)}
            seen = torch.tensor([score for given in self._teacher.values() for score in given], dtype=torch.float64)
            self._std = float(seen.std()) if len(seen) > 1 and seen.std() > 0 else 1.0
        return torch.tensor([score for row in prompts for score in self._teacher[row.row_id]], device=texts.tokens_T.device)

    def loss(self, values: Tensor, batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        targets, sequences = batch.fields["teacher"], batch.denominators.sequences
        errors = ((values - targets) / self._std).square()
        loss, means = errors.sum() / sequences, {"score_error": errors, "score": values, "teacher_score": targets}
        if self.config.pairs:
            margins, wanted = values[::2] - values[1::2], targets[::2] - targets[1::2]
            entropies = F.binary_cross_entropy_with_logits(margins, wanted.sigmoid(), reduction="none")
            loss = loss + self.config.margin_coef * entropies.sum() / (sequences / 2)
            means |= {"margin_entropy": 2 * entropies, "agreement": 2.0 * (margins.sign() == wanted.sign())}
        return loss, {name: summed.detach().sum() / sequences for name, summed in means.items()}

    def state_dict(self) -> dict[str, Any]:
        return {"teacher": dict(self._teacher), "std": self._std}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._teacher, self._std = dict(state["teacher"]), state["std"]
