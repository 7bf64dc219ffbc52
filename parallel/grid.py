"""The process grid: which rank holds which coordinate on every axis, and which layers it owns.

Axis order from fastest to slowest is Megatron-Core's default "tp-cp-ep-dp-pp":
`rank = tp_rank + tp * (cp_rank + cp * (dp_rank + dp * pp_rank))`. Experts cut the
ranks of a pipeline stage anew, as Megatron-Core's do: `etp` consecutive ranks share each matrix of an expert, `ep` such groups share the
experts of a layer, and what is left are replicas: `rank = etp_rank + etp * (ep_rank + ep * (replica + replicas * pp_rank))`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Coord:
    """Coordinates of one rank on the grid."""

    tp_rank: int
    cp_rank: int
    dp_rank: int
    pp_rank: int


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Sizes of the axes. `vpp` is the number of model chunks a pipeline stage holds (1: no interleaving)."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    vpp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1

    def __post_init__(self) -> None:
        if self.stage % self.sharing:
            raise ValueError(
                f"{self.stage} ranks of a pipeline stage ({self}) do not divide into groups of {self.sharing} that share experts"
            )

    @property
    def stage(self) -> int:
        """Number of ranks of one pipeline stage."""
        return self.tp * self.cp * self.dp

    @property
    def sharing(self) -> int:
        """Number of ranks that hold one copy of a layer's experts together, and exchange tokens in it."""
        return self.ep * self.etp

    def ep_rank(self, rank: int) -> int:
        """Which share of the experts `rank` holds."""
        return rank % self.stage // self.etp % self.ep

    def etp_rank(self, rank: int) -> int:
        """Which share of each of its experts' matrices `rank` holds."""
        return rank % self.stage % self.etp

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.tp * self.pp * self.dp * self.cp

    def coord(self, rank: int) -> Coord:
        """Coordinates of `rank`; raises ValueError outside [0, world)."""
        if not 0 <= rank < self.world:
            raise ValueError(f"rank {rank} is outside the grid of {self.world} ranks ({self})")
        rest, tp_rank = divmod(rank, self.tp)
        rest, cp_rank = divmod(rest, self.cp)
        pp_rank, dp_rank = divmod(rest, self.dp)
        return Coord(tp_rank, cp_rank, dp_rank, pp_rank)

    def rank(self, coord: Coord) -> int:
        """Inverse of `coord`."""
        return coord.tp_rank + self.tp * (coord.cp_rank + self.cp * (coord.dp_rank + self.dp * coord.pp_rank))

    def layers(self, pp_rank: int, chunk: int, num_layers: int) -> range:
        """Global layer numbers of model chunk `chunk` on stage `pp_rank` (interleaved schedule, arXiv 2104.04473 section 2.2)."""
        per_chunk, rest = divmod(num_layers, self.pp * self.vpp)
        if rest:
            raise ValueError(f"{num_layers} layers do not divide by pipeline {self.pp} x virtual {self.vpp} chunks")
        first = (chunk * self.pp + pp_rank) * per_chunk
        return range(first, first + per_chunk)

    def __str__(self) -> str:
        sizes = {"tp": self.tp, "pp": self.pp, "vpp": self.vpp, "cp": self.cp, "ep": self.ep, "etp": self.etp, "dp": self.dp}
        return " ".join(f"{axis}{size}" for axis, size in sizes.items() if size > 1 or axis in ("tp", "pp", "dp"))


def padded_vocab(vocab_size: int, tp: int) -> int:
    """Rows of Megatron's embedding: the next multiple of 128 that every tensor-parallel rank can share evenly."""
    multiple = math.lcm(128, tp)
    return -(-vocab_size // multiple) * multiple
