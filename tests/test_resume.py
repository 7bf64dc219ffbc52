"""Runs that stop and go on. Not covered: torchrun, vLLM (the rollout engine holds no state of the run), CUDA; kills: tests/killloop."""

from __future__ import annotations

import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from safetensors.torch import load_file, save_file
from toy_task import toy_folder, toy_overrides

from tridentrl.configs.load import load_config
from tridentrl.trainer.rl_trainer import RLTrainer
from tridentrl.trainer.world import world_from_torchrun

HERE = Path(__file__).parent
PPO = ["algorithm.name=ppo", "algorithm.samples_per_prompt=2", "trainer.kl_coef=0.05"]
GRPO = ["algorithm.name=grpo", "algorithm.group_size=2", "algorithm.mini_batch_size=4"]
TP2, DP2 = ["parallel.tensor=2"], ["parallel.tensor=1"]


def common(folder: Path) -> list[str]:
    """Nine rows in batches of four, so that the third step is in the next epoch; the rate rises for two steps, then falls."""
    return [
        *toy_overrides(folder, rows=9, val_rows=3),
        f"reward.custom_fn.path={HERE / 'closeness_reward.py'}",
        "rollout.backend=hf",
        "trainer.eval_at_start=false",
        "trainer.eval_interval=2",
        "trainer.save_interval=2",
        "optimizer.warmup_steps=2",
        "optimizer.schedule=cosine",
        "optimizer.critic_lr=1e-3",
    ]


def run(overrides: list[str], stop_after: int | None = None) -> list[str]:
    """One run; what it logged on this rank. `stop_after`: breaks off after that step as an error would."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("tridentrl").addHandler(handler)
    logging.getLogger("tridentrl").setLevel(logging.INFO)
    trainer = RLTrainer(load_config(overrides), world_from_torchrun(os.environ))
    if stop_after is not None:
        run_step = trainer._run_step

        def run_or_stop(step: int) -> Any:
            if step > stop_after:
                raise InterruptedError
            return run_step(step)

        trainer._run_step = run_or_stop  # type: ignore[method-assign]
        with pytest.raises(InterruptedError):
            trainer.run()
        trainer.close()
    else:
        trainer.run()
    return lines


def records(folder: Path) -> list[dict[str, Any]]:
    """Without what the clock says, and without the syncs: a resumed run fills its rollout engine first."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    varying = ("timing_s/", "perf/", "reshard/", "memory/")
    return [{name: value for name, value in line.items() if not name.startswith(varying)} for line in lines]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


RATES = {"ppo": [0.5, 1.0, 0.5, 0.0], "grpo": [0.75, 0.84150635, 0.375, 0.03349365]}
"""Of each step, as shares of the peak. grpo takes two optimizer steps, so: 1/2 1, cosine at 30 and 60, 90 and 120, 150 and 180 degrees."""


@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
def test_a_resumed_run_is_the_uninterrupted_run(algorithm: str, tmp_path: Path) -> None:
    settings, layout = {"ppo": (PPO, TP2), "grpo": (GRPO, DP2)}[algorithm]
    base = [*common(tmp_path), *settings, "trainer.total_steps=4"]
    outputs = tmp_path / "outputs"
    run_ranks(2, run, [*base, *layout, "exp_name=straight"])
    # Broken off in step 4: what step 3 left in the records and in the folder is not the resumed run's.
    run_ranks(2, run, [*base, *layout, "exp_name=same"], 3)
    assert [record["step"] for record in records(outputs / "same")] == [1, 2, 2, 3]
    shutil.copytree(outputs / "same", outputs / "other")
    (outputs / "same" / "metrics.jsonl").open("a").write('{"step": 3, "cut sho')

    log = run_ranks(2, run, [*base, *layout, "exp_name=same"])[0]
    assert any(line.startswith("resumed after step 2") for line in log)
    assert not any(line.startswith("changed since") for line in log)
    straight = records(outputs / "straight")
    assert records(outputs / "same") == straight  # rewards, losses, lengths, learning rates, weight versions, evaluations
    assert [record["actor/lr"] / 3e-4 for record in straight if "actor/lr" in record] == pytest.approx(RATES[algorithm])
    assert [record["rollout/weight_version"] for record in straight if "actor/lr" in record][-1] == 4
    for role in ("", "-critic") if algorithm == "ppo" else ("",):
        a, b = (weights(outputs / name / "hf" / f"step_4{role}") for name in ("straight", "same"))
        assert all(torch.equal(b[name], tensor) for name, tensor in a.items())
    assert not list(outputs.glob("*.before-*"))

    log = run_ranks(2, run, [*base, *layout, "exp_name=same"])[0]
    assert any(line.startswith("already complete") and "step 4" in line for line in log)
    assert records(outputs / "same") == straight

    if algorithm == "grpo":
        return
    log = run_ranks(2, run, [*base, *DP2, "exp_name=other"])[0]
    assert any("random states of the ranks start from the seed" in line for line in log)
    assert any(line.startswith("changed since: parallel.tensor") for line in log)
    for mine, theirs in zip(records(outputs / "other"), straight, strict=True):
        for name in ("reward/mean", "rollout/length_mean", "actor/loss", "actor/grad_norm", "actor/lr", "val/reward/mean"):
            if name in theirs:
                assert mine[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-6), (mine["step"], name)
    a, b = (weights(outputs / name / "hf" / "step_4") for name in ("straight", "other"))
    assert all((b[name] - tensor).abs().max() < 1e-4 for name, tensor in a.items())


