"""Masks on packed tokens. Shape legend: R tokens of n samples, packed one after the other; a mask is 1 where a token is trained."""

from __future__ import annotations

import torch
from torch import Tensor


def neutralise(mask_R: Tensor, *tensors_R: Tensor) -> tuple[Tensor, ...]:
    """The tensors with 0 where the mask is 0, before any arithmetic: multiplying by the mask would keep NaN, also in the backward pass.

    Gradients of masked entries are exactly 0, whatever their values were.
    """
    trained_R = mask_R.bool()
    return tuple(torch.where(trained_R, tensor_R, 0.0) for tensor_R in tensors_R)


def sample_index(lengths_n: Tensor) -> Tensor:
    """Which of the n samples each packed token belongs to: [n] -> int64 [R]."""
    return torch.arange(len(lengths_n), device=lengths_n.device).repeat_interleave(lengths_n)


def sum_per_sample(x_R: Tensor, lengths_n: Tensor) -> Tensor:
    """Sum of a packed tensor over each sample's tokens: [R] -> [n], differentiable."""
    return x_R.new_zeros(len(lengths_n)).index_add(0, sample_index(lengths_n), x_R)
