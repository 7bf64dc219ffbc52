"""How one Hugging Face tensor is cut over tensor-parallel ranks, in Megatron and in vLLM.

A cut answers with a `Shard`: the full shape of the local tensor it lies in (padding and fused neighbours included) and the pairs of
boxes (in the Hugging Face tensor, in the local tensor) that this rank holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from tridentrl.parallel.grid import padded_vocab
from tridentrl.weights.pieces import Box, Shape, intersect, shift, whole

VLLM_VOCAB_MULTIPLE = 64
"""vLLM pads the rows of embedding and head to this multiple before it splits them (`DEFAULT_VOCAB_PADDING_SIZE`)."""


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's share of one Hugging Face tensor."""

    shape: Shape
    """Shape of the local tensor, with padding and with what other Hugging Face tensors put into it."""
    parts: tuple[tuple[Box, Box], ...]
    """(box in the Hugging Face tensor, box in the local tensor), same shape each."""


class Cut(Protocol):
    """`shape` is that of the Hugging Face tensor. Raises ValueError when `tp` ranks cannot share it."""

    def megatron(self, shape: Shape, tp: int, tp_rank: int) -> Shard: ...

    def vllm(self, shape: Shape, tp: int, tp_rank: int) -> Shard: ...


@dataclass(frozen=True, slots=True)
class Replicated:
    """Every rank holds all of it (norms, router, value head)."""

    def megatron(self, shape: Shape, tp: int, tp_rank: int) -> Shard:
        return Shard(shape, ((whole(shape), whole(shape)),))

    vllm = megatron


@dataclass(frozen=True, slots=True)
class Columns:
    """Dim 1 in even blocks: the projection that follows a column-parallel one (o_proj, down_proj)."""

    def megatron(self, shape: Shape, tp: int, tp_rank: int) -> Shard:
        rows, columns = shape
        block = share("input columns", columns, tp)
        return Shard((rows, block), ((((0, rows), (tp_rank * block, (tp_rank + 1) * block)), whole((rows, block))),))

    vllm = megatron


@dataclass(frozen=True, slots=True)
class VocabRows:
    """Dim 0 in even blocks of the *padded* vocabulary; padding rows lie outside every box."""

    def megatron(self, shape: Shape, tp: int, tp_rank: int) -> Shard:
        return self._block(shape, padded_vocab(shape[0], tp), tp, tp_rank)

    def vllm(self, shape: Shape, tp: int, tp_rank: int) -> Shard:
        return self._block(shape, -(-shape[0] // VLLM_VOCAB_MULTIPLE) * VLLM_VOCAB_MULTIPLE, tp, tp_rank)

    def _block(self, shape: Shape, padded: int, tp: int, tp_rank: int) -> Shard:
        rows = share("padded vocabulary rows", padded, tp)
        return take_rows(shape, [(0, shape[0], 0)], (tp_rank * rows, (tp_rank + 1) * rows))


@dataclass(frozen=True, slots=True)
class GateUp:
    """Half of a gated MLP's first projection: both engines hold [gate block; up block] per rank."""

    slot: Literal[0, 1]
    """0: gate, 1: up."""

    def megatron(self, shape: Shape, tp: int, tp_rank: int) -> Shard:
        block = share("MLP rows", shape[0], tp)
        mine = ((tp_rank * block, (tp_rank + 1) * block), *whole(shape[1:]))
        at = ((self.slot * block, (self.slot + 1) * block), *whole(shape[1:]))
        return Shard((2 * block, *shape[1:]), ((mine, at),))

    vllm = megatron


@dataclass(frozen=True, slots=True)
class QkvSlot:
    """Query, key or value rows inside the fused attention projection (weight or bias)."""

    slot: Literal["q", "k", "v"]
    num_heads: int
    num_kv_heads: int
    head_dim: int

    def megatron(self, shape: Shape, tp: int, tp_rank: int) -> Shard:
        """Rows lie group by group, [queries of the group, its key, its value], and ranks take even blocks of that fused tensor.

        With fewer kv heads than ranks a block holds a part of a group, which is how Megatron-Core stores it.
        """
        self._check(tp)
        queries = self.num_heads // self.num_kv_heads
        group = queries + 2
        per_group = queries if self.slot == "q" else 1
        start = {"q": 0, "k": queries, "v": queries + 1}[self.slot]
        d = self.head_dim
        segments = [(g * per_group * d, per_group * d, (g * group + start) * d) for g in range(self.num_kv_heads)]
        rows = share("fused attention rows", self.num_kv_heads * group * d, tp)
        return take_rows(shape, segments, (tp_rank * rows, (tp_rank + 1) * rows))

    def vllm(self, shape: Shape, tp: int, tp_rank: int) -> Shard:
        """[q | k | v] of this rank's heads; with more ranks than kv heads, tp / num_kv_heads ranks hold the same kv head."""
        self._check(tp)
        d = self.head_dim
        q_rows = self.num_heads // tp * d
        kv_rows = max(self.num_kv_heads // tp, 1) * d
        copies = max(tp // self.num_kv_heads, 1)
        local = (q_rows + 2 * kv_rows, *shape[1:])
        start = {"q": 0, "k": q_rows, "v": q_rows + kv_rows}[self.slot]
        rows = q_rows if self.slot == "q" else kv_rows
        first = tp_rank * q_rows if self.slot == "q" else tp_rank // copies * kv_rows
        rest = whole(shape[1:])
        return Shard(local, ((((first, first + rows), *rest), ((start, start + rows), *rest)),))

    def _check(self, tp: int) -> None:
        share("attention heads", self.num_heads, tp)
        if self.num_kv_heads % tp and tp % self.num_kv_heads:
            raise ValueError(
                f"{self.num_kv_heads} key-value heads and tensor-parallel size {tp}: one must be a multiple of the other; "
                f"choose a tensor-parallel size that divides {self.num_kv_heads} or is a multiple of it"
            )


def share(what: str, size: int, ranks: int, axis: str = "tensor-parallel") -> int:
    """`size` / `ranks`; raises ValueError when it does not divide."""
    if size % ranks:
        raise ValueError(f"{size} {what} do not divide by {axis} size {ranks}; choose a size that divides {size}")
    return size // ranks


def take_rows(shape: Shape, segments: list[tuple[int, int, int]], block: tuple[int, int]) -> Shard:
    """Rows `block` of a virtual tensor in which `segments` (first row in `shape`, number of rows, first virtual row) are laid out."""
    rest = whole(shape[1:])
    parts = []
    for first, count, virtual in segments:
        held = intersect(((virtual, virtual + count),), (block,))
        if held is not None:
            source = shift(held, (first - virtual,))
            parts.append(((*source, *rest), (*shift(held, (-block[0],)), *rest)))
    return Shard((block[1] - block[0], *shape[1:]), tuple(parts))
