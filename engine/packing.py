"""Sequences packed one after the other, cut into micro-batches under a token budget.

Shape legend: T tokens (prompt and response), R response tokens, both over the sequences held by this data-parallel rank;
t and r the same for one micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from tridentrl.data.balance import micro_batches


@dataclass(frozen=True, kw_only=True)
class Sequences:
    """The sequences of this data-parallel rank, in order. Lengths count tokens; a response is the tail of its sequence."""

    tokens_T: Tensor
    total_lengths: list[int]
    response_lengths: list[int]
    together: int = 1
    """So many sequences in a row, such as the two of a pair, are never split between micro-batches."""


@dataclass(frozen=True, kw_only=True)
class PackedMicroBatch:
    """What one pass through the pipeline carries."""

    tokens: Tensor
    """int64 [1, t], padded at the end to a multiple of the tensor-parallel size; the padding is a sequence of its own."""
    packing: PackedSeqParams
    scored_r: Tensor
    """Positions in t whose output predicts a response token: one before the token itself."""
    targets_r: Tensor
    """The response tokens."""
    rows_r: Tensor
    """Where each response token lies among the rank's R."""
    lengths: list[int]
    """Response tokens of each sequence in this micro-batch."""


def pack(sequences: Sequences, *, max_tokens: int, multiple: int, count_multiple: int = 1, device: torch.device) -> list[PackedMicroBatch]:
    """Cut into micro-batches of at most `max_tokens` tokens each (a longer unit of sequences goes alone).

    `multiple`: the token count of each is padded to a multiple of it. `count_multiple`: micro-batches without any response are
    added until their number is a multiple of it, as the interleaved pipeline schedule demands; there is always at least one.
    """
    starts_T = [0, *torch.tensor(sequences.total_lengths, dtype=torch.int64).cumsum(0).tolist()]
    starts_R = [0, *torch.tensor(sequences.response_lengths, dtype=torch.int64).cumsum(0).tolist()]
    together = sequences.together
    units = [sum(sequences.total_lengths[first : first + together]) for first in range(0, len(sequences.total_lengths), together)]
    batches = [
        _pack_one(sequences, [unit * together + i for unit in members for i in range(together)], starts_T, starts_R, multiple, device)
        for members in micro_batches(units, max_tokens)
    ]
    while not batches or len(batches) % count_multiple:
        batches.append(_pack_one(sequences, [], starts_T, starts_R, multiple, device))
    return batches


def _pack_one(
    sequences: Sequences, members: list[int], starts_T: list[int], starts_R: list[int], multiple: int, device: torch.device
) -> PackedMicroBatch:
    tokens, scored, rows, boundaries = [], [], [], [0]
    for i in members:
        total, response = sequences.total_lengths[i], sequences.response_lengths[i]
        assert response < total, "a response token needs a token before it"
        end = boundaries[-1] + total
        tokens.append(sequences.tokens_T[starts_T[i] : starts_T[i] + total])
        scored.append(torch.arange(end - response - 1, end - 1))
        rows.append(torch.arange(starts_R[i], starts_R[i] + response))
        boundaries.append(end)
    padding = -boundaries[-1] % multiple or (0 if members else multiple)
    if padding:
        tokens.append(torch.zeros(padding, dtype=torch.int64, device=sequences.tokens_T.device))
        boundaries.append(boundaries[-1] + padding)
    tokens_t = torch.cat(tokens).to(device)
    scored_r = torch.cat([torch.zeros(0, dtype=torch.int64), *scored]).to(device)
    ends = torch.tensor(boundaries, dtype=torch.int32, device=device)
    longest = int(ends.diff().max())
    return PackedMicroBatch(
        tokens=tokens_t[None],
        packing=PackedSeqParams(qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=longest, max_seqlen_kv=longest),
        scored_r=scored_r,
        targets_r=tokens_t[scored_r + 1],
        rows_r=torch.cat([torch.zeros(0, dtype=torch.int64), *rows]).to(device),
        lengths=[sequences.response_lengths[i] for i in members],
    )
