"""Carry out a plan: copies within a rank, then the moves between ranks in bounded buckets, straight into the live target tensors.

Every pair of ranks has one stream: its moves one after another. A round ships the next bucket of every stream at once in one grouped
exchange, so the memory on the way stays bounded whatever the model's size. The schedule depends on the plan alone and is made once.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from tridentrl.weights.pieces import Box, shape_of, slices, volume
from tridentrl.weights.plan import ReshardPlan, no_garbage_collection

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Slot:
    """`size` elements at `offset` of a bucket are the box `box` of the local tensor `name`, in row-major order."""

    offset: int
    size: int
    name: str
    box: Box


@dataclass(frozen=True, slots=True)
class Bucket:
    """What one round ships between this rank and `peer`, in elements from `offset` of the staging buffer."""

    peer: int
    offset: int
    size: int
    slots: tuple[Slot, ...]


@dataclass(frozen=True, slots=True)
class Round:
    """One grouped exchange of this rank."""

    sends: tuple[Bucket, ...]
    receives: tuple[Bucket, ...]


@dataclass(frozen=True, kw_only=True)
class Receipt:
    """What one execution did to this rank."""

    bytes_received: int
    """Bytes that arrived from other ranks, counted on arrival."""
    lower_bound: int
    """Bytes of target elements that this rank's source tensors do not hold."""
    bucket_bytes: int
    """Staging memory at its peak, both directions together."""
    seconds: float
    version: int
    """Weight version that the targets hold now, as the caller numbers them."""

    @property
    def ratio(self) -> float:
        """bytes_received / lower_bound; 1.0 when nothing had to move and nothing did."""
        return self.bytes_received / self.lower_bound if self.lower_bound else float(1 + self.bytes_received)


