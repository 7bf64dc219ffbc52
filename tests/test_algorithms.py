"""Control flow and losses of the algorithms on table models, against hand numbers and float64 loops that share no code with them.

Not covered here: real engines, and layouts other than a split over data-parallel ranks.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from typing import Any

import pytest
import torch
from table_cases import KEPT, NAN, SAMPLES, SPLITS, Float64, assert_all_close, clipped, gradients, grpo_advantages, sgd, stepped
from table_models import VOCAB, Sample
from torch import Tensor

from tridentrl.algos import GRPO, PPO, SFT, Algorithm, get_algorithm_registry, register
from tridentrl.algos.registry import algorithm_class

# GRPO


def test_grpo_trains_the_scored_samples_on_group_advantages() -> None:
    ctx = stepped(GRPO(GRPO.Config(group_size=4)))
    assert ctx.calls == ["generate 4", "timer advantage", "reference"]
    (update,) = ctx.actor_updates
    by_hand = [0.866024] * 3 + [-0.866024] * 6 + [0.866024]  # rewards 1, 0, 0, 1 on 3, 2, 4, 1 tokens
    by_hand += [-0.440225] * 3 + [-0.704360] + [1.144585] * 5  # rewards 0.5, 0.25, 2: mean 0.916667, unbiased std 0.946485
    assert update.fields["advantages"].tolist() == pytest.approx(by_hand, abs=2e-6)
    model = Float64()
    old = [float(lp) for s in KEPT for lp in model.logprobs(model.actor, s)]
    ref = [float(lp) for s in KEPT for lp in model.logprobs(model.reference, s)]
    assert update.fields["old_logprobs"].tolist() == pytest.approx(old, abs=1e-6)
    assert update.fields["ref_logprobs"].tolist() == pytest.approx(ref, abs=1e-6)
    assert update.denominators.tokens == 16 and update.denominators.sequences == 6
    trained = [bool(m) for s in KEPT for m in s.trained]
    k3 = [math.exp(r - o) - 1 - (r - o) for o, r, m in zip(old, ref, trained, strict=True) if m]
    assert ctx.logged["kl/mean"] == pytest.approx(statistics.mean(k3), rel=1e-5)
    assert update.metrics["kl"] == pytest.approx(statistics.mean(k3), rel=1e-5)
    assert update.metrics["ratio_max"] == 1 and update.metrics["ppo_kl"] == 0 and update.metrics["pg_clipfrac"] == 0
    entropies = [float(e) for s in KEPT for e, m in zip(model.entropies(model.actor, s), s.trained, strict=True) if m]
    assert update.metrics["entropy"] == pytest.approx(statistics.mean(entropies), rel=1e-5)


@pytest.mark.parametrize(("micro", "ranks"), SPLITS)
@pytest.mark.parametrize("estimator", ["k3", "k2"])
def test_grpo_gradients_equal_float64_for_every_split(micro: int, ranks: int, estimator: Any) -> None:
    config = GRPO.Config(group_size=4, beta=0.3, kl_estimator=estimator, epochs=2, mini_batch_size=4, clip_coef=0.1, clip_coef_high=0.15)
    got, _, logged = gradients(GRPO(config), micro, ranks)
    model, advantages = Float64(), grpo_advantages()
    old = [[float(lp) for lp in model.logprobs(model.actor, s)] for s in KEPT]

    def loss(weights: Tensor, batch: list[int]) -> Tensor:
        """Equation 3 of the paper, sample by sample."""
        objectives = []
        for i in batch:
            terms = []
            ref = model.logprobs(model.reference, KEPT[i])
            for t, lp in enumerate(model.logprobs(weights, KEPT[i])):
                if KEPT[i].trained[t]:
                    kl = (ref[t] - lp).exp() - (ref[t] - lp) - 1 if estimator == "k3" else (lp - ref[t]) ** 2 / 2
                    terms.append(clipped((lp - old[i][t]).exp(), advantages[i], 0.1, 0.15) - 0.3 * kl)
            if terms:
                objectives.append(sum(terms) / len(terms))
        return -sum(objectives) / len(objectives)

    assert_all_close(got, sgd(model.actor, loss, [[0, 1, 2, 3], [4, 5, 6]] * 2))
    assert logged["advantage/groups_single"] == logged["advantage/groups_equal"] == 0


def test_grpo_without_beta_needs_no_reference() -> None:
    assert GRPO(GRPO.Config(beta=0.0)).roles(kl_coef=0.1) == ("actor",)
    assert GRPO().roles(kl_coef=0.0) == ("actor", "reference")
    ctx = stepped(GRPO(GRPO.Config(group_size=4, beta=0.0)))
    assert "reference" not in ctx.calls and "kl/mean" not in ctx.logged and "kl" not in ctx.actor_updates[0].metrics


def test_grpo_keeps_the_best_of_each_group_with_the_advantages_of_the_whole_group() -> None:
    (update,) = stepped(GRPO(GRPO.Config(group_size=4, top_k=1))).actor_updates
    best = grpo_advantages()
    assert update.fields["advantages"].tolist() == pytest.approx([best[0]] * 3 + [best[6]] * 5, abs=2e-6)
    assert update.denominators.sequences == 2


def test_grpo_counts_groups_that_teach_nothing() -> None:
    samples = [
        Sample(0, [1], [2], 0.7),
        Sample(0, [1], [3], 0.7),
        Sample(1, [1], [2], 1.0),
        Sample(1, [1], [2], NAN),
        Sample(2, [1], [4], NAN),
    ]
    ctx = stepped(GRPO(GRPO.Config(group_size=2, beta=0.0)), samples)
    assert ctx.logged == {"advantage/groups_single": 1, "advantage/groups_equal": 1}
    (update,) = ctx.actor_updates
    assert update.fields["advantages"].tolist() == [0, 0, 0] and not update.gradient.any()


@pytest.mark.parametrize("algorithm", [GRPO(GRPO.Config(group_size=4)), PPO()])
def test_a_step_whose_samples_were_all_excluded_updates_nothing(algorithm: Algorithm) -> None:
    ctx = stepped(algorithm, [Sample(0, [1], [2, 3], NAN)] * 4, kl_coef=0.1)
    assert ctx.actor_updates == ctx.critic_updates == []


@pytest.mark.parametrize("algorithm", [GRPO(GRPO.Config(group_size=4, mask_truncated=True)), PPO(PPO.Config(mask_truncated=True))])
def test_truncated_responses_can_leave_numerator_and_denominator(algorithm: Algorithm) -> None:
    ctx = stepped(algorithm, junk=NAN)
    finished = [float(m and not s.truncated) for s in KEPT for m in s.trained]
    for update in [*ctx.actor_updates, *ctx.critic_updates]:
        assert update.mask.tolist() == finished
        assert update.denominators.tokens == sum(finished) == 11 and update.denominators.sequences == 4
        assert update.gradient.isfinite().all() and update.gradient.any()


# PPO


def test_ppo_puts_kl_on_every_token_and_the_score_on_the_last_trained_one() -> None:
    algorithm = PPO(PPO.Config(lam=1.0, samples_per_prompt=4, whiten_advantages=False))
    ctx = stepped(algorithm, kl_coef=0.5)
    assert ctx.calls == ["generate 4", "reference", "timer advantage"]
    (update,) = ctx.critic_updates
    model = Float64()
    kls = [
        [float(lp - ref) for lp, ref in zip(model.logprobs(model.actor, s), model.logprobs(model.reference, s), strict=True)] for s in KEPT
    ]
    returns, values = [], []
    for sample, kl in zip(KEPT, kls, strict=True):
        for t, trained in enumerate(sample.trained):
            to_go = [k for k, m in zip(kl[t:], sample.trained[t:], strict=True) if m]
            returns.append(sample.reward - 0.5 * sum(to_go) if trained else 0.0)  # with lambda 1: the reward to go
            values.append(float(model.critic[sample.previous[t]]) if trained else 0.0)
    assert update.fields["returns"].tolist() == pytest.approx(returns, abs=1e-5)
    advantages = [r - v for r, v in zip(returns, values, strict=True)]
    (actor_update,) = ctx.actor_updates
    assert actor_update.fields["advantages"].tolist() == pytest.approx(advantages, abs=1e-5)
    trained_kls = [k for s, kl in zip(KEPT, kls, strict=True) for k, m in zip(kl, s.trained, strict=True) if m]
    assert ctx.logged["kl/mean"] == pytest.approx(statistics.mean(trained_kls), rel=1e-5)
    trained = [bool(m) for s in KEPT for m in s.trained]
    mean_return = statistics.mean(r for r, m in zip(returns, trained, strict=True) if m)
    assert ctx.logged["advantage/return_mean"] == pytest.approx(mean_return, rel=1e-5)
    errors = [(r - v) ** 2 for r, v, m in zip(returns, values, trained, strict=True) if m]
    assert update.metrics["vf_loss"] == pytest.approx(statistics.mean(errors), rel=1e-5)


def ppo_advantages(model: Float64, kl_coef: float, lam: float) -> tuple[list[list[float]], list[list[float]]]:
    """Whitened advantages and returns per sample and token (gamma 1); entries that are not trained are never used."""
    advantages, returns = [], []
    for s in KEPT:
        kl = [float(lp - r) for lp, r in zip(model.logprobs(model.actor, s), model.logprobs(model.reference, s), strict=True)]
        places = [t for t, m in enumerate(s.trained) if m]
        a, value_next, a_next = [NAN] * len(s.response), 0.0, 0.0
        for t in reversed(places):
            value = float(model.critic[s.previous[t]])
            reward = -kl_coef * kl[t] + (s.reward if t == places[-1] else 0.0)
            a[t] = a_next = reward + value_next - value + lam * a_next
            value_next = value
        advantages.append(a)
        returns.append([x + float(model.critic[p]) for x, p in zip(a, s.previous, strict=True)])
    flat = [x for a in advantages for x in a if not math.isnan(x)]
    mean, std = statistics.mean(flat), statistics.stdev(flat)
    return [[(x - mean) / std for x in a] for a in advantages], returns


@pytest.mark.parametrize(("micro", "ranks"), SPLITS)
def test_ppo_gradients_equal_float64_for_every_split(micro: int, ranks: int) -> None:
    config = PPO.Config(lam=0.9, epochs=2, mini_batch_size=4, clip_coef=0.1, value_clip=0.15, vf_coef=0.7, entropy_coef=0.05)
    got_actor, got_critic, _ = gradients(PPO(config), micro, ranks, kl_coef=0.2)
    model = Float64()
    advantages, returns = ppo_advantages(model, 0.2, 0.9)
    old = [[float(lp) for lp in model.logprobs(model.actor, s)] for s in KEPT]

    def actor_loss(weights: Tensor, batch: list[int]) -> Tensor:
        terms = []
        for i in batch:
            entropies = model.entropies(weights, KEPT[i])
            for t, lp in enumerate(model.logprobs(weights, KEPT[i])):
                if KEPT[i].trained[t]:
                    terms.append(-clipped((lp - old[i][t]).exp(), advantages[i][t], 0.1, 0.1) - 0.05 * entropies[t])
        return sum(terms) / len(terms)

    def critic_loss(weights: Tensor, batch: list[int]) -> Tensor:
        terms = []
        for i in batch:
            for t, previous in enumerate(KEPT[i].previous):
                if KEPT[i].trained[t]:
                    value, before = weights[previous], model.critic[previous]
                    held = torch.clamp(value, before - 0.15, before + 0.15)
                    terms.append(torch.maximum((value - returns[i][t]) ** 2, (held - returns[i][t]) ** 2))
        return 0.7 * sum(terms) / len(terms)

    batches = [[0, 1, 2, 3], [4, 5, 6]] * 2
    assert_all_close(got_actor, sgd(model.actor, actor_loss, batches))
    assert_all_close(got_critic, sgd(model.critic, critic_loss, batches))


def test_ppo_needs_a_reference_only_for_the_kl_reward() -> None:
    assert set(PPO().roles(kl_coef=0.1)) == {"actor", "critic", "reference"}
    assert PPO().roles(kl_coef=0.0) == ("actor", "critic")
    assert "reference" not in stepped(PPO()).calls


# SFT


def test_sft_is_the_mean_nll_of_response_tokens_end_token_included() -> None:
    eos = 2
    samples = [Sample(0, [eos, 1], [3, 4, eos], 0.0), Sample(1, [5], [eos], 0.0), Sample(2, [1, eos], [4, 4], 0.0, mask=[0, 0])]
    flat = torch.zeros(VOCAB, VOCAB)
    (update,) = stepped(SFT(), samples, actor=flat).actor_updates
    assert update.denominators.tokens == 4
    assert update.metrics["nll"] == pytest.approx(math.log(VOCAB))
    summed = SFT(SFT.Config(loss_aggregation="seq-mean-token-sum"))
    (update,) = stepped(summed, samples[:1], actor=flat).actor_updates
    # Sum over 3 tokens: 3 ln 6. Gradient of the state "4", which is followed by the end token: p - onehot.
    expected = [1 / VOCAB] * VOCAB
    expected[eos] -= 1
    assert update.gradient[4].tolist() == pytest.approx(expected)
    assert not SFT.online and SFT().roles(kl_coef=0.1) == ("actor",)


@pytest.mark.parametrize(("micro", "ranks"), SPLITS)
def test_sft_gradients_equal_float64_for_every_split(micro: int, ranks: int) -> None:
    got, _, _ = gradients(SFT(SFT.Config(mini_batch_size=5)), micro, ranks)
    model = Float64()

    def loss(weights: Tensor, batch: list[int]) -> Tensor:
        terms = [-lp for i in batch for lp, m in zip(model.logprobs(weights, SAMPLES[i]), SAMPLES[i].trained, strict=True) if m]
        return sum(terms) / len(terms)

    assert_all_close(got, sgd(model.actor, loss, [[0, 1, 2, 3, 4], [5, 6, 7]]))


# Registry and settings


def test_the_registry_lists_algorithms_and_names_the_nearest() -> None:
    assert {"grpo": GRPO, "ppo": PPO, "sft": SFT}.items() <= get_algorithm_registry().items()
    assert algorithm_class("ppo") is PPO
    with pytest.raises(ValueError, match=r"algorithm.name=grop is unknown; did you mean grpo\? Known are .*dr_grpo, grpo, .*ppo, "):
        algorithm_class("grop")
    with pytest.raises(ValueError, match=r"name 'ppo' belongs to tridentrl\.algos\.ppo\.PPO"):
        register("ppo")(GRPO)
    with pytest.raises(ValueError, match="GRPO needs a GRPOConfig, got a PPOConfig"):
        GRPO(PPO.Config())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GRPO.Config(group_size=1), "group_size=1: a sample is compared with the others of its group; set 2 or more"),
        (lambda: GRPO.Config(kl_estimator="k1"), r"kl_estimator=k1: choose one of k2, k3 \(as a loss, k1 has gradient 0"),
        (lambda: GRPO.Config(top_k=9), "top_k=9: it counts samples of a group of group_size=8; set 1 to 8"),
        (lambda: GRPO.Config(beta=-1.0), "beta=-1.0: .*set 0 or more"),
        (lambda: GRPO.Config(loss_aggregation="fixed-length", loss_length=0), "loss_length=0: .*set 1 or more"),
        (lambda: PPO.Config(clip_coef=0.0), "clip_coef=0.0: "),
        (lambda: PPO.Config(clip_coef=NAN), "clip_coef=nan: "),
        (lambda: PPO.Config(lam=1.5), "lam=1.5: lambda of GAE"),
        (lambda: PPO.Config(mini_batch_size=0), "mini_batch_size=0: an optimizer step needs"),
        (lambda: SFT.Config(epochs=0, loss_aggregation="mean"), "(?s)epochs=0: .*\nloss_aggregation=mean: choose one of token-mean"),
    ],
)
def test_settings_that_cannot_work_are_refused_with_value_rule_and_fix(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
