"""3D-HybridEngine: the actor's weights go from their training layout into the live rollout engine, in place, after each update.

After HybridFlow (arXiv 2409.19256, section 5), but by a plan of boxes: each rank receives exactly what it lacks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from tridentrl.configs.model_spec import ModelSpec
from tridentrl.engine.megatron import MegatronEngine
from tridentrl.engine.placement import Placement, best_placement
from tridentrl.engine.rollout import RolloutEngine
from tridentrl.parallel.grid import Grid
from tridentrl.weights.checksum import verify
from tridentrl.weights.execute import Receipt, Resharder, common_dtype
from tridentrl.weights.layouts import vllm_layout
from tridentrl.weights.pieces import Piece, volume
from tridentrl.weights.plan import boxes_by_name, common_elements, distinct_elements, no_garbage_collection, plan, same_layouts


class HybridEngine:
    """Moves weights from `actor` to `rollout` on all ranks of the world.

    checksum_syncs: the first so many syncs are proved by a checksum. bucket_bytes: size limit of one message buffer.
    ranks_per_node: senders on the receiver's node come before others; None: all ranks are on one node.
    """

    def __init__(
        self, actor: MegatronEngine, rollout: RolloutEngine, *, checksum_syncs: int, bucket_bytes: int, ranks_per_node: int | None = None
    ) -> None:
        self.actor, self.rollout = actor, rollout
        self.checksum_syncs = checksum_syncs
        self.version = 0
        """Number of syncs done; stamped on the samples that follow."""
        with no_garbage_collection():
            sources = actor.layouts()
            shares = [rollout.layout(tensor_rank) for tensor_rank in range(rollout.placement.tensor)]
        targets = {rank: shares[seat] for replica in rollout.placement.replicas for seat, rank in enumerate(replica)}
        _check_every_parameter_is_covered(actor.spec, targets[dist.get_rank()], rollout.tensors())
        node_of = {rank: rank // (ranks_per_node or actor.grid.world) for rank in targets}
        self.plan = plan(sources, targets, rank=dist.get_rank(), node_of=node_of)
        self.dtype = common_dtype(rollout.tensors(), dist.group.WORLD)
        self.resharder = Resharder(self.plan, group=dist.group.WORLD, bucket_bytes=bucket_bytes, dtype=self.dtype)

    @torch.no_grad()
    def sync(self) -> Receipt:
        """Bring the rollout engine to the actor's weights. Collective over the world."""
        self.version += 1
        receipt = self.resharder.run(self.actor.tensors(), self.rollout.tensors(), version=self.version)
        if self.version <= self.checksum_syncs:
            self.prove()
        self.rollout.weights_changed()
        return receipt

    def prove(self) -> None:
        """Compare position-keyed checksums of both sides; raises RuntimeError with the tensor's name on every rank."""
        verify(self.plan, self.actor.tensors(), self.rollout.tensors(), group=dist.group.WORLD, dtype=self.dtype)


def _check_every_parameter_is_covered(spec: ModelSpec, pieces: list[Piece], tensors: Mapping[str, Tensor]) -> None:
    """Every element of the rollout engine's parameters comes from the trainer, but for the padding rows of a vocabulary."""
    covered: dict[str, int] = defaultdict(int)
    for piece in pieces:
        covered[piece.local_name] += volume(piece.local_box)
    unknown = sorted(covered.keys() - tensors.keys())
    bare = sorted(
        name
        for name, tensor in tensors.items()
        if covered[name] != tensor.numel() and not (name.endswith(("embed_tokens.weight", "lm_head.weight")) and covered[name])
    )
    if unknown or bare:
        raise RuntimeError(
            f"the rollout engine's parameters do not match what is known of family {spec.family}: "
            f"no such parameter {unknown or 'missing'}; not covered by the trainer's weights {bare or 'none'}"
        )


def place_replicas(spec: ModelSpec, grid: Grid, layouts: Mapping[int, Sequence[Piece]], *, tensor: int, ranks_per_node: int) -> Placement:
    """Seats for vLLM replicas of `tensor` ranks such that the ranks of each node have the least to receive from `layouts`."""
    with no_garbage_collection():
        wanted = [boxes_by_name(vllm_layout(spec, tensor, tensor_rank)) for tensor_rank in range(tensor)]
        sizes = [distinct_elements(boxes) for boxes in wanted]
        # One row for each distinct training layout, whatever axes make it: what each seat lacks there.
        lacking: dict[int, list[int]] = {}
        for pieces, ranks in same_layouts(layouts):
            held = boxes_by_name(pieces)
            row = [size - common_elements(held, boxes) for size, boxes in zip(sizes, wanted, strict=True)]
            lacking |= dict.fromkeys(ranks, row)
    return best_placement(lambda rank, seat: lacking[rank][seat], world=grid.world, tensor=tensor, ranks_per_node=ranks_per_node)
