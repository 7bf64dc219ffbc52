"""Critic-free online algorithms on table models, against hand numbers and float64 loops that share no code with them.

Each test of gradients runs every split into micro-batches and data-parallel ranks. Not covered here: real engines (test_online_runs).
"""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from table_cases import KEPT, SAMPLES, SPLITS, Float64, assert_all_close, clipped, gradients, grpo_advantages, sgd, stepped
from table_models import Sample, TableContext, pack
from torch import Tensor

from tridentrl.algos import CISPO, DAPO, GRPO, GSPO, RLOO, DrGRPO, ReinforcePP, ReinforcePPBaseline, ReMax
from tridentrl.algos.rollouts import concatenated
from tridentrl.configs.convert import ConfigError
from tridentrl.configs.load import load_config, save_config, typed_options
from tridentrl.kernels.advantages import leave_one_out, reward_to_go, samplewise_sum
from tridentrl.kernels.losses import clipped_weight_loss, policy_loss

NAN = math.nan
ALL = [list(range(7))]
TWICE = [[0, 1, 2, 3], [4, 5, 6]] * 2
"""Two epochs of mini-batches of four."""


def trained_sum(terms: list[Tensor], sample: Sample) -> Tensor | float:
    return sum((term for term, m in zip(terms, sample.trained, strict=True) if m), 0.0)


def kls(model: Float64, sample: Sample) -> list[float]:
    """k1 per token, 0 where it is not trained."""
    pairs = zip(model.logprobs(model.actor, sample), model.logprobs(model.reference, sample), sample.trained, strict=True)
    return [float(lp - ref) if m else 0.0 for lp, ref, m in pairs]


# RLOO


def test_leave_one_out_by_hand() -> None:
    three_of_eight = torch.tensor([1.0, 0, 1, 0, 0, 1, 0, 0])
    got = leave_one_out(three_of_eight, torch.zeros(8, dtype=torch.int64))
    assert got.tolist() == pytest.approx([0.714286 if r else -0.428571 for r in three_of_eight.tolist()], abs=1e-6)
    rewards, groups = torch.tensor([0.7, 5.0, 0.7, NAN, 1.0, 0.7]), torch.tensor([1, 2, 1, 1, 3, 1])
    assert leave_one_out(rewards, groups).tolist() == [0] * 6  # equal, alone, excluded


@pytest.mark.parametrize(("micro", "ranks"), SPLITS)
def test_rloo_is_reinforce_on_whole_responses_with_the_others_as_the_baseline(micro: int, ranks: int) -> None:
    (got,), _, _ = gradients(RLOO(RLOO.Config(group_size=4, beta=0.2)), micro, ranks)
    model = Float64()
    returns = [s.reward - 0.2 * sum(kls(model, s)) for s in KEPT]

    def loss(weights: Tensor, batch: list[int]) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for i in batch:
            others = [r for j, r in enumerate(returns) if j != i and KEPT[j].group == KEPT[i].group]
            total = total - (returns[i] - statistics.mean(others)) * trained_sum(model.logprobs(weights, KEPT[i]), KEPT[i])
        return total / 6  # samples with a trained token

    assert_all_close([got], sgd(model.actor, loss, ALL))


# ReMax

GREEDY = [Sample(0, [1, 2], [5], 0.25), Sample(1, [4], [0, 5], 0.75)]


@pytest.mark.parametrize(("micro", "ranks"), SPLITS)
def test_remax_takes_the_greedy_reward_off_and_gives_each_token_the_kl_to_go(micro: int, ranks: int) -> None:
    (got,), _, _ = gradients(ReMax(ReMax.Config(samples_per_prompt=4)), micro, ranks, kl_coef=0.2, greedy=GREEDY)
    model = Float64()

    def loss(weights: Tensor, batch: list[int]) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for i in batch:
            kl = kls(model, KEPT[i])
            gain = KEPT[i].reward - GREEDY[KEPT[i].group].reward
            terms = [(gain - 0.2 * sum(kl[t:])) * lp for t, lp in enumerate(model.logprobs(weights, KEPT[i]))]
            total = total - trained_sum(terms, KEPT[i])
        return total / 6

    assert_all_close([got], sgd(model.actor, loss, ALL))


def test_remax_leaves_out_a_prompt_whose_greedy_response_has_no_reward() -> None:
    ctx = stepped(ReMax(), greedy=[GREEDY[0], Sample(1, [4], [0, 5], NAN)])
    assert ctx.calls == ["generate greedily", "generate 1", "timer advantage"]
    assert len(ctx.actor_updates[0].mask) == sum(len(s.response) for s in SAMPLES if s.group == 0)
    assert not stepped(ReMax(), [Sample(0, [1], [2], NAN)], greedy=[GREEDY[0]]).actor_updates


