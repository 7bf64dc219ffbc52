"""Whole runs of a model with experts: they stop and go on, also with its experts shared out otherwise. Not covered: vLLM, CUDA."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from test_resume import GRPO, common, records, run, weights
from tiny import tiny_folder
from toy_task import CHARACTERS, toy_tokenizer

EP2 = ["parallel.tensor=1", "parallel.expert=2"]
ETP2 = ["parallel.tensor=2", "parallel.expert_tensor=2"]


def test_a_run_resumed_with_experts_shared_out_otherwise_is_the_uninterrupted_run(tmp_path: Path) -> None:
    model = tiny_folder("qwen3_moe", vocab_size=len(CHARACTERS))
    toy_tokenizer().save_pretrained(model)
    base = [*common(tmp_path), *GRPO, "trainer.total_steps=3", f"model.actor_pretrained_model_name_or_path={model}"]
    outputs = tmp_path / "outputs"
    run_ranks(2, run, [*base, *EP2, "exp_name=straight"])
    run_ranks(2, run, [*base, *EP2, "exp_name=same"], 2)
    shutil.copytree(outputs / "same", outputs / "other")
    run_ranks(2, run, [*base, *EP2, "exp_name=same"])
    straight = records(outputs / "straight")
    assert records(outputs / "same") == straight
    final = weights(outputs / "straight" / "hf" / "step_3")
    assert all(torch.equal(weights(outputs / "same" / "hf" / "step_3")[name], tensor) for name, tensor in final.items())
    # The rollout engine has the trainer's experts.
    assert max(record["rollout/train_logprob_diff_max"] for record in straight if "actor/lr" in record) < 1e-4

    log = run_ranks(2, run, [*base, *ETP2, "exp_name=other"])[0]
    assert any(line.startswith("resumed after step 2") for line in log)
    assert any("layout was tp1 pp1 ep2 dp2 and is tp2 pp1 etp2 dp1" in line for line in log)
    for mine, theirs in zip(records(outputs / "other"), straight, strict=True):
        for name in ("reward/mean", "rollout/length_mean", "actor/loss", "actor/grad_norm", "actor/lr", "val/reward/mean"):
            if name in theirs:
                assert mine[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-6), (mine["step"], name)
    other = weights(outputs / "other" / "hf" / "step_3")
    assert all((other[name] - tensor).abs().max() < 1e-4 for name, tensor in final.items())
