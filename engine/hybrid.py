"""3D-HybridEngine: the actor's weights go from their training layout into the live rollout engine, in place, after each update.

After HybridFlow (arXiv 2409.19256, section 5), but by a plan of boxes: each rank receives exactly what it lacks.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from tridentrl.engine.megatron import MegatronEngine
from tridentrl.engine.rollout import RolloutEngine
from tridentrl.parallel.model import uses_transformer_engine
from tridentrl.weights.checksum import verify
from tridentrl.weights.execute import Receipt, reshard
from tridentrl.weights.layouts import megatron_layout
from tridentrl.weights.plan import plan


class HybridEngine:
    """Moves weights from `actor` to `rollout` on all ranks of the world.

    checksum_syncs: the first so many syncs are proved by a checksum. bucket_bytes: size limit of one message buffer.
    """

    def __init__(self, actor: MegatronEngine, rollout: RolloutEngine, *, checksum_syncs: int, bucket_bytes: int) -> None:
        self.actor, self.rollout = actor, rollout
        self.checksum_syncs, self.bucket_bytes = checksum_syncs, bucket_bytes
        self.version = 0
        """Number of syncs done; stamped on the samples that follow."""
        world = dist.get_world_size()
        fused = uses_transformer_engine()
        sources = {rank: megatron_layout(actor.spec, actor.grid, rank, head="lm", fused_norms=fused) for rank in range(world)}
        targets = {rank: rollout.layout(rank % rollout.tensor) for rank in range(world)}
        _check_every_parameter_is_covered(targets[dist.get_rank()], rollout.tensors())
        self.plan = plan(sources, targets)

    @torch.no_grad()
    def sync(self) -> Receipt:
        """Bring the rollout engine to the actor's weights. Collective over the world."""
        self.version += 1
        source_tensors, target_tensors = self.actor.tensors(), self.rollout.tensors()
        receipt = reshard(
            self.plan, source_tensors, target_tensors, group=dist.group.WORLD, bucket_bytes=self.bucket_bytes, version=self.version
        )
        if self.version <= self.checksum_syncs:
            self.prove()
        self.rollout.weights_changed()
        return receipt

    def prove(self) -> None:
        """Compare position-keyed checksums of both sides; raises RuntimeError with the tensor's name on every rank."""
        verify(self.plan, self.actor.tensors(), self.rollout.tensors(), group=dist.group.WORLD)
