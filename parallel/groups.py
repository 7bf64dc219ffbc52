"""Megatron's process groups for one grid."""

from __future__ import annotations

import logging

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from tridentrl.parallel.cpu import megatron_facade
from tridentrl.parallel.grid import Grid


def init_groups(grid: Grid, *, seed: int) -> None:
    """Make Megatron's groups for `grid` over the whole torch.distributed world, which must have exactly `grid.world` ranks.

    Megatron keeps its groups in module globals: one grid per process at a time. `seed` starts its random-state tracker.
    """
    if dist.get_world_size() != grid.world:
        raise ValueError(f"the grid {grid} has {grid.world} ranks, the job has {dist.get_world_size()}")
    # Warnings for the groups of one rank that every layout has.
    logging.getLogger("megatron.core").setLevel(logging.ERROR)
    with megatron_facade():
        if parallel_state.model_parallel_is_initialized():
            parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=grid.tp,
            pipeline_model_parallel_size=grid.pp,
            virtual_pipeline_model_parallel_size=grid.vpp if grid.vpp > 1 else None,
            context_parallel_size=grid.cp,
            expert_model_parallel_size=grid.ep,
            expert_tensor_parallel_size=grid.etp,
        )
        model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
