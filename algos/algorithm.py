"""The base of every algorithm: a typed config, the models it needs, and `step`, its whole control flow."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from tridentrl.algos.context import Context, MicroBatch
from tridentrl.algos.rollouts import Rollouts
from tridentrl.kernels.losses import AGGREGATIONS, token_weights

Aggregation = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "fixed-length"]


@dataclass(frozen=True, kw_only=True)
class BaseConfig:
    """Keys of the section `algorithm` that every algorithm has. Making one with bad values raises a ValueError that lists all of them."""

    epochs: int = 1
    """Passes over the samples of one step."""
    mini_batch_size: int | None = None
    """Samples (responses, not prompts) over all ranks per optimizer step; None: all samples of the step at once."""
    loss_aggregation: Aggregation = "token-mean"
    """How token losses become one number: token-mean, seq-mean-token-mean, seq-mean-token-sum or fixed-length."""
    loss_length: int | None = None
    """Tokens that loss_aggregation=fixed-length divides each sample's sum by, usually the longest response allowed."""

    def __post_init__(self) -> None:
        if problems := self.problems():
            raise ValueError("\n".join(problems))

    def problems(self) -> list[str]:
        """Every broken rule as a sentence with key, value, rule and fix."""
        return [
            *rule("epochs", self.epochs, self.epochs >= 1, "at least one pass over the samples is needed; set 1 or more"),
            *rule(
                "mini_batch_size",
                self.mini_batch_size,
                self.mini_batch_size is None or self.mini_batch_size >= 1,
                "an optimizer step needs at least one sample; set 1 or more, or null for all samples",
            ),
            *rule(
                "loss_aggregation", self.loss_aggregation, self.loss_aggregation in AGGREGATIONS, f"choose one of {', '.join(AGGREGATIONS)}"
            ),
            *rule(
                "loss_length",
                self.loss_length,
                self.loss_aggregation != "fixed-length" or (self.loss_length is not None and self.loss_length >= 1),
                "loss_aggregation=fixed-length divides by it; set the longest response in tokens",
            ),
        ]


@dataclass(frozen=True, kw_only=True)
class PolicyGradientConfig(BaseConfig):
    """Settings shared by the algorithms that sample and use the clipped ratio objective."""

    clip_coef: float = 0.2
    """The probability ratio counts down to 1 - clip_coef (arXiv 1707.06347)."""
    clip_coef_high: float | None = None
    """The ratio counts up to 1 + clip_coef_high; None: the same as clip_coef."""
    mask_truncated: bool = False
    """Do not train on responses that were cut for length: their tokens leave loss and denominators. Rewards and lengths still count."""

    @property
    def clip_range(self) -> tuple[float, float]:
        """(low, high) distances from 1."""
        return self.clip_coef, self.clip_coef if self.clip_coef_high is None else self.clip_coef_high

    def problems(self) -> list[str]:
        low, high = self.clip_range
        return [
            *super().problems(),
            *rule("clip_coef", low, 0 < low <= 1, "a ratio cannot fall below 0; set it in (0, 1], usually 0.2"),
            *rule("clip_coef_high", high, high > 0, "set it above 0, or null for the value of clip_coef"),
        ]


def rule(key: str, value: Any, holds: bool, sentence: str) -> list[str]:
    """Nothing where the rule holds, else one error message."""
    return [] if holds else [f"{key}={'null' if value is None else value}: {sentence}"]


class Algorithm(ABC):
    """One RL or supervised algorithm. Sees tensors and the `Context`, never an engine."""

    Config: ClassVar[type[BaseConfig]] = BaseConfig
    online: ClassVar[bool] = True
    """Whether it trains on its own samples, so that a rollout engine is needed."""

    def __init__(self, config: BaseConfig | None = None) -> None:
        self.config: Any = self.Config() if config is None else config
        if not isinstance(self.config, self.Config):
            raise ValueError(f"{type(self).__name__} needs a {self.Config.__name__}, got a {type(config).__name__}")

    @abstractmethod
    def roles(self, *, kl_coef: float) -> tuple[str, ...]:
        """Models it needs out of actor, critic, reference, when `trainer.kl_coef` is `kl_coef`."""

    @property
    def samples_per_prompt(self) -> int:
        """Responses to each prompt of a step."""
        return 1

    @abstractmethod
    def step(self, ctx: Context, prompts: Any) -> None:
        """Everything that happens to one batch of prompts. Every rank runs it alike."""

    def state_dict(self) -> dict[str, Any]:
        """What it learned beside the models, for a checkpoint: copies of tensors and plain values, equal on all ranks."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` gave."""
        assert not state, f"{type(self).__name__} saves a state but does not load it"

    def weights(self, batch: MicroBatch) -> Tensor:
        """Weight of each token's loss, [r], by `loss_aggregation`."""
        return token_weights(
            batch.response_mask,
            batch.lengths,
            mode=self.config.loss_aggregation,
            tokens=batch.denominators.tokens,
            sequences=batch.denominators.sequences,
            fixed_length=self.config.loss_length,
        )


def without_truncated(rollouts: Rollouts) -> Rollouts:
    """The same samples with nothing to train in those that were cut for length."""
    finished_R = rollouts.per_token(~rollouts.truncated_N)
    return replace(rollouts, response_mask_R=torch.where(finished_R, rollouts.response_mask_R, 0.0))
