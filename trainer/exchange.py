"""Batches on their data-parallel ranks: responses from the rollout replica that sampled them, or from the data.

Shape legend: N samples of the step over all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from tridentrl.algos.rollouts import Rollouts
from tridentrl.data.balance import balanced_assignment
from tridentrl.data.prompts import PromptRow
from tridentrl.engine.packing import Sequences
from tridentrl.engine.placement import Placement
from tridentrl.engine.rollout import Completion
from tridentrl.parallel.grid import Grid


def exchange(
    mine: dict[int, Completion],
    *,
    prompts_N: list[list[int]],
    group_ids_N: list[int],
    data_sources_N: list[str],
    replica_N: list[int],
    placement: Placement,
    grid: Grid,
    device: torch.device,
) -> Rollouts:
    """Collective over the world. `mine`: the completions this rank's replica sampled, by sample number; equal on all its ranks.

    `replica_N` says which replica samples what. Samples are dealt to data-parallel ranks so that each gets about as many tokens.
    """
    rank, count = dist.get_rank(), len(prompts_N)
    facts_N2 = torch.zeros(count, 2, dtype=torch.int64, device=device)
    seats = [placement.seat(other) for other in range(grid.world)]
    """By rank: its replica, and its part in it."""
    if seats[rank][1] == 0:
        for i, completion in mine.items():
            facts_N2[i] = torch.tensor([len(completion.response_ids), completion.truncated])
    dist.all_reduce(facts_N2)
    lengths, truncated_N = facts_N2[:, 0].tolist(), facts_N2[:, 1].bool().cpu()
    owner_N = balanced_assignment([len(prompt) + length for prompt, length in zip(prompts_N, lengths, strict=True)], grid.dp)

    def travels(source: int, destination: int) -> list[int]:
        """Samples that rank `source` sends to rank `destination`: each rank of a replica serves its share of the world."""
        replica, part = seats[source]
        if destination % placement.tensor != part:
            return []
        dp_rank = grid.coord(destination).dp_rank
        return [i for i in range(count) if owner_N[i] == dp_rank and replica_N[i] == replica]

    outgoing = [travels(rank, destination) for destination in range(grid.world)]
    incoming = [travels(source, rank) for source in range(grid.world)]
    sent = [_encode(mine[i]) for destination in outgoing for i in destination]
    # Two int32 words for each token: its id and the bits of its log-probability.
    send = torch.cat([torch.zeros(0, dtype=torch.int32), *sent]).to(device)
    send_sizes = [2 * sum(lengths[i] for i in samples) for samples in outgoing]
    receive_sizes = [2 * sum(lengths[i] for i in samples) for samples in incoming]
    received = torch.empty(sum(receive_sizes), dtype=torch.int32, device=device)
    dist.all_to_all_single(received, send, receive_sizes, send_sizes)

    responses: dict[int, tuple[Tensor, Tensor]] = {}
    words = received.cpu()
    for i in (i for samples in incoming for i in samples):
        part, words = words[: 2 * lengths[i]], words[2 * lengths[i] :]
        responses[i] = part[: lengths[i]].long(), part[lengths[i] :].view(torch.float32)
    rows = sorted(responses)
    tokens = [torch.zeros(0, dtype=torch.int64)]
    for i in rows:
        tokens += [torch.tensor(prompts_N[i], dtype=torch.int64), responses[i][0]]
    logprobs_R = torch.cat([torch.zeros(0), *(responses[i][1] for i in rows)])
    return Rollouts(
        group_ids_N=torch.tensor(group_ids_N, dtype=torch.int64),
        prompt_lengths_N=torch.tensor([len(prompt) for prompt in prompts_N], dtype=torch.int64),
        response_lengths_N=torch.tensor(lengths, dtype=torch.int64),
        truncated_N=truncated_N,
        data_sources_N=tuple(data_sources_N),
        rows_n=torch.tensor(rows, dtype=torch.int64),
        tokens_T=torch.cat(tokens),
        response_mask_R=torch.ones_like(logprobs_R),
        fields={"engine_logprobs": logprobs_R},
    ).to(device)


def given(prompts: Sequence[PromptRow], responses: Sequence[Sequence[list[int]]], *, grid: Grid, device: torch.device) -> Rollouts:
    """A batch of responses that nobody sampled, equally many to each row, in order; those of a row are on one data-parallel rank."""
    each = len(responses[0])
    totals = [sum(len(row.prompt_ids) + len(ids) for ids in to_row) for row, to_row in zip(prompts, responses, strict=True)]
    owner_N = [owner for owner in balanced_assignment(totals, grid.dp) for _ in range(each)]
    mine = [i for i, owner in enumerate(owner_N) if owner == grid.coord(dist.get_rank()).dp_rank]
    rows_N = [row for row in prompts for _ in range(each)]
    responses_N = [ids for to_row in responses for ids in to_row]
    tokens = [token for i in mine for token in [*rows_N[i].prompt_ids, *responses_N[i]]]
    return Rollouts(
        group_ids_N=torch.arange(len(prompts)).repeat_interleave(each),
        prompt_lengths_N=torch.tensor([len(row.prompt_ids) for row in rows_N]),
        response_lengths_N=torch.tensor([len(ids) for ids in responses_N]),
        truncated_N=torch.zeros(len(rows_N), dtype=torch.bool),
        data_sources_N=tuple(row.data_source for row in rows_N),
        rows_n=torch.tensor(mine, dtype=torch.int64),
        tokens_T=torch.tensor(tokens, dtype=torch.int64),
        response_mask_R=torch.ones(sum(len(responses_N[i]) for i in mine)),
    ).to(device)


def _encode(completion: Completion) -> Tensor:
    ids = torch.tensor(completion.response_ids, dtype=torch.int32)
    return torch.cat([ids, torch.tensor(completion.logprobs, dtype=torch.float32).view(torch.int32)])


def sequences_of(rollouts: Rollouts, together: int = 1) -> Sequences:
    """The tokens held here as the engines take them."""
    total_N = rollouts.prompt_lengths_N + rollouts.response_lengths_N
    return Sequences(
        tokens_T=rollouts.tokens_T,
        total_lengths=total_N[rollouts.rows_n].tolist(),
        response_lengths=rollouts.lengths_n.tolist(),
        together=together,
    )
