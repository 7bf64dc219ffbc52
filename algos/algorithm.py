"""The base of every algorithm: a typed config, the models it needs, and `step`, its whole control flow."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch import Tensor

from tridentrl.algos.context import Context, MicroBatch, Prompt
from tridentrl.kernels.losses import AGGREGATIONS, token_weights

Aggregation = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "fixed-length"]


@dataclass(frozen=True, kw_only=True)
class StepConfig:
    """Keys of the section `algorithm` that every algorithm has. Making one with bad values raises a ValueError that lists all of them."""

    epochs: int = 1
    """Passes over the samples of one step."""
    mini_batch_size: int | None = None
    """Samples (responses, not prompts) over all ranks per optimizer step; None: all samples of the step at once."""

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
        ]


@dataclass(frozen=True, kw_only=True)
class PairConfig(StepConfig):
    """Of algorithms that learn from preference pairs, with one loss for each pair."""

    def problems(self) -> list[str]:
        return [*super().problems(), *whole_pairs(self.mini_batch_size)]


@dataclass(frozen=True, kw_only=True)
class BaseConfig(StepConfig):
    """Of algorithms with a loss for each token."""

    loss_aggregation: Aggregation = "token-mean"
    """How token losses become one number: token-mean, seq-mean-token-mean, seq-mean-token-sum or fixed-length."""
    loss_length: int | None = None
    """Tokens that loss_aggregation=fixed-length divides each sample's sum by; None: `rollout.max_response_length`."""

    def problems(self) -> list[str]:
        return [
            *super().problems(),
            *rule(
                "loss_aggregation", self.loss_aggregation, self.loss_aggregation in AGGREGATIONS, f"choose one of {', '.join(AGGREGATIONS)}"
            ),
            *rule(
                "loss_length",
                self.loss_length,
                self.loss_length is None or self.loss_length >= 1,
                "loss_aggregation=fixed-length divides by it; set 1 or more, or null for rollout.max_response_length",
            ),
        ]


def rule(key: str, value: Any, holds: bool, sentence: str) -> list[str]:
    """Nothing where the rule holds, else one error message."""
    return [] if holds else [f"{key}={'null' if value is None else value}: {sentence}"]


def whole_pairs(mini_batch_size: int | None) -> list[str]:
    """The rule that a mini-batch does not cut a pair in two."""
    even = mini_batch_size is None or mini_batch_size % 2 == 0
    return rule("mini_batch_size", mini_batch_size, even, "it counts responses, two to a pair; set an even number")


class Algorithm(ABC):
    """One RL or supervised algorithm. Sees tensors and the `Context`, never an engine."""

    Config: ClassVar[type[StepConfig]] = BaseConfig
    online: ClassVar[bool] = True
    """Whether it trains on its own samples, so that a rollout engine is needed."""
    sections: tuple[str, ...] = ("reward",)
    """Which of the sections `reward` and `cost` score its samples, when it is online."""
    data_keys: tuple[str, ...] = ()
    """Settings of the section `data` that must name a column."""

    def __init__(self, config: StepConfig | None = None) -> None:
        self.config: Any = self.Config() if config is None else config
        if not isinstance(self.config, self.Config):
            raise ValueError(f"{type(self).__name__} needs a {self.Config.__name__}, got a {type(config).__name__}")

    @abstractmethod
    def roles(self, *, kl_coef: float) -> tuple[str, ...]:
        """Models it needs out of actor, critic, reference and reward_model, when `trainer.kl_coef` is `kl_coef`; first the main one."""

    @property
    def samples_per_prompt(self) -> int:
        """Responses to each prompt of a step."""
        return 1

    @property
    def longest_prompt(self) -> int | None:
        """Tokens of the longest prompt that its settings cover; None: any."""
        return None

    @abstractmethod
    def step(self, ctx: Context, prompts: Sequence[Prompt]) -> None:
        """Everything that happens to one batch of prompts. Every rank runs it alike."""

    def state_dict(self) -> dict[str, Any]:
        """What it learned beside the models, for a checkpoint: copies of tensors and plain values, equal on all ranks."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` gave."""
        assert not state, f"{type(self).__name__} saves a state but does not load it"

    def weights(self, batch: MicroBatch) -> Tensor:
        """Weight of each token's loss, [r], by `loss_aggregation` of a `BaseConfig`."""
        return token_weights(
            batch.response_mask,
            batch.lengths,
            mode=self.config.loss_aggregation,
            tokens=batch.denominators.tokens,
            sequences=batch.denominators.sequences,
            fixed_length=self.config.loss_length or batch.denominators.longest,
        )
