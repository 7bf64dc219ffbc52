"""What an algorithm sees of a batch of sequences.

Shape legend: N samples of the step over all ranks; n of them on this data-parallel rank; T tokens of those n samples,
prompt and response, packed one after the other; R response tokens of those n samples, packed the same way.
Everything with N is equal on every rank; everything with n, T or R differs from one data-parallel rank to the next.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from dataclasses import fields as dataclass_fields

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Rollouts:
    """A batch of prompt + response sequences: sample facts known everywhere, tokens only where they are trained."""

    group_ids_N: Tensor
    """int64. Samples of one prompt row share an id; two rows with equal text do not."""
    prompt_lengths_N: Tensor
    response_lengths_N: Tensor
    truncated_N: Tensor
    """bool. True where the engine stopped for length and not by an end-of-sequence id or stop string."""
    data_sources_N: tuple[str, ...]
    rows_n: Tensor
    """int64, ascending. Which of the N samples have their tokens here."""
    tokens_T: Tensor
    """int64 ids exactly as sampled, never re-tokenised."""
    response_mask_R: Tensor
    """float32. 1 where the token was chosen by the policy and is trained."""
    fields: Mapping[str, Tensor] = field(default_factory=dict)
    """Further float32 tensors of shape [R], for example `engine_logprobs`, `old_logprobs`, `advantages`."""

    def __len__(self) -> int:
        return len(self.group_ids_N)

    @property
    def lengths_n(self) -> Tensor:
        """Response tokens of each sample held here, shape [n]."""
        return self.response_lengths_N[self.rows_n]

    def per_token(self, values_N: Tensor) -> Tensor:
        """Repeat one value per sample over that sample's response tokens: [N] -> [R]."""
        if values_N.shape != (len(self),):
            raise ValueError(f"expected one value for each of the {len(self)} samples, got shape {tuple(values_N.shape)}")
        return values_N[self.rows_n].repeat_interleave(self.lengths_n)

    def with_fields(self, **fields_R: Tensor) -> Rollouts:
        """A copy that carries these [R] tensors too."""
        for name, tensor in fields_R.items():
            if tensor.shape != self.response_mask_R.shape:
                raise ValueError(f"{name} has shape {tuple(tensor.shape)}, the batch has {self.response_mask_R.shape[0]} response tokens")
        return replace(self, fields={**self.fields, **fields_R})

    def to(self, device: torch.device) -> Rollouts:
        """The same batch with every tensor on `device`."""
        tensors = {f.name: getattr(self, f.name).to(device) for f in dataclass_fields(self) if isinstance(getattr(self, f.name), Tensor)}
        return replace(self, **tensors, fields={name: tensor.to(device) for name, tensor in self.fields.items()})

    def __getitem__(self, keep_N: Tensor) -> Rollouts:
        """The samples where the boolean mask `keep_N` is True, in the same order, tokens and fields cut alike."""
        if keep_N.dtype != torch.bool or keep_N.shape != (len(self),):
            raise ValueError(f"select samples by a bool mask of shape ({len(self)},), got {keep_N.dtype} {tuple(keep_N.shape)}")
        keep_n = keep_N[self.rows_n]
        keep_R = keep_n.repeat_interleave(self.lengths_n)
        keep_T = keep_n.repeat_interleave((self.prompt_lengths_N + self.response_lengths_N)[self.rows_n])
        renumbered_N = keep_N.cumsum(0) - 1
        return Rollouts(
            group_ids_N=self.group_ids_N[keep_N],
            prompt_lengths_N=self.prompt_lengths_N[keep_N],
            response_lengths_N=self.response_lengths_N[keep_N],
            truncated_N=self.truncated_N[keep_N],
            data_sources_N=tuple(source for source, kept in zip(self.data_sources_N, keep_N.tolist(), strict=True) if kept),
            rows_n=renumbered_N[self.rows_n[keep_n]],
            tokens_T=self.tokens_T[keep_T],
            response_mask_R=self.response_mask_R[keep_R],
            fields={name: tensor[keep_R] for name, tensor in self.fields.items()},
        )

    def as_wholes(self) -> Rollouts:
        """The same sequences, each with one "response token" behind its end, so that the value of its state is a score of the whole.

        That token is never read by what stands before it. Fields do not come along.
        """
        ends = self.tokens_T.split((self.prompt_lengths_N + self.response_lengths_N)[self.rows_n].tolist())
        behind = self.tokens_T.new_zeros(1)
        return replace(
            self,
            prompt_lengths_N=self.prompt_lengths_N + self.response_lengths_N,
            response_lengths_N=torch.ones_like(self.response_lengths_N),
            tokens_T=torch.cat([self.tokens_T[:0], *(part for sequence in ends for part in (sequence, behind))]),
            response_mask_R=torch.ones(len(ends), device=self.tokens_T.device),
            fields={},
        )


def concatenated(parts: Sequence[Rollouts]) -> Rollouts:
    """One batch of the samples of several, in order. Groups of different parts stay different groups: their ids are numbered on."""
    first = parts[0]
    samples, groups, rows_n, group_ids_N = 0, 0, list[Tensor](), list[Tensor]()
    for part in parts:
        rows_n.append(part.rows_n + samples)
        group_ids_N.append(part.group_ids_N + groups)
        samples += len(part)
        groups += int(part.group_ids_N.max()) + 1 if len(part) else 0
    return Rollouts(
        group_ids_N=torch.cat(group_ids_N),
        prompt_lengths_N=torch.cat([part.prompt_lengths_N for part in parts]),
        response_lengths_N=torch.cat([part.response_lengths_N for part in parts]),
        truncated_N=torch.cat([part.truncated_N for part in parts]),
        data_sources_N=tuple(source for part in parts for source in part.data_sources_N),
        rows_n=torch.cat(rows_n),
        tokens_T=torch.cat([part.tokens_T for part in parts]),
        response_mask_R=torch.cat([part.response_mask_R for part in parts]),
        fields={name: torch.cat([part.fields[name] for part in parts]) for name in first.fields},
    )