def refused(overrides: list[str]) -> str:
    with pytest.raises(ValueError) as caught:
        RLTrainer(load_config(overrides), world_from_torchrun(os.environ))
    return str(caught.value)


def test_what_resume_asks_for_is_what_happens(tmp_path: Path) -> None:
    base = [*common(tmp_path), "exp_name=run", "trainer.save_interval=1", "trainer.keep_last=null", "trainer.eval_interval=null"]
    base.append("data.val_files=[]")
    folder = tmp_path / "outputs" / "run"
    checkpoints = folder / "checkpoints"
    run_ranks(1, run, [*base, *GRPO, "trainer.total_steps=3"])
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step_1", "step_2", "step_3"]
    third = records(folder)[2]

    def tree() -> list[str]:
        return sorted(str(path) for path in tmp_path.rglob("*"))

    before = tree()
    for changes, message in [
        (["trainer.resume=/no/such"], "trainer.resume=/no/such: /no/such is not a complete checkpoint"),
        (["trainer.total_steps=5", *PPO], "algorithm.name is grpo, this run has ppo"),
        (["trainer.total_steps=5", "seed=7"], "seed was 1 when it was saved and is 7"),
        (
            ["trainer.total_steps=5", f"data.train_files={tmp_path / 'val.arrow'}", "data.train_batch_size=2"],
            "was 9 when it was saved and is 3",
        ),
    ]:
        algorithm = [] if PPO[0] in changes else GRPO
        (text,) = run_ranks(1, refused, [*base, *algorithm, *changes])
        assert message in text and ("trainer.resume=never" in text or "give auto" in text)
    assert tree() == before, "what is refused leaves everything as it was"

    base += GRPO
    # Step 1 by name: steps 2 and 3 are done again, and the old ones kept out of the way.
    log = run_ranks(1, run, [*base, "trainer.total_steps=3", f"trainer.resume={checkpoints / 'step_1'}"])[0]
    assert any(line.startswith("resumed after step 1") for line in log)
    assert [record["step"] for record in records(folder)] == [1, 2, 3] and records(folder)[2] == third
    assert len(list(checkpoints.glob("skipped-step_[23]-*"))) == 2

    # The newest is damaged: the one before it, with a word.
    (shard,) = (checkpoints / "step_3" / "actor").glob("__0_*")
    os.truncate(shard, 1000)
    (text,) = run_ranks(1, refused, [*base, f"trainer.resume={checkpoints / 'step_3'}"])
    assert str(shard) in text
    log = run_ranks(1, run, [*base, "trainer.total_steps=3"])[0]
    assert any(line.startswith("skipped the checkpoint") and str(shard) in line for line in log)
    assert any(line.startswith("resumed after step 2") for line in log)
    assert records(folder)[2] == third

    # From a folder elsewhere into a run of another name; and anew, the old run moved aside.
    run_ranks(1, run, [*base, "exp_name=branch", "trainer.total_steps=3", f"trainer.resume={checkpoints / 'step_2'}"])
    assert records(tmp_path / "outputs" / "branch") == [third]
    # The same command again goes on where that came to, and does not set out once more.
    log = run_ranks(1, run, [*base, "exp_name=branch", "trainer.total_steps=4", f"trainer.resume={checkpoints / 'step_2'}"])[0]
    assert any(line.startswith("resumed after step 3") for line in log)
    assert [record["step"] for record in records(tmp_path / "outputs" / "branch")] == [3, 4]
    run_ranks(1, run, [*base, "trainer.total_steps=1", "trainer.resume=never"])
    assert [record["step"] for record in records(folder)] == [1]
    (moved,) = (tmp_path / "outputs").glob("run.before-*")
    assert len(records(moved)) == 3


def test_another_reference_is_refused_and_the_same_one_elsewhere_is_not(tmp_path: Path) -> None:
    base = [*common(tmp_path), *GRPO, "algorithm.beta=0.1", "data.val_files=[]", "trainer.eval_interval=null"]
    run_ranks(1, run, [*base, "trainer.total_steps=1"])
    shutil.copytree(tmp_path / "model", tmp_path / "copy")
    other = Path(toy_folder(tmp_path / "other", hidden_size=128))
    tensors = load_file(other / "model.safetensors")
    save_file({name: tensor * 1.01 for name, tensor in tensors.items()}, other / "model.safetensors", metadata={"format": "pt"})
    key = "model.reference_pretrained_model_name_or_path"
    (text,) = run_ranks(1, refused, [*base, "trainer.total_steps=2", f"{key}={other}"])
    assert str(tmp_path / "model") in text and key in text
    log = run_ranks(1, run, [*base, "trainer.total_steps=2", f"{key}={tmp_path / 'copy'}"])[0]
    assert any(line.startswith("resumed after step 1") for line in log)
