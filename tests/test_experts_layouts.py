"""Where experts lie when they are shared out and cut, and that they travel with the fewest bytes. Pure arithmetic: no ranks run."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from safetensors.torch import load_file
from test_plan import assert_exact_and_minimal, megatron_world, vllm_world
from tiny import tiny_folder, tiny_spec
from weight_worlds import tiny_spec as layout_spec

from tridentrl.configs.model_spec import ModelSpec
from tridentrl.parallel.grid import Grid
from tridentrl.weights.layouts import hf_layout, hf_shapes, megatron_layout
from tridentrl.weights.plan import plan


def test_ranks_of_a_group_hold_consecutive_experts() -> None:
    spec = tiny_spec(tiny_folder("qwen3_moe"))

    def experts(grid: Grid, rank: int) -> dict[str, str]:
        pieces = [piece for piece in megatron_layout(spec, grid, rank) if "layers.0.mlp.experts" in piece.local_name]
        return {piece.local_name.split(".")[7]: piece.hf_name.split(".")[5] for piece in pieces}

    assert [experts(Grid(dp=2, ep=2), rank) for rank in (0, 1)] == [{"0": "0", "1": "1"}, {"0": "2", "1": "3"}]
    # With tensor parallelism a group may lie across it: every expert is whole on its rank.
    assert [experts(Grid(tp=2, dp=2, ep=2), rank)["0"] for rank in range(4)] == ["0", "2", "0", "2"]
    assert [experts(Grid(tp=2, dp=2, ep=4), rank) for rank in range(4)] == [{"0": "0"}, {"0": "1"}, {"0": "2"}, {"0": "3"}]
    stored = load_file(tiny_folder("qwen3_moe") + "/model.safetensors")
    assert {piece.hf_name for rank in range(2) for piece in megatron_layout(spec, Grid(dp=2, ep=2), rank)} == stored.keys()


def test_ranks_that_cut_experts_hold_half_of_gate_of_up_and_of_down_each() -> None:
    """Experts of 64: a rank of two has rows [0, 32) or [32, 64) of gate and of up, and those columns of down."""
    spec, grid = tiny_spec(tiny_folder("qwen3_moe")), Grid(tp=2, dp=4, ep=2, etp=2)

    def share(rank: int) -> dict[str, tuple[Any, Any]]:
        pieces = [piece for piece in megatron_layout(spec, grid, rank) if "layers.1.mlp.experts.local_experts.1." in piece.local_name]
        return {piece.hf_name.removeprefix("model.layers.1.mlp.experts."): (piece.hf_box, piece.local_box) for piece in pieces}

    low, high, hidden = (0, 32), (32, 64), (0, 64)
    first = {
        "1.gate_proj.weight": ((low, hidden), (low, hidden)),
        "1.up_proj.weight": ((low, hidden), (high, hidden)),
        "1.down_proj.weight": ((hidden, low), (hidden, low)),
    }
    second = {
        "3.gate_proj.weight": ((high, hidden), (low, hidden)),
        "3.up_proj.weight": ((high, hidden), (high, hidden)),
        "3.down_proj.weight": ((hidden, high), (hidden, low)),
    }
    # Ranks 0 and 1 cut experts 0 and 1, ranks 2 and 3 cut 2 and 3, the other four are replicas, whatever their tensor-parallel rank.
    assert share(0) == share(4) == first and share(3) == share(7) == second
    assert share(1)["1.up_proj.weight"] == ((high, hidden), (high, hidden))


LAYOUTS = [
    Grid(tp=t, pp=p, vpp=v, dp=d, ep=e, etp=x)
    for t, p, v, d, e, x in itertools.product([1, 2, 4], [1, 2], [1, 2], [1, 2, 4], [1, 2, 4], [1, 2, 4])
    if t * p * d <= 8 and t * d % (e * x) == 0 and (p > 1 or v == 1)
]


@pytest.mark.parametrize(
    "grid", [Grid(tp=2, ep=2), Grid(tp=2, etp=2), Grid(tp=4, ep=2, etp=2), Grid(pp=2, vpp=2, dp=4, ep=2, etp=2)], ids=str
)
def test_experts_reach_every_rollout_layout_files_and_training_layout_exactly(grid: Grid) -> None:
    spec = expert_spec(num_layers=4)
    source = megatron_world(spec, grid)
    for tp in (1, 2, 4, 8):
        if grid.world % tp == 0:
            assert_exact_and_minimal(spec, source, vllm_world(spec, grid.world, tp))
    files = {0: hf_layout(spec)}, {0: hf_shapes(spec)}
    assert_exact_and_minimal(spec, source, files)
    assert_exact_and_minimal(spec, files, source)
    assert_exact_and_minimal(spec, source, megatron_world(spec, Grid(tp=2, dp=2, ep=4)))


def test_experts_on_the_whole_grid_receive_the_lower_bound() -> None:
    """Volumes only; exactness is the test above."""
    assert len(LAYOUTS) > 90
    for grid in LAYOUTS:
        spec = expert_spec(num_layers=grid.pp * grid.vpp)
        sources = {rank: megatron_layout(spec, grid, rank) for rank in range(grid.world)}
        for tp in (1, 2, 4, 8):
            if grid.world % tp == 0:
                todo = plan(sources, vllm_world(spec, grid.world, tp)[0])
                assert todo.bytes_received == todo.lower_bound, (grid, tp)


def expert_spec(num_layers: int) -> ModelSpec:
    sizes = {"num_experts": 4, "experts_per_token": 2, "expert_ffn_size": 8}
    return layout_spec(family="qwen3_moe", hf_type="qwen3_moe", num_layers=num_layers, hidden_size=8, qk_norm=True, **sizes)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda spec: megatron_layout(spec, Grid(dp=3, ep=3), 0), ["4 experts", "expert-parallel size 3"]),
        (lambda spec: Grid(dp=3, ep=2), ["3 ranks", "groups of 2"]),
    ],
)
def test_experts_that_do_not_divide_are_named(make: Any, words: list[str]) -> None:
    with pytest.raises(ValueError) as error:
        make(tiny_spec(tiny_folder("qwen3_moe")))
    assert all(word in str(error.value) for word in words), str(error.value)