def test_the_reward_to_go_skips_masked_tokens() -> None:
    rewards, mask = torch.tensor([1.0, NAN, 2, 4, 8]), torch.tensor([1.0, 0, 1, 1, 1])
    assert reward_to_go(rewards, mask, torch.tensor([3, 2])).tolist() == [3, 0, 2, 12, 8]
    sums = samplewise_sum(rewards, mask, torch.tensor([3, 2]), torch.tensor([2, 0]), samples=3, group=None)
    assert sums.tolist() == [12, 0, 3]


# Dr. GRPO


@pytest.mark.parametrize(("micro", "ranks"), SPLITS)
def test_dr_grpo_divides_by_neither_spread_nor_length(micro: int, ranks: int) -> None:
    got, _, _ = gradients(DrGRPO(DrGRPO.Config(group_size=4, epochs=2, mini_batch_size=4)), micro, ranks, max_response_length=9)
    model = Float64()
    old = [[float(lp) for lp in model.logprobs(model.actor, s)] for s in KEPT]
    means = {group: statistics.mean(s.reward for s in KEPT if s.group == group) for group in (0, 1)}

    def loss(weights: Tensor, batch: list[int]) -> Tensor:
        total, samples = torch.zeros((), dtype=torch.float64), sum(any(KEPT[i].trained) for i in batch)
        for i in batch:
            advantage = KEPT[i].reward - means[KEPT[i].group]
            terms = [clipped((lp - o).exp(), advantage, 0.2, 0.2) for lp, o in zip(model.logprobs(weights, KEPT[i]), old[i], strict=True)]
            total = total - trained_sum(terms, KEPT[i]) / 9
        return total / samples

    assert_all_close(got, sgd(model.actor, loss, TWICE))


# GSPO


@pytest.mark.parametrize(("micro", "ranks"), SPLITS)
def test_gspo_clips_the_ratio_of_whole_responses(micro: int, ranks: int) -> None:
    config = GSPO.Config(group_size=4, epochs=2, mini_batch_size=4, clip_coef=0.02, clip_coef_high=0.03)
    got, _, _ = gradients(GSPO(config), micro, ranks)
    model, advantages = Float64(), grpo_advantages()
    old = [[float(lp) for lp in model.logprobs(model.actor, s)] for s in KEPT]

    def loss(weights: Tensor, batch: list[int]) -> Tensor:
        objectives = []
        for i in batch:
            if any(KEPT[i].trained):
                gaps = [lp - o for lp, o in zip(model.logprobs(weights, KEPT[i]), old[i], strict=True)]
                ratio = (trained_sum(gaps, KEPT[i]) / sum(KEPT[i].trained)).exp()  # type: ignore[union-attr]
                objectives.append(clipped(ratio, advantages[i], 0.02, 0.03))
        return -sum(objectives) / len(objectives)

    assert_all_close(got, sgd(model.actor, loss, TWICE))


def test_the_ratio_of_a_response_by_hand() -> None:
    logprobs = torch.tensor([0.5, 0.1, NAN, -0.2, 0.3], requires_grad=True)
    old, mask, lengths = torch.tensor([0.1, 0.1, NAN, 0.0, 0.0]), torch.tensor([1.0, 1, 0, 1, 1]), torch.tensor([3, 1, 1])
    advantages, weights = torch.tensor([1.0, 1, NAN, -1, 1]), torch.tensor([0.5, 0.5, 0, 1, 1]) / 3
    loss, metrics = policy_loss(
        logprobs, old, advantages, mask, weights, clip_low=0.1, clip_high=0.25, tokens=4, sequence_lengths_s=lengths
    )
    # Ratios e^0.2 (free), e^-0.2 (held at 0.9, A < 0), e^0.3 (held at 1.25).
    assert loss.item() == pytest.approx((-math.exp(0.2) + 0.9 - 1.25) / 3)
    loss.backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([-math.exp(0.2) / 6, -math.exp(0.2) / 6, 0, 0, 0])
    assert metrics["ratio_max"].item() == pytest.approx(math.exp(0.3)) and metrics["pg_clipfrac"].item() == 0.5
    for broken in (NAN, math.inf):
        loss, _ = policy_loss(
            torch.tensor([broken, 0.0, 0, 0, 0]),
            old,
            advantages,
            mask,
            weights,
            clip_low=0.1,
            clip_high=0.25,
            tokens=4,
            sequence_lengths_s=lengths,
        )
        assert loss.isnan()


