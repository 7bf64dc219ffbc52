"""Scores of whole responses, by functions in worker processes or by models on the engine, as the rows' data sources say.

The settings `reward` make one judge, `cost` another.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from tridentrl.algos.rollouts import Rollouts
from tridentrl.configs.schema import RewardConfig
from tridentrl.data.prompts import PromptRow
from tridentrl.engine.megatron import MegatronEngine
from tridentrl.kernels.advantages import samplewise_sum
from tridentrl.parallel.grid import Grid
from tridentrl.rewards.pool import RewardError
from tridentrl.trainer.exchange import sequences_of
from tridentrl.trainer.scoring import Scorer

AtWork = Callable[[MegatronEngine], AbstractContextManager[None]]
"""Brings a model to the device for the time of a block."""


@dataclass
class RunningScale:
    """Mean and standard deviation of all scores so far (Welford 1962, Technometrics 4, batches by Chan et al. 1983)."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0
    """Sum of squared distances from the mean."""

    def add(self, scores: Tensor) -> None:
        """Take in a batch [k]."""
        if not len(scores):
            return
        batch = scores.double()
        shift, total = batch.mean().item() - self.mean, self.count + len(batch)
        self.squares += (batch - batch.mean()).square().sum().item() + shift**2 * self.count * len(batch) / total
        self.mean += shift * len(batch) / total
        self.count = total

    def scaled(self, scores: Tensor) -> Tensor:
        """(score - mean) / std; only the mean is taken off while there is no spread."""
        std = math.sqrt(self.squares / (self.count - 1)) if self.count > 1 else 0.0
        return (scores - self.mean) / (std or 1.0)


@dataclass
class Judge:
    """One of the two sections `reward` and `cost`."""

    section: str
    config: RewardConfig
    functions: Scorer
    models: Mapping[str, MegatronEngine]
    """By data source; rows of other sources go to the functions."""
    scales: dict[str, RunningScale] = field(default_factory=dict)
    """By data source, of what its model said."""

    def by_functions(
        self, rollouts: Rollouts, rows_N: Sequence[PromptRow], grid: Grid, *, step: int, watch: bool
    ) -> tuple[Tensor, dict[str, float]]:
        """Scores [N] on all ranks (NaN: excluded; 0 where a model is to score), and counts for the metrics. Collective over the world."""
        mine_N = [source not in self.models for source in rollouts.data_sources_N]
        by_function = torch.tensor(mine_N, device=rollouts.tokens_T.device)
        rewards_N = torch.zeros(len(rollouts), device=rollouts.tokens_T.device)
        with error_of_section(self.section):
            rows = [row for row, mine in zip(rows_N, mine_N, strict=True) if mine]
            rewards_N[by_function], metrics = self.functions.score(rollouts[by_function], rows, grid, step, watch=watch)
        return rewards_N, metrics

    def by_models(self, rewards_N: Tensor, rollouts: Rollouts, group: ProcessGroup | None, at_work: AtWork) -> None:
        """Fill in what the models say. Collective over the world."""
        for engine in dict.fromkeys(self.models.values()):
            mine = torch.tensor([self.models.get(source) is engine for source in rollouts.data_sources_N], device=rewards_N.device)
            if not mine.any():
                continue
            wholes = rollouts[mine].as_wholes()
            with at_work(engine):
                values_n = engine.values(sequences_of(wholes))
            rewards_N[mine] = samplewise_sum(
                values_n, wholes.response_mask_R, wholes.lengths_n, wholes.rows_n, samples=len(wholes), group=group
            )

    def adjusted(self, rewards_N: Tensor, sources_N: Sequence[str]) -> Tensor:
        """As training takes them: those of models scaled by what was seen so far, this batch included, then all clipped."""
        if self.config.normalize:
            rewards_N = rewards_N.clone()
            for source in sorted(self.models.keys() & set(sources_N)):
                mine = torch.tensor([other == source for other in sources_N], device=rewards_N.device)
                scale = self.scales.setdefault(source, RunningScale())
                scale.add(rewards_N[mine & ~rewards_N.isnan()])
                rewards_N[mine] = scale.scaled(rewards_N[mine])
        if self.config.clip is not None:
            rewards_N = rewards_N.clamp(*self.config.clip)
        return rewards_N

    def state_dict(self) -> dict[str, dict[str, float]]:
        """Of the scales. Plain values."""
        return {source: dict(vars(scale)) for source, scale in self.scales.items()}

    def load_state_dict(self, state: Mapping[str, Mapping[str, float]]) -> None:
        self.scales = {
            source: RunningScale(count=int(scale["count"]), mean=scale["mean"], squares=scale["squares"]) for source, scale in state.items()
        }


@contextlib.contextmanager
def error_of_section(section: str) -> Iterator[None]:
    """Errors of the rewards package name settings of the section `reward`; inside they name those of `section`."""
    try:
        yield
    except (ValueError, RewardError) as error:
        if section == "reward":
            raise
        raise type(error)(str(error).replace("reward.", f"{section}.")) from None
