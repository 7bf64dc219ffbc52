"""Seats of rollout replicas: against every possible seating, and against what HybridFlow's stride would receive."""

from __future__ import annotations

import itertools
import time
from dataclasses import replace

import pytest

from tridentrl.configs.model_spec import ModelSpec
from tridentrl.engine.hybrid import place_replicas
from tridentrl.engine.placement import Placement, contiguous
from tridentrl.parallel.grid import Grid
from tridentrl.weights.layouts import megatron_layout, vllm_layout
from tridentrl.weights.plan import plan

SPEC = ModelSpec(
    family="qwen2",
    hf_type="qwen2",
    num_layers=4,
    hidden_size=32,
    num_heads=8,
    num_kv_heads=4,
    head_dim=4,
    ffn_size=64,
    vocab_size=97,
    max_positions=64,
    tied=False,
    qkv_bias=True,
    qk_norm=False,
    norm_eps=1e-6,
)


MOE = replace(
    SPEC, family="qwen3_moe", hf_type="qwen3_moe", qkv_bias=False, qk_norm=True, num_experts=8, experts_per_token=2, expert_ffn_size=32
)


def received(grid: Grid, placement: Placement, spec: ModelSpec = SPEC) -> int:
    """Bytes that all ranks together receive."""
    sources = {rank: megatron_layout(spec, grid, rank) for rank in range(grid.world)}
    targets = {rank: vllm_layout(spec, placement.tensor, placement.seat(rank)[1]) for rank in range(grid.world)}
    return sum(plan(sources, targets).bytes_received.values())


def placed(grid: Grid, tensor: int, ranks_per_node: int = 8, spec: ModelSpec = SPEC) -> Placement:
    layouts = {rank: megatron_layout(spec, grid, rank) for rank in range(grid.world)}
    return place_replicas(spec, grid, layouts, tensor=tensor, ranks_per_node=ranks_per_node)


@pytest.mark.parametrize("tensor", [1, 2, 4])
@pytest.mark.parametrize("grid", [Grid(tp=4), Grid(tp=2, pp=2), Grid(tp=2, dp=2), Grid(pp=4), Grid(pp=2, dp=2), Grid(dp=4)], ids=str)
def test_no_seating_of_four_ranks_receives_less(grid: Grid, tensor: int) -> None:
    everything = [
        received(grid, Placement(tuple(order[first : first + tensor] for first in range(0, 4, tensor))))
        for order in itertools.permutations(range(4))
        if all(list(order[first : first + tensor]) == sorted(order[first : first + tensor]) for first in range(0, 4, tensor))
    ]
    assert received(grid, placed(grid, tensor)) == min(everything)


def test_tp4_into_engines_of_two_keeps_each_quarter_in_its_half() -> None:
    grid = Grid(tp=4)
    ours, plain = placed(grid, 2), contiguous(4, 2)
    halves = {part: sorted(rank for rank in range(4) if ours.seat(rank)[1] == part) for part in (0, 1)}
    assert halves == {0: [0, 1], 1: [2, 3]}
    assert received(grid, ours) < received(grid, plain)


@pytest.mark.parametrize("tensor", [1, 2, 4, 8])
@pytest.mark.parametrize("grid", [Grid(tp=8), Grid(tp=4, dp=2), Grid(tp=2, pp=2, dp=2), Grid(tp=2, pp=4), Grid(tp=4, pp=2)], ids=str)
def test_eight_ranks_on_two_nodes_never_receive_more_than_consecutive_ones(grid: Grid, tensor: int) -> None:
    seats = placed(grid, tensor, ranks_per_node=4)
    assert sorted(rank for replica in seats.replicas for rank in replica) == list(range(8))
    for mine, plain in zip(seats.replicas, contiguous(8, tensor).replicas, strict=True):
        assert [rank // 4 for rank in mine] == [rank // 4 for rank in plain]
    assert received(grid, seats) <= received(grid, contiguous(8, tensor))


@pytest.mark.parametrize("tensor", [2, 4])
@pytest.mark.parametrize("grid", [Grid(tp=2, dp=4, ep=4), Grid(dp=8, etp=4), Grid(pp=2, dp=4, ep=2)], ids=str)
def test_replicas_that_hold_other_experts_are_told_apart(grid: Grid, tensor: int) -> None:
    assert received(grid, placed(grid, tensor, spec=MOE), MOE) <= received(grid, contiguous(8, tensor), MOE)
    nobody_swaps_for_less(grid, placed(grid, tensor, spec=MOE))


def nobody_swaps_for_less(grid: Grid, seats: Placement) -> None:
    """No exchange of two ranks between two replicas would save a byte."""
    best = received(grid, seats, MOE)
    for one, other in itertools.combinations(range(len(seats.replicas)), 2):
        for a, b in itertools.product(seats.replicas[one], seats.replicas[other]):
            replicas = list(seats.replicas)
            replicas[one] = tuple(sorted({*replicas[one], b} - {a}))
            replicas[other] = tuple(sorted({*replicas[other], a} - {b}))
            assert received(grid, Placement(tuple(replicas)), MOE) >= best


def test_1024_ranks_are_seated_in_seconds() -> None:
    """TP8 into replicas of two on the same nodes of eight: each half goes to the ranks that hold quarters of it, as for TP4 above."""
    grid = Grid(tp=8, pp=4, dp=32)
    start = time.perf_counter()
    seats = placed(grid, 2)
    assert time.perf_counter() - start < 10
    assert all(seats.seat(rank)[1] == rank % 8 // 4 for rank in range(1024))