# CISPO


@pytest.mark.parametrize(("micro", "ranks"), SPLITS)
def test_cispo_weighs_reinforce_by_clipped_ratios(micro: int, ranks: int) -> None:
    config = CISPO.Config(group_size=4, epochs=2, mini_batch_size=4, clip_coef=0.02, clip_coef_high=0.03)
    got, _, _ = gradients(CISPO(config), micro, ranks)
    model, advantages = Float64(), grpo_advantages()
    old = [[float(lp) for lp in model.logprobs(model.actor, s)] for s in KEPT]

    def loss(weights: Tensor, batch: list[int]) -> Tensor:
        terms = []
        for i in batch:
            for lp, o, m in zip(model.logprobs(weights, KEPT[i]), old[i], KEPT[i].trained, strict=True):
                if m:
                    held = min(max(math.exp(float(lp) - o), 0.98), 1.03)
                    terms.append(held * advantages[i] * lp)
        return -sum(terms) / len(terms)

    assert_all_close(got, sgd(model.actor, loss, TWICE))


def test_cispo_keeps_the_gradient_of_a_clipped_token_by_hand() -> None:
    logprobs = torch.tensor([-1.0, -0.5, NAN], requires_grad=True)
    old, mask = torch.tensor([-3.0, -0.5, NAN]), torch.tensor([1.0, 1, 0])
    loss, metrics = clipped_weight_loss(
        logprobs, old, torch.tensor([2.0, -1.0, NAN]), mask, mask / 2, clip_low=1.0, clip_high=4.0, tokens=2
    )
    assert loss.item() == pytest.approx(-(5 * 2 * -1.0 + 1 * -1 * -0.5) / 2)  # e^2 = 7.4 is held at 5
    loss.backward()
    assert logprobs.grad is not None and logprobs.grad.tolist() == pytest.approx([-5, 0.5, 0])
    assert metrics["pg_clipfrac"].item() == 0.5
    for broken in (NAN, math.inf, -math.inf):  # at a trained token
        logprobs = torch.tensor([broken, -0.5, 0.0], requires_grad=True)
        loss, _ = clipped_weight_loss(logprobs, old, torch.zeros(3), mask, mask / 2, clip_low=1.0, clip_high=4.0, tokens=2)
        loss.backward()
        assert loss.isnan() and logprobs.grad is not None and logprobs.grad[0].isnan() and logprobs.grad[2] == 0
    with pytest.raises(ValueError, match=r"dual_clip=3.0: the weights are bounded"):
        CISPO.Config(dual_clip=3.0)


# REINFORCE++


def whitened(advantages: list[list[float]]) -> list[list[float]]:
    """Per sample and token, over all trained tokens."""
    flat = [a for row, s in zip(advantages, KEPT, strict=True) for a, m in zip(row, s.trained, strict=True) if m]
    mean, std = statistics.mean(flat), statistics.stdev(flat)
    return [[(a - mean) / std for a in row] for row in advantages]


@pytest.mark.parametrize(("micro", "ranks"), SPLITS)
@pytest.mark.parametrize("baseline", [False, True])
def test_reinforce_pp_normalises_over_the_whole_batch(micro: int, ranks: int, baseline: bool) -> None:
    algorithm = (
        ReinforcePPBaseline(ReinforcePPBaseline.Config(group_size=4, epochs=2, mini_batch_size=4))
        if baseline
        else ReinforcePP(ReinforcePP.Config(samples_per_prompt=4, epochs=2, mini_batch_size=4))
    )
    got, _, _ = gradients(algorithm, micro, ranks, kl_coef=0.2)
    model = Float64()
    old = [[float(lp) for lp in model.logprobs(model.actor, s)] for s in KEPT]
    means = {group: statistics.mean(s.reward for s in KEPT if s.group == group) for group in (0, 1)}
    if baseline:
        advantages = whitened([[s.reward - means[s.group]] * len(s.response) for s in KEPT])
    else:
        advantages = whitened([[s.reward - 0.2 * sum(kls(model, s)[t:]) for t in range(len(s.response))] for s in KEPT])

    def loss(weights: Tensor, batch: list[int]) -> Tensor:
        terms = []
        for i in batch:
            ref = model.logprobs(model.reference, KEPT[i])
            for t, lp in enumerate(model.logprobs(weights, KEPT[i])):
                if KEPT[i].trained[t]:
                    penalty = 0.2 * (lp - ref[t]) ** 2 / 2 if baseline else 0.0
                    terms.append(penalty - clipped((lp - old[i][t]).exp(), advantages[i][t], 0.2, 0.2))
        return sum(terms) / len(terms)

    assert_all_close(got, sgd(model.actor, loss, TWICE))


