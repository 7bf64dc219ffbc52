"""Safe RLHF: the multiplier by hand, the losses in plain loops, a whole run. Other layouts: test_online_runs."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from table_cases import KEPT, SAMPLES
from table_models import VOCAB, TableContext, Update, table
from test_resume import common, records, run
from torch import Tensor

from tridentrl.algos import SafeRLHF
from tridentrl.configs.convert import ConfigError
from tridentrl.configs.load import load_config
from tridentrl.trainer.prepare import prepare

Config = SafeRLHF.Config


def test_the_multiplier_follows_the_cost_and_stays_above_zero() -> None:
    def moved(cost: float, **settings: Any) -> float:
        return SafeRLHF(Config(cost_limit=2.0, lambda_init=3.0, lambda_lr=0.1, **settings)).move_lambda(cost)

    assert moved(2.0) == pytest.approx(3.0)
    assert moved(3.0) == pytest.approx(3.0 * math.exp(0.1 * 3.0 * 1.0))
    assert moved(1.0) == pytest.approx(3.0 * math.exp(-0.1 * 3.0 * 1.0))
    assert moved(5.0) > moved(3.0) > 3.0 > moved(1.0) > moved(-50.0) > 0
    assert moved(math.nan) == moved(math.inf) == pytest.approx(3.0)
    assert moved(100.0, lambda_max=4.0) == pytest.approx(4.0)


def test_the_combined_advantage_by_hand_and_a_state_that_goes_on() -> None:
    algorithm = SafeRLHF(Config(lambda_init=3.0))
    assert algorithm.combined(torch.tensor([2.0]), torch.tensor([1.0])).item() == pytest.approx(-0.25)
    other = SafeRLHF(Config(lambda_init=1.0))
    other.load_state_dict(algorithm.state_dict())
    assert other.combined(torch.tensor([2.0]), torch.tensor([1.0])).item() == pytest.approx(-0.25)


COSTS = [0.5, 2.0, -1.0, 1.0, 0.0, math.nan, 3.0, 0.25]
"""Of the eight samples of table_cases, whose fifth has no reward."""


@dataclass
class TwoCritics(TableContext):
    costs: list[float] = field(default_factory=lambda: COSTS)
    cost_critic: Tensor = field(default_factory=lambda: table(4, VOCAB))
    cost_updates: list[Update] = field(default_factory=list)

    def cost(self, rollouts: Any, *, name: str = "cost") -> Tensor:
        return torch.tensor(self.costs)

    def values(self, rollouts: Any, *, role: str = "critic") -> Tensor:
        mine, self.critic = self.critic, self.cost_critic if role == "cost_critic" else self.critic
        values = super().values(rollouts)
        self.critic = mine
        return values

    def update_critic(self, rollouts: Any, loss: Any, *, role: str = "critic", **settings: Any) -> None:
        if role == "critic":
            super().update_critic(rollouts, loss, **settings)
            return
        mine, updates = (self.critic, self.critic_updates)
        self.critic, self.critic_updates = self.cost_critic, self.cost_updates
        super().update_critic(rollouts, loss, **settings)
        self.cost_critic, self.critic, self.critic_updates = self.critic, mine, updates


def stepped(**settings: Any) -> TwoCritics:
    ctx = TwoCritics(SAMPLES, kl_coef=0.2)
    SafeRLHF(Config(cost_limit=0.5, lambda_init=2.0, lambda_lr=0.1, whiten_advantages=False, lam=0.9, **settings)).step(ctx, [None, None])  # type: ignore[list-item]
    return ctx


def gae_of(rewards: list[float], values: list[float], mask: list[int], lam: float) -> list[float]:
    """Backwards over the trained tokens."""
    advantages, following, next_value = [0.0] * len(mask), 0.0, 0.0
    for t in reversed(range(len(mask))):
        if mask[t]:
            following = rewards[t] + next_value - values[t] + lam * following
            advantages[t], next_value = following, values[t]
    return advantages


def test_two_critics_learn_rewards_and_costs_and_the_policy_what_the_multiplier_makes_of_both() -> None:
    ctx = stepped()
    kept = [(sample, cost) for sample, cost in zip(SAMPLES, COSTS, strict=True) if not (math.isnan(sample.reward) or math.isnan(cost))]
    assert len(kept) == len(KEPT) - 1
    mean_cost = sum(cost for _, cost in kept) / len(kept)
    multiplier = 2.0 * math.exp(0.1 * 2.0 * (mean_cost - 0.5))
    assert ctx.logged["safe_rlhf/lambda"] == pytest.approx(multiplier)
    assert ctx.logged["safe_rlhf/cost_over_limit"] == pytest.approx(mean_cost - 0.5)

    start, expected, returns = TwoCritics(SAMPLES), [], {"critic": [], "cost": []}
    for sample, cost in kept:
        steps = list(zip(sample.previous, sample.response, sample.trained, strict=True))
        kls = [(start.actor[p].log_softmax(0)[t] - start.reference[p].log_softmax(0)[t]).item() if m else 0.0 for p, t, m in steps]
        last = max((t for t, m in enumerate(sample.trained) if m), default=-1)
        parts = {}
        for name, score, weights, sign in (("critic", sample.reward, start.critic, -1), ("cost", cost, start.cost_critic, 1)):
            rewards = [(score if t == last else 0.0) + sign * 0.5 * 0.2 * kl for t, kl in enumerate(kls)]
            values = [weights[p].item() for p, _, _ in steps]
            parts[name] = gae_of(rewards, values, sample.trained, 0.9)
            returns[name] += [a + v if m else 0.0 for a, v, m in zip(parts[name], values, sample.trained, strict=True)]
        expected += [(r - multiplier * c) / (1 + multiplier) for r, c in zip(parts["critic"], parts["cost"], strict=True)]
    (update,), (critic,), (cost_critic,) = ctx.actor_updates, ctx.critic_updates, ctx.cost_updates
    assert update.fields["advantages"].tolist() == pytest.approx(expected, abs=1e-5)
    assert critic.fields["returns"].tolist() == pytest.approx(returns["critic"], abs=1e-5)
    assert cost_critic.fields["returns"].tolist() == pytest.approx(returns["cost"], abs=1e-5)
    assert (critic.fields["returns"] - cost_critic.fields["returns"]).abs().max() > 0.1
    assert not torch.equal(ctx.critic, start.critic) and not torch.equal(ctx.cost_critic, start.cost_critic)


def test_without_any_known_cost_nothing_moves() -> None:
    ctx = TwoCritics(SAMPLES, costs=[math.nan] * 8)
    algorithm = SafeRLHF(Config(lambda_init=2.0))
    algorithm.step(ctx, [None, None])  # type: ignore[list-item]
    assert algorithm.log_lambda == math.log(2.0)
    assert not ctx.actor_updates and not ctx.critic_updates and not ctx.cost_updates


# Runs

LONG = '''
def compute_score(response, ground_truth):
    """Share of the response that is the digit 9 or a letter."""
    return sum(c == "9" or c.isalpha() for c in response) / 6
'''


def test_the_multiplier_follows_the_cost_of_a_run_and_a_resume_goes_on_with_it(tmp_path: Path) -> None:
    (tmp_path / "long.py").write_text(LONG)
    settings = [
        *common(tmp_path),
        "algorithm.name=safe_rlhf",
        "algorithm.samples_per_prompt=2",
        "algorithm.cost_limit=0.2",
        "algorithm.lambda_lr=1",
        "trainer.kl_coef=0.05",
        f"cost.custom_fn.path={tmp_path / 'long.py'}",
        "cost.workers=1",
        "trainer.total_steps=4",
    ]
    outputs = tmp_path / "outputs"
    settings.append("parallel.tensor=1")
    run_ranks(2, run, [*settings, "exp_name=dp2"])
    run_ranks(2, run, [*settings, "exp_name=parts"], 3)
    run_ranks(2, run, [*settings, "exp_name=parts"])
    assert records(outputs / "parts") == records(outputs / "dp2")
    multiplier = 1.0
    for line in [line for line in records(outputs / "dp2") if "actor/loss" in line]:
        multiplier *= math.exp(multiplier * (line["cost/mean"] - 0.2))
        assert line["safe_rlhf/lambda"] == pytest.approx(multiplier, rel=1e-5)
        assert line["cost_critic/loss"] > 0 and line["critic/loss"] != line["cost_critic/loss"]
    evaluated = [line for line in records(outputs / "dp2") if "val/cost/mean" in line]
    assert len(evaluated) == 2 and all(0 <= line["val/cost/mean"] <= 1 for line in evaluated)
    assert (outputs / "dp2" / "hf" / "step_4-cost_critic" / "config.json").exists()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["algorithm.lambda_init=0"], "algorithm.lambda_init=0.0: it moves in log space"),
        (["algorithm.lambda_lr=0"], "algorithm.lambda_lr=0.0: with 0 nothing would hold the limit"),
        (["algorithm.lambda_max=0.5"], "algorithm.lambda_max=0.5: it bounds lambda_init too"),
    ],
)
def test_settings_that_do_not_fit_are_refused(tmp_path: Path, settings: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        prepare(load_config([*common(tmp_path), "algorithm.name=safe_rlhf", *settings]), world=1)


def no_cost(overrides: list[str]) -> str:
    from tridentrl.trainer.rl_trainer import RLTrainer

    with pytest.raises(ValueError) as caught:
        RLTrainer(load_config(overrides))
    return str(caught.value)


def test_a_run_without_anything_that_says_what_is_costly_is_refused(tmp_path: Path) -> None:
    message = run_ranks(1, no_cost, [*common(tmp_path), "algorithm.name=safe_rlhf"])[0]
    assert "no reward function for these values" in message and "cost.custom_fn.path=FILE.py" in message and "cost.by_source" in message
