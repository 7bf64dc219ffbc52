"""Policy, value and KL losses: hand numbers, exact sums over a small vocabulary, and masked values of any kind."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tridentrl.kernels.losses import kl_estimate, kl_loss, policy_loss, token_weights, value_loss

NAN, INF = math.nan, math.inf


def policy(
    logprobs: list[float], old: list[float], advantages: list[float], mask: list[float], *, low: float = 0.2, high: float = 0.2
) -> tuple[float, list[float], dict[str, float]]:
    """Token-mean policy loss of one batch, its gradient and its metrics."""
    logp, mask_r = torch.tensor(logprobs, requires_grad=True), torch.tensor(mask)
    tokens = float(mask_r.sum())
    weights = token_weights(mask_r, torch.tensor([len(mask)]), mode="token-mean", tokens=tokens, sequences=1)
    loss, metrics = policy_loss(
        logp, torch.tensor(old), torch.tensor(advantages), mask_r, weights, clip_low=low, clip_high=high, tokens=tokens
    )
    loss.backward()
    assert logp.grad is not None
    return loss.item(), logp.grad.tolist(), {name: value.item() for name, value in metrics.items()}


@pytest.mark.parametrize("junk", [NAN, -200.0, 200.0, INF, -INF])
def test_a_masked_token_changes_neither_loss_nor_gradient_nor_metrics(junk: float) -> None:
    clean = policy([0.0], [0.0], [1.0], [1.0])
    assert clean[0] == -1.0 and clean[1] == [-1.0]
    for logprobs, old, advantages in [
        ([0.0, 0.0], [0.0, junk], [1.0, 1.0]),
        ([0.0, junk], [0.0, 0.0], [1.0, 1.0]),
        ([0.0, 0.0], [0.0, 0.0], [1.0, junk]),
        ([0.0, junk], [0.0, junk], [1.0, junk]),
    ]:
        loss, grad, metrics = policy(logprobs, old, advantages, [1.0, 0.0])
        assert loss == -1.0
        assert grad == [-1.0, 0.0]
        assert metrics == clean[2]


def test_an_overflowing_ratio_is_bounded_with_finite_gradients() -> None:
    loss, grad, metrics = policy([0.0, 0.0], [0.0, -200.0], [1.0, 1.0], [1.0, 1.0])
    assert loss == pytest.approx(-1.1)  # the second token counts as 1.2
    assert grad == [-0.5, 0.0]
    assert metrics["ratio_max"] == pytest.approx(math.exp(20), rel=1e-6)
    loss, grad, _ = policy([0.0, 0.0], [0.0, -200.0], [1.0, -1.0], [1.0, 1.0])
    assert loss == pytest.approx((math.exp(20) - 1) / 2, rel=1e-6)
    assert grad == [-0.5, 0.0]  # beyond the clamp nothing pulls


@pytest.mark.parametrize("broken", [NAN, INF, -INF])
def test_a_broken_trained_token_shows_in_loss_and_gradient(broken: float) -> None:
    for logprobs, old, advantage in [(0.0, broken, 1.0), (broken, 0.0, 1.0), (0.0, broken, -1.0), (0.0, 0.0, NAN), (0.0, broken, 0.0)]:
        loss, grad, _ = policy([0.0, logprobs], [0.0, old], [1.0, advantage], [1.0, 1.0])
        assert math.isnan(loss) and grad[0] == -0.5 and math.isnan(grad[1])
    for clip in (None, 0.2):
        loss, grad, _ = values([0.0, broken], [0.0, 0.0], [1.0, 1.0], [1.0, 1.0], clip)
        assert not math.isfinite(loss) and not math.isfinite(grad[1])


def test_the_clip_holds_the_ratio_on_the_side_where_the_objective_would_grow() -> None:
    log = math.log
    # ratios 1.5, 1.5, 0.5, 0.5 with advantages +, -, +, -; clip range [0.8, 1.3]
    loss, grad, metrics = policy([log(1.5), log(1.5), log(0.5), log(0.5)], [0.0] * 4, [1.0, -1.0, 1.0, -1.0], [1.0] * 4, high=0.3)
    assert loss == pytest.approx((-1.3 + 1.5 - 0.5 + 0.8) / 4)
    assert grad == pytest.approx([0, 1.5 / 4, -0.5 / 4, 0])
    assert metrics["pg_clipfrac"] == 0.5
    assert metrics["pg_loss"] == pytest.approx(loss)
    expected_kl = (2 * (0.5 - log(1.5)) + 2 * (-0.5 - log(0.5))) / 4
    assert metrics["ppo_kl"] == pytest.approx(expected_kl, rel=1e-5)
    assert metrics["ratio_max"] == pytest.approx(1.5)


def test_a_ratio_of_mixed_temperatures_is_what_the_numbers_say() -> None:
    _, _, metrics = policy([-0.126928], [-0.018150], [1.0], [1.0])
    assert metrics["ratio_max"] == pytest.approx(0.8969, abs=1e-4)


def test_a_batch_without_trained_tokens_has_loss_and_gradient_zero() -> None:
    loss, grad, metrics = policy([NAN], [NAN], [NAN], [0.0])
    assert loss == 0 and grad == [0]
    assert metrics == {"pg_loss": 0, "pg_clipfrac": 0, "ppo_kl": 0, "ratio_max": 0}


@pytest.mark.parametrize(
    ("mode", "expected"),
    [("token-mean", 1.75), ("seq-mean-token-mean", 2.5), ("seq-mean-token-sum", 3.5), ("fixed-length", 0.875)],
)
def test_aggregation_does_not_depend_on_the_split(mode: str, expected: float) -> None:
    losses = {1: [4.0], 3: [1.0, 1.0, 1.0]}  # by length of the sample

    def loss_of(*lengths: int) -> float:
        per_token = torch.tensor([loss for length in lengths for loss in losses[length]])
        mask = torch.ones_like(per_token)
        weights = token_weights(mask, torch.tensor(lengths), mode=mode, tokens=4, sequences=2, fixed_length=4)
        return float((weights * per_token).sum())

    assert loss_of(1, 3) == pytest.approx(expected)
    assert loss_of(1) + loss_of(3) == pytest.approx(expected)


def test_weights_count_trained_tokens_only() -> None:
    mask, lengths = torch.tensor([1.0, 0, 1, 0, 0, 1]), torch.tensor([3, 2, 0, 1])
    weights = token_weights(mask, lengths, mode="seq-mean-token-mean", tokens=3, sequences=2)
    assert weights.tolist() == [0.25, 0, 0.25, 0, 0, 0.5]
    assert token_weights(mask, lengths, mode="token-mean", tokens=3, sequences=2).tolist() == pytest.approx([1 / 3, 0, 1 / 3, 0, 0, 1 / 3])
    with pytest.raises(ValueError, match=r"unknown loss aggregation 'mean'.*token-mean, "):
        token_weights(mask, lengths, mode="mean", tokens=3, sequences=2)
    with pytest.raises(ValueError, match="at least 1 token, got None"):
        token_weights(mask, lengths, mode="fixed-length", tokens=3, sequences=2)


def values(
    new: list[float], old: list[float], returns: list[float], mask: list[float], clip: float | None
) -> tuple[float, list[float], dict[str, float]]:
    new_r, mask_r = torch.tensor(new, requires_grad=True), torch.tensor(mask)
    tokens = float(mask_r.sum())
    loss, metrics = value_loss(new_r, torch.tensor(old), torch.tensor(returns), mask_r, mask_r / tokens, clip=clip, tokens=tokens)
    loss.backward()
    assert new_r.grad is not None
    return loss.item(), new_r.grad.tolist(), {name: value.item() for name, value in metrics.items()}


def test_value_loss_by_hand_clipped_and_plain() -> None:
    new, old, returns = [1.0, 1.0, 0.1], [0.0, 0.0, 0.0], [2.0, 0.0, 1.0]
    loss, grad, metrics = values(new, old, returns, [1.0] * 3, None)
    assert loss == pytest.approx((1 + 1 + 0.81) / 3) and grad == pytest.approx([-2 / 3, 2 / 3, -1.8 / 3])
    assert metrics["vf_clipfrac"] == 0
    # Held at 0.2 the first one's error is 1.8, more than its own: it counts and is flat. The second one's own error is the larger.
    loss, grad, metrics = values(new, old, returns, [1.0] * 3, 0.2)
    assert loss == pytest.approx((3.24 + 1 + 0.81) / 3) and grad == pytest.approx([0, 2 / 3, -1.8 / 3])
    assert metrics["vf_clipfrac"] == pytest.approx(1 / 3) and metrics["vf_loss"] == pytest.approx(loss)


@pytest.mark.parametrize("junk", [NAN, INF, -INF, 1e30])
def test_a_masked_value_changes_nothing(junk: float) -> None:
    clean = values([1.0], [0.5], [2.0], [1.0], 0.2)
    for new, old, returns in [(junk, 0.0, 0.0), (0.0, junk, 0.0), (0.0, 0.0, junk), (junk, junk, junk)]:
        loss, grad, metrics = values([1.0, new], [0.5, old], [2.0, returns], [1.0, 0.0], 0.2)
        assert (loss, grad, metrics) == (clean[0], [*clean[1], 0.0], clean[2])


def expected_kl_gradient(kind: str) -> tuple[Tensor, float]:
    """Gradient and value of the estimator in exact expectation over a policy with three tokens."""
    theta = torch.tensor([0.2, -0.1, 0.4], dtype=torch.float64, requires_grad=True)
    logp, ref = theta.log_softmax(-1), torch.tensor([0.0, 0.5, -0.3], dtype=torch.float64).log_softmax(-1)
    expectation = (logp.detach().exp() * kl_estimate(logp, ref, kind)).sum()
    return torch.autograd.grad(expectation, theta)[0], expectation.item()


def test_the_gradient_of_each_kl_estimator_is_the_documented_one() -> None:
    theta = torch.tensor([0.2, -0.1, 0.4], dtype=torch.float64, requires_grad=True)
    logp, ref = theta.log_softmax(-1), torch.tensor([0.0, 0.5, -0.3], dtype=torch.float64).log_softmax(-1)
    reverse = (logp.exp() * (logp - ref)).sum()  # KL(policy || reference)
    forward = (ref.exp() * (ref - logp)).sum()
    (true_gradient,) = torch.autograd.grad(reverse, theta, retain_graph=True)
    (forward_gradient,) = torch.autograd.grad(forward, theta)
    assert true_gradient.tolist() == pytest.approx([-0.002057, -0.201595, 0.203651], abs=1e-6)
    assert expected_kl_gradient("k1")[0].tolist() == pytest.approx([0, 0, 0], abs=1e-12)
    assert expected_kl_gradient("k2")[0].tolist() == pytest.approx(true_gradient.tolist(), abs=1e-12)
    assert expected_kl_gradient("k3")[0].tolist() == pytest.approx([0.042559, -0.236326, 0.193767], abs=1e-6)
    assert expected_kl_gradient("k3")[0].tolist() == pytest.approx(forward_gradient.tolist(), abs=1e-12)
    for unbiased in ("k1", "k3"):
        assert expected_kl_gradient(unbiased)[1] == pytest.approx(reverse.item())


def test_the_gradient_of_each_kl_estimator_in_the_reward_is_the_documented_one() -> None:
    theta = torch.tensor([0.2, -0.1, 0.4], dtype=torch.float64, requires_grad=True)
    logp, ref = theta.log_softmax(-1), torch.tensor([0.0, 0.5, -0.3], dtype=torch.float64).log_softmax(-1)

    def of(x: Tensor) -> list[float]:
        return torch.autograd.grad(x, theta, retain_graph=True)[0].tolist()

    def as_reward(kind: str) -> list[float]:
        """The policy gradient E[estimate grad log pi] of a penalty that is itself not differentiated."""
        return of((logp.detach().exp() * kl_estimate(logp, ref, kind).detach() * logp).sum())

    reverse, forward = of((logp.exp() * (logp - ref)).sum()), of((ref.exp() * (ref - logp)).sum())
    squares = of((logp.exp() * (logp - ref).square() / 2).sum())
    assert as_reward("k1") == pytest.approx(reverse, abs=1e-12)
    assert as_reward("k2") == pytest.approx([a - b for a, b in zip(squares, reverse, strict=True)], abs=1e-12)
    assert as_reward("k3") == pytest.approx([a - b for a, b in zip(reverse, forward, strict=True)], abs=1e-12)


def test_kl_in_the_loss_logs_its_own_estimator_and_refuses_k1() -> None:
    logprobs, ref, mask = torch.tensor([-1.0, NAN]), torch.tensor([-1.5, INF]), torch.tensor([1.0, 0])
    for kind, expected in [("k2", 0.125), ("k3", math.exp(-0.5) - 0.5)]:
        loss, metrics = kl_loss(logprobs, ref, mask, mask, kind=kind, tokens=1)
        assert loss.item() == metrics["kl"].item() == pytest.approx(expected)
    with pytest.raises(ValueError, match="'k1' in a loss must be k2 or k3"):
        kl_loss(logprobs, ref, mask, mask, kind="k1", tokens=1)
    with pytest.raises(ValueError, match="unknown KL estimator 'k4'"):
        kl_estimate(logprobs, ref, "k4")
