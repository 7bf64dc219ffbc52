"""The critic: a language model's body with a fresh value head, saved and loaded with its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from ranks import run_ranks
from test_resume import PPO, common, run
from tiny import tiny_folder, tiny_model, tiny_spec

from tridentrl.engine.megatron import MegatronEngine
from tridentrl.engine.packing import Sequences
from tridentrl.parallel.grid import Grid
from tridentrl.parallel.groups import init_groups
from tridentrl.parallel.optimizer import OptimizerSettings
from tridentrl.weights.hf_io import export_hf, read_config

TOKENS = torch.tensor([5, 6, 7, 8, 9, 10, 11])
SEQUENCE = Sequences(tokens_T=TOKENS, total_lengths=[7], response_lengths=[4])


def values_and_export(grid: Grid, folder: str, target: str) -> Any:
    init_groups(grid, seed=1)
    critic = MegatronEngine(tiny_spec(folder), grid, head="value", max_tokens=64, sequence_parallel=True)
    fresh = critic.load_value_model(folder, seed=9)
    values = critic.values(SEQUENCE)
    export_hf(critic.spec, read_config(folder), critic.layouts(), critic.tensors(), target, head="value")
    again = MegatronEngine(tiny_spec(folder), grid, head="value", max_tokens=64, sequence_parallel=True)
    fresh_again = again.load_value_model(target, seed=1234)
    return fresh, fresh_again, values, again.values(SEQUENCE)


@pytest.mark.parametrize("grid", [Grid(), Grid(tp=2), Grid(pp=2), Grid(tp=2, pp=2)], ids=str)
def test_a_critic_starts_from_a_language_model_and_reloads_its_own_head(grid: Grid, tmp_path: Path) -> None:
    folder = tiny_folder("qwen2")  # tied: the critic must not be
    body = tiny_model(folder)
    head = torch.randn(1, 64, generator=torch.Generator().manual_seed(9)) / 8
    with torch.no_grad():
        expected = (body.model(TOKENS[None]).last_hidden_state[0, 2:-1] @ head.T)[:, 0]
    target = tmp_path / "critic"
    for fresh, fresh_again, values, again in run_ranks(grid.world, values_and_export, grid, folder, str(target)):
        assert (fresh, fresh_again) == (True, False)
        assert values == pytest.approx(expected, abs=1e-5)
        assert torch.equal(values, again)
    scored = transformers.AutoModelForSequenceClassification.from_pretrained(target)
    with torch.no_grad():
        last = scored(TOKENS[None, :-1]).logits
    assert last.item() == pytest.approx(expected[-1].item(), abs=1e-5)


def losses_at_temperatures(folder: str) -> list[float]:
    init_groups(Grid(), seed=1)
    critic = MegatronEngine(tiny_spec(folder), Grid(), head="value", max_tokens=64, optimizer=OptimizerSettings(lr=0.0))
    critic.load_value_model(folder, seed=9)
    return [critic.update(SEQUENCE, lambda values, batch: ((values[0] ** 2).sum(), {}), temperature=t)["loss"] for t in (1.0, 0.5)]


def test_the_sampling_temperature_does_not_touch_values() -> None:
    folder = tiny_folder("qwen2")
    with torch.no_grad():
        head = torch.randn(1, 64, generator=torch.Generator().manual_seed(9)) / 8
        values = (tiny_model(folder).model(TOKENS[None]).last_hidden_state[0, 2:-1] @ head.T)[:, 0]
    assert run_ranks(1, losses_at_temperatures, folder)[0] == pytest.approx([values.square().sum().item()] * 2, rel=1e-5)


def test_a_run_says_once_that_its_critic_starts_with_a_fresh_head(tmp_path: Path) -> None:
    (log,) = run_ranks(1, run, [*common(tmp_path), *PPO, "trainer.total_steps=1", "trainer.save_interval=null", "data.val_files=[]"])
    assert [line for line in log if "no value head" in line] == [
        f"critic: {tmp_path / 'model'} has no value head, a fresh one is drawn from seed 1"
    ]
