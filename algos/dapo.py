"""DAPO: decoupled clip and dynamic sampling policy optimisation (arXiv 2503.14476).

Advantage of every token of a sample: (reward - group mean) / (group std + 1e-6) (eq. 9). Loss: eq. 8 with its sign turned: the clipped
ratio objective with more room upwards (section 3.1), averaged over all tokens (`loss_aggregation=token-mean`, section 3.3); no KL term.

Dynamic sampling (section 3.2): groups whose rewards are all equal are left out, and further prompts are drawn until the step has as
many groups as it has prompts. Soft overlong punishment (section 3.4, eq. 13): with L = overlong_length and B = overlong_buffer, a
response of more than L - B tokens loses overlong_penalty times min(1, (|y| - (L - B)) / B) of its reward.

Deviations: the std is the unbiased one, and 1e-6 is added to it. A group is left out for equal rewards of any kind (the
paper: all correct or all wrong), read before the punishment. Drawing stops after `max_generation_batches` batches of prompts, and the step
then trains on the groups it has (the paper draws without a bound). The mean over tokens is over all tokens of an optimizer step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tridentrl.algos.algorithm import rule
from tridentrl.algos.context import Context, Prompt
from tridentrl.algos.groups import GroupAlgorithm, GroupConfig
from tridentrl.algos.registry import register
from tridentrl.algos.rollouts import Rollouts, concatenated
from tridentrl.kernels.advantages import group_normalized, group_statistics


@dataclass(frozen=True, kw_only=True)
class DAPOConfig(GroupConfig):
    clip_coef_high: float | None = 0.28
    """The ratio counts up to 1 + clip_coef_high (the paper's value, section 4.1); None: the same as clip_coef."""
    beta: float | None = 0.0
    """Weight of the KL to the reference (the paper has none); None: `trainer.kl_coef`. With 0 no reference model is built."""
    dynamic_sampling: bool = True
    """Draw further prompts in place of groups with equal rewards. false: such groups are only left out."""
    max_generation_batches: int = 10
    """Batches of prompts that one step draws at most."""
    overlong_penalty: float = 1.0
    """Reward that a response of overlong_length or more tokens loses; 0: none."""
    overlong_length: int | None = None
    """Tokens from which the whole penalty counts; None: `rollout.max_response_length`."""
    overlong_buffer: int | None = None
    """Tokens before overlong_length over which the penalty grows from 0; None: a fifth of overlong_length (4096 of 20480 in the paper)."""

    def problems(self) -> list[str]:
        length, buffer = self.overlong_length, self.overlong_buffer
        return [
            *super().problems(),
            *rule(
                "max_generation_batches",
                self.max_generation_batches,
                self.max_generation_batches >= 1,
                "the step's own prompts are the first batch; set 1 or more",
            ),
            *rule("overlong_penalty", self.overlong_penalty, self.overlong_penalty >= 0, "it is taken off the reward; set 0 or more"),
            *rule("overlong_length", length, length is None or length >= 1, "set 1 or more, or null for rollout.max_response_length"),
            *rule(
                "overlong_buffer",
                buffer,
                buffer is None or (buffer >= 1 and (length is None or buffer <= length)),
                "it lies before overlong_length; set 1 to that, or null for a fifth of it",
            ),
        ]


@register("dapo")
class DAPO(GroupAlgorithm):
    Config = DAPOConfig
    config: DAPOConfig

    def step(self, ctx: Context, prompts: Sequence[Prompt]) -> None:
        wanted, drawn, equal = len(prompts), 0, 0
        parts, scores, groups = list[Rollouts](), list[Tensor](), 0
        for batches in range(1, self.config.max_generation_batches + 1):
            rollouts = self.sampled(ctx, prompts)
            rewards = ctx.reward(rollouts)
            found = group_statistics(rewards, rollouts.group_ids_N)
            teaches_G = found.std_G > 0
            drawn, equal = drawn + len(teaches_G), equal + int((~teaches_G).sum())
            taken_G = teaches_G & (teaches_G.cumsum(0) <= wanted - groups)
            keep = taken_G[found.index_N]
            parts, scores, groups = [*parts, rollouts[keep]], [*scores, rewards[keep]], groups + int(taken_G.sum())
            if groups == wanted or batches == self.config.max_generation_batches or not self.config.dynamic_sampling:
                break
            prompts = ctx.more_prompts()
        ctx.log({"dapo/generation_batches": batches, "dapo/groups": groups, "dapo/equal_share": equal / drawn})
        rollouts = concatenated(parts)
        self.learn(ctx, rollouts, torch.cat(scores) - self.overlong(rollouts.response_lengths_N, ctx.max_response_length))

    def overlong(self, lengths: Tensor, max_response_length: int) -> Tensor:
        """Punishment of each response by its length in tokens, [N] (eq. 13 with its sign turned)."""
        longest = self.config.overlong_length or max_response_length
        buffer = self.config.overlong_buffer or max(longest // 5, 1)
        return self.config.overlong_penalty * ((lengths - (longest - buffer)) / buffer).clamp(0, 1)

    def advantages(self, rewards: Tensor, group_ids: Tensor) -> Tensor:
        return group_normalized(rewards, group_ids)
