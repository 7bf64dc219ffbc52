"""Log-probability of chosen tokens and entropy of their distributions, from logits cut by vocabulary over tensor-parallel ranks.

Shape legend: T tokens; V vocabulary columns of this rank, padding included.
Only `local_statistics` and `local_gradient` touch [T, V] data. They never see a process group, so a faster twin replaces just these two.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK_ELEMENTS = 1 << 22
"""Logits worked on at once: temporaries stay at a few times 16 MiB of fp32 however large T x V is."""
LOWEST_LOG = -1e4
"""Stands for log 0 in products p log p. exp of it is 0 in fp32 and fp64, so no value changes and 0 * -inf never arises."""


def vocab_parallel_logprobs(
    logits_TV: Tensor, targets_T: Tensor, *, vocab_start: int, vocab_size: int, temperature: float, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    """log softmax(logits / temperature) at the targets and the entropy of that softmax in nats, both fp32 [T], both differentiable.

    `logits_TV` (fp32 or bf16, computed in fp32, never overwritten) holds the global columns [vocab_start, vocab_start + V). Columns from
    `vocab_size` on are padding: they enter nothing and get gradient 0. `targets_T` are global ids. `group` is the tensor-parallel group;
    None means that this rank holds the whole vocabulary. Every rank of the group passes the same targets, gets the same results and must
    send back the same gradients, as a loss that is computed alike on all of them does. A row that is -inf everywhere gives NaN.
    """
    if logits_TV.dim() != 2 or targets_T.shape != logits_TV.shape[:1]:
        raise ValueError(f"expected logits [T, V] and targets [T], got {tuple(logits_TV.shape)} and {tuple(targets_T.shape)}")
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature}, log-probabilities need a value above 0 (the argmax has none)")
    if len(targets_T) and not (targets_T.min() >= 0 and targets_T.max() < vocab_size):
        raise ValueError(f"targets lie in [{targets_T.min()}, {targets_T.max()}], but the vocabulary has ids [0, {vocab_size})")
    columns = max(0, min(vocab_size - vocab_start, logits_TV.shape[1]))
    logprobs_T, entropy_T = _VocabParallelLogprobs.apply(logits_TV, targets_T - vocab_start, columns, float(temperature), group)
    return logprobs_T, entropy_T


class _VocabParallelLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits_TV: Tensor, targets_T: Tensor, columns: int, temperature: float, group: dist.ProcessGroup | None
    ) -> tuple[Tensor, Tensor]:
        """`targets_T` count from this rank's first column; `columns` of them are real."""
        local_top_T, total_T, weighted_T, chosen_T = local_statistics(logits_TV, targets_T, columns, temperature)
        top_T = local_top_T.clone()
        if group is not None:
            dist.all_reduce(top_T, dist.ReduceOp.MAX, group=group)
        # A rank without any finite logit has sums of 0, which need no change of origin (and -inf - top would spoil them).
        shift_T = torch.where(local_top_T == -torch.inf, 0.0, local_top_T - top_T)
        scale_T = shift_T.exp()
        reduced_3T = torch.stack([total_T * scale_T, (weighted_T + total_T * shift_T) * scale_T, chosen_T])
        if group is not None:
            dist.all_reduce(reduced_3T, dist.ReduceOp.SUM, group=group)
        total_T, weighted_T, chosen_T = reduced_3T
        log_total_T = total_T.log()
        entropy_T = log_total_T - weighted_T / total_T
        ctx.save_for_backward(logits_TV, targets_T, top_T, log_total_T, entropy_T)
        ctx.columns, ctx.temperature = columns, temperature
        ctx.set_materialize_grads(False)
        return chosen_T - top_T - log_total_T, entropy_T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs_T: Tensor | None, grad_entropy_T: Tensor | None) -> tuple[Tensor | None, ...]:
        logits_TV, targets_T, top_T, log_total_T, entropy_T = ctx.saved_tensors
        grad_TV = local_gradient(
            logits_TV,
            targets_T,
            top_T,
            log_total_T,
            entropy_T,
            torch.zeros_like(entropy_T) if grad_logprobs_T is None else grad_logprobs_T,
            grad_entropy_T,
            ctx.columns,
            ctx.temperature,
        )
        return grad_TV, None, None, None, None


def local_statistics(logits_TV: Tensor, targets_T: Tensor, columns: int, temperature: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of z = logits / temperature over the first `columns` columns, each [T]: top = max z, sum e^(z-top), sum (z-top) e^(z-top), z[target].

    Without columns, or where all are -inf, they are -inf, 0, 0. z[target] is 0 where the target is not one of these columns.
    """
    rows, dtype = len(logits_TV), torch.promote_types(logits_TV.dtype, torch.float32)
    top_T = logits_TV.new_full((rows,), -torch.inf, dtype=dtype)
    total_T, weighted_T, chosen_T = (logits_TV.new_zeros(rows, dtype=dtype) for _ in range(3))
    if columns == 0:
        return top_T, total_T, weighted_T, chosen_T
    for part in _row_chunks(rows, columns):
        z = logits_TV[part, :columns].to(dtype) / temperature
        top = z.amax(-1)
        target = targets_T[part]
        owned = (target >= 0) & (target < columns)
        chosen_T[part] = torch.where(owned, z.gather(-1, target.clamp(0, columns - 1)[:, None])[:, 0], 0.0)
        z.sub_(torch.where(top == -torch.inf, 0.0, top)[:, None])
        exps = z.exp()
        top_T[part], total_T[part] = top, exps.sum(-1)
        weighted_T[part] = exps.mul_(z.clamp_(min=LOWEST_LOG)).sum(-1)
    return top_T, total_T, weighted_T, chosen_T


def local_gradient(
    logits_TV: Tensor,
    targets_T: Tensor,
    top_T: Tensor,
    log_total_T: Tensor,
    entropy_T: Tensor,
    grad_logprobs_T: Tensor,
    grad_entropy_T: Tensor | None,
    columns: int,
    temperature: float,
) -> Tensor:
    """Gradient of the logits, [T, V] in their dtype. With a, b the gradients of log-prob and entropy H (None: not used), p the softmax
    and y the target:

    d/dz_j = a (1[j = y] - p_j) - b p_j (log p_j + H), and logits = temperature z.
    """
    grad_TV = torch.empty_like(logits_TV)
    grad_TV[:, columns:] = 0
    if columns == 0:
        return grad_TV
    for part in _row_chunks(len(logits_TV), columns):
        logp = (logits_TV[part, :columns].to(top_T.dtype) / temperature).sub_(top_T[part, None]).sub_(log_total_T[part, None])
        grad = logp.exp()
        factor = grad_logprobs_T[part, None]
        if grad_entropy_T is not None:
            factor = logp.clamp_(min=LOWEST_LOG).add_(entropy_T[part, None]).mul_(grad_entropy_T[part, None]).add_(factor)
        grad.mul_(factor).neg_()
        target = targets_T[part]
        owned = (target >= 0) & (target < columns)
        grad.scatter_add_(-1, target.clamp(0, columns - 1)[:, None], torch.where(owned, grad_logprobs_T[part], 0.0)[:, None])
        grad_TV[part, :columns] = grad.div_(temperature)
    return grad_TV


def _row_chunks(rows: int, columns: int) -> Iterator[slice]:
    step = max(1, CHUNK_ELEMENTS // columns)
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))
