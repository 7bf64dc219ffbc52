"""What vLLM (0.32, CPU build) needs to run inside training processes. Each entry says when it can go."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tridentrl.engine.placement import Placement

_engines: list[object] = []
EXPERT_MULTIPLE = 32
"""vLLM's CPU kernels take experts whose feed-forward share is a multiple of this (`output_alignment`; 16 on one kind of processor)."""


def keep_until_exit(engine: object) -> None:
    """vLLM's engine destroys torch's process groups when it is collected, those that it did not make too.

    Can go when an external-launcher engine leaves the world's groups alone.
    """
    _engines.append(engine)


def prepare_vllm(run_id: str, placement: Placement, *, cpu: bool, kv_cache_gib: int) -> None:
    """Call once, before vLLM is imported and after torch.distributed is initialised. `run_id`: fresh for each run, equal on all ranks."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine lives in this process, where its weights are replaced
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_CONFIGURE_LOGGING", "1")
    _seat_ranks(placement)
    if not cpu:
        return
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(kv_cache_gib)
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    _do_not_compile()
    _keep_linear_weights_plain()
    _keep_expert_weights_plain()
    _name_shared_memory_after_the_run(run_id)


def _seat_ranks(placement: Placement) -> None:
    """vLLM groups consecutive ranks; its groups are renamed on their way in, so that seat s of all replicas is the rank we want there.

    Can go when the external launcher takes the ranks of its groups.
    """
    from vllm.distributed import parallel_state

    rank_of_seat = [rank for replica in placement.replicas for rank in replica]
    plain = getattr(parallel_state.init_model_parallel_group, "plain", parallel_state.init_model_parallel_group)

    def init_model_parallel_group(group_ranks: list[list[int]], *args: Any, **kwargs: Any) -> Any:
        return plain([[rank_of_seat[seat] for seat in seats] for seats in group_ranks], *args, **kwargs)

    init_model_parallel_group.plain = plain  # type: ignore[attr-defined]
    parallel_state.init_model_parallel_group = init_model_parallel_group


def _do_not_compile() -> None:
    """Even in eager mode vLLM compiles pieces of its sampler with inductor's C++ compiler: 24 s at the first generation, 0.4 s without.

    Can go when `enforce_eager` covers the sampler on CPU.
    """
    import torch._dynamo

    torch._dynamo.config.disable = True


def _keep_linear_weights_plain() -> None:
    """vLLM repacks linear weights for oneDNN and empties the parameter; a plain one can be written in place between generations.

    Can go when vLLM's CPU build has a way to update packed weights.
    """
    import vllm._custom_ops as custom_ops

    custom_ops._supports_onednn = False


def _keep_expert_weights_plain() -> None:
    """vLLM pads and repacks the experts' weights once after loading; here that is done for every forward pass, from the plain ones.

    Slow, and for tests on CPU only. Can go with `_keep_linear_weights_plain`.
    """
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe

    pack, run = cpu_moe.cpu_prepack_moe_weight, cpu_moe.cpu_fused_moe
    if getattr(run, "repacks", False):
        return

    def cpu_fused_moe(output: Any, hidden: Any, w13: Any, w2: Any, *rest: Any) -> Any:
        isa, missing = rest[5], -w2.shape[2] % EXPERT_MULTIPLE
        if missing:
            gate_up = w13.view(len(w13), 2, w2.shape[2], w13.shape[2])
            w13 = torch.nn.functional.pad(gate_up, (0, 0, 0, missing)).flatten(1, 2)
            w2 = torch.nn.functional.pad(w2, (0, missing))
        return run(output, hidden, pack(w13, isa), pack(w2, isa), *rest)

    cpu_fused_moe.repacks = True  # type: ignore[attr-defined]
    cpu_moe.cpu_prepack_moe_weight = lambda weight, isa: weight
    cpu_moe.cpu_fused_moe = cpu_fused_moe
    cpu_moe.CPUUnquantizedExperts._pad_moe_intermediate = lambda self, layer: None


def _name_shared_memory_after_the_run(run_id: str) -> None:
    """The CPU worker names its shared-memory segments after `env://`, the same for all runs: two runs on one host, or a run after
    one that was killed, then fail with "create shm in SHMManager failed. errno: 17". Can go when the name holds something fresh.
    """
    from vllm.distributed.device_communicators import cpu_communicator

    communicator = cpu_communicator._CPUSHMDistributed
    plain_name = communicator.make_group_name
    if getattr(plain_name, "named_by_run", None) == run_id:
        return

    def make_group_name(owner: object) -> str:
        return f"{_segment_prefix(run_id)}{plain_name(owner)}".replace("/", "")

    make_group_name.named_by_run = run_id  # type: ignore[attr-defined]
    communicator.make_group_name = staticmethod(make_group_name)


def _segment_prefix(run_id: str) -> str:
    return f"tridentrl-{run_id}-"


def forget_shared_memory_names(run_id: str) -> None:
    """Call when the engine of every rank is up: all have mapped their segments by now, and memory without a name cannot be left behind
    by a run that is killed. Collective over the world."""
    dist.barrier()
    for segment in Path("/dev/shm").glob(f"{_segment_prefix(run_id)}*"):
        segment.unlink(missing_ok=True)
