"""Policy and value losses on packed tokens, in plain torch.

Shape legend: r response tokens of the s samples of one micro-batch, packed one after the other.
A loss is always sum(weights * per-token loss), with weights that already hold the *global* denominators (`token_weights`). So the loss
of a batch is the sum over its micro-batches and ranks, and no split changes a gradient. Metrics add up the same way, as means over the
`tokens` trained tokens of the whole batch; one whose name ends in `_max` is reduced by maximum.
Masked entries are replaced before any arithmetic (`kernels.masks`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from tridentrl.kernels.masks import neutralise, sample_index, sum_per_sample

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to +-20 (ratio up to 4.9e8) so that exp and its gradient stay finite; beyond it the gradient is 0."""
AGGREGATIONS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "fixed-length")
KL_ESTIMATORS = ("k1", "k2", "k3")
KL_LOSS_ESTIMATORS = ("k2", "k3")
"""Those that have a gradient in expectation, see `kl_estimate`."""

Metrics = dict[str, Tensor]


def token_weights(
    mask_r: Tensor, lengths_s: Tensor, *, mode: str, tokens: float, sequences: float, fixed_length: int | None = None
) -> Tensor:
    """Weight of each token's loss, [r], 0 where masked. `tokens` and `sequences` count the whole batch, over all micro-batches and ranks.

    token-mean: 1 / tokens, every token counts the same. seq-mean-token-mean: 1 / (trained tokens of its sample * sequences), every sample
    counts the same. seq-mean-token-sum: 1 / sequences. fixed-length: 1 / (fixed_length * sequences) (Dr. GRPO, arXiv 2503.20783).
    """
    mask_r = mask_r.bool().float()
    tokens, sequences = max(tokens, 1.0), max(sequences, 1.0)  # a batch without trained tokens has loss 0
    if mode == "token-mean":
        return mask_r / tokens
    if mode == "seq-mean-token-mean":
        trained_s = sum_per_sample(mask_r, lengths_s).clamp(min=1)
        return mask_r / (trained_s[sample_index(lengths_s)] * sequences)
    if mode == "seq-mean-token-sum":
        return mask_r / sequences
    if mode == "fixed-length":
        if fixed_length is None or fixed_length < 1:
            raise ValueError(f"aggregation 'fixed-length' divides by a length of at least 1 token, got {fixed_length}")
        return mask_r / (fixed_length * sequences)
    raise ValueError(f"unknown loss aggregation {mode!r}; choose one of {', '.join(AGGREGATIONS)}")


def policy_loss(
    logprobs_r: Tensor,
    old_logprobs_r: Tensor,
    advantages_r: Tensor,
    mask_r: Tensor,
    weights_r: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    tokens: float,
    dual_clip: float | None = None,
    sequence_lengths_s: Tensor | None = None,
) -> tuple[Tensor, Metrics]:
    """Clipped surrogate (arXiv 1707.06347, eq. 7) with its sign turned: sum w max(-ratio A, -clip(ratio, 1 - clip_low, 1 + clip_high) A).

    `dual_clip`: where A < 0 the loss of a token is at most -dual_clip A (arXiv 1912.09729, eq. 5).
    `sequence_lengths_s`: the ratio of every token is its whole response's, exp(mean of its trained tokens' log-ratios) (GSPO, arXiv
    2507.18071, eq. 7); the gradient reaches all of them.
    Returns the scalar loss and pg_loss, pg_clipfrac (share of tokens where a clip decides), ppo_kl (estimate of KL(old || new) from
    samples of old: token ratio - 1 - log ratio, never negative) and ratio_max. The log-ratio is clamped to `LOG_RATIO_LIMIT`; an infinite
    or NaN log-ratio at a trained token makes the loss and that token's gradient NaN, so that it can be seen and the step skipped.
    """
    logprobs_r, old_logprobs_r, advantages_r = neutralise(mask_r, logprobs_r, old_logprobs_r, advantages_r)
    log_ratio_r = token_log_ratio_r = _bounded(logprobs_r - old_logprobs_r)
    if sequence_lengths_s is not None:
        trained_s = sum_per_sample(mask_r.bool().to(logprobs_r.dtype), sequence_lengths_s)
        mean_s = sum_per_sample(logprobs_r - old_logprobs_r, sequence_lengths_s) / trained_s.clamp(min=1)
        log_ratio_r = _bounded(mean_s)[sample_index(sequence_lengths_s)]
    ratio_r = log_ratio_r.exp()
    plain_r = -ratio_r * advantages_r
    clipped_r = torch.maximum(plain_r, -ratio_r.clamp(1 - clip_low, 1 + clip_high) * advantages_r)
    if dual_clip is not None:
        clipped_r = torch.where(advantages_r < 0, torch.minimum(clipped_r, -dual_clip * advantages_r), clipped_r)
    loss = (weights_r * clipped_r).sum()
    return loss, _ratio_metrics(loss, clipped_r != plain_r, ratio_r, token_log_ratio_r, mask_r, tokens)


