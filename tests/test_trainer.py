"""Whole runs through real Megatron-Core, vLLM and reward workers. Not covered here: torchrun (test_main), CUDA, learning (make demo)."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from ranks import run_ranks
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from toy_task import toy_overrides, write_arrow
from warm_vllm import vllm as _warm  # noqa: F401

from tridentrl.configs.load import load_config
from tridentrl.trainer.launcher import RUN_ID
from tridentrl.trainer.rl_trainer import RLTrainer
from tridentrl.trainer.world import world_from_torchrun

HERE = Path(__file__).parent
LAYOUTS = {
    1: ["parallel.tensor=1", "rollout.tensor=1"],
    2: ["parallel.tensor=2", "rollout.tensor=1"],
    4: ["parallel.tensor=1", "parallel.pipeline=2", "rollout.tensor=2"],
}
"""One process; TP2 into two engines; PP2 x DP2 into two engines of two ranks."""
ALGORITHMS = {
    "grpo": ["algorithm.name=grpo", "algorithm.group_size=4", "algorithm.beta=0.1", "algorithm.mini_batch_size=8"],
    "ppo": ["algorithm.name=ppo", "algorithm.samples_per_prompt=2", "trainer.kl_coef=0.05", "optimizer.critic_lr=3e-4"],
}
REWARD = [f"reward.custom_fn.path={HERE / 'closeness_reward.py'}"]
SAME = ["kl/mean", "reward/mean", "rollout/length_mean", "rollout/entropy", "actor/loss", "actor/grad_norm", "actor/entropy"]


def train(overrides_of_runs: list[list[str]], run_id: str) -> list[dict[str, float]]:
    os.environ[RUN_ID] = run_id
    world = world_from_torchrun(os.environ)  # before vLLM changes LOCAL_WORLD_SIZE
    return [RLTrainer(load_config(overrides), world).run() for overrides in overrides_of_runs]


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_one_two_and_four_processes_sample_and_learn_the_same(tmp_path: Path) -> None:
    common = [*toy_overrides(tmp_path), *REWARD, "trainer.total_steps=3", "trainer.eval_interval=3", "trainer.save_interval=null"]
    folders = {}
    for world, layout in LAYOUTS.items():
        runs = [[*common, *layout, *settings, f"exp_name={name}-{world}"] for name, settings in ALGORITHMS.items()]
        run_ranks(world, train, runs, f"world{world}-{tmp_path.name}-{id(tmp_path)}", timeout_s=240)
        for name in ALGORITHMS:
            folders[name, world] = tmp_path / "outputs" / f"{name}-{world}"
    for name in ALGORITHMS:
        alone = records(folders[name, 1])
        assert [record["step"] for record in alone] == [0, 1, 2, 3, 3]
        metrics = [*SAME, *(["critic/loss", "critic/grad_norm", "critic/vf_loss"] if name == "ppo" else [])]
        for world in (2, 4):
            spread = records(folders[name, world])
            for mine, theirs in zip(alone, spread, strict=True):
                for metric in [metric for metric in metrics if metric in mine]:
                    assert theirs[metric] == pytest.approx(mine[metric], rel=2e-4, abs=2e-6), (name, world, mine["step"], metric)
            for step in (0, 3):
                rows = [(folders[name, w] / "rollouts" / f"step_{step}.jsonl").read_text().splitlines() for w in (1, world)]
                responses = [[json.loads(row)["response"] for row in part] for part in rows]
                assert responses[0] == responses[1]
            same_weights(folders[name, 1] / "hf" / "step_3", folders[name, world] / "hf" / "step_3")
        steps = [record for record in alone if "actor/loss" in record]
        assert [record["rollout/weight_version"] for record in steps] == [1, 2, 3]
        for record in steps:
            assert record["rollout/train_logprob_diff_max"] < 1e-4
            stages = ["generate", "reward", "old_logprob", "ref", "update_actor", "advantage", "step"]
            for stage in [*stages, *(["values", "update_critic"] if name == "ppo" else [])]:
                assert record[f"timing_s/{stage}"] > 0, stage
        # The first sync served the evaluation at step 0.
        for record in [alone[0], *steps[1:]]:
            assert record["reshard/bytes_ratio"] == 1.0
        # The policy moved, so that equal metrics say something about updates too.
        assert steps[2]["kl/mean"] != pytest.approx(steps[0]["kl/mean"], abs=1e-4)


def same_weights(a: Path, b: Path) -> None:
    models = [transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in (a, b)]
    for name, tensor in models[0].items():
        assert (tensor - models[1][name]).abs().max() < 2e-4, name


def evaluate(overrides: list[str]) -> dict[str, float]:
    trainer = RLTrainer(load_config(overrides))
    metrics = trainer.evaluate(0)
    trainer.close()
    return metrics


def test_evaluation_scores_every_row_once_whatever_the_batches(tmp_path: Path) -> None:
    reward = tmp_path / "last_row.py"
    reward.write_text("def compute_score(ground_truth):\n    return float(ground_truth == '4')\n")
    rows = [{"prompt": f"{i}+0=", "answer": str(i), "data_source": "sums"} for i in range(5)]
    overrides = [
        *toy_overrides(tmp_path),
        f"data.val_files={write_arrow(tmp_path / 'five.arrow', rows)}",
        f"reward.custom_fn.path={reward}",
        "data.val_batch_size=2",
        "rollout.backend=hf",
        "parallel.tensor=1",
    ]
    for metrics in run_ranks(2, evaluate, overrides):
        assert metrics["val/reward/mean"] == pytest.approx(0.2)
    written = [json.loads(line) for line in (tmp_path / "outputs" / "default" / "rollouts" / "step_0.jsonl").read_text().splitlines()]
    assert [row["prompt"] for row in written] == [f"{i}+0=" for i in range(5)]
    assert [row["reward"] for row in written] == [0, 0, 0, 0, 1]


def test_an_earlier_run_of_the_same_name_is_kept(tmp_path: Path) -> None:
    overrides = [*toy_overrides(tmp_path), "reward.default=exact_match", "rollout.backend=hf", "data.val_max_rows=2"]
    for _ in range(2):
        run_ranks(1, evaluate, overrides)
    folders = sorted(path.name for path in (tmp_path / "outputs").iterdir() if path.is_dir())
    assert len(folders) == 2 and folders[0] == "default" and folders[1].startswith("default.before-")
    for folder in folders:
        assert len(records(tmp_path / "outputs" / folder)) == 1


def warnings_of_a_run(overrides: list[str]) -> list[str]:
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("tridentrl").addHandler(handler)
    RLTrainer(load_config(overrides)).run()
    return messages


def test_a_run_whose_answers_are_mostly_cut_says_so_once(tmp_path: Path) -> None:
    overrides = [*toy_overrides(tmp_path), *REWARD, "rollout.backend=hf", "rollout.ignore_eos=true", "trainer.total_steps=3"]
    (messages,) = run_ranks(1, warnings_of_a_run, [*overrides, "data.val_max_rows=1", "algorithm.group_size=2"])
    assert sum("100 % of the responses were cut at rollout.max_response_length=6" in message for message in messages) == 1


def failure_of_a_run(overrides: list[str]) -> str:
    with pytest.raises(RuntimeError) as error:
        RLTrainer(load_config(overrides)).run()
    return str(error.value)


def test_a_run_that_changes_nothing_is_an_error_and_saves_nothing(tmp_path: Path) -> None:
    common = [*toy_overrides(tmp_path), "rollout.backend=hf", "trainer.eval_at_start=false", "data.val_max_rows=1"]
    abstains = tmp_path / "abstains.py"
    abstains.write_text("def compute_score(response):\n    return None\n")
    excluded = [*common, f"reward.custom_fn.path={abstains}", "trainer.total_steps=2", "exp_name=excluded"]
    assert "the run made no update" in run_ranks(1, failure_of_a_run, excluded)[0]
    cut = ["rollout.ignore_eos=true", "algorithm.mask_truncated=true", "trainer.total_steps=2", "exp_name=cut"]
    assert "the run made no update" in run_ranks(2, failure_of_a_run, [*common, *REWARD, *cut])[1]
    with safe_open(tmp_path / "model" / "model.safetensors", framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    tensors["model.norm.weight"][0] = float("nan")
    save_file(tensors, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    broken = ["algorithm.name=sft", "data.response_key=answer", "trainer.total_steps=9", "exp_name=broken"]
    assert "5 updates in a row" in run_ranks(1, failure_of_a_run, [*common, *broken])[0]
    for name in ("excluded", "cut", "broken"):
        assert not (tmp_path / "outputs" / name / "hf").exists()
        assert not list((tmp_path / "outputs" / name / "checkpoints").glob("step_*"))


def test_export_keeps_dtype_tokenizer_and_generation_settings_of_their_own_folders(tmp_path: Path) -> None:
    overrides = [*toy_overrides(tmp_path), *REWARD, "rollout.backend=hf", "trainer.total_steps=1", "data.val_max_rows=1"]
    model, tokenizer = tmp_path / "model", tmp_path / "tokenizer"
    transformers.AutoModelForCausalLM.from_pretrained(model).bfloat16().save_pretrained(model)
    tokenizer.mkdir()
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (model / file).rename(tokenizer / file)
    (tokenizer / "generation_config.json").write_text('{"eos_token_id": 5}')
    overrides += [f"model.tokenizer_name_or_path={tokenizer}", 'rollout.stop=["4","a"]', "trainer.loggers=[jsonl,tensorboard]"]
    run_ranks(1, warnings_of_a_run, overrides)
    exported = tmp_path / "outputs" / "default" / "hf" / "step_1"
    assert {tensor.dtype for tensor in load_file(exported / "model.safetensors").values()} == {torch.bfloat16}
    assert json.loads((exported / "config.json").read_text())["dtype"] == "bfloat16"
    assert (exported / "tokenizer.json").read_text() == (tokenizer / "tokenizer.json").read_text()
    assert json.loads((exported / "generation_config.json").read_text())["eos_token_id"] == 1
    events = EventAccumulator(str(tmp_path / "outputs" / "default" / "tensorboard")).Reload()
    (loss,) = events.Scalars("actor/loss")
    (step,) = [record for record in records(tmp_path / "outputs" / "default") if "actor/loss" in record]
    assert loss.step == 1 and loss.value == pytest.approx(step["actor/loss"], rel=1e-6)
