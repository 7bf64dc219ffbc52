"""From experts that are shared out and cut into live vLLM engines and into files. Dense models: tests/test_hybrid.py. Not covered: CUDA."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from safetensors.torch import load_file
from test_hybrid import PROMPTS, greedy_by_transformers, reshard_from
from tiny import tiny_folder, tiny_model, tiny_spec
from warm_vllm import vllm as _warm  # noqa: F401

from tridentrl.engine.megatron import MegatronEngine
from tridentrl.engine.placement import Placement
from tridentrl.parallel.grid import Grid
from tridentrl.parallel.groups import init_groups
from tridentrl.weights.hf_io import export_hf, read_config


@pytest.mark.parametrize(
    # Over four ranks vLLM copies the two key-value heads, and pads its share of an expert, 16, in the kernel.
    ("grids", "replicas"),
    [([Grid(tp=2, etp=2), Grid(dp=2, ep=2)], ((0, 1),)), ([Grid(tp=2, dp=2, ep=2, etp=2)], ((0, 1, 2, 3),))],
    ids=["two ranks", "four ranks"],
)
def test_experts_of_every_layout_land_bit_for_bit_in_live_vllm(
    grids: list[Grid], replicas: tuple[tuple[int, ...], ...], tmp_path: Path
) -> None:
    folder = tiny_folder("qwen3_moe", hidden_size=128)
    reports = run_ranks(grids[0].world, reshard_from, grids, Placement(replicas), folder, uuid.uuid4().hex, str(tmp_path), timeout_s=240)
    for grid in grids:
        model = tiny_model(str(tmp_path / str(grid).replace(" ", "-")))
        expected = [greedy_by_transformers(model, prompt) for prompt in PROMPTS]
        for report in (rank[str(grid)] for rank in reports):
            assert report["different"] == []
            assert report["ratios"] == [1.0, 1.0]
            assert max(report["gaps"]) < 1e-4 and report["stale"] > 1e-2
            assert report["greedy"] == expected


def export(grids: list[Grid], folder: str, root: Path) -> None:
    for number, grid in enumerate(grids):
        init_groups(grid, seed=1)
        engine = MegatronEngine(tiny_spec(folder), grid, max_tokens=64, sequence_parallel=True)
        engine.load(folder)
        export_hf(engine.spec, read_config(folder), engine.layouts(), engine.tensors(), root / str(number), group=dist.group.WORLD)


def test_experts_are_exported_bit_for_bit(tmp_path: Path) -> None:
    folder = tiny_folder("qwen3_moe")
    grids = [Grid(tp=2, dp=2, ep=2, etp=2), Grid(tp=4, ep=2, etp=2), Grid(pp=2, vpp=2, dp=2, etp=2)]
    run_ranks(4, export, grids, folder, tmp_path)
    original = load_file(folder + "/model.safetensors")
    for number in range(len(grids)):
        exported = load_file(tmp_path / str(number) / "model.safetensors")
        assert exported.keys() == original.keys()
        assert all(torch.equal(exported[name], tensor) for name, tensor in original.items())
