"""Whole runs of the online algorithms: a tensor- and a pipeline-parallel run sample by vLLM and learn the same.

The two layouts also cut micro-batches differently. Not covered here: learning (make test-learning).
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from toy_task import toy_overrides
from warm_vllm import vllm as _warm  # noqa: F401

from tridentrl.configs.load import load_config
from tridentrl.trainer.launcher import RUN_ID
from tridentrl.trainer.rl_trainer import RLTrainer

LAYOUTS = {
    "tp2": ["parallel.tensor=2", "trainer.micro_batch_tokens=256"],
    "pp2": ["parallel.tensor=1", "parallel.pipeline=2", "trainer.micro_batch_tokens=32"],
}
GROUPS = "group_size: 4, mini_batch_size: 8"
ALGORITHMS = {
    "grpo": GROUPS + ", beta: 0.1",
    "rloo": GROUPS,
    "remax": "samples_per_prompt: 2",
    "reinforce_pp": "samples_per_prompt: 4, kl_target: 0.1",
    "reinforce_pp_baseline": GROUPS,
    "dr_grpo": "group_size: {5: 2, 16: 4}, importance_weights: sequence, mismatch_mask: geometric",
    "gspo": GROUPS + ", clip_coef: 0.01, clip_coef_high: 0.01",
    "cispo": "group_size: 4, top_k: 2, top_k_by: abs_advantage, mini_batch_size: 4",
    "dapo": "group_size: 4, overlong_buffer: 4",
    "ppo": "samples_per_prompt: 2, epochs: 2, mini_batch_size: 4",
    "safe_rlhf": "samples_per_prompt: 2, cost_limit: 0.1",
}
"""In turn, a step each, in one run: every one goes on from what the one before it has made."""
SAME = ["reward/mean", "greedy_reward/mean", "kl/mean", "kl/weight", "rollout/response_tokens", "rollout/entropy"]
SAME += ["actor/loss", "actor/grad_norm", "actor/pg_clipfrac", "actor/ppo_kl", "actor/entropy", "advantage/groups_equal", "dapo/groups"]


DAPO = ["algorithm.name=dapo", "algorithm.group_size=2", "algorithm.max_generation_batches=3", "algorithm.overlong_buffer=4"]
FIFTH = """
def compute_score(response: str) -> float:
    return float(sum(map(ord, response)) % 5 == 0)
"""
"""Right one time in five, so that many groups are all wrong."""


def train(overrides: list[str]) -> None:
    RLTrainer(load_config(overrides)).run()


def train_with_vllm(overrides: list[str], run_id: str) -> None:
    os.environ[RUN_ID] = run_id
    train(overrides)


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


def test_every_online_algorithm_learns_alike_through_vllm_on_tensor_and_pipeline_parallel_ranks(tmp_path: Path) -> None:
    points = [f"{{at: {at}, name: {name}, config: {{{own}}}}}" for at, (name, own) in enumerate(ALGORITHMS.items())]
    here = Path(__file__).parent
    shared = [
        *toy_overrides(tmp_path, val_rows=1),
        f"reward.custom_fn.path={here / 'closeness_reward.py'}",
        f"cost.custom_fn.path={here / 'closeness_reward.py'}",
        "cost.workers=1",
        f"algorithm.schedule=[{','.join(points)}]",
        f"trainer.total_steps={len(ALGORITHMS)}",
        "trainer.kl_coef=0.05",
        "trainer.eval_at_start=false",
        "trainer.save_interval=null",
        "optimizer.lr=1e-4",
        "rollout.tensor=1",
    ]
    run_id = f"online-{tmp_path.name}-{id(tmp_path)}"
    for layout, sizes in LAYOUTS.items():
        run_ranks(2, train_with_vllm, [*shared, *sizes, f"exp_name={layout}"], f"{run_id}-{layout}", timeout_s=240)
    tensor, pipeline = (dict(zip(ALGORITHMS, steps(tmp_path / "outputs" / layout), strict=True)) for layout in LAYOUTS)
    for name, mine in tensor.items():
        assert mine["actor/grad_norm"] > 0 and mine["actor/skipped_steps"] == 0, name
        assert mine["rollout/train_logprob_diff_max"] < 1e-4 and 0 <= mine["rollout/train_kl"] < 1e-8, name
        assert mine["reshard/bytes_ratio"] == 1.0, name
        for metric in [metric for metric in SAME if metric in mine]:
            assert pipeline[name][metric] == pytest.approx(mine[metric], rel=5e-4, abs=5e-6), (name, metric)
    with_kl = {"grpo", "rloo", "remax", "reinforce_pp", "reinforce_pp_baseline", "ppo", "safe_rlhf"}
    assert {name for name, record in tensor.items() if "kl/mean" in record} == with_kl
    assert tensor["remax"]["reward/mean"] != tensor["remax"]["greedy_reward/mean"]
    assert tensor["dr_grpo"]["rollout/mismatch_dropped_share"] == 0
    assert tensor["dapo"]["dapo/groups"] == 4
    assert {name for name, record in tensor.items() if "cost_critic/loss" in record} == {"safe_rlhf"}


def test_a_resumed_run_goes_on_in_the_data_behind_what_dynamic_sampling_drew(tmp_path: Path) -> None:
    shared = [*common(tmp_path), *DAPO, f"reward.custom_fn.path={tmp_path / 'fifth.py'}", "trainer.save_interval=1", "parallel.tensor=1"]
    run_ranks(1, train, [*shared, "exp_name=whole"])
    run_ranks(1, stop_after_one_step, [*shared, "exp_name=halves"])
    run_ranks(1, train, [*shared, "exp_name=halves"])
    whole, halves = (steps(tmp_path / "outputs" / name) for name in ("whole", "halves"))
    assert whole[0]["dapo/generation_batches"] > 1
    for metric in [*SAME, "rollout/length_mean", "dapo/generation_batches"]:
        assert [record.get(metric) for record in halves] == [record.get(metric) for record in whole], metric
    epochs = [torch.load(tmp_path / "outputs" / name / "checkpoints" / "step_2" / "trainer.pt")["sampler"] for name in ("whole", "halves")]
    drawn = sum(record["dapo/generation_batches"] for record in whole)
    assert epochs[0] == epochs[1] and epochs[0]["rows_taken"] == 4 * drawn