# Groups


def test_top_k_can_rank_by_the_distance_of_the_advantage_from_zero() -> None:
    samples = [Sample(0, [1], [2] * (i + 1), r) for i, r in enumerate([1.0, 1.0, 1.0, 0.0])]
    (by_reward,) = stepped(GRPO(GRPO.Config(group_size=4, beta=0.0, top_k=1)), samples).actor_updates
    assert by_reward.fields["advantages"].tolist() == pytest.approx([0.5], abs=1e-5)
    (by_distance,) = stepped(GRPO(GRPO.Config(group_size=4, beta=0.0, top_k=1, top_k_by="abs_advantage")), samples).actor_updates
    assert by_distance.fields["advantages"].tolist() == pytest.approx([-1.5] * 4, abs=1e-5)


def test_the_group_size_can_depend_on_the_length_of_the_prompt() -> None:
    config = GRPO.Config(group_size={1024: 2, 256: 8})
    assert [config.size_for(length) for length in (1, 256, 257, 1024)] == [8, 8, 2, 2]
    algorithm = GRPO(config)
    assert algorithm.samples_per_prompt == 8 and algorithm.longest_prompt == 1024 and GRPO().longest_prompt is None
    with pytest.raises(ValueError, match=r"a prompt has 1025 tokens, and the longest that has a group size is 1024; add an entry"):
        config.size_for(1025)
    asked: list[Any] = []
    ctx = SimpleNamespace(generate=lambda prompts, n: asked.append(n))
    algorithm.sampled(ctx, [SimpleNamespace(prompt_ids=[0] * length) for length in (300, 7)])  # type: ignore[arg-type,list-item]
    assert asked == [[2, 8]]


def test_group_sizes_are_read_from_the_command_line_and_a_file(tmp_path: Path) -> None:
    required = ["data.train_files=a.arrow", "model.actor_pretrained_model_name_or_path=m"]
    config = load_config([*required, "algorithm.group_size={256:8,1024:4}"])
    assert typed_options(GRPO.Config, config.algorithm).sizes == {256: 8, 1024: 4}
    save_config(config, tmp_path / "saved.yaml")
    again = load_config([], config_file=tmp_path / "saved.yaml")
    assert typed_options(GRPO.Config, again.algorithm) == GRPO.Config(group_size={256: 8, 1024: 4})
    with pytest.raises(ConfigError, match=r"algorithm.group_size must be an integer or a mapping from an integer to an integer"):
        typed_options(GRPO.Config, load_config([*required, "algorithm.group_size={long:8}"]).algorithm)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"group_size": {256: 8, 1024: 1}}, r"group_size=.*: a sample is compared with the others of its group; set 2 or more"),
        ({"group_size": {}}, "group_size={}: .*set 2 or more"),
        ({"group_size": {0: 4}}, "longest prompts in tokens; set 1 or more"),
        ({"group_size": {256: 8, 1024: 4}, "top_k": 5}, "top_k=5: .*set 1 to 4"),
        ({"top_k": 2, "top_k_by": "length"}, "top_k_by=length: choose reward or abs_advantage"),
    ],
)
def test_group_settings_that_cannot_work_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GRPO.Config(**settings)


# DAPO

EQUAL, ONE_RIGHT = [1.0, 1.0], [1.0, 0.0]


def groups(*rewards: list[float], length: int = 1) -> list[Sample]:
    return [Sample(g, [g + 1], [2] * length, r) for g, group in enumerate(rewards) for r in group]


def dapo_step(batches: list[list[Sample]], *, prompts: int, **settings: Any) -> TableContext:
    ctx = TableContext(batches[0], later=batches[1:], max_response_length=10)
    DAPO(DAPO.Config(group_size=2, **settings)).step(ctx, [SimpleNamespace(prompt_ids=[1])] * prompts)  # type: ignore[arg-type]
    return ctx


def test_dapo_draws_prompts_until_the_step_has_its_groups_and_drops_the_rest() -> None:
    batches = [groups(EQUAL, ONE_RIGHT), groups([0.0, 0.0], [NAN, 1.0]), groups([0.0, 1.0], [3.0, 0.0], length=2), groups(ONE_RIGHT)]
    ctx = dapo_step(batches, prompts=2)
    assert [call for call in ctx.calls if "timer" not in call] == ["generate 2", "more prompts"] * 2 + ["generate 2"]
    assert ctx.logged["dapo/generation_batches"] == 3 and ctx.logged["dapo/groups"] == 2
    assert ctx.logged["dapo/equal_share"] == 0.5  # of 6 groups, 3
    (update,) = ctx.actor_updates
    half = pytest.approx([0.707106, -0.707106, -0.707106, -0.707106, 0.707106, 0.707106], abs=2e-6)
    assert update.fields["advantages"].tolist() == half and update.denominators.sequences == 4


