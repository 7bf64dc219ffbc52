"""A model with experts against transformers, its experts shared out in several ways. Not covered here: CUDA, Transformer Engine layers."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from ranks import run_ranks
from test_megatron_engine import in_hf_names, logits_of_all_families, reference_gradients, some_sequences, update_gradients
from tiny import tiny_folder, tiny_model

from tridentrl.parallel.grid import Grid

GRIDS = [
    Grid(),
    Grid(tp=2),
    Grid(tp=2, ep=2),
    # Six sequences: two ranks have one more than the others, which share experts with them.
    Grid(dp=4, ep=2),
    Grid(dp=2, pp=2, vpp=2, ep=2),
    # The matrices of an expert cut: over tensor-parallel ranks, over data-parallel ones, over both, in a pipeline.
    Grid(tp=2, etp=2),
    Grid(tp=2, dp=2, etp=4),
    Grid(dp=4, ep=2, etp=2),
    Grid(tp=2, pp=2, etp=2),
]


@pytest.mark.parametrize(
    ("grid", "normalized"),
    [(Grid(), True), (Grid(), False), (Grid(tp=2, ep=2), False), (Grid(tp=2, etp=2), True), (Grid(tp=4, ep=2, etp=2), True)],
    ids=str,
)
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


@functools.cache
def expected_gradients(algorithm: str, head: str) -> dict[str, torch.Tensor]:
    return in_file_names(reference_gradients(tiny_folder("qwen3_moe"), algorithm, head))


def gradients_of(grid: Grid, folder: str, losses: list[tuple[str, str]]) -> list[Any]:
    """With one sequence per micro-batch, and with several."""
    return [update_gradients(grid, folder, *loss, max_tokens) for loss in losses for max_tokens in (1, 40)]


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_gradients_equal_float64_transformers(grid: Grid) -> None:
    losses = [("ppo", "lm"), ("ppo", "value")] if grid == Grid(tp=2, etp=2) else [("ppo", "lm")]
    by_rank = run_ranks(grid.world, gradients_of, grid, tiny_folder("qwen3_moe"), losses, timeout_s=120)
    for case in range(2 * len(losses)):
        wanted = expected_gradients(*losses[case // 2])
        results: list[Any] = [rank[case] for rank in by_rank]
        gradients = in_hf_names(results, {name: gradient.shape for name, gradient in wanted.items()})
        scale = max(gradient.abs().max() for gradient in wanted.values())
        for name, gradient in wanted.items():
            assert (gradients[name] - gradient).abs().max() < 1e-5 * scale, (case, name)
        norm = torch.stack([gradient.norm() for gradient in wanted.values()]).norm().item()
        assert [result[2]["grad_norm"] for result in results] == pytest.approx([norm] * grid.world, rel=1e-5)