def clipped_weight_loss(
    logprobs_r: Tensor,
    old_logprobs_r: Tensor,
    advantages_r: Tensor,
    mask_r: Tensor,
    weights_r: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    tokens: float,
) -> tuple[Tensor, Metrics]:
    """REINFORCE under clipped importance weights (CISPO, arXiv 2506.13585, eq. 4): -sum w held(ratio) A log pi.

    held(ratio) = clip(ratio, 1 - clip_low, 1 + clip_high) is a constant for the gradient, so that no token's gradient vanishes.
    Metrics and what becomes of broken log-ratios as for `policy_loss`.
    """
    logprobs_r, old_logprobs_r, advantages_r = neutralise(mask_r, logprobs_r, old_logprobs_r, advantages_r)
    log_ratio_r = _bounded(logprobs_r - old_logprobs_r).detach()
    ratio_r = log_ratio_r.exp()
    held_r = ratio_r.clamp(1 - clip_low, 1 + clip_high)
    loss = -(weights_r * held_r * advantages_r * logprobs_r).sum()
    return loss, _ratio_metrics(loss, held_r != ratio_r, ratio_r, log_ratio_r, mask_r, tokens)


@torch.no_grad()
def _ratio_metrics(loss: Tensor, clipped_r: Tensor, ratio_r: Tensor, log_ratio_r: Tensor, mask_r: Tensor, tokens: float) -> Metrics:
    return {
        "pg_loss": loss.detach(),
        "pg_clipfrac": mean_over_batch(clipped_r, mask_r, tokens=tokens),
        "ppo_kl": mean_over_batch(log_ratio_r.exp() - 1 - log_ratio_r, mask_r, tokens=tokens),
        "ratio_max": torch.cat([ratio_r.new_zeros(1), ratio_r[mask_r.bool()]]).max(),
    }


def value_loss(
    values_r: Tensor,
    old_values_r: Tensor,
    returns_r: Tensor,
    mask_r: Tensor,
    weights_r: Tensor,
    *,
    clip: float | None,
    tokens: float,
) -> tuple[Tensor, Metrics]:
    """Squared error (value - return)^2 (arXiv 1707.06347, eq. 9), or with `clip` (not in that paper) the larger of it and the error of the
    value held within +-clip of the old one. Returns the scalar loss and vf_loss, vf_clipfrac (share of tokens where the clip decides)."""
    values_r, old_values_r, returns_r = neutralise(mask_r, values_r, old_values_r, returns_r)
    error_r = plain_r = (values_r - returns_r).square()
    if clip is not None:
        held_r = old_values_r + (values_r - old_values_r).clamp(-clip, clip)
        error_r = torch.maximum(plain_r, (held_r - returns_r).square())
    loss = (weights_r * error_r).sum()
    return loss, {"vf_loss": loss.detach(), "vf_clipfrac": mean_over_batch(error_r > plain_r, mask_r, tokens=tokens)}


def kl_estimate(logprobs_r: Tensor, ref_logprobs_r: Tensor, kind: str) -> Tensor:
    """Per-token estimate of KL(policy || reference) from tokens that the policy sampled, [r]. Neutralise masked entries first.

    Names and estimators as in J. Schulman, Approximating KL Divergence, 2020 (joschu.net/blog/kl-approx.html).
    With d = logprob - ref_logprob: k1 = d, k2 = d^2 / 2, k3 = e^-d - 1 + d. k1 and k3 are unbiased, k3 and k2 are never negative.
    What the *gradient* of each is, in expectation, when used as a loss on fresh samples (the sampling itself is not differentiated):
    k1: 0, it does nothing but add noise, so `kl_loss` refuses it; k2: the gradient of KL(policy || reference), the one meant;
    k3: the gradient of KL(reference || policy), close to it only near the reference.
    In a *reward*, which is not differentiated, k1 is the right one; the gradients of k2 and k3 there vanish close to the reference.
    d is clamped to `LOG_RATIO_LIMIT`.
    """
    difference_r = _bounded(logprobs_r - ref_logprobs_r)
    if kind == "k1":
        return difference_r
    if kind == "k2":
        return 0.5 * difference_r.square()
    if kind == "k3":
        return (-difference_r).exp() - 1 + difference_r
    raise ValueError(f"unknown KL estimator {kind!r}; choose one of {', '.join(KL_ESTIMATORS)}")


def kl_loss(
    logprobs_r: Tensor, ref_logprobs_r: Tensor, mask_r: Tensor, weights_r: Tensor, *, kind: str, tokens: float
) -> tuple[Tensor, Metrics]:
    """sum(weights * KL estimate) as a loss term, and `kl`, the mean of the same estimate over the batch."""
    if kind not in KL_LOSS_ESTIMATORS:
        raise ValueError(f"KL estimator {kind!r} in a loss must be k2 or k3: the gradient of k1 is 0 in expectation; use k1 in the reward")
    logprobs_r, ref_logprobs_r = neutralise(mask_r, logprobs_r, ref_logprobs_r)
    kl_r = kl_estimate(logprobs_r, ref_logprobs_r, kind)
    return (weights_r * kl_r).sum(), {"kl": mean_over_batch(kl_r, mask_r, tokens=tokens)}


def mean_over_batch(x_r: Tensor, mask_r: Tensor, *, tokens: float) -> Tensor:
    """This micro-batch's share of the mean over all `tokens` trained tokens of the batch, detached scalar."""
    (x_r,) = neutralise(mask_r, x_r.detach().float())
    return x_r.sum() / max(tokens, 1.0)


def _bounded(log_ratio_r: Tensor) -> Tensor:
    """Held within +-`LOG_RATIO_LIMIT`, where nothing pulls any more; but NaN, with a gradient of NaN, where it is infinite or NaN."""
    log_ratio_r = log_ratio_r + 0 * log_ratio_r.detach()  # infinite becomes NaN
    # Not `clamp` alone: its gradient at NaN is 0, so that a broken input would go unnoticed by whoever checks gradients.
    return torch.where(log_ratio_r.abs() > LOG_RATIO_LIMIT, log_ratio_r.detach().clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT), log_ratio_r)
