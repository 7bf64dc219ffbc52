"""Whole runs of the critic-free online algorithms: a tensor- and a pipeline-parallel run sample and learn the same.

The two layouts also cut micro-batches differently. Not covered here: vLLM (test_trainer), learning (make demo).
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ranks import run_ranks
from toy_task import toy_overrides

from tridentrl.configs.load import load_config
from tridentrl.trainer.rl_trainer import RLTrainer

LAYOUTS = {
    "tp2": ["parallel.tensor=2", "trainer.micro_batch_tokens=256"],
    "pp2": ["parallel.tensor=1", "parallel.pipeline=2", "trainer.micro_batch_tokens=32"],
}
GROUPS = ["algorithm.group_size=4", "algorithm.mini_batch_size=8"]
ALGORITHMS = {
    "rloo": [*GROUPS, "trainer.kl_coef=0.05"],
    "remax": ["algorithm.samples_per_prompt=2", "trainer.kl_coef=0.05"],
    "reinforce_pp": ["algorithm.samples_per_prompt=4", "trainer.kl_coef=0.05", "algorithm.kl_target=0.1"],
    "reinforce_pp_baseline": [*GROUPS, "trainer.kl_coef=0.05"],
    "dr_grpo": ["algorithm.group_size={5:2,16:4}", "algorithm.importance_weights=sequence", "algorithm.mismatch_mask=geometric"],
    "gspo": [*GROUPS, "algorithm.clip_coef=0.01", "algorithm.clip_coef_high=0.01"],
    "cispo": [*GROUPS, "algorithm.top_k=2", "algorithm.top_k_by=abs_advantage", "algorithm.mini_batch_size=4"],
}
SAME = ["reward/mean", "greedy_reward/mean", "kl/mean", "kl/weight", "rollout/response_tokens", "rollout/entropy"]
SAME += ["actor/loss", "actor/grad_norm", "actor/pg_clipfrac", "actor/ppo_kl", "actor/entropy", "advantage/groups_equal"]


def train(runs: list[list[str]]) -> None:
    for overrides in runs:
        RLTrainer(load_config(overrides)).run()


def steps(folder: Path) -> list[dict[str, float]]:
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [record for record in records if "actor/loss" in record]


def test_every_online_algorithm_learns_alike_on_tensor_and_pipeline_parallel_ranks(tmp_path: Path) -> None:
    common = [
        *toy_overrides(tmp_path, val_rows=1),
        f"reward.custom_fn.path={Path(__file__).parent / 'closeness_reward.py'}",
        *("rollout.backend=hf", "trainer.total_steps=2", "trainer.eval_at_start=false", "trainer.save_interval=null"),
    ]
    for layout, settings in LAYOUTS.items():
        runs = [[*common, *settings, f"algorithm.name={name}", *own, f"exp_name={name}-{layout}"] for name, own in ALGORITHMS.items()]
        run_ranks(2, train, runs, timeout_s=240)
    for name in ALGORITHMS:
        tensor, pipeline = (steps(tmp_path / "outputs" / f"{name}-{layout}") for layout in LAYOUTS)
        assert [record["step"] for record in tensor] == [record["step"] for record in pipeline] == [1, 2]
        for mine, theirs in zip(tensor, pipeline, strict=True):
            assert mine["actor/grad_norm"] > 0 and mine["actor/skipped_steps"] == 0
            assert mine["rollout/train_logprob_diff_max"] < 1e-4 and 0 <= mine["rollout/train_kl"] < 1e-8
            for metric in [metric for metric in SAME if metric in mine]:
                assert theirs[metric] == pytest.approx(mine[metric], rel=2e-4, abs=2e-6), (name, mine["step"], metric)
    records = {name: steps(tmp_path / "outputs" / f"{name}-tp2") for name in ALGORITHMS}
    assert {name for name, both in records.items() if "kl/mean" in both[0]} == {"rloo", "remax", "reinforce_pp", "reinforce_pp_baseline"}
    assert "greedy_reward/mean" in records["remax"][0] and records["remax"][0]["reward/mean"] != records["remax"][0]["greedy_reward/mean"]
    assert records["reinforce_pp"][1]["kl/weight"] != records["reinforce_pp"][0]["kl/weight"] == 0.05
    assert any(record["actor/pg_clipfrac"] > 0 for record in records["gspo"])
    assert records["dr_grpo"][0]["rollout/mismatch_dropped_share"] == 0
