"""Rewards of a whole batch: each sample is scored on one rank, all ranks learn all scores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tridentrl.algos.rollouts import Rollouts
from tridentrl.data.prompts import PromptRow
from tridentrl.parallel.grid import Grid
from tridentrl.rewards.pool import RewardError, RewardPool, RewardSample, Scores


class Scorer:
    """Decodes the responses held by a data-parallel rank; its tensor- and pipeline-parallel ranks share the scoring of them."""

    def __init__(self, pool: RewardPool, tokenizer: Any) -> None:
        self.pool, self.tokenizer = pool, tokenizer

    def responses(self, rollouts: Rollouts) -> list[str]:
        """Text of the n responses held here, without special tokens. Bytes that are no character become U+FFFD."""
        decode = self.tokenizer.decode  # batch_decode makes one text of no texts
        return [
            decode(tokens.tolist(), skip_special_tokens=True, clean_up_tokenization_spaces=False) for tokens in response_tokens(rollouts)
        ]

    def score(
        self, rollouts: Rollouts, rows_N: Sequence[PromptRow], grid: Grid, step: int, *, watch: bool = True
    ) -> tuple[Tensor, dict[str, float]]:
        """Rewards [N] (NaN: excluded) and counts for the metrics. A failure on one rank raises the same RewardError on all."""
        coord = grid.coord(dist.get_rank())
        sharers = grid.tp * grid.pp
        mine = range(coord.pp_rank * grid.tp + coord.tp_rank, len(rollouts.rows_n), sharers)
        texts, numbers = self.responses(rollouts), rollouts.rows_n.tolist()
        samples = []
        for k in mine:
            row = rows_N[numbers[k]]
            samples.append(
                RewardSample(
                    id=f"step {step} row {row.row_id} sample {numbers[k]}",
                    prompt=row.prompt_text,
                    response=texts[k],
                    ground_truth=row.ground_truth,
                    data_source=row.data_source,
                    extra_info=row.extra_info,
                    ability=row.ability,
                )
            )
        scores = _share([numbers[k] for k in mine], lambda: self.pool.collect(self.pool.submit(samples)))
        self.pool.judge([part for _, part in scores], watch=watch)
        rewards_N = torch.zeros(len(rollouts))
        for numbers_of_rank, part in scores:
            rewards_N[numbers_of_rank] = torch.tensor(part.rewards, dtype=torch.float32)
        metrics = {
            "abstained": float(sum(part.abstained for _, part in scores)),
            "failed": float(sum(len(part.failures) for _, part in scores)),
            "timed_out": float(sum(part.timed_out for _, part in scores)),
        }
        return rewards_N.to(rollouts.tokens_T.device), metrics


def response_tokens(rollouts: Rollouts) -> list[Tensor]:
    """The response ids of each sample held here."""
    total_n = (rollouts.prompt_lengths_N + rollouts.response_lengths_N)[rollouts.rows_n].tolist()
    prompt_n = rollouts.prompt_lengths_N[rollouts.rows_n].tolist()
    return [tokens[prompt:] for tokens, prompt in zip(rollouts.tokens_T.split(total_n), prompt_n, strict=True)]


def _share(numbers: list[int], score: Callable[[], Scores]) -> list[tuple[list[int], Scores]]:
    """Sample numbers and scores of every rank. A RewardError on one rank is raised on all of them."""
    mine: tuple[list[int], Scores] | str
    try:
        mine = numbers, score()
    except RewardError as error:
        mine = str(error)
    everyone: list[tuple[list[int], Scores] | str] = [""] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    errors = [f"{part}\n(on rank {rank})" for rank, part in enumerate(everyone) if isinstance(part, str)]
    if errors:
        raise RewardError(errors[0])
    return [part for part in everyone if not isinstance(part, str)]
