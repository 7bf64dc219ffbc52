"""Which box goes from which rank to which, so that every target holds its pieces and the fewest bytes cross between ranks.

Pure Python on boxes. Loading, exporting and resharding are the same question with other layouts at the two ends.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product

from tridentrl.weights.pieces import Box, Piece, intersect, locate, volume

Pair = tuple[int, int]
"""(source rank, destination rank)."""


@dataclass(frozen=True, slots=True)
class Move:
    """`hf_box` of `hf_name`, from `source_box` of the sender's tensor `source` to `target_box` of the receiver's tensor `target`."""

    hf_name: str
    hf_box: Box
    source: str
    source_box: Box
    target: str
    target_box: Box


@dataclass(frozen=True, kw_only=True)
class ReshardPlan:
    """All copies that fill all targets. Made by `plan`; the same on every rank."""

    local: Mapping[int, Sequence[Move]]
    """By rank: copies from its own source tensors."""
    moves: Mapping[Pair, Sequence[Move]]
    """By pair of different ranks, in the order in which they travel."""
    echoes: Mapping[int, Sequence[Move]]
    """By rank: copies between its own *target* tensors after the exchange, for boxes that it holds twice and received once."""
    targets: Mapping[int, Sequence[Piece]]
    itemsize: int
    """Bytes per element on the way."""
    bytes_received: Mapping[int, int]
    """By rank, what the moves bring it."""
    lower_bound: Mapping[int, int]
    """By rank, bytes of the distinct target elements that its own source tensors do not hold. No plan can receive less."""


def plan(
    sources: Mapping[int, Sequence[Piece]],
    targets: Mapping[int, Sequence[Piece]],
    *,
    node_of: Mapping[int, int] | None = None,
    itemsize: int = 4,
) -> ReshardPlan:
    """Cover every target box exactly once: from own memory, else from the rank of the same node, else of any, that has sent least.

    `node_of` maps a rank to its node (None: all on one). Deterministic. Raises ValueError when no source holds a part of a target,
    naming tensor and box.
    """
    builder = _Builder(sources, node_of, itemsize)
    for rank in sorted(targets):
        builder.fill(rank, targets[rank])
    ranks = sorted({*sources, *targets})
    return ReshardPlan(
        local=dict(builder.local),
        moves={pair: builder.moves[pair] for pair in sorted(builder.moves)},
        echoes=dict(builder.echoes),
        targets=targets,
        itemsize=itemsize,
        bytes_received={rank: builder.received[rank] for rank in ranks},
        lower_bound={rank: itemsize * missing_elements(sources.get(rank, ()), targets.get(rank, ())) for rank in ranks},
    )


def missing_elements(held: Sequence[Piece], wanted: Sequence[Piece]) -> int:
    """Number of distinct Hugging Face elements in `wanted` that are not in `held`."""
    wanted_boxes, held_boxes = _boxes_by_name(wanted), _boxes_by_name(held)
    count = 0
    for name, boxes in wanted_boxes.items():
        edges = _edges([*boxes, *held_boxes.get(name, ())])
        mine = {cell for box in held_boxes.get(name, ()) for cell in _cells(box, edges)}
        count += sum(volume(cell) for cell in {cell for box in boxes for cell in _cells(box, edges)} - mine)
    return count


class _Holders:
    """Who holds what of one Hugging Face tensor: the grid of all source boxes' edges, and for each cell its holders."""

    def __init__(self, held: Mapping[Box, Mapping[int, Piece]]) -> None:
        self.edges = _edges(list(held))
        self.cells: dict[Box, dict[int, Piece]] = defaultdict(dict)
        for box, pieces in held.items():
            for cell in _cells(box, self.edges):
                self.cells[cell] |= pieces
        self._parts: dict[Box, list[tuple[Box, dict[int, Piece]]]] = {}

    def parts(self, name: str, target: Box) -> list[tuple[Box, dict[int, Piece]]]:
        """`target` cut along the cells, with the holders of each part; remembered, since replicas ask for the same boxes."""
        if target not in self._parts:
            parts = []
            for cell in _cells(target, self.edges, outer=True):
                part = intersect(cell, target)
                assert part is not None
                if cell not in self.cells:
                    raise ValueError(f"no source holds {name}{_text(part)}, which a target needs: the layouts do not fit together")
                parts.append((part, self.cells[cell]))
            if sum(volume(part) for part, _ in parts) != volume(target):
                ends = _text(tuple((edges[0], edges[-1]) for edges in self.edges))
                raise ValueError(f"no source holds all of {name}{_text(target)}, the sources lie within {ends}: the layouts do not fit")
            self._parts[target] = parts
        return self._parts[target]


