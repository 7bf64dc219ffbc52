"""Proof that a reshard landed: both sides hash what they hold by Hugging Face coordinates, and only hashes travel.

h(box) = sum over its elements of bits(x) * key(position), modulo 2^64, with an odd key from the position in the Hugging Face tensor.
Sums over disjoint boxes add up to the sum over their union, however the tensor is cut, so senders and receiver need not agree on boxes.
A single changed bit always changes h (an odd key times a power of two is never 0); moved, swapped or stale values change it but for
odds of about 2^-64.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
import torch.distributed as dist

from tridentrl.weights.execute import Tensors
from tridentrl.weights.pieces import Box, slices
from tridentrl.weights.plan import ReshardPlan

AXIS_FACTORS = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9)
"""One odd 64-bit constant per dim: they keep positions apart before the bits are mixed."""
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
CHUNK = 1 << 20
"""Elements hashed at once; bounds the int64 temporaries to some tens of MB."""

Key = tuple[str, str]
"""(Hugging Face name, local name) on a rank: the finest thing a mismatch can be pinned on."""


@torch.no_grad()
def verify(
    plan: ReshardPlan, source_tensors: Tensors, target_tensors: Tensors, *, group: dist.ProcessGroup | None, dtype: torch.dtype
) -> None:
    """Check that every target holds what the plan's sources hold, bit for bit in `dtype` (that of the targets).

    Collective over `group`; costs one pass over the weights, and 8 bytes for each tensor between two ranks that exchange weights. Each
    rank may have a plan of its own part only. Raises RuntimeError on every rank, naming the tensors and ranks that differ.
    """
    rank = dist.get_rank(group) if dist.is_initialized() else 0
    device = next(iter([*target_tensors.values(), *source_tensors.values()]), torch.empty(0)).device
    pieces = plan.targets.get(rank, ())
    row = _rows((piece.hf_name, piece.local_name) for piece in pieces)
    difference = torch.zeros(len(row), dtype=torch.int64, device=device)
    for move in plan.local.get(rank, ()):
        difference[row[move.hf_name, move.target]] += box_hash(source_tensors[move.source], move.source_box, move.hf_box, dtype)
    for move in plan.echoes.get(rank, ()):
        # An echo is sent by the first copy, which is itself compared with its sender under its own key.
        difference[row[move.hf_name, move.target]] += box_hash(target_tensors[move.source], move.source_box, move.hf_box, dtype)
    for piece in pieces:
        local = target_tensors[piece.local_name]
        difference[row[piece.hf_name, piece.local_name]] -= box_hash(local, piece.local_box, piece.hf_box, local.dtype)
    for keys, sums in _sums_of_senders(plan, source_tensors, rank, device, group, dtype):
        difference[[row[key] for key in keys]] += sums
    names = list(row)
    mine = [names[i] for i in difference.nonzero().flatten().tolist()]
    everyone = [mine]
    if dist.is_initialized():
        everyone = [[] for _ in range(dist.get_world_size(group))]
        dist.all_gather_object(everyone, mine, group=group)
    wrong: dict[str, list[int]] = defaultdict(list)
    for number, keys in enumerate(everyone):
        for hf_name, local_name in keys:
            wrong[f"{hf_name} (in {local_name})"].append(number)
    if wrong:
        listed = "; ".join(f"{name} on rank {', '.join(map(str, ranks))}" for name, ranks in list(wrong.items())[:20])
        raise RuntimeError(f"after the reshard {len(wrong)} tensors differ from their source: {listed}")


def _sums_of_senders(
    plan: ReshardPlan, source_tensors: Tensors, rank: int, device: torch.device, group: dist.ProcessGroup | None, dtype: torch.dtype
) -> list[tuple[list[Key], torch.Tensor]]:
    """For every rank that sends to this one: the tensors it sends parts of, and the sums over these parts."""
    operations, arrived = [], []
    for (source, destination), moves in plan.moves.items():
        row = _rows((move.hf_name, move.target) for move in moves)
        sums = torch.zeros(len(row), dtype=torch.int64, device=device)
        if source == rank:
            for move in moves:
                sums[row[move.hf_name, move.target]] += box_hash(source_tensors[move.source], move.source_box, move.hf_box, dtype)
            operations.append(dist.P2POp(dist.isend, sums, group=group, group_peer=destination))
        elif destination == rank:
            operations.append(dist.P2POp(dist.irecv, sums, group=group, group_peer=source))
            arrived.append((list(row), sums))
    for request in dist.batch_isend_irecv(operations) if operations else []:
        request.wait()
    return arrived


def _rows(keys: Iterable[Key]) -> dict[Key, int]:
    """Each key once, numbered in the order in which both ends meet them."""
    return {key: number for number, key in enumerate(dict.fromkeys(keys))}


def box_hash(tensor: torch.Tensor, local_box: Box, hf_box: Box, dtype: torch.dtype) -> torch.Tensor:
    """h of the box, an int64 scalar (wrapped). Values are converted to `dtype` first."""
    values = tensor[slices(local_box)].to(dtype)
    rows = values.shape[0]
    step = max(1, CHUNK * rows // max(values.numel(), 1))
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    for first in range(0, rows, step):
        part = values[first : first + step].contiguous()
        start = hf_box[0][0] + first
        key = position_keys(((start, start + part.shape[0]), *hf_box[1:]), values.device)
        total += (part.view(BITS[dtype.itemsize]).to(torch.int64) * key).sum()
    return total


def position_keys(hf_box: Box, device: torch.device) -> torch.Tensor:
    """Odd int64 keys of the positions in `hf_box`, same shape: splitmix64's finaliser (Steele et al. 2014) over the coordinates."""
    key = torch.zeros((1,) * len(hf_box), dtype=torch.int64, device=device)
    for dim, ((low, high), factor) in enumerate(zip(hf_box, AXIS_FACTORS, strict=False)):
        along = torch.arange(low, high, dtype=torch.int64, device=device) * _signed(factor)
        key = key + along.view([-1 if other == dim else 1 for other in range(len(hf_box))])
    key = (key ^ _shift_right(key, 30)) * _signed(0xBF58476D1CE4E5B9)
    key = (key ^ _shift_right(key, 27)) * _signed(0x94D049BB133111EB)
    return (key ^ _shift_right(key, 31)) | 1


def _signed(value: int) -> int:
    """The int64 with the bits of an unsigned 64-bit `value`."""
    return value - (1 << 64) if value >> 63 else value


def _shift_right(value: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift; int64's own shift would copy the sign down."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)
