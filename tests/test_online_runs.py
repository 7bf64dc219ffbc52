"""Whole runs of the critic-free online algorithms: a tensor- and a pipeline-parallel run sample and learn the same.

The two layouts also cut micro-batches differently. Not covered here: vLLM (test_trainer), learning (make demo).
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
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
SAME += ["actor/loss", "actor/grad_norm", "actor/pg_clipfrac", "actor/ppo_kl", "actor/entropy", "advantage/groups_equal", "dapo/groups"]


DAPO = ["algorithm.name=dapo", "algorithm.group_size=2", "algorithm.max_generation_batches=3", "algorithm.overlong_buffer=4"]
FIFTH = """
def compute_score(response: str) -> float:
    return float(sum(map(ord, response)) % 5 == 0)
"""
"""Right one time in five, so that many groups are all wrong."""


def train(runs: list[list[str]]) -> None:
    for overrides in runs:
        RLTrainer(load_config(overrides)).run()


def stop_after_one_step(overrides: list[str]) -> None:
    trainer = RLTrainer(load_config(overrides))
    run_step = trainer._run_step

    def run_or_stop(step: int) -> dict[str, float]:
        if step > 1:
            raise InterruptedError
        return run_step(step)

    trainer._run_step = run_or_stop  # type: ignore[method-assign]
    with pytest.raises(InterruptedError):
        trainer.run()


def steps(folder: Path) -> list[dict[str, float]]:
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [record for record in records if "actor/loss" in record]


def common(folder: Path) -> list[str]:
    (folder / "fifth.py").write_text(FIFTH)
    return [*toy_overrides(folder, val_rows=1), "rollout.backend=hf", "trainer.total_steps=2", "trainer.eval_at_start=false"]


def test_every_online_algorithm_learns_alike_on_tensor_and_pipeline_parallel_ranks(tmp_path: Path) -> None:
    shared = [*common(tmp_path), "trainer.save_interval=null"]
    closeness = f"reward.custom_fn.path={Path(__file__).parent / 'closeness_reward.py'}"
    settings = {name: [f"algorithm.name={name}", *own, closeness] for name, own in ALGORITHMS.items()}
    settings["dapo"] = [*DAPO, f"reward.custom_fn.path={tmp_path / 'fifth.py'}"]
    for layout, sizes in LAYOUTS.items():
        runs = [[*shared, *sizes, *own, f"exp_name={name}-{layout}"] for name, own in settings.items()]
        run_ranks(2, train, runs, timeout_s=240)
    for name in settings:
        tensor, pipeline = (steps(tmp_path / "outputs" / f"{name}-{layout}") for layout in LAYOUTS)
        assert [record["step"] for record in tensor] == [record["step"] for record in pipeline] == [1, 2]
        for mine, theirs in zip(tensor, pipeline, strict=True):
            assert mine["actor/grad_norm"] > 0 and mine["actor/skipped_steps"] == 0
            assert mine["rollout/train_logprob_diff_max"] < 1e-4 and 0 <= mine["rollout/train_kl"] < 1e-8
            for metric in [metric for metric in SAME if metric in mine]:
                assert theirs[metric] == pytest.approx(mine[metric], rel=2e-4, abs=2e-6), (name, mine["step"], metric)
    records = {name: steps(tmp_path / "outputs" / f"{name}-tp2") for name in settings}
    assert {name for name, both in records.items() if "kl/mean" in both[0]} == {"rloo", "remax", "reinforce_pp", "reinforce_pp_baseline"}
    assert "greedy_reward/mean" in records["remax"][0] and records["remax"][0]["reward/mean"] != records["remax"][0]["greedy_reward/mean"]
    assert records["reinforce_pp"][1]["kl/weight"] != records["reinforce_pp"][0]["kl/weight"] == 0.05
    assert any(record["actor/pg_clipfrac"] > 0 for record in records["gspo"])
    drawn = [record["dapo/generation_batches"] for record in records["dapo"]]
    assert max(drawn) > 1 and all(record["dapo/groups"] <= 4 for record in records["dapo"])
    assert records["dr_grpo"][0]["rollout/mismatch_dropped_share"] == 0


def test_a_resumed_run_goes_on_in_the_data_behind_what_dynamic_sampling_drew(tmp_path: Path) -> None:
    shared = [*common(tmp_path), *DAPO, f"reward.custom_fn.path={tmp_path / 'fifth.py'}", "trainer.save_interval=1", "parallel.tensor=1"]
    run_ranks(1, train, [[*shared, "exp_name=whole"]])
    run_ranks(1, stop_after_one_step, [*shared, "exp_name=halves"])
    run_ranks(1, train, [[*shared, "exp_name=halves"]])
    whole, halves = (steps(tmp_path / "outputs" / name) for name in ("whole", "halves"))
    assert whole[0]["dapo/generation_batches"] > 1
    for metric in [*SAME, "rollout/length_mean", "dapo/generation_batches"]:
        assert [record.get(metric) for record in halves] == [record.get(metric) for record in whole], metric
    epochs = [torch.load(tmp_path / "outputs" / name / "checkpoints" / "step_2" / "trainer.pt")["sampler"] for name in ("whole", "halves")]
    drawn = sum(record["dapo/generation_batches"] for record in whole)
    assert epochs[0] == epochs[1] and epochs[0]["rows_taken"] == 4 * drawn
