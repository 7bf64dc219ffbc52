"""What the algorithms share that compare the responses to one prompt: groups, their sizes, which samples of them are trained.

A group is the responses to one prompt row; two rows with the same text are two groups. `GroupAlgorithm.step` is the whole control
flow; a subclass says how rewards become advantages, and some replace the surrogate.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from tridentrl.algos.algorithm import rule
from tridentrl.algos.context import Context, Prompt
from tridentrl.algos.policy_gradient import PolicyGradient, PolicyGradientConfig, without_excluded
from tridentrl.algos.rollouts import Rollouts
from tridentrl.kernels.advantages import GroupStatistics, group_statistics, top_k_per_group


@dataclass(frozen=True, kw_only=True)
class GroupConfig(PolicyGradientConfig):
    """Keys of every algorithm that compares the responses to one prompt."""

    group_size: int | Mapping[int, int] = 8
    """Responses sampled for each prompt. A mapping such as {256: 8, 1024: 4} gives 8 to prompts of up to 256 tokens and 4 to those of up
    to 1024."""
    top_k: int | None = None
    """Samples of each group that are trained, chosen after the group's advantages are known; None: all."""
    top_k_by: Literal["reward", "abs_advantage"] = "reward"
    """What top_k ranks by, highest first: the reward, or how far the advantage is from 0."""

    @property
    def sizes(self) -> dict[int | None, int]:
        """Group size by the longest prompt it is for, in ascending order; None: any prompt."""
        return {None: self.group_size} if isinstance(self.group_size, int) else dict(sorted(self.group_size.items()))

    def size_for(self, prompt_length: int) -> int:
        """ValueError for a prompt of more tokens than any size is given for."""
        for longest, size in self.sizes.items():
            if longest is None or prompt_length <= longest:
                return size
        raise ValueError(
            f"algorithm.group_size={self.sizes}: a prompt has {prompt_length} tokens, and the longest that has a group size is {longest};"
            " add an entry for it, or set data.max_prompt_length"
        )

    def problems(self) -> list[str]:
        smallest = min(self.sizes.values(), default=0)
        return [
            *super().problems(),
            *rule("group_size", self.group_size, smallest >= 2, "a sample is compared with the others of its group; set 2 or more"),
            *rule(
                "group_size",
                self.group_size,
                all(longest is None or longest >= 1 for longest in self.sizes),
                "its keys are the longest prompts in tokens; set 1 or more",
            ),
            *rule(
                "top_k",
                self.top_k,
                self.top_k is None or 1 <= self.top_k <= smallest,
                f"it counts samples of a group of group_size={self.group_size}; set 1 to {smallest}, or null for all",
            ),
            *rule("top_k_by", self.top_k_by, self.top_k_by in ("reward", "abs_advantage"), "choose reward or abs_advantage"),
        ]


class GroupAlgorithm(PolicyGradient):
    """Sample groups, score them, turn rewards into advantages within each group, train."""

    Config = GroupConfig
    config: GroupConfig

    @property
    def samples_per_prompt(self) -> int:
        return max(self.config.sizes.values())

    @property
    def longest_prompt(self) -> int | None:
        return max((longest for longest in self.config.sizes if longest is not None), default=None)

    def step(self, ctx: Context, prompts: Sequence[Prompt]) -> None:
        rollouts = self.sampled(ctx, prompts)
        self.learn(ctx, rollouts, ctx.reward(rollouts))

    def sampled(self, ctx: Context, prompts: Sequence[Prompt]) -> Rollouts:
        """A group for each prompt."""
        size = self.config.group_size
        return ctx.generate(prompts, n=size if isinstance(size, int) else [self.config.size_for(len(row.prompt_ids)) for row in prompts])

    def learn(self, ctx: Context, rollouts: Rollouts, rewards: Tensor) -> None:
        """Everything after the rewards [N]; NaN leaves a sample out."""
        rollouts, rewards = without_excluded(rollouts, rewards)
        if len(rollouts) == 0:
            return  # there is nothing to learn from
        if self.config.kl_in == "reward":
            rollouts = self.scored(ctx, rollouts)
            rewards = self.less_kl_of_response(ctx, rewards, rollouts)
        with ctx.timer("advantage"):
            advantages = self.advantages(rewards, rollouts.group_ids_N)
        ctx.log(group_metrics(group_statistics(rewards, rollouts.group_ids_N)))
        if self.config.top_k is not None:
            ranks = rewards if self.config.top_k_by == "reward" else advantages.abs()
            keep = top_k_per_group(ranks, rollouts.group_ids_N, self.config.top_k)
            rollouts, advantages = rollouts[keep], advantages[keep]
        if self.config.kl_in == "loss":
            rollouts = self.scored(ctx, rollouts)
        self.update(ctx, rollouts, rollouts.per_token(advantages))

    @abstractmethod
    def advantages(self, rewards: Tensor, group_ids: Tensor) -> Tensor:
        """Of each sample, [N], from rewards and groups [N]."""


def group_metrics(groups: GroupStatistics) -> dict[str, float]:
    """Groups that teach nothing, as counts: `single` has one sample left, `equal` several with the same reward."""
    single_G = groups.counts_G == 1
    equal_G = (groups.counts_G > 1) & (groups.std_G == 0)
    return {"advantage/groups_single": float(single_G.sum()), "advantage/groups_equal": float(equal_G.sum())}
