"""Samples on their way from rollout replicas to training ranks, and their scores back to all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tridentrl.engine.placement import Placement, contiguous
from tridentrl.engine.rollout import Completion
from tridentrl.parallel.grid import Grid
from tridentrl.rewards.pool import RewardError, Scores
from tridentrl.trainer.exchange import exchange
from tridentrl.trainer.scoring import Scorer, _share

SAMPLES = 11


def completion(i: int) -> Completion:
    generator = torch.Generator().manual_seed(i)
    length = [5, 1, 0, 9, 3, 3, 7, 2, 8, 1, 4][i]
    ids = torch.randint(0, 1 << 20, (length,), generator=generator).tolist()
    return Completion(response_ids=ids, logprobs=torch.randn(length, generator=generator).tolist(), truncated=i % 3 == 0)


def prompts() -> list[list[int]]:
    return [[100 + i] * (1 + i % 4) for i in range(SAMPLES)]


def exchanged(grid: Grid, placement: Placement) -> Any:
    replicas = len(placement.replicas)
    replica_N = [i % replicas for i in range(SAMPLES)]
    mine = {i: completion(i) for i in range(SAMPLES) if replica_N[i] == placement.seat(dist.get_rank())[0]}
    rollouts = exchange(
        mine,
        prompts_N=prompts(),
        group_ids_N=[i // 2 for i in range(SAMPLES)],
        data_sources_N=["a"] * SAMPLES,
        replica_N=replica_N,
        placement=placement,
        grid=grid,
        device=torch.device("cpu"),
    )
    return (
        rollouts.rows_n.tolist(),
        rollouts.tokens_T.tolist(),
        rollouts.fields["engine_logprobs"],
        rollouts.response_lengths_N.tolist(),
        rollouts.truncated_N.tolist(),
    )


@pytest.mark.parametrize("replicas", [((0,), (1,), (2,), (3,)), ((0, 1), (2, 3)), ((0, 2), (1, 3)), ((0, 1, 2, 3),)], ids=str)
@pytest.mark.parametrize("grid", [Grid(tp=2, dp=2), Grid(pp=2, dp=2), Grid(dp=4), Grid(tp=4)], ids=str)
def test_every_sample_arrives_once_bit_for_bit(grid: Grid, replicas: tuple[tuple[int, ...], ...]) -> None:
    by_rank = run_ranks(4, exchanged, grid, Placement(replicas))
    rows_of_dp: dict[int, list[int]] = {}
    for rank, (rows, tokens, logprobs, lengths, truncated) in enumerate(by_rank):
        assert rows_of_dp.setdefault(grid.coord(rank).dp_rank, rows) == rows
        assert tokens == [token for i in rows for token in [*prompts()[i], *completion(i).response_ids]]
        assert torch.equal(logprobs, torch.tensor([logprob for i in rows for logprob in completion(i).logprobs]))
        assert lengths == [len(completion(i).response_ids) for i in range(SAMPLES)]
        assert truncated == [completion(i).truncated for i in range(SAMPLES)]
    assert sorted(row for rows in rows_of_dp.values() for row in rows) == list(range(SAMPLES))
    loads = [sum(len(prompts()[i]) + len(completion(i).response_ids) for i in rows) for rows in rows_of_dp.values()]
    assert max(loads) - min(loads) <= 13  # no more than the longest sample


def failing_on_rank_1() -> str:
    def score() -> Scores:
        if dist.get_rank() == 1:
            raise RewardError("sample 7 is impossible")
        return Scores([1.0], 0, [], 0)

    with pytest.raises(RewardError) as error:
        _share([dist.get_rank()], score)
    return str(error.value)


def test_a_reward_error_on_one_rank_is_raised_on_all() -> None:
    assert run_ranks(3, failing_on_rank_1) == ["sample 7 is impossible\n(on rank 1)"] * 3


def test_half_a_character_decodes_without_an_error() -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={byte: i for i, byte in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    ids = fast("é🙂").input_ids
    assert len(ids) == 6
    scorer = Scorer(None, fast)  # type: ignore[arg-type]
    (rollouts,) = run_ranks(1, one_response, ids[:4])
    assert scorer.responses(rollouts) == ["é\N{REPLACEMENT CHARACTER}"]


def one_response(ids: list[int]) -> Any:
    return exchange(
        {0: Completion(response_ids=ids, logprobs=[0.0] * len(ids), truncated=True)},
        prompts_N=[[1]],
        group_ids_N=[0],
        data_sources_N=["a"],
        replica_N=[0],
        placement=contiguous(1, 1),
        grid=Grid(),
        device=torch.device("cpu"),
    )
