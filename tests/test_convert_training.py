"""Training that starts from a converted folder is training from the original. What is converted: tests/test_convert.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from test_checkpoint import update
from test_resume import GRPO, common, records, run
from tiny import tiny_folder, tiny_spec

from tridentrl.checkpoint.convert import hf_to_megatron
from tridentrl.engine.megatron import MegatronEngine
from tridentrl.parallel.grid import Grid
from tridentrl.parallel.groups import init_groups
from tridentrl.parallel.optimizer import OptimizerSettings


def trained_from(grid: Grid, folders: list[str]) -> list[Any]:
    """By folder: this rank's weights as loaded, metrics of two updates, and the weights after them."""
    init_groups(grid, seed=1)
    results = []
    for folder in folders:
        settings = OptimizerSettings(lr=1e-3, gradient_clip=1.0)
        engine = MegatronEngine(tiny_spec(folder), grid, max_tokens=64, sequence_parallel=True, optimizer=settings)
        engine.load(folder)
        loaded = {name: tensor.clone() for name, tensor in engine.tensors().items()}
        results.append((loaded, [update(engine), update(engine)], dict(engine.tensors())))
    return results


@pytest.mark.parametrize("kind", ["qwen2", "qwen3_moe"])
def test_a_folder_converted_for_four_ranks_trains_on_one_and_on_four_as_the_original(kind: str, tmp_path: Path) -> None:
    hf_to_megatron(tiny_folder(kind), tmp_path / "megatron", tensor=2, pipeline=2)
    losses = []
    for grid in (Grid(), Grid(tp=4)):
        for original, ours in run_ranks(grid.world, trained_from, grid, [tiny_folder(kind), str(tmp_path / "megatron")]):
            for wanted, weights in ((original[0], ours[0]), (original[2], ours[2])):
                assert weights.keys() == wanted.keys() and all(torch.equal(weights[name], tensor) for name, tensor in wanted.items())
            assert ours[1] == original[1]
            losses.append([metrics[name] for metrics in ours[1] for name in ("loss", "grad_norm")])
    assert all(values == pytest.approx(losses[0], rel=1e-5) for values in losses) and losses[0][0] != losses[0][2]


def test_a_run_from_the_converted_folder_is_the_run_from_the_original(tmp_path: Path) -> None:
    base = [*common(tmp_path), *GRPO, "trainer.total_steps=2", "trainer.save_interval=null"]
    hf_to_megatron(tmp_path / "model", tmp_path / "megatron", tensor=2, pipeline=2)
    for name in ("model", "megatron"):
        run_ranks(1, run, [*base, f"exp_name={name}", f"model.actor_pretrained_model_name_or_path={tmp_path / name}"])
    original, ours = (records(tmp_path / "outputs" / name) for name in ("model", "megatron"))
    assert len(original) > 2 and ours == original
