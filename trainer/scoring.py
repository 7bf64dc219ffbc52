"""Rewards of a whole batch: each sample is scored on one rank, all ranks learn all scores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tridentrl.algos.rollouts import Rollouts
from tridentrl.data.prompts import PromptRow
from tridentrl.parallel.grid import Grid
from tridentrl.rewards.pool import RewardError, RewardPool, RewardSample


class Scorer:
    """Decodes the responses held by a data-parallel rank; its tensor- and pipeline-parallel ranks share the scoring of them."""

    def __init__(self, pool: RewardPool, tokenizer: Any) -> None:
        self.pool, self.tokenizer = pool, tokenizer

    def responses(self, rollouts: Rollouts) -> list[str]:
        """Text of the n responses held here, without special tokens. Bytes that are no character become U+FFFD."""
        ids = [tokens.tolist() for tokens in response_tokens(rollouts)]
        return self.tokenizer.batch_decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def score(self, rollouts: Rollouts, rows_N: Sequence[PromptRow], grid: Grid, step: int) -> tuple[Tensor, dict[str, float]]:
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
                )
            )
        scores, error = self._score_here(samples)
        _raise_everywhere(error)
        rewards_N = torch.zeros(len(rollouts), device=rollouts.tokens_T.device)
        rewards_N[rollouts.rows_n[list(mine)]] = torch.tensor(scores, dtype=torch.float32, device=rewards_N.device)
        counts = self.pool.metrics()
        totals = torch.tensor(list(counts.values()), device=rewards_N.device)
        dist.all_reduce(rewards_N)
        dist.all_reduce(totals)
        return rewards_N, dict(zip(counts, totals.tolist(), strict=True))

    def _score_here(self, samples: list[RewardSample]) -> tuple[list[float], str | None]:
        try:
            return self.pool.score(samples), None
        except RewardError as error:
            return [], str(error)


def response_tokens(rollouts: Rollouts) -> list[Tensor]:
    """The response ids of each sample held here."""
    total_n = (rollouts.prompt_lengths_N + rollouts.response_lengths_N)[rollouts.rows_n].tolist()
    prompt_n = rollouts.prompt_lengths_N[rollouts.rows_n].tolist()
    return [tokens[prompt:] for tokens, prompt in zip(rollouts.tokens_T.split(total_n), prompt_n, strict=True)]


def _raise_everywhere(error: str | None) -> None:
    errors: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, error)
    for rank, text in enumerate(errors):
        if text is not None:
            raise RewardError(f"{text}\n(on rank {rank})" if len(errors) > 1 else text)
