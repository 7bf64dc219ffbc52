"""Seats of rollout replicas: against every possible seating, and against what HybridFlow's stride would receive."""

from __future__ import annotations

import itertools

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


def received(grid: Grid, placement: Placement) -> int:
    """Bytes that all ranks together receive."""
    sources = {rank: megatron_layout(SPEC, grid, rank) for rank in range(grid.world)}
    targets = {rank: vllm_layout(SPEC, placement.tensor, placement.seat(rank)[1]) for rank in range(grid.world)}
    return sum(plan(sources, targets).bytes_received.values())


def placed(grid: Grid, tensor: int, ranks_per_node: int = 8) -> Placement:
    layouts = {rank: megatron_layout(SPEC, grid, rank) for rank in range(grid.world)}
    return place_replicas(SPEC, grid, layouts, tensor=tensor, ranks_per_node=ranks_per_node)


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
