"""Both ways to move weights on real ranks of this machine: the plan, and gathering with slicing, turn by turn in one run."""

from __future__ import annotations

import ctypes
import functools
import multiprocessing
import re
import statistics
import tempfile
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as torch_processes
from gather_then_slice import GatherThenSlice, bytes_received, units

from tridentrl.configs.model_spec import ModelSpec
from tridentrl.engine.hybrid import place_replicas
from tridentrl.parallel.grid import Grid
from tridentrl.weights.execute import Resharder
from tridentrl.weights.layouts import hf_shapes, megatron_layout, megatron_shapes, vllm_layout, vllm_shapes
from tridentrl.weights.pieces import Piece, Shape, slices
from tridentrl.weights.plan import plan

DTYPE = torch.bfloat16
METHODS = ("plan", "tensor by tensor", "whole model")


@dataclass(frozen=True)
class Run:
    """One method once on one rank."""

    received: int
    peak: int
    """Bytes by which resident memory grew at most."""
    seconds: float
    exact: bool


@dataclass(frozen=True)
class Outcome:
    """One method on one layout. Bytes by rank; seconds are those of the slowest rank, the median of the repeats."""

    method: str
    received: tuple[int, ...]
    lower_bound: tuple[int, ...]
    formula: tuple[int, ...]
    """`gather_then_slice.bytes_received` of each rank."""
    peak_mb: float
    """Largest growth of a rank's resident memory, in a first round in which the allocator keeps nothing; MB = 1e6 bytes."""
    seconds: float
    exact: bool
    """Every tensor of every rank had the bits of the whole model's slice, each time; so all methods agree bit by bit."""


def parse_layout(text: str) -> tuple[Grid, int]:
    """`tp2 pp2 -> 1`: training sizes, then the rollout's tensor-parallel size. Raises ValueError."""
    match = re.fullmatch(r"\s*((?:(?:tp|pp|dp|vpp|ep|etp)\d+\s+)+)->\s*(\d+)\s*", text)
    if not match:
        raise ValueError(f"layout {text!r} is not like 'tp2 pp2 dp1 -> 1' (axes tp, pp, vpp, dp, ep, etp); write it so")
    sizes = {axis: int(size) for axis, size in re.findall(r"([a-z]+)(\d+)", match[1])}
    grid, tensor = Grid(**sizes), int(match[2])
    if grid.world % tensor:
        raise ValueError(f"layout {text!r}: {grid.world} ranks do not divide into replicas of {tensor}; choose a divisor")
    return grid, tensor


def model_of(megabytes: float, *, experts: bool) -> ModelSpec:
    """A Llama of 8 layers (or a Qwen3 with 8 experts in each of 4) of about that size in bf16."""
    family = "qwen3_moe" if experts else "llama"
    hidden = 128
    while True:
        spec = ModelSpec(
            family=family,
            hf_type=family,
            num_layers=4 if experts else 8,
            hidden_size=hidden,
            num_heads=16,
            num_kv_heads=8,
            head_dim=hidden // 16,
            ffn_size=hidden * 7 // 2,
            vocab_size=8192,
            max_positions=2048,
            tied=False,
            qkv_bias=False,
            qk_norm=experts,
            norm_eps=1e-6,
            num_experts=8 * experts,
            experts_per_token=2 * experts,
            expert_ffn_size=hidden * experts,
        )
        if model_bytes(spec) >= megabytes * 1e6:
            return spec
        hidden += 128


def model_bytes(spec: ModelSpec) -> int:
    """In bf16."""
    return 2 * sum(torch.Size(shape).numel() for shape in hf_shapes(spec).values())


def measure(spec: ModelSpec, grid: Grid, tensor: int, *, repeats: int, bucket_bytes: int) -> list[Outcome]:
    """One outcome per method, from `grid.world` forked ranks, seated as the HybridEngine seats them on one node."""
    outcomes = multiprocessing.get_context("fork").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (grid.world, f"{folder}/store", outcomes, spec, grid, tensor, repeats, bucket_bytes)
        torch_processes.start_processes(_rank, args=arguments, nprocs=grid.world, start_method="fork")
    return outcomes.get()


