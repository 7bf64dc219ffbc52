"""How far the trainer's probabilities of sampled tokens are from those of the engine that sampled them.

Shape legend: R response tokens of n samples, packed one after the other. The engine is the behaviour policy, its log-probs are those of
the samples; `old_logprobs` are the trainer's own before the first update. Equal weights give nearly, never exactly, equal log-probs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tridentrl.kernels.losses import LOG_RATIO_LIMIT
from tridentrl.kernels.masks import neutralise, sample_index, sum_per_sample

LEVELS = ("token", "sequence", "geometric")


def mismatch_ratio(old_logprobs_R: Tensor, engine_logprobs_R: Tensor, mask_R: Tensor, lengths_n: Tensor, *, level: str) -> Tensor:
    """pi_old / pi_engine, [R], 1 where masked. NaN where a trained token's log-probs are not finite.

    token: of the token alone. sequence: the product over the trained tokens of its response, which is the importance weight of the whole
    response. geometric: the geometric mean of that product's factors, which does not drift from 1 with the length.
    Source of such weights: Yao et al., Your Efficient RL Framework Secretly Brings You Off-Policy RL Training, 2025.
    Logarithms are held within +-`LOG_RATIO_LIMIT`.
    """
    if level not in LEVELS:
        raise ValueError(f"unknown level {level!r}; choose one of {', '.join(LEVELS)}")
    old_logprobs_R, engine_logprobs_R = neutralise(mask_R, old_logprobs_R, engine_logprobs_R)
    log_ratio_R = old_logprobs_R - engine_logprobs_R
    if level != "token":
        log_ratio_n = sum_per_sample(log_ratio_R.double(), lengths_n)
        if level == "geometric":
            log_ratio_n = log_ratio_n / sum_per_sample(mask_R.bool().double(), lengths_n).clamp(min=1)
        log_ratio_R = log_ratio_n.to(log_ratio_R.dtype)[sample_index(lengths_n)]
    log_ratio_R = torch.where(log_ratio_R.isfinite(), log_ratio_R.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT), torch.nan)
    return torch.where(mask_R.bool(), log_ratio_R.exp(), 1.0)
