"""Boxes and pieces: the coordinates in which all three worlds (Hugging Face, Megatron, vLLM) speak about weights.

A box is a half-open range per dim, counted in elements. A piece says that a box of a Hugging Face tensor lies at a box of a local
tensor; both boxes have the same shape, so one slice assignment moves it. No torch in here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Box = tuple[tuple[int, int], ...]
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """`hf_box` of the Hugging Face tensor `hf_name` lies at `local_box` of this rank's tensor `local_name`."""

    hf_name: str
    hf_box: Box
    local_name: str
    local_box: Box


def whole(shape: Sequence[int]) -> Box:
    """The box that covers a tensor of `shape`."""
    return tuple((0, size) for size in shape)


def shape_of(box: Box) -> Shape:
    """Size of `box` per dim."""
    return tuple(high - low for low, high in box)


def volume(box: Box) -> int:
    """Number of elements in `box`."""
    count = 1
    for low, high in box:
        count *= high - low
    return count


def intersect(a: Box, b: Box) -> Box | None:
    """The common part of two boxes of the same tensor, or None when it is empty."""
    common = []
    for (a_low, a_high), (b_low, b_high) in zip(a, b, strict=True):
        low, high = max(a_low, b_low), min(a_high, b_high)
        if low >= high:
            return None
        common.append((low, high))
    return tuple(common)


def shift(box: Box, offsets: Sequence[int]) -> Box:
    """`box` moved by `offsets` (elements per dim)."""
    return tuple((low + offset, high + offset) for (low, high), offset in zip(box, offsets, strict=True))


def locate(piece: Piece, hf_box: Box) -> Box:
    """Where `hf_box`, which must lie inside `piece`, is in the local tensor."""
    return tuple(
        (low + local[0] - outer[0], high + local[0] - outer[0])
        for (low, high), outer, local in zip(hf_box, piece.hf_box, piece.local_box, strict=True)
    )


def clip(piece: Piece, hf_box: Box) -> Piece | None:
    """The part of `piece` inside `hf_box`, or None."""
    common = intersect(piece.hf_box, hf_box)
    return None if common is None else Piece(piece.hf_name, common, piece.local_name, locate(piece, common))


def clip_local(piece: Piece, local_box: Box) -> Piece | None:
    """The part of `piece` inside `local_box` of its local tensor, or None."""
    mirrored = clip(Piece(piece.local_name, piece.local_box, piece.hf_name, piece.hf_box), local_box)
    return None if mirrored is None else Piece(piece.hf_name, mirrored.local_box, piece.local_name, mirrored.hf_box)


def slices(box: Box) -> tuple[slice, ...]:
    """Index that selects `box` from an array or tensor."""
    return tuple(slice(low, high) for low, high in box)
