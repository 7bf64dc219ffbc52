"""One algorithm takes over from another: planned, called for, or by hand from a checkpoint. The rollouts are by plain transformers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from safetensors.torch import load_file
from test_resume import DP2, common, records, run
from toy_task import toy_overrides

from tridentrl.configs.convert import ConfigError
from tridentrl.configs.load import load_config
from tridentrl.trainer.phases import optimizer_steps, phase_of, planned_phases
from tridentrl.trainer.prepare import prepare
from tridentrl.trainer.rl_trainer import RLTrainer
from tridentrl.trainer.world import world_from_torchrun

PPO = "name: ppo, config: {samples_per_prompt: 2}"
GRPO = "name: grpo, config: {group_size: 2, beta: 0.1, mini_batch_size: 4}"


def schedule(*points: str) -> str:
    return f"algorithm.schedule=[{','.join('{' + point + '}' for point in points)}]"


def base(folder: Path) -> list[str]:
    settings = [item for item in common(folder) if not item.startswith(("optimizer.schedule", "optimizer.warmup"))]
    return [*settings, *DP2, "trainer.kl_coef=0.05", "trainer.total_steps=4", "trainer.keep_last=null"]


def run_and_switch(overrides: list[str], at: int, name: str, config: dict[str, Any], stop_after: int | None = None) -> list[float]:
    """By calls; the steps at which the run stood, and whether a second call of the same switch changed anything."""
    trainer = RLTrainer(load_config(overrides), world_from_torchrun(os.environ))
    trainer.run(until=at)
    stood = [trainer.steps_done]
    trainer.switch_algorithm(name, config)
    phases = trainer.phases
    trainer.switch_algorithm(name, config)
    assert trainer.phases is phases
    trainer.run(until=stop_after)
    stood.append(trainer.steps_done)
    if stop_after:
        trainer.close()
    return stood


def assert_same(one: Path, other: Path, *, roles: tuple[str, ...] = ("",)) -> None:
    assert records(one)[-3:] == records(other)[-3:]
    for role in roles:
        a, b = (load_file(folder / "hf" / f"step_4{role}" / "model.safetensors") for folder in (one, other))
        assert all(torch.equal(b[name], tensor) for name, tensor in a.items())


def test_switching_at_step_2_is_starting_the_second_algorithm_from_the_checkpoint_of_step_2(tmp_path: Path) -> None:
    settings, outputs = base(tmp_path), tmp_path / "outputs"
    log = run_ranks(2, run, [*settings, schedule(f"at: 0, {PPO}", f"at: 2, {GRPO}"), "exp_name=planned"])[0]
    (line,) = [line for line in log if line.startswith("Loaded")]
    assert line == "Loaded GRPO controller. Reusing Actor(352K), Reference(352K), Critic(352K) from existing workers."
    planned = records(outputs / "planned")
    assert ["critic/loss" in record for record in planned if "actor/loss" in record] == [True, True, False, False]
    assert ["advantage/groups_equal" in record for record in planned if "actor/loss" in record] == [False, False, True, True]

    first = ["algorithm.name=ppo", "algorithm.samples_per_prompt=2"]
    second = ["algorithm.name=grpo", "algorithm.group_size=2", "algorithm.beta=0.1", "algorithm.mini_batch_size=4"]
    run_ranks(2, run, [*settings, *first, "trainer.total_steps=2", "exp_name=first"])
    checkpoint = outputs / "first" / "checkpoints" / "step_2"
    log = run_ranks(2, run, [*settings, *second, f"trainer.resume={checkpoint}", "exp_name=second"])[0]
    assert "grpo takes over from ppo" in log
    assert "no algorithm of this run uses the critic of the checkpoint, which is left there" in log
    assert_same(outputs / "planned", outputs / "second")

    stood = run_ranks(
        2, run_and_switch, [*settings, *first, "exp_name=called"], 2, "grpo", {"group_size": 2, "beta": 0.1, "mini_batch_size": 4}
    )
    assert stood == [[2, 4]] * 2
    assert_same(outputs / "planned", outputs / "called")
    # The critic waits for its next turn, optimizer and all.
    critics = [load_file(outputs / name / "hf" / "step_4-critic" / "model.safetensors") for name in ("planned", "called")]
    before = load_file(outputs / "first" / "hf" / "step_2-critic" / "model.safetensors")
    assert all(torch.equal(critic[name], tensor) for critic in critics for name, tensor in before.items())


def test_a_model_that_nobody_has_is_built_at_the_switch_and_a_resume_lands_in_the_right_algorithm(tmp_path: Path) -> None:
    settings, outputs = [*base(tmp_path), "trainer.save_interval=1"], tmp_path / "outputs"
    changes = [*settings, schedule(f"at: 0, {GRPO}", f"at: 1, {PPO}", f"at: 3, {GRPO}")]
    log = run_ranks(2, run, [*changes, "exp_name=straight"])[0]
    loaded = [line for line in log if line.startswith("Loaded")]
    assert loaded[0].startswith("Loaded PPO controller. Reusing Actor(352K), Reference(352K) from existing workers. Built Critic(")
    assert loaded[1] == "Loaded GRPO controller. Reusing Actor(352K), Reference(352K), Critic(352K) from existing workers."
    for stop in (1, 2):  # where one takes over, and in the midst of its turn
        run_ranks(2, run, [*changes, f"exp_name=from{stop}"], stop)
        log = run_ranks(2, run, [*changes, f"exp_name=from{stop}"])[0]
        assert any(line.startswith(f"resumed after step {stop}") for line in log)
        assert_same(outputs / "straight", outputs / f"from{stop}", roles=("", "-critic"))

    # A switch by call, of which the settings know nothing, is in the checkpoint.
    first = [*settings, "algorithm.name=grpo", "algorithm.group_size=2", "algorithm.beta=0.1", "algorithm.mini_batch_size=4"]
    ppo = {"samples_per_prompt": 2}
    run_ranks(2, run_and_switch, [*first, "exp_name=called"], 1, "ppo", ppo, 2)
    run_ranks(2, run, [*first, "exp_name=called"])
    called, planned = ([line for line in records(outputs / name) if "actor/loss" in line] for name in ("called", "straight"))
    assert called[:3] == planned[:3]
    assert "critic/loss" in called[3] and "critic/loss" not in planned[3]


def test_supervised_training_first_then_rollouts(tmp_path: Path) -> None:
    settings = [*base(tmp_path), "data.response_key=answer", "data.val_files=[]", "trainer.eval_interval=null", "trainer.resume=never"]
    log = run_ranks(2, run, [*settings, schedule("at: 0, name: sft", f"at: 2, {GRPO}", "at: 4, name: ppo")])[0]
    assert "algorithm.schedule: ppo at 4 never runs, the run has 4 steps" in log
    line = next(line for line in log if line.startswith("Loaded"))
    assert line == "Loaded GRPO controller. Reusing Actor(352K) from existing workers. Built Reference(352K)."
    lines = records(tmp_path / "outputs" / "default")
    assert [("actor/nll" in line, "reward/mean" in line) for line in lines] == [(True, False)] * 2 + [(False, True)] * 2
    assert lines[2]["rollout/weight_version"] == 1  # the engine is filled once, with what SFT has made of the actor
    assert lines[2]["rollout/train_logprob_diff_max"] < 1e-4


def test_a_resume_lands_behind_a_switch_that_needs_what_the_settings_do_not_ask_for(tmp_path: Path) -> None:
    settings = [*base(tmp_path), "data.response_key=answer", "data.val_files=[]", "trainer.eval_interval=null", "algorithm.name=sft"]
    run_ranks(2, run_and_switch, [*settings, "trainer.save_interval=1"], 1, "grpo", {"group_size": 2, "beta": 0.0}, 2)
    run_ranks(2, run, settings)
    lines = records(tmp_path / "outputs" / "default")
    assert [("actor/nll" in line, "reward/mean" in line) for line in lines] == [(True, False)] + [(False, True)] * 3


def test_the_plan_counts_steps_and_optimizer_steps(tmp_path: Path) -> None:
    config = load_config([*toy_overrides(tmp_path), schedule(f"at: 2, {GRPO}"), "algorithm.name=sft", "algorithm.epochs=3"])
    phases = planned_phases(config.algorithm)
    assert [(phase.at, phase.name) for phase in phases] == [(0, "sft"), (2, "grpo")]
    assert [phase_of(phases, step).name for step in (1, 2, 3, 9)] == ["sft", "sft", "grpo", "grpo"]
    # Two steps of 3 epochs over 6 rows at once, then three of 6 x 2 samples in mini-batches of 4.
    assert optimizer_steps(phases, 5, prompts=6) == 2 * 3 + 3 * 3
    assert optimizer_steps(phases, 1, prompts=6) == 3


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ([schedule("at: 5, name: grop")], r"algorithm.schedule\[0\]: algorithm.name=grop is unknown; did you mean grpo"),
        ([schedule("at: 5, name: ppo, config: {gama: 1}")], r"unknown key algorithm.schedule\[0\].config.gama .*did you mean .*gamma"),
        ([schedule("at: 5, name: ppo, config: {gamma: 2}")], r"algorithm.schedule\[0\].config.gamma=2.*a discount lies in \[0, 1\]"),
        ([schedule("at: -1, name: ppo")], r"algorithm.schedule\[0\].at must be an integer >= 0"),
        ([schedule("name: ppo")], r"algorithm.schedule\[0\].at is required"),
        ([schedule("at: 5, name: ppo", "at: 5, name: grpo")], r"begin at steps \[5, 5\], which must ascend"),
        ([schedule("at: 0, name: ppo"), "algorithm.beta=0.1"], "algorithm.beta: the entry of algorithm.schedule at step 0 brings its own"),
        ([schedule("at: 5, name: dpo")], "algorithm.name=dpo learns from data.chosen_key and data.rejected_key"),
        ([schedule("at: 5, name: grpo, config: {mini_batch_size: 5}")], "algorithm.mini_batch_size=5 samples"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused(tmp_path: Path, settings: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        prepare(load_config([*toy_overrides(tmp_path), *settings]), world=1)
