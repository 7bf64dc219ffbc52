"""Several algorithms in one step, by data source. Losses against each algorithm's own; runs against runs without tasks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from test_resume import common, records, run
from test_switch import DP2
from toy_task import toy_overrides, toy_rows, write_arrow

from tridentrl.algos import GRPO, PPO
from tridentrl.algos.context import Denominators, MicroBatch
from tridentrl.algos.per_task import TASK, _summed
from tridentrl.configs.convert import ConfigError
from tridentrl.configs.load import load_config
from tridentrl.trainer.prepare import prepare
from tridentrl.trainer.rl_trainer import RLTrainer
from tridentrl.trainer.world import world_from_torchrun

GENERATOR = torch.Generator().manual_seed(5)


def draws(*size: int) -> torch.Tensor:
    return torch.randn(*size, generator=GENERATOR)


def batch_of(lengths: list[int], fields: dict[str, torch.Tensor], mask: torch.Tensor) -> MicroBatch:
    return MicroBatch(mask, torch.tensor(lengths), fields, Denominators(tokens=20.0, sequences=8.0, longest=5))


def test_each_sample_has_the_loss_of_its_task_and_the_gradient_that_it_gives() -> None:
    """Samples of 3, 2, 0, 4 and 1 tokens; those of task 0 are the first, third and last."""
    grpo, ppo = GRPO(GRPO.Config(group_size=2, beta=0.3)), PPO(PPO.Config(clip_coef=0.1, entropy_coef=0.05))
    logprobs, entropy, mask = draws(10).requires_grad_(), draws(10).requires_grad_(), (draws(10) > -0.5).float()
    fields = {"old_logprobs": logprobs.detach() + 0.3 * draws(10), "ref_logprobs": draws(10), "advantages": draws(10)}
    task = torch.tensor([0.0] * 3 + [1.0] * 6 + [0.0])
    whole = batch_of([3, 2, 0, 4, 1], {**fields, TASK: task}, mask)
    loss, metrics = _summed([("math", grpo.loss, 0.25), ("code", ppo.loss, 0.75)], [logprobs, entropy], whole)
    grads = torch.autograd.grad(loss, [logprobs, entropy])

    expected, parts = torch.zeros(()), {}
    for name, algorithm, number, lengths in (("math", grpo, 0, [3, 1]), ("code", ppo, 1, [2, 4])):
        mine = task == number
        part = batch_of(lengths, {field: tensor[mine] for field, tensor in fields.items()}, mask[mine])
        value, parts[name] = algorithm.loss(logprobs[mine], entropy[mine], part)
        expected = expected + value
    assert torch.allclose(loss, expected)
    for mine, theirs in zip(grads, torch.autograd.grad(expected, [logprobs, entropy]), strict=True):
        assert torch.allclose(mine, theirs)
    assert metrics["pg_loss"].item() == pytest.approx(parts["math"]["pg_loss"].item() + parts["code"]["pg_loss"].item())
    assert metrics["math/pg_clipfrac"].item() == pytest.approx(parts["math"]["pg_clipfrac"].item() / 0.25)
    assert metrics["code/entropy"].item() == pytest.approx(parts["code"]["entropy"].item() / 0.75)
    assert metrics["math/ratio_max"] == parts["math"]["ratio_max"]
    assert metrics["ratio_max"].item() == max(parts[name]["ratio_max"].item() for name in parts)
    assert "math/kl" in metrics and "code/kl" not in metrics


def base(folder: Path) -> list[str]:
    """Batches of two rows of sums, then two of math."""
    rows = [{**row, "data_source": "math" if number % 4 > 1 else "sums"} for number, row in enumerate(toy_rows(12, seed=1))]
    settings = [item for item in common(folder) if not item.startswith("data.train_files")]
    return [*settings, f"data.train_files={write_arrow(folder / 'two.arrow', rows)}", "data.shuffle=false", "trainer.total_steps=3"]


GRPO_SETTINGS = ["algorithm.name=grpo", "algorithm.group_size=2", "algorithm.beta=0.1"]
COMPARED = ["actor/loss", "actor/pg_loss", "actor/grad_norm", "actor/entropy", "reward/mean", "reward/std", "kl/mean", "rollout/tokens"]


def test_the_same_algorithm_for_all_tasks_is_the_run_without_tasks(tmp_path: Path) -> None:
    settings, outputs = [*base(tmp_path), *GRPO_SETTINGS, *DP2], tmp_path / "outputs"
    run_ranks(2, run, [*settings, "exp_name=plain"])
    run_ranks(2, run, [*settings, "algorithm.tasks={math: {name: grpo, config: {group_size: 2, beta: 0.1}}}", "exp_name=tasks"])
    for one, other in zip(records(outputs / "tasks"), records(outputs / "plain"), strict=True):
        names = [name for name in COMPARED if name in other and name != "kl/mean"]
        assert [one[name] for name in names] == pytest.approx([other[name] for name in names], rel=1e-4, abs=1e-6)
        if "actor/loss" in one:
            both = [one["math/reward/mean"], one["default/reward/mean"]]
            assert sum(both) / 2 == pytest.approx(one["reward/mean"])
            assert {"math/kl/mean", "default/kl/mean", "actor/math/pg_clipfrac"} <= one.keys()


def by_call(overrides: list[str]) -> None:
    trainer = RLTrainer(load_config(overrides), world_from_torchrun(os.environ))
    with pytest.raises(ValueError, match=r"algorithm.tasks.maths: no row .* they have math, sums"):
        trainer.set_task_algorithm("maths", "grpo")
    trainer.set_task_algorithm("math", "grpo", {"group_size": 4, "beta": 0.0})
    trainer.run()


def test_a_critic_for_one_task_and_groups_for_another_in_one_step(tmp_path: Path) -> None:
    settings, outputs = [*base(tmp_path), "algorithm.name=ppo", "algorithm.samples_per_prompt=1", "trainer.kl_coef=0"], tmp_path / "outputs"
    tasks = "algorithm.tasks={math: {name: grpo, config: {group_size: 4, beta: 0}}}"
    for name, layout in {"pp2": ["parallel.pipeline=2"], "dp2": DP2}.items():
        run_ranks(2, run, [*settings, tasks, *layout, f"exp_name={name}"])
    run_ranks(2, by_call, [*settings, *DP2, "exp_name=called"])
    lines = [line for line in records(outputs / "dp2") if "actor/loss" in line]
    assert len(lines) == 3
    for line in lines:
        assert line["critic/loss"] == line["critic/vf_loss"] * 0.5 and line["critic/default/vf_loss"] == pytest.approx(
            line["critic/vf_loss"]
        )
        assert "math/advantage/groups_equal" in line and "default/advantage/return_mean" in line
        assert line["actor/skipped_steps"] == 0 and line["actor/grad_norm"] > 0
        assert line["reward/mean"] == pytest.approx((line["default/reward/mean"] * 2 + line["math/reward/mean"] * 8) / 10, abs=1e-6)
    others = [line for line in records(outputs / "pp2") if "actor/loss" in line]
    for key in ("actor/loss", "critic/loss", "reward/mean", "math/reward/mean"):
        assert [one[key] for one in others] == pytest.approx([line[key] for line in lines], rel=1e-3, abs=1e-5), key
    assert records(outputs / "called") == records(outputs / "dp2")


def refused(overrides: list[str]) -> str:
    with pytest.raises(ValueError) as caught:
        RLTrainer(load_config(overrides))
    return str(caught.value)


@pytest.mark.parametrize(
    ("tasks", "words"),
    [
        ("{math: {name: grop}}", "algorithm.name=grop is unknown; did you mean grpo"),
        ("{math: {name: grpo, config: {gamma: 1}}}", "unknown key algorithm.tasks.math.config.gamma"),
        ("{math: {name: sft}}", "the algorithm of math learns from given responses"),
        ("{math: {name: grpo, config: {epochs: 2}}}", "set mini_batch_size=null and epochs=1 everywhere"),
        ("{math: {name: dapo}}", "the algorithm of math would draw further prompts"),
        ("{default: {name: rloo}}", "algorithm.tasks.default: that name stands for the rows of all sources without a task"),
        ("{math: grpo}", "algorithm.tasks must be a mapping from text to a mapping from text to any value"),
    ],
)
def test_tasks_that_cannot_share_a_step_are_refused(tmp_path: Path, tasks: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        prepare(load_config([*toy_overrides(tmp_path), f"algorithm.tasks={tasks}"]), world=1)


def test_a_task_that_no_row_has_is_refused_with_those_there_are(tmp_path: Path) -> None:
    message: Any = run_ranks(1, refused, [*base(tmp_path), "algorithm.tasks={maths: {name: grpo}}"])[0]
    assert "algorithm.tasks.maths: no row of data.train_files has that data source; they have math, sums" in message