def test_dapo_trains_on_what_it_has_after_the_last_batch_it_may_draw() -> None:
    batches = [groups(EQUAL, ONE_RIGHT), groups(EQUAL, EQUAL), groups(ONE_RIGHT, ONE_RIGHT)]
    ctx = dapo_step(batches, prompts=2, max_generation_batches=2)
    assert ctx.logged["dapo/generation_batches"] == 2 and ctx.actor_updates[0].denominators.sequences == 2
    ctx = dapo_step(batches, prompts=2, dynamic_sampling=False)
    assert ctx.logged["dapo/generation_batches"] == 1 and ctx.actor_updates[0].denominators.sequences == 2
    ctx = dapo_step([groups(EQUAL, EQUAL)], prompts=2, max_generation_batches=1)
    assert ctx.logged["dapo/groups"] == 0 and not ctx.actor_updates


def test_groups_of_several_batches_stay_apart() -> None:
    first, second = groups(ONE_RIGHT, ONE_RIGHT), groups([5.0, 0.0], length=3)
    whole = concatenated([pack(first, [0, 3]), pack(first, [])[torch.zeros(4, dtype=torch.bool)], pack(second, [1])])
    assert whole.group_ids_N.tolist() == [0, 0, 1, 1, 2, 2] and whole.rows_n.tolist() == [0, 3, 5]
    assert whole.response_lengths_N.tolist() == [1, 1, 1, 1, 3, 3] and whole.tokens_T.tolist() == [1, 2, 2, 2, 1, 2, 2, 2]
    assert whole[torch.tensor([False] * 5 + [True])].tokens_T.tolist() == [1, 2, 2, 2]


def test_the_overlong_punishment_by_hand() -> None:
    lengths = torch.tensor([1, 8, 9, 10, 12])
    assert DAPO().overlong(lengths, 10).tolist() == pytest.approx([0, 0, 0.5, 1, 1])
    custom = DAPO(DAPO.Config(overlong_penalty=2.0, overlong_length=12, overlong_buffer=4))
    assert custom.overlong(lengths, 99).tolist() == pytest.approx([0, 0, 0.5, 1, 2])
    # It moves advantages, but makes no group of equal rewards one that teaches.
    samples = [Sample(0, [1], [2], 1.0), Sample(0, [1], [2] * 10, 1.0), Sample(1, [1], [2], 0.0), Sample(1, [1], [2] * 10, 3.0)]
    (update,) = dapo_step([samples], prompts=1, dynamic_sampling=False).actor_updates
    assert update.fields["advantages"].tolist() == pytest.approx([-0.707106] + [0.707106] * 10, abs=2e-6)  # rewards 0 and 3 - 1
    (update,) = dapo_step([samples[2:]], prompts=1, overlong_penalty=6.0).actor_updates
    assert update.fields["advantages"][0].item() > 0  # 0 beats 3 - 6


@pytest.mark.parametrize(("micro", "ranks"), SPLITS)
def test_dapo_is_grpo_with_more_room_upwards_averaged_over_tokens(micro: int, ranks: int) -> None:
    config = DAPO.Config(group_size=4, epochs=2, mini_batch_size=4, clip_coef=0.02, clip_coef_high=0.03, overlong_penalty=0.0)
    got, _, _ = gradients(DAPO(config), micro, ranks)
    model, advantages = Float64(), grpo_advantages()
    old = [[float(lp) for lp in model.logprobs(model.actor, s)] for s in KEPT]

    def loss(weights: Tensor, batch: list[int]) -> Tensor:
        terms = []
        for i in batch:
            for lp, o, m in zip(model.logprobs(weights, KEPT[i]), old[i], KEPT[i].trained, strict=True):
                if m:
                    terms.append(-clipped((lp - o).exp(), advantages[i], 0.02, 0.03))
        return sum(terms) / len(terms)

    assert_all_close(got, sgd(model.actor, loss, TWICE))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_generation_batches": 0}, "max_generation_batches=0: .*set 1 or more"),
        ({"overlong_penalty": -1.0}, "overlong_penalty=-1.0: "),
        ({"overlong_length": 4, "overlong_buffer": 5}, "overlong_buffer=5: it lies before overlong_length"),
    ],
)
def test_dapo_settings_that_cannot_work_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DAPO.Config(**settings)
