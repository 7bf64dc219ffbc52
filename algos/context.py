"""What the trainer offers an algorithm. Shapes as in `algos.rollouts`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor
from torch.distributed import ProcessGroup

from tridentrl.algos.rollouts import Rollouts


@dataclass(frozen=True)
class Denominators:
    """Sizes of the whole optimizer batch, over every micro-batch and data-parallel rank, so that no split changes a gradient."""

    tokens: float
    """Trained response tokens (sum of `response_mask`)."""
    sequences: float
    """Samples with at least one trained token."""
    longest: int
    """Tokens of the longest response allowed, `rollout.max_response_length`."""


@dataclass(frozen=True)
class MicroBatch:
    """What a loss sees of one micro-batch: r response tokens of s samples, packed."""

    response_mask: Tensor
    """float32 [r]."""
    lengths: Tensor
    """int64 [s], response tokens of each sample; sums to r."""
    fields: dict[str, Tensor]
    """float32 [r] each, as put there by `Rollouts.with_fields`."""
    denominators: Denominators


# A policy loss gets (logprobs [r], entropy [r], micro-batch), a value loss (values [r], micro-batch). Both return a scalar
# already divided by the global denominators, so that the sum over micro-batches and data-parallel ranks is the loss, and
# metrics that are summed the same way (a name that ends in `_max` is reduced by maximum instead).
PolicyLoss = Callable[[Tensor, Tensor, MicroBatch], tuple[Tensor, dict[str, Tensor]]]
ValueLoss = Callable[[Tensor, MicroBatch], tuple[Tensor, dict[str, Tensor]]]


class Prompt(Protocol):
    """What an algorithm may read of a prompt row."""

    @property
    def row_id(self) -> int:
        """Number of the row in the data files."""
        ...

    @property
    def data_source(self) -> str: ...

    @property
    def prompt_ids(self) -> list[int]:
        """Tokens after the template."""
        ...


class Context(Protocol):
    """The verbs of a controller program. Every rank calls the same ones in the same order."""

    kl_coef: float
    """`trainer.kl_coef`."""
    data_group: ProcessGroup | None
    """The data-parallel group; None when there is one rank."""
    max_response_length: int
    """`rollout.max_response_length`, tokens."""

    def generate(self, prompts: Any, *, n: int | Sequence[int], greedy: bool = False) -> Rollouts:
        """Sample `n` responses to each prompt row, or as many as `n` says for each. A sample's group id is its row's place in `prompts`.

        Field `engine_logprobs` holds the engine's own log-probabilities.
        """
        ...

    def more_prompts(self) -> Any:
        """The next batch of training rows within the same step. The place in the data moves on: the next step, and a resumed run, go on
        behind it."""
        ...

    def demonstrations(self, prompts: Any) -> Rollouts:
        """The rows' own responses (`data.response_key`) as a batch, for supervised training."""
        ...

    def preferences(self, prompts: Any) -> Rollouts:
        """Two samples for each row, its chosen response (`data.chosen_key`) and its rejected one (`data.rejected_key`), in this order."""
        ...

    def reward(self, rollouts: Rollouts, *, name: str = "reward") -> Tensor:
        """Score of every sample, float32 [N], on all ranks; NaN where the sample is excluded from statistics and loss.

        Of the last rollouts generated. `name`: where their metrics go, `<name>/mean` and so on.
        """
        ...

    def cost(self, rollouts: Rollouts, *, name: str = "cost") -> Tensor:
        """The same by the section `cost`, for an algorithm that names it in `sections`."""
        ...

    def actor_logprobs(self, rollouts: Rollouts) -> Tensor:
        """log pi(token) of the current actor at the sampling temperature, float32 [R]."""
        ...

    def reference_logprobs(self, rollouts: Rollouts) -> Tensor:
        """The same from the frozen reference."""
        ...

    def values(self, rollouts: Rollouts, *, role: str = "critic") -> Tensor:
        """Value of the state in which each response token was chosen by the model `role`, which has a value head, float32 [R]."""
        ...

    def update_actor(
        self, rollouts: Rollouts, loss: PolicyLoss, *, epochs: int = 1, mini_batch_size: int | None = None, together: int = 1
    ) -> None:
        """One optimizer step per mini-batch of `mini_batch_size` samples (None: all) and epoch.

        `together`: so many samples in a row are never split, neither between mini-batches nor micro-batches; a loss sees them in a row.
        """
        ...

    def update_critic(
        self,
        rollouts: Rollouts,
        loss: ValueLoss,
        *,
        role: str = "critic",
        epochs: int = 1,
        mini_batch_size: int | None = None,
        together: int = 1,
    ) -> None:
        """The same for the model `role`, which has a value head."""
        ...

    def timer(self, name: str) -> AbstractContextManager[None]:
        """Adds the seconds of the block to `timing_s/<name>`."""
        ...

    def log(self, metrics: Mapping[str, float]) -> None:
        """Record metrics of this step under their full names, for example `rollout/length_mean`."""
        ...
