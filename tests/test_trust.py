"""What keeps a policy gradient honest: engine mismatch weighed or masked, KL in reward or loss, its adaptive weight, dual clip, entropy.

Against hand numbers and float64 loops on table models. Not covered here: real engines (test_online_runs).
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ranks import run_ranks
from table_cases import KEPT, SAMPLES, SPLITS, Float64, assert_all_close, clipped, gradients, grpo_advantages, sgd, stepped
from table_models import VOCAB, Sample, TableContext, pack, table
from torch import Tensor

from tridentrl.algos import GRPO, PPO, DrGRPO
from tridentrl.kernels.losses import policy_loss
from tridentrl.kernels.mismatch import mismatch_ratio
from tridentrl.trainer.context import TrainContext

NAN, INF = math.nan, math.inf
ENGINE = TableContext(SAMPLES).actor + 0.3 * table(9, VOCAB, VOCAB)


def test_the_mismatch_of_tokens_and_responses_by_hand() -> None:
    old, engine = torch.tensor([-1.0, -2.0, NAN, -0.5]), torch.tensor([-1.5, -2.0, INF, -1.0])
    mask, lengths = torch.tensor([1.0, 1, 0, 1]), torch.tensor([3, 1])
    for level, log_ratios in [("token", [0.5, 0, 0, 0.5]), ("sequence", [0.5, 0.5, 0, 0.5]), ("geometric", [0.25, 0.25, 0, 0.5])]:
        ratios = mismatch_ratio(old, engine, mask, lengths, level=level)
        assert ratios.tolist() == pytest.approx([math.exp(x) for x in log_ratios], rel=1e-6)
    far = mismatch_ratio(torch.tensor([0.0, -INF]), torch.tensor([-99.0, -1.0]), torch.ones(2), torch.tensor([1, 1]), level="sequence")
    assert far[0].item() == pytest.approx(math.exp(20), rel=1e-6) and far[1].isnan()
    with pytest.raises(ValueError, match="unknown level 'word'; choose one of token, sequence, geometric"):
        mismatch_ratio(old, engine, mask, lengths, level="word")


def logged_mismatch() -> dict[str, float]:
    rollouts = pack([Sample(0, [1], [2, 3, 4], 0.0, mask=[1, 0, 1])], [0]).with_fields(engine_logprobs=torch.tensor([-1.0, INF, -2.0]))
    logged: dict[str, float] = {}
    context: Any = SimpleNamespace(data_group=None, device=torch.device("cpu"), log=logged.update)
    TrainContext._log_mismatch(context, torch.tensor([-1.5, NAN, -1.0]), rollouts)
    return logged


def test_the_logged_distance_between_engine_and_trainer_by_hand() -> None:
    (logged,) = run_ranks(1, logged_mismatch)
    # log-ratios trainer to engine -0.5 and 1; k3 of KL(engine || trainer) is ratio - 1 - log ratio.
    assert logged["rollout/train_logprob_diff_mean"] == 0.75 and logged["rollout/train_logprob_diff_max"] == 1.0
    assert logged["rollout/train_kl"] == pytest.approx((math.exp(-0.5) - 1 + 0.5 + math.exp(1) - 1 - 1) / 2, rel=1e-6)


def mismatch(model: Float64, sample: Sample, level: str) -> list[float]:
    """pi_old / pi_engine per token, in Python floats; 1 where it is not trained."""
    old, engine = model.logprobs(model.actor, sample), model.logprobs(ENGINE.double(), sample)
    gaps = [float(a - b) for a, b in zip(old, engine, strict=True)]
    trained = [gap for gap, m in zip(gaps, sample.trained, strict=True) if m]
    whole = sum(trained) / (len(trained) if level == "geometric" else 1) if trained else 0.0
    return [math.exp(gap if level == "token" else whole) if m else 1.0 for gap, m in zip(gaps, sample.trained, strict=True)]


@pytest.mark.parametrize(("micro", "ranks"), SPLITS)
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_importance_weights_are_cut_and_multiply_the_surrogate_only(micro: int, ranks: int, level: Any) -> None:
    config = GRPO.Config(
        group_size=4,
        beta=0.3,
        kl_estimator="k2",
        epochs=2,
        mini_batch_size=4,
        importance_weights=level,
        importance_cap=1.1,
        entropy_coef=0.1,
    )
    got, _, logged = gradients(GRPO(config), micro, ranks, engine=ENGINE)
    model, advantages = Float64(), grpo_advantages()
    old = [[float(lp) for lp in model.logprobs(model.actor, s)] for s in KEPT]
    ratios = [mismatch(model, s, level) for s in KEPT]

    def loss(weights: Tensor, batch: list[int]) -> Tensor:
        objectives = []
        for i in batch:
            ref, entropies, terms = model.logprobs(model.reference, KEPT[i]), model.entropies(weights, KEPT[i]), []
            for t, lp in enumerate(model.logprobs(weights, KEPT[i])):
                if KEPT[i].trained[t]:
                    gain = min(ratios[i][t], 1.1) * clipped((lp - old[i][t]).exp(), advantages[i], 0.2, 0.2)
                    terms.append(gain - 0.3 * (lp - ref[t]) ** 2 / 2 + 0.1 * entropies[t])
            if terms:
                objectives.append(sum(terms) / len(terms))
        return -sum(objectives) / len(objectives)

    assert_all_close(got, sgd(model.actor, loss, [[0, 1, 2, 3], [4, 5, 6]] * 2))
    trained = [r for row, s in zip(ratios, KEPT, strict=True) for r, m in zip(row, s.trained, strict=True) if m]
    assert 0 < sum(r > 1.1 for r in trained) < len(trained)  # the case has both
    assert logged["rollout/importance_capped_share"] == pytest.approx(sum(r > 1.1 for r in trained) / len(trained))
    assert logged["rollout/importance_weight_mean"] == pytest.approx(sum(min(r, 1.1) for r in trained) / len(trained), rel=1e-5)


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("algorithm", [GRPO, PPO])
def test_what_the_engine_saw_otherwise_leaves_loss_and_denominators(level: Any, algorithm: Any) -> None:
    config = algorithm.Config(mismatch_mask=level, mismatch_range=(0.8, 1.2), **({"group_size": 4} if algorithm is GRPO else {}))
    ctx = stepped(algorithm(config), engine=ENGINE, junk=NAN)
    (update,) = ctx.actor_updates
    model = Float64()
    ratios = [(r, bool(m)) for s in KEPT for r, m in zip(mismatch(model, s, level), s.trained, strict=True)]
    inside = [float(m and 0.8 <= r <= 1.2) for r, m in ratios]
    assert update.mask.tolist() == inside and update.denominators.tokens == sum(inside)
    assert 0 < sum(inside) < 16 and update.gradient.isfinite().all()
    assert ctx.logged["rollout/mismatch_dropped_share"] == pytest.approx(1 - sum(inside) / 16)
    if algorithm is PPO:  # the critic learns from every token
        assert ctx.critic_updates[0].denominators.tokens == 16


def test_an_engine_that_agrees_changes_nothing() -> None:
    plain = stepped(GRPO(GRPO.Config(group_size=4)))
    careful = stepped(GRPO(GRPO.Config(group_size=4, importance_weights="sequence", mismatch_mask="token")))
    assert torch.equal(plain.actor_updates[0].gradient, careful.actor_updates[0].gradient)
    assert careful.logged["rollout/mismatch_dropped_share"] == careful.logged["rollout/importance_capped_share"] == 0


@pytest.mark.parametrize(("micro", "ranks"), [(1, 1), (2, 2)])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_in_the_reward_of_a_group_is_the_sum_over_the_response(micro: int, ranks: int, estimator: Any) -> None:
    config = DrGRPO.Config(group_size=4, beta=0.2, kl_in="reward", kl_estimator=estimator, loss_aggregation="seq-mean-token-mean")
    (got,), _, logged = gradients(DrGRPO(config), micro, ranks)
    model, rewards, every = Float64(), list[float](), list[float]()
    for s in KEPT:
        d = [float(a - b) for a, b in zip(model.logprobs(model.actor, s), model.logprobs(model.reference, s), strict=True)]
        kls = [{"k1": x, "k2": x * x / 2, "k3": math.exp(-x) - 1 + x}[estimator] for x, m in zip(d, s.trained, strict=True) if m]
        every += kls
        rewards.append(s.reward - 0.2 * sum(kls))
    assert logged["kl/mean"] == pytest.approx(sum(every) / len(every), rel=1e-5)
    advantages = []
    for s, reward in zip(KEPT, rewards, strict=True):
        group = [r for r, other in zip(rewards, KEPT, strict=True) if other.group == s.group]
        advantages.append(reward - sum(group) / len(group))

    def loss(weights: Tensor, batch: list[int]) -> Tensor:
        objectives = []
        for i in batch:
            terms = [lp * advantages[i] for lp, m in zip(model.logprobs(weights, KEPT[i]), KEPT[i].trained, strict=True) if m]
            if terms:
                objectives.append(sum(terms) / len(terms))
        return -sum(objectives) / len(objectives)

    assert_all_close([got], sgd(model.actor, loss, [list(range(7))]))


def test_ppo_can_have_its_kl_in_the_loss() -> None:
    config = PPO.Config(samples_per_prompt=4, kl_in="loss", kl_estimator="k2", whiten_advantages=False)
    plain = PPO.Config(samples_per_prompt=4, beta=0.0, whiten_advantages=False)
    (with_kl,), (without,) = stepped(PPO(config), kl_coef=0.5).actor_updates, stepped(PPO(plain), kl_coef=0.5).actor_updates
    assert with_kl.fields["advantages"].tolist() == without.fields["advantages"].tolist()
    model = Float64()

    def penalty(weights: Tensor, batch: list[int]) -> Tensor:
        squares = [
            (lp - ref) ** 2 / 2
            for s in KEPT
            for lp, ref, m in zip(model.logprobs(weights, s), model.logprobs(model.reference, s), s.trained, strict=True)
            if m
        ]
        return 0.5 * sum(squares) / len(squares)

    assert_all_close([with_kl.gradient - without.gradient], sgd(model.actor, penalty, [[]]))


def test_the_weight_of_the_kl_follows_its_target_and_is_in_the_state() -> None:
    ctx = TableContext(SAMPLES, lr=0.0)
    algorithm = GRPO(GRPO.Config(group_size=4, beta=0.5, kl_target=1e-3))
    for weight in (0.5, 0.51, 0.5202):  # far above the target: the error counts 0.2, the gain is 0.1
        algorithm.step(ctx, None)
        assert ctx.logged["kl/weight"] == pytest.approx(weight)
    resumed = GRPO(GRPO.Config(group_size=4, beta=0.5, kl_target=1e-3))
    resumed.load_state_dict(algorithm.state_dict())
    assert resumed.kl_weight == algorithm.kl_weight == pytest.approx(0.5 * 1.02**3)
    below = GRPO(GRPO.Config(group_size=4, beta=0.5, kl_target=1e3))
    below.step(ctx, None)
    assert below.kl_weight == pytest.approx(0.49)
    near = GRPO(GRPO.Config(group_size=4, beta=0.5, kl_target=ctx.logged["kl/mean"] / 1.1))
    near.step(ctx, None)
    assert near.kl_weight == pytest.approx(0.5 * 1.01)
    assert GRPO().state_dict() == {}
    from_trainer = PPO(PPO.Config(kl_target=1e3))
    from_trainer.step(TableContext(SAMPLES, kl_coef=0.1), None)
    assert from_trainer.kl_weight == pytest.approx(0.098)


def test_the_dual_clip_bounds_the_loss_of_bad_tokens_by_hand() -> None:
    logprobs = torch.tensor([math.log(5.0), math.log(2.0), math.log(5.0)], requires_grad=True)
    mask, advantages = torch.ones(3), torch.tensor([-1.0, -1.0, 1.0])
    loss, metrics = policy_loss(logprobs, torch.zeros(3), advantages, mask, mask / 3, clip_low=0.2, clip_high=0.2, tokens=3, dual_clip=3.0)
    assert loss.item() == pytest.approx((3 + 2 - 1.2) / 3)
    loss.backward()
    assert logprobs.grad is not None and logprobs.grad.tolist() == pytest.approx([0, 2 / 3, 0])
    assert metrics["pg_clipfrac"].item() == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dual_clip": 1.0}, "dual_clip=1.0: set it above 1"),
        ({"kl_in": "advantage"}, "kl_in=advantage: choose reward or loss"),
        ({"kl_in": "reward", "kl_estimator": "k4"}, "kl_estimator=k4: choose one of k1, k2, k3$"),
        ({"kl_target": 0.0}, "kl_target=0.0: .*above 0 nats per token"),
        ({"beta": 0.0, "kl_target": 1.0}, "kl_target=1.0: .*beta above 0"),
        ({"importance_weights": "word"}, "importance_weights=word: choose one of none, token, sequence, geometric"),
        ({"importance_cap": 0.5}, "importance_cap=0.5: .*set 1 or more"),
        ({"mismatch_range": (1.0, 2.0)}, r"mismatch_range=\[1.0, 2.0\]: it must hold the ratio 1"),
        ({"entropy_coef": -1.0}, "entropy_coef=-1.0: "),
    ],
)
def test_trust_settings_that_cannot_work_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GRPO.Config(**settings)
