"""An algorithm in a file of the user's, named by `algorithm.path`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ranks import run_ranks
from table_cases import stepped
from table_models import Sample
from toy_task import toy_overrides

from tridentrl.configs.load import load_config
from tridentrl.trainer.prepare import prepare
from tridentrl.trainer.rl_trainer import RLTrainer

BEST_OF_N = '''
"""Imitate the best of n samples."""
from dataclasses import dataclass

import torch

from tridentrl.algos import Algorithm, register
from tridentrl.algos.algorithm import BaseConfig
from tridentrl.kernels.advantages import top_k_per_group


@dataclass(frozen=True, kw_only=True)
class BestOfNConfig(BaseConfig):
    n: int = 4
    """Samples for each prompt."""


@register("best_of_n")
class BestOfN(Algorithm):
    Config = BestOfNConfig

    def roles(self, *, kl_coef):
        return ("actor",)

    @property
    def samples_per_prompt(self):
        return self.config.n

    def step(self, ctx, prompts):
        rollouts = ctx.generate(prompts, n=self.config.n)
        best = top_k_per_group(ctx.reward(rollouts), rollouts.group_ids_N, 1)
        ctx.update_actor(rollouts[best], self.loss)

    def loss(self, logprobs, entropy, batch):
        loss = -(self.weights(batch) * logprobs).sum()
        return loss, {"nll": loss.detach()}
'''


def run(overrides: list[str]) -> None:
    RLTrainer(load_config(overrides)).run()


def test_an_own_algorithm_runs_with_its_own_typed_settings(tmp_path: Path) -> None:
    path = tmp_path / "best_of_n.py"
    path.write_text(BEST_OF_N)
    common = [*toy_overrides(tmp_path, val_rows=2), f"algorithm.path={path}", "algorithm.name=best_of_n", "reward.default=exact_match"]
    run_ranks(2, run, [*common, "algorithm.n=3", "rollout.backend=hf", "parallel.tensor=2", "trainer.total_steps=1"])
    records = [json.loads(line) for line in (tmp_path / "outputs" / "default" / "metrics.jsonl").read_text().splitlines()]
    (step,) = [record for record in records if "actor/loss" in record]
    assert step["actor/nll"] == step["actor/loss"] > 0
    with pytest.raises(ValueError, match=r"algorithm\.m"):
        prepare(load_config([*common, "algorithm.m=3"]), world=1)


FROM_THE_BASE = '''
from tridentrl.algos import register
from tridentrl.algos.groups import GroupAlgorithm


@register("halves")
class Halves(GroupAlgorithm):
    """Advantage: reward minus one half."""

    def advantages(self, rewards, group_ids):
        return rewards - 0.5
'''


def test_an_own_advantage_on_the_shared_base_gets_all_its_settings(tmp_path: Path) -> None:
    path = tmp_path / "halves.py"
    path.write_text(FROM_THE_BASE)
    common = [*toy_overrides(tmp_path), f"algorithm.path={path}", "algorithm.name=halves"]
    algorithm = prepare(load_config([*common, "algorithm.group_size=2", "algorithm.dual_clip=3"]), world=1).phases[0].algorithm
    assert algorithm.config.dual_clip == 3
    samples = [Sample(0, [1], [2], 1.0), Sample(0, [1], [3, 2], 0.25)]
    (update,) = stepped(algorithm, samples).actor_updates
    assert update.fields["advantages"].tolist() == [0.5, -0.25, -0.25]


def test_a_file_that_fails_or_is_not_there_is_named(tmp_path: Path) -> None:
    common = toy_overrides(tmp_path)
    with pytest.raises(ValueError, match=r"algorithm.path=.*nothing.py: there is no such file"):
        prepare(load_config([*common, f"algorithm.path={tmp_path}/nothing.py"]), world=1)
    (tmp_path / "broken.py").write_text("import no_such_module\n")
    with pytest.raises(ValueError, match=r"(?s)broken.py cannot be run.*no_such_module"):
        prepare(load_config([*common, f"algorithm.path={tmp_path}/broken.py"]), world=1)
