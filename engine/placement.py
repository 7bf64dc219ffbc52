"""Which training rank plays which part in which rollout replica, chosen so that as many weights as possible lie there already.

HybridFlow (arXiv 2409.19256, section 5.3) groups ranks with a stride for this; here the overlap itself decides, for any two layouts.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Placement:
    """By replica, its ranks in tensor-parallel order. Every rank of the world is in exactly one replica."""

    replicas: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        # torch.distributed numbers the ranks of a group in ascending order, whatever order it is given.
        assert all(list(ranks) == sorted(ranks) for ranks in self.replicas), f"ranks of a replica must ascend: {self.replicas}"

    @property
    def tensor(self) -> int:
        """Tensor-parallel size of a replica."""
        return len(self.replicas[0])

    def seat(self, rank: int) -> tuple[int, int]:
        """(replica, tensor-parallel rank inside it) of `rank`."""
        for number, ranks in enumerate(self.replicas):
            if rank in ranks:
                return number, ranks.index(rank)
        raise ValueError(f"rank {rank} has no seat in {self}")


def contiguous(world: int, tensor: int) -> Placement:
    """Replicas of consecutive ranks, as vLLM makes them by itself."""
    return Placement(tuple(tuple(range(first, first + tensor)) for first in range(0, world, tensor)))


def best_placement(missing: Callable[[int, int], int], *, world: int, tensor: int, ranks_per_node: int) -> Placement:
    """Start from `contiguous` and swap two ranks of one node between replicas as long as that saves anything: never worse than that.

    `missing(rank, tensor_rank)`: what `rank` would have to receive in that seat. Replicas keep to the nodes they start on.
    """
    replicas = [list(ranks) for ranks in contiguous(world, tensor).replicas]

    def cost(*groups: list[int]) -> int:
        return sum(missing(rank, seat) for ranks in groups for seat, rank in enumerate(ranks))

    neighbours: dict[int, list[int]] = defaultdict(list)
    for number, ranks in enumerate(replicas):
        for node in sorted({rank // ranks_per_node for rank in ranks}):
            neighbours[node].append(number)
    pairs = sorted({pair for numbers in neighbours.values() for pair in itertools.combinations(numbers, 2)})
    improved = True
    while improved:
        improved = False
        for one, other in pairs:
            for a, b in itertools.product(replicas[one], replicas[other]):
                if a // ranks_per_node != b // ranks_per_node:
                    continue
                swapped = (sorted({*replicas[one], b} - {a}), sorted({*replicas[other], a} - {b}))
                if cost(*swapped) < cost(replicas[one], replicas[other]):
                    replicas[one], replicas[other] = swapped
                    improved = True
                    break
    return Placement(tuple(tuple(ranks) for ranks in replicas))
