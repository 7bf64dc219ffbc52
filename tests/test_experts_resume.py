"""Training with experts goes on from a checkpoint on any layout. Whole runs: tests/test_resume.py. Not covered here: CUDA."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from test_checkpoint import contents, engine_on, gathered_state, odd_folder, update

from tridentrl.checkpoint.model import load_model
from tridentrl.checkpoint.store import CheckpointStore
from tridentrl.engine.megatron import MegatronEngine
from tridentrl.parallel.grid import Grid
from tridentrl.parallel.groups import init_groups

SAVED = {
    "ep2": (Grid(dp=2, ep=2), [Grid(dp=2, ep=2), Grid(tp=2, etp=2)]),
    "ep2 etp2": (Grid(tp=2, dp=2, ep=2, etp=2), [Grid(dp=2, etp=2), Grid(pp=2, vpp=2)]),
}


def state_and_future(engine: MegatronEngine) -> tuple[Any, Any, Any]:
    """Whole state, metrics of two updates, whole state after them."""
    return gathered_state(engine), [update(engine), update(engine)], gathered_state(engine)


def save(grid: Grid, roles: dict[str, bool], root: Path) -> Any:
    init_groups(grid, seed=1)
    engines = {role: engine_on(grid, "qwen3_moe", bf16=bf16) for role, bf16 in roles.items()}
    for engine in engines.values():
        update(engine), update(engine)
    CheckpointStore(root).save(2, contents(engines))
    return {role: state_and_future(engine) for role, engine in engines.items()}


def load(grid: Grid, roles: dict[str, bool], root: Path) -> Any:
    init_groups(grid, seed=1)
    engines = {role: engine_on(grid, "qwen3_moe", bf16=bf16, load=False) for role, bf16 in roles.items()}
    for role, engine in engines.items():
        load_model(engine, root / "step_2" / role)
    return {role: state_and_future(engine) for role, engine in engines.items()}


@pytest.mark.parametrize("saved", SAVED)
def test_another_layout_of_experts_has_the_same_state_and_the_same_future(saved: str, tmp_path: Path) -> None:
    odd_folder("qwen3_moe")
    grid, others = SAVED[saved]
    roles = {"actor": False, "half": True} if saved == "ep2" else {"actor": False}  # half: in bf16
    original = run_ranks(grid.world, save, grid, roles, tmp_path)[0]
    experts = [tensor for name, tensor in original["actor"][0].items() if ".experts." in name and name.endswith("exp_avg_sq")]
    assert len(experts) == 4 * 4 * 3 and all(tensor.sum() > 0 for tensor in experts)
    for other in others:
        resumed = run_ranks(other.world, load, other, roles, tmp_path)[0]
        for role in roles:
            (before, metrics, after), (loaded, went_on, ended) = original[role], resumed[role]
            assert loaded.keys() == before.keys()
            for name, tensor in before.items():
                assert torch.equal(loaded[name], tensor), (other, role, name)
            if other == grid:
                assert went_on == metrics
                assert all(torch.equal(ended[name], tensor) for name, tensor in after.items())
            elif role == "actor":  # in bf16 rounding decides which experts a token takes, and so much more than rounding
                for mine, theirs in zip(went_on, metrics, strict=True):
                    for metric in ("loss", "grad_norm", "lr"):
                        assert mine[metric] == pytest.approx(theirs[metric], rel=1e-5), (other, metric)
                weights = [name for name in before if "/" not in name]
                # Two steps of 1e-3 each.
                assert max((after[name] - before[name]).abs().max() for name in weights) > 1e-3
                assert max((after[name] - ended[name]).abs().max() for name in weights) < 1e-5, other
