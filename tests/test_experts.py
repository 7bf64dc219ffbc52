"""A model with experts against transformers, its experts shared out in several ways. Not covered here: CUDA, Transformer Engine layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import run_ranks
from safetensors.torch import load_file
from test_megatron_engine import gradients_of_all_losses, in_hf_names, logits_of_all_families, reference_gradients, some_sequences
from tiny import tiny_folder, tiny_model, tiny_spec

from tridentrl.parallel.grid import Grid
from tridentrl.weights.layouts import megatron_layout

GRIDS = [
    Grid(),
    Grid(tp=2),
    Grid(dp=2, ep=2),
    Grid(tp=2, ep=2),
    Grid(dp=2, pp=2, ep=2),
    # Six sequences: two ranks have one more than the others, which share experts with them.
    Grid(dp=4, ep=2),
]
LOSSES = [("grpo", "lm"), ("ppo", "lm"), ("ppo", "value")]


@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize("grid", GRIDS[:4], ids=str)
def test_logits_equal_those_of_transformers(grid: Grid, normalized: bool) -> None:
    folder = tiny_folder("qwen3_moe", norm_topk_prob=normalized)
    model = tiny_model(folder)
    with torch.no_grad():
        expected = torch.cat([model(tokens[None]).logits[0] for tokens in some_sequences()])
    for logits in (rank["moe"] for rank in run_ranks(grid.world, logits_of_all_families, grid, {"moe": folder})):
        assert (logits - expected).abs().max() < 1e-5


def in_file_names(gradients: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """transformers 5 holds all experts of a layer in two tensors, and stores each expert's projections by themselves."""
    named = {}
    for name, gradient in gradients.items():
        stem = name.rpartition(".")[0]
        if name.endswith("experts.gate_up_proj"):
            for expert, rows in enumerate(gradient):
                named[f"{stem}.{expert}.gate_proj.weight"], named[f"{stem}.{expert}.up_proj.weight"] = rows.chunk(2)
        elif name.endswith("experts.down_proj"):
            named |= {f"{stem}.{expert}.down_proj.weight": columns for expert, columns in enumerate(gradient)}
        else:
            named[name] = gradient
    return named


@pytest.fixture(scope="module")
def expected() -> list[dict[str, torch.Tensor]]:
    folder = tiny_folder("qwen3_moe")
    return [in_file_names(reference_gradients(folder, *loss)) for loss in LOSSES for _ in (1, 40)]


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_gradients_equal_float64_transformers(grid: Grid, expected: list[dict[str, torch.Tensor]]) -> None:
    by_rank = run_ranks(grid.world, gradients_of_all_losses, grid, tiny_folder("qwen3_moe"), timeout_s=120)
    for case, wanted in enumerate(expected):
        results: list[Any] = [rank[case] for rank in by_rank]
        gradients = in_hf_names(results, {name: gradient.shape for name, gradient in wanted.items()})
        scale = max(gradient.abs().max() for gradient in wanted.values())
        for name, gradient in wanted.items():
            assert (gradients[name] - gradient).abs().max() < 1e-5 * scale, (case, name)
        norm = torch.stack([gradient.norm() for gradient in wanted.values()]).norm().item()
        assert [result[2]["grad_norm"] for result in results] == pytest.approx([norm] * grid.world, rel=1e-5)


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
