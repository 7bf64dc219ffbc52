"""Which box goes from which rank to which, so that every target holds its pieces and the fewest bytes cross between ranks.

Pure Python on boxes. Loading, exporting and resharding are the same question with other layouts at the two ends.
"""

from __future__ import annotations

import contextlib
import gc
import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, count, pairwise, product

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
    """Copies that fill the targets: all of them, or those in which one rank takes part. Made by `plan`."""

    local: Mapping[int, Sequence[Move]]
    """By rank: copies from its own source tensors."""
    moves: Mapping[Pair, Sequence[Move]]
    """By pair of different ranks, in the order in which they travel."""
    echoes: Mapping[int, Sequence[Move]]
    """By rank: copies between its own *target* tensors after the exchange, for boxes that it holds twice and received once."""
    targets: Mapping[int, Sequence[Piece]]
    """Of all ranks, whichever are planned."""
    itemsize: int
    """Bytes per element on the way."""
    bytes_received: Mapping[int, int]
    """By planned rank, what the moves bring it."""
    lower_bound: Mapping[int, int]
    """By planned rank, bytes of the distinct target elements that its own source tensors do not hold. No plan can receive less."""


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """For code that makes a million small tuples and no cycles: the collector would look through them again and again, for seconds."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@no_garbage_collection()
def plan(
    sources: Mapping[int, Sequence[Piece]],
    targets: Mapping[int, Sequence[Piece]],
    *,
    rank: int | None = None,
    node_of: Mapping[int, int] | None = None,
    itemsize: int = 4,
) -> ReshardPlan:
    """Cover every target box exactly once: from own memory, else from a rank of the same node, else from any that holds it.

    rank: leave out what this rank neither sends nor receives; the rest is exactly as in the plan of all ranks (None). So every rank
    plans for itself, in time that hardly grows with the number of ranks, and both ends of a move agree without a word between them.
    node_of: maps a rank to its node (None: all on one). Ranks that hold the same should share one list: they are compared once then.
    Raises ValueError when no source holds a part of a planned target, naming tensor and box.
    """
    planned = sorted({*sources, *targets}) if rank is None else [rank]
    planner = _Planner(sources, rank, node_of)
    for number, (pieces, ranks) in enumerate(same_layouts(targets)):
        planner.fill(number, pieces, ranks)
    received = dict.fromkeys(planned, 0)
    for (_, receiver), moves in planner.moves.items():
        if receiver in received:
            received[receiver] += itemsize * sum(volume(move.hf_box) for move in moves)
    return ReshardPlan(
        local=dict(planner.local),
        moves={pair: planner.moves[pair] for pair in sorted(planner.moves)},
        echoes=dict(planner.echoes),
        targets=targets,
        itemsize=itemsize,
        bytes_received=received,
        lower_bound={r: itemsize * missing_elements(sources.get(r, ()), targets.get(r, ())) for r in planned},
    )


def same_layouts(layouts: Mapping[int, Sequence[Piece]]) -> list[tuple[Sequence[Piece], tuple[int, ...]]]:
    """The distinct layouts, each with its ranks in ascending order. Quick where ranks share one list."""
    groups: dict[tuple[Piece, ...], list[int]] = {}
    seen: dict[int, tuple[Sequence[Piece], list[int]]] = {}  # by id of the list, which must stay alive as long
    for rank in sorted(layouts):
        pieces = layouts[rank]
        if id(pieces) not in seen:
            seen[id(pieces)] = (pieces, groups.setdefault(tuple(pieces), []))
        seen[id(pieces)][1].append(rank)
    return [(pieces, tuple(ranks)) for pieces, ranks in groups.items()]


def missing_elements(held: Sequence[Piece], wanted: Sequence[Piece]) -> int:
    """Number of distinct Hugging Face elements in `wanted` that are not in `held`."""
    return distinct_elements(boxes_by_name(wanted)) - common_elements(boxes_by_name(held), boxes_by_name(wanted))


def distinct_elements(boxes: Mapping[str, Sequence[Box]]) -> int:
    """Number of Hugging Face elements in `boxes` (by tensor), each counted once however many boxes it is in."""
    return sum(volume(cell) for many in boxes.values() for cell in (many if len(many) == 1 else _covered(many, _edges(many))))


def common_elements(held: Mapping[str, Sequence[Box]], wanted: Mapping[str, Sequence[Box]]) -> int:
    """Number of distinct Hugging Face elements that are in boxes of both; takes time for `held` only, however much is wanted."""
    total = 0
    for name, mine in held.items():
        theirs = wanted.get(name, ())
        if len(mine) == len(theirs) == 1:
            both = intersect(mine[0], theirs[0])
            total += volume(both) if both else 0
        elif theirs:
            edges = _edges([*mine, *theirs])
            total += sum(volume(cell) for cell in _covered(mine, edges) & _covered(theirs, edges))
    return total


class _Holders:
    """Who holds what of one Hugging Face tensor: the grid of all source boxes' edges, and for each cell its holders.

    Holders are numbers of source layouts, with the piece that all ranks of that layout have.
    """

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


class _Planner:
    """Fills the targets of one distinct layout after another. `rank`: the only one of interest, None: all are."""

    def __init__(self, sources: Mapping[int, Sequence[Piece]], rank: int | None, node_of: Mapping[int, int] | None) -> None:
        self.rank, self.node_of = rank, node_of
        self.source_groups = same_layouts(sources)
        self.group_of = {member: number for number, (_, ranks) in enumerate(self.source_groups) for member in ranks}
        held: dict[str, dict[Box, dict[int, Piece]]] = defaultdict(lambda: defaultdict(dict))
        for number, (pieces, _) in enumerate(self.source_groups):
            for piece in pieces:
                held[piece.hf_name][piece.hf_box].setdefault(number, piece)
        self.held = held
        self.own_names = {piece.hf_name for piece in sources.get(rank, ())} if rank is not None else set(held)
        self.holders: dict[str, _Holders] = {}
        self.local: dict[int, list[Move]] = defaultdict(list)
        self.moves: dict[Pair, list[Move]] = defaultdict(list)
        self.echoes: dict[int, list[Move]] = defaultdict(list)

    def fill(self, number: int, pieces: Sequence[Piece], ranks: tuple[int, ...]) -> None:
        """Plan for `ranks`, whose targets are all `pieces`; `number` is that of this layout."""
        planned = set(ranks) if self.rank is None else {self.rank} & set(ranks)
        if not planned:
            pieces = [piece for piece in pieces if piece.hf_name in self.own_names]
        routes: dict[tuple[int, ...], _Routes] = {}
        turns: dict[tuple[tuple[int, ...], int], int] = defaultdict(lambda: number)
        arrived: dict[tuple[str, Box], tuple[str, Box]] = {}
        for piece, box, who in self._parts(pieces, ranks[0]):
            key, name, at = tuple(sorted(who)), piece.hf_name, locate(piece, box)
            if key not in routes:
                routes[key] = _Routes([r for group in key for r in self.source_groups[group][1]], ranks, self.rank, self.node_of)
            route = routes[key]
            for receiver in planned & route.holders:
                source = who[self.group_of[receiver]]
                self.local[receiver].append(Move(name, box, source.local_name, locate(source, box), piece.local_name, at))
            if (name, box) in arrived:
                for receiver in planned - route.holders:
                    self.echoes[receiver].append(Move(name, box, *arrived[name, box], piece.local_name, at))
                continue
            arrived[name, box] = (piece.local_name, at)
            # Boxes of one size take turns, so that no holder gets all the large ones.
            turn = (key, volume(box))
            for sender, receiver in route.pairs(turns[turn]):
                source = who[self.group_of[sender]]
                self.moves[sender, receiver].append(Move(name, box, source.local_name, locate(source, box), piece.local_name, at))
            turns[turn] += 1

    def _parts(self, pieces: Sequence[Piece], rank: int) -> Iterator[tuple[Piece, Box, dict[int, Piece]]]:
        """Each piece cut into boxes that the same layouts hold in full: (piece, box, holders)."""
        # Boxes that overlap are cut along the edges of all boxes of their tensor here, so that a common part is a cell of its own.
        own_edges = {name: _edges(boxes) for name, boxes in boxes_by_name(pieces).items() if not _apart(boxes)}
        for piece in pieces:
            name = piece.hf_name
            if name not in self.holders:
                if name not in self.held:
                    raise ValueError(f"no source holds {name}, which rank {rank} needs for {piece.local_name}")
                self.holders[name] = _Holders(self.held[name])
            for part, who in self.holders[name].parts(name, piece.hf_box):
                if name not in own_edges:
                    yield piece, part, who
                    continue
                for cell in _cells(part, own_edges[name], outer=True):
                    box = intersect(cell, part)
                    assert box is not None
                    yield piece, box, who


class _Routes:
    """Who sends to whom what `holders` have and the others of `wanting` lack: a rule that any rank can follow by itself.

    The wanting of a node hear holders of that node; those of nodes without a holder hear all holders, the more the less these send at home.
    """

    def __init__(self, holders: Sequence[int], wanting: Sequence[int], rank: int | None, node_of: Mapping[int, int] | None) -> None:
        self.holders, self.rank = frozenset(holders), rank
        near, lacking = (_by_node(ranks, node_of) for ranks in (sorted(holders), [r for r in wanting if r not in self.holders]))
        self.pools = [_Pool(near[node], [Fraction(0)] * len(near[node]), many) for node, many in lacking.items() if node in near]
        far = [receiver for node, many in lacking.items() if node not in near for receiver in many]
        loads = [Fraction(len(lacking.get(node, ())), len(senders)) for node, senders in near.items() for _ in senders]
        self.pools.append(_Pool([sender for senders in near.values() for sender in senders], loads, far))
        self.period = math.lcm(*(pool.fine for pool in self.pools))
        self._pairs: dict[int, list[Pair]] = {}

    def pairs(self, turn: int) -> list[Pair]:
        """(sender, receiver) for every receiver, at the box number `turn` of its size; only those with `rank` in them."""
        turn %= self.period
        if turn not in self._pairs:
            dealt = [pair for pool in self.pools for pair in pool.deal(turn)]
            self._pairs[turn] = [pair for pair in dealt if self.rank is None or self.rank in pair]
        return self._pairs[turn]


class _Pool:
    """Deals receivers out among senders such that all senders together with their `loads` (in receivers) have as equal a load as can be.

    A sender's share of the receivers need not be whole. The shares lie on a line one after another, receiver j moves to and fro within
    [j, j + 1) from turn to turn, and hears the sender whose share it is in: mostly the same one, so that pairs are few.
    """

    def __init__(self, senders: Sequence[int], loads: Sequence[Fraction], receivers: Sequence[int]) -> None:
        self.senders, self.receivers = senders, receivers
        lowest = sorted(loads)
        while (level := Fraction(sum(lowest) + len(receivers), len(lowest))) < lowest[-1]:
            lowest.pop()
        shares = [max(level - load, Fraction(0)) for load in loads]
        self.fine = math.lcm(*(share.denominator for share in shares))
        self.ends = [int(end * self.fine) for end in accumulate(shares)]
        # Steps of the golden ratio cover the unit evenly after any number of turns.
        self.step = next(step for step in count(round(0.618 * self.fine)) if math.gcd(step, self.fine) == 1)

    def deal(self, turn: int) -> Iterator[Pair]:
        """(sender, receiver) for every receiver."""
        place = turn * self.step % self.fine
        for receiver in self.receivers:
            yield self.senders[bisect_right(self.ends, place)], receiver
            place += self.fine


def _by_node(ranks: Sequence[int], node_of: Mapping[int, int] | None) -> dict[int, list[int]]:
    nodes: dict[int, list[int]] = defaultdict(list)
    for rank in ranks:
        nodes[node_of[rank] if node_of else 0].append(rank)
    return nodes


def boxes_by_name(pieces: Sequence[Piece]) -> dict[str, list[Box]]:
    """The Hugging Face boxes of `pieces` by tensor."""
    boxes: dict[str, list[Box]] = defaultdict(list)
    for piece in pieces:
        boxes[piece.hf_name].append(piece.hf_box)
    return boxes


def _covered(boxes: Sequence[Box], edges: list[list[int]]) -> set[Box]:
    """Cells of the grid `edges` that lie in any of `boxes`."""
    return {cell for box in boxes for cell in _cells(box, edges)}


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