class _Builder:
    """Fills one target rank after another and remembers who has sent how much."""

    def __init__(self, sources: Mapping[int, Sequence[Piece]], node_of: Mapping[int, int] | None, itemsize: int) -> None:
        held: dict[str, dict[Box, dict[int, Piece]]] = defaultdict(lambda: defaultdict(dict))
        for rank in sorted(sources):
            for piece in sources[rank]:
                held[piece.hf_name][piece.hf_box].setdefault(rank, piece)
        self.holders = {name: _Holders(boxes) for name, boxes in held.items()}
        self.node_of, self.itemsize = node_of, itemsize
        self.sent: dict[int, int] = defaultdict(int)
        self.received: dict[int, int] = defaultdict(int)
        self.local: dict[int, list[Move]] = defaultdict(list)
        self.moves: dict[Pair, list[Move]] = defaultdict(list)
        self.echoes: dict[int, list[Move]] = defaultdict(list)

    def fill(self, rank: int, pieces: Sequence[Piece]) -> None:
        wanted = _boxes_by_name(pieces)
        # Boxes that overlap are cut along the edges of all boxes of their tensor here, so that a common part is a cell of its own.
        own_edges = {name: _edges(boxes) for name, boxes in wanted.items() if not _apart(boxes)}
        arrived: dict[tuple[str, Box], tuple[str, Box]] = {}
        for piece in pieces:
            holders = self.holders.get(piece.hf_name)
            if holders is None:
                raise ValueError(f"no source holds {piece.hf_name}, which rank {rank} needs for {piece.local_name}")
            for part, who in holders.parts(piece.hf_name, piece.hf_box):
                if piece.hf_name not in own_edges:
                    self._place(rank, piece, part, who, arrived)
                    continue
                for cell in _cells(part, own_edges[piece.hf_name], outer=True):
                    box = intersect(cell, part)
                    assert box is not None
                    self._place(rank, piece, box, who, arrived)

    def _place(self, rank: int, piece: Piece, box: Box, who: Mapping[int, Piece], arrived: dict[tuple[str, Box], tuple[str, Box]]) -> None:
        name, at = piece.hf_name, locate(piece, box)
        if rank in who:
            source = who[rank]
            self.local[rank].append(Move(name, box, source.local_name, locate(source, box), piece.local_name, at))
        elif (name, box) in arrived:
            self.echoes[rank].append(Move(name, box, *arrived[name, box], piece.local_name, at))
        else:
            sender = self._sender(rank, who)
            source, size = who[sender], volume(box) * self.itemsize
            self.moves[sender, rank].append(Move(name, box, source.local_name, locate(source, box), piece.local_name, at))
            arrived[name, box] = (piece.local_name, at)
            self.sent[sender] += size
            self.received[rank] += size

    def _sender(self, rank: int, who: Mapping[int, Piece]) -> int:
        ranks = list(who)
        if self.node_of is not None:
            here = self.node_of[rank]
            ranks = [other for other in ranks if self.node_of[other] == here] or ranks
        return min(ranks, key=lambda other: (self.sent[other], other))


def _boxes_by_name(pieces: Sequence[Piece]) -> dict[str, list[Box]]:
    boxes: dict[str, list[Box]] = defaultdict(list)
    for piece in pieces:
        boxes[piece.hf_name].append(piece.hf_box)
    return boxes


def _apart(boxes: list[Box]) -> bool:
    """Whether no two boxes share rows (dim 0); boxes that do may still be disjoint."""
    rows = sorted(box[0] for box in boxes)
    return all(before[1] <= after[0] for before, after in pairwise(rows))


def _edges(boxes: Sequence[Box]) -> list[list[int]]:
    """Per dim, all coordinates at which some box begins or ends."""
    return [sorted({edge for box in boxes for edge in box[dim]}) for dim in range(len(boxes[0]))]


def _cells(box: Box, edges: list[list[int]], outer: bool = False) -> Iterator[Box]:
    """Cells of the grid `edges` inside `box`, whose own edges are on the grid; with `outer`, all cells that touch any `box`."""
    ranges = []
    for (low, high), grid in zip(box, edges, strict=True):
        first = max(bisect_right(grid, low) - 1, 0) if outer else bisect_left(grid, low)
        last = min(bisect_left(grid, high), len(grid) - 1)
        ranges.append([(grid[i], grid[i + 1]) for i in range(first, last)])
    return product(*ranges)


def _text(box: Box) -> str:
    return "[" + ", ".join(f"{low}:{high}" for low, high in box) + "]"