class Resharder:
    """A plan prepared for one rank. `run` may be called any number of times; all ranks of `group` call it together."""

    def __init__(self, plan: ReshardPlan, *, group: dist.ProcessGroup | None, bucket_bytes: int, dtype: torch.dtype) -> None:
        """`bucket_bytes` bounds the staging memory per direction; `dtype` is that of the bytes on the way and of the targets.

        Each rank may have a plan of its own part only. The plan's ranks are ranks within `group` (None: the world). All ranks of it call
        this together. Raises ValueError when a bucket cannot hold an element per peer.
        """
        self.plan, self.group, self.dtype = plan, group, dtype
        self.rank = dist.get_rank(group) if dist.is_initialized() else 0
        peers = [most_peers(plan)]
        if dist.is_initialized():
            peers = [0] * dist.get_world_size(group)
            dist.all_gather_object(peers, most_peers(plan), group=group)
        self.rounds = schedule(plan, self.rank, bucket_elements=bucket_bytes // dtype.itemsize, peers=max(peers))

    @torch.no_grad()
    def run(self, source_tensors: Tensors, target_tensors: Tensors, *, version: int = 0) -> Receipt:
        """Fill `target_tensors` in place. Raises ValueError when a target has another dtype than the one on the way."""
        wrong = sorted(f"{name} ({tensor.dtype})" for name, tensor in target_tensors.items() if tensor.dtype != self.dtype)
        if wrong:
            raise ValueError(f"targets must be {self.dtype}, the data type on the way; these are not: {', '.join(wrong)}")
        device = next(iter([*target_tensors.values(), *source_tensors.values()]), torch.empty(0)).device
        start = _clock(device)
        for move in self.plan.local.get(self.rank, ()):
            target_tensors[move.target][slices(move.target_box)].copy_(source_tensors[move.source][slices(move.source_box)])
        arrived, peak = self._exchange(source_tensors, target_tensors, device)
        for move in self.plan.echoes.get(self.rank, ()):
            target_tensors[move.target][slices(move.target_box)].copy_(target_tensors[move.source][slices(move.source_box)])
        return Receipt(
            bytes_received=arrived * self.dtype.itemsize,
            lower_bound=self.plan.lower_bound.get(self.rank, 0) // self.plan.itemsize * self.dtype.itemsize,
            bucket_bytes=peak * self.dtype.itemsize,
            seconds=_clock(device) - start,
            version=version,
        )

    def _exchange(self, source_tensors: Tensors, target_tensors: Tensors, device: torch.device) -> tuple[int, int]:
        """All rounds; returns elements received and elements of staging memory."""
        outgoing = torch.empty(_capacity(self.rounds, "sends"), dtype=self.dtype, device=device)
        incoming = torch.empty(_capacity(self.rounds, "receives"), dtype=self.dtype, device=device)
        arrived = 0
        for step in self.rounds:
            operations = []
            for bucket in step.sends:
                flat = outgoing[bucket.offset : bucket.offset + bucket.size]
                for slot in bucket.slots:
                    staged = flat[slot.offset : slot.offset + slot.size].view(shape_of(slot.box))
                    staged.copy_(source_tensors[slot.name][slices(slot.box)])
                operations.append(dist.P2POp(dist.isend, flat, group=self.group, group_peer=bucket.peer))
            for bucket in step.receives:
                flat = incoming[bucket.offset : bucket.offset + bucket.size]
                operations.append(dist.P2POp(dist.irecv, flat, group=self.group, group_peer=bucket.peer))
            for work in dist.batch_isend_irecv(operations) if operations else ():
                work.wait()
            for bucket in step.receives:
                flat = incoming[bucket.offset : bucket.offset + bucket.size]
                arrived += flat.numel()
                for slot in bucket.slots:
                    staged = flat[slot.offset : slot.offset + slot.size].view(shape_of(slot.box))
                    target_tensors[slot.name][slices(slot.box)].copy_(staged)
        return arrived, outgoing.numel() + incoming.numel()


def reshard(
    plan: ReshardPlan,
    source_tensors: Tensors,
    target_tensors: Tensors,
    *,
    group: dist.ProcessGroup | None,
    bucket_bytes: int,
    dtype: torch.dtype | None = None,
    version: int = 0,
) -> Receipt:
    """Carry out `plan` once; `Resharder` keeps the schedule for many times. All ranks of `group` call it together.

    `dtype` None: that of the target tensors, which must be one on all ranks.
    """
    dtype = dtype or common_dtype(target_tensors, group)
    return Resharder(plan, group=group, bucket_bytes=bucket_bytes, dtype=dtype).run(source_tensors, target_tensors, version=version)


def common_dtype(tensors: Tensors, group: dist.ProcessGroup | None) -> torch.dtype:
    """The one data type of `tensors` on all ranks of `group`; ValueError on every rank when there is not exactly one."""
    mine = {tensor.dtype for tensor in tensors.values()}
    everyone: list[set[torch.dtype]] = [mine]
    if dist.is_initialized():
        everyone = [set() for _ in range(dist.get_world_size(group))]
        dist.all_gather_object(everyone, mine, group=group)
    found = set().union(*everyone)
    if len(found) != 1:
        names = ", ".join(sorted(map(str, found))) or "none"
        raise ValueError(f"the target tensors must all have one data type, they have: {names}; pass dtype=")
    return found.pop()


def most_peers(plan: ReshardPlan) -> int:
    """Streams of the planned rank that has most of them in one direction."""
    degree = Counter(end for source, destination in plan.moves for end in (("out", source), ("in", destination)))
    return max(degree.values(), default=0)


@no_garbage_collection()
def schedule(plan: ReshardPlan, rank: int, *, bucket_elements: int, peers: int | None = None) -> list[Round]:
    """The rounds of `rank`. Every stream gets the same share of a bucket, that of the rank with the most peers.

    peers: the largest `most_peers` of all ranks' plans; None: `plan` is of all ranks. Raises ValueError when the share is below 1.
    """
    peers = most_peers(plan) if peers is None else peers
    if not peers:
        return []
    share = bucket_elements // peers
    if share < 1:
        raise ValueError(f"a bucket of {bucket_elements} elements is too small for a rank with {peers} peers; raise bucket_bytes")
    sends, receives = {}, {}
    for (source, destination), moves in plan.moves.items():
        if source == rank:
            sends[destination] = _buckets([(move.source, move.source_box) for move in moves], share)
        if destination == rank:
            receives[source] = _buckets([(move.target, move.target_box) for move in moves], share)
    count = max([len(buckets) for buckets in [*sends.values(), *receives.values()]], default=0)
    return [Round(_round(sends, i), _round(receives, i)) for i in range(count)]


def _round(streams: Mapping[int, list[tuple[Slot, ...]]], index: int) -> tuple[Bucket, ...]:
    buckets, offset = [], 0
    for peer, stream in streams.items():
        if index < len(stream):
            size = stream[index][-1].offset + stream[index][-1].size
            buckets.append(Bucket(peer, offset, size, stream[index]))
            offset += size
    return tuple(buckets)


def _buckets(boxes: Sequence[tuple[str, Box]], share: int) -> list[tuple[Slot, ...]]:
    """The boxes in order, cut so that each bucket has at most `share` elements. Depends on their shapes only, so both ends agree."""
    buckets: list[tuple[Slot, ...]] = []
    slots: list[Slot] = []
    used = 0
    for name, box in boxes:
        todo = [box]
        while todo:
            head, rest = first_elements(todo.pop(), share - used)
            if head is not None:
                slots.append(Slot(used, volume(head), name, head))
                used += volume(head)
            todo.extend(reversed(rest))
            if head is None or used == share:
                buckets.append(tuple(slots))
                slots, used = [], 0
    if slots:
        buckets.append(tuple(slots))
    return buckets


def first_elements(box: Box, room: int) -> tuple[Box | None, list[Box]]:
    """Cut `box` into its first elements in row-major order, at most `room` and a box themselves, and the boxes of the others in order.

    The first is None when there is no room at all.
    """
    if volume(box) <= room:
        return box, []
    if room == 0:
        return None, [box]
    (low, high), inner = box[0], box[1:]
    fitting = room // volume(inner)
    if fitting:
        return ((low, low + fitting), *inner), [((low + fitting, high), *inner)]
    head, rest = first_elements(inner, room)
    assert head is not None
    row = (low, low + 1)
    after = [((low + 1, high), *inner)] if low + 1 < high else []
    return (row, *head), [*((row, *part) for part in rest), *after]


def _capacity(rounds: Sequence[Round], direction: str) -> int:
    return max((sum(bucket.size for bucket in getattr(step, direction)) for step in rounds), default=0)


def _clock(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