def _rank(
    rank: int, world: int, store: str, outcomes: Any, spec: ModelSpec, grid: Grid, tensor: int, repeats: int, bucket_bytes: int
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    layouts = {r: megatron_layout(spec, grid, r) for r in range(world)}
    seats = place_replicas(spec, grid, layouts, tensor=tensor, ranks_per_node=world)
    targets = {r: vllm_layout(spec, tensor, seats.seat(r)[1]) for r in range(world)}
    shapes = vllm_shapes(spec, tensor, seats.seat(rank)[1])
    source = _cut(spec, layouts[rank], megatron_shapes(spec, grid, rank))
    expected, target = _cut(spec, targets[rank], shapes), _cut(spec, [], shapes)
    todo = plan(layouts, targets, rank=rank, itemsize=DTYPE.itemsize)
    resharder = Resharder(todo, group=None, bucket_bytes=bucket_bytes, dtype=DTYPE)
    gathers = [GatherThenSlice(spec, grid, targets[rank], whole_model=whole) for whole in (False, True)]
    ways = (lambda: resharder.run(source, target).bytes_received, *(functools.partial(gather.run, source, target) for gather in gathers))
    runs: dict[str, list[Run]] = {name: [] for name in METHODS}
    for repeat in range(repeats + 1):
        _allocate(keep=repeat > 0)
        for name, way in list(zip(METHODS, ways, strict=True))[:: 1 if repeat % 2 else -1]:
            runs[name].append(_watched(way, target, expected))
    formula = bytes_received(units(spec, grid), grid, rank, itemsize=DTYPE.itemsize)
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, (todo.lower_bound[rank], formula, runs))
    if rank == 0:
        bounds, formulas, all_runs = zip(*everyone, strict=True)
        outcomes.put([_outcome(name, bounds, formulas, [runs[name] for runs in all_runs]) for name in METHODS])
    dist.barrier()
    dist.destroy_process_group()


def _outcome(name: str, bounds: Sequence[int], formulas: Sequence[int], by_rank: Sequence[Sequence[Run]]) -> Outcome:
    by_repeat = list(zip(*by_rank, strict=True))
    return Outcome(
        method=name,
        received=tuple(runs[-1].received for runs in by_rank),
        lower_bound=tuple(bounds),
        formula=tuple(formulas),
        peak_mb=max(run.peak for run in by_repeat[0]) / 1e6,
        seconds=statistics.median(max(run.seconds for run in runs) for runs in by_repeat[1:]),
        exact=all(run.exact for runs in by_rank for run in runs),
    )


def _allocate(*, keep: bool) -> None:
    """Whether freed memory stays with the allocator, which is quick, or goes back at once, so that resident memory is what is in use."""
    libc, trim_threshold, mmap_threshold = ctypes.CDLL("libc.so.6"), -1, -3  # mallopt(3)
    libc.mallopt(mmap_threshold, 1 << 25 if keep else 1 << 16)
    libc.mallopt(trim_threshold, 1 << 30 if keep else 1 << 16)
    libc.malloc_trim(0)


def _watched(way: Callable[[], int], target: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> Run:
    """Run `way` into zeroed targets. All ranks start together."""
    for tensor in target.values():
        tensor.zero_()
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    dist.barrier()
    before, start = _resident("VmRSS"), time.perf_counter()
    received = way()
    seconds = time.perf_counter() - start
    peak = _resident("VmHWM") - before
    return Run(received, peak, seconds, all(torch.equal(tensor, expected[name]) for name, tensor in target.items()))


def _resident(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def _cut(spec: ModelSpec, pieces: Sequence[Piece], shapes: Mapping[str, Shape]) -> dict[str, torch.Tensor]:
    """Local tensors of `shapes`, zero but for `pieces` of a random model that is the same on all ranks."""
    local = {name: torch.zeros(shape, dtype=DTYPE) for name, shape in shapes.items()}
    by_name: dict[str, list[Piece]] = defaultdict(list)
    for piece in pieces:
        by_name[piece.hf_name].append(piece)
    for name, shape in hf_shapes(spec).items():
        if name in by_name:
            whole = torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode()))).to(DTYPE)
            for piece in by_name[name]:
                local[piece.local_name][slices(piece.local_box)] = whole[slices(piece.hf_box)]
    return local
