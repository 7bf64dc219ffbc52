"""A controller context on tensors alone: the policy and the critic are tables indexed by the previous token, trained by plain SGD.

Gives the algorithms everything that `algos.context.Context` promises without any engine: samples spread over the ranks of a group,
mini-batches cut into micro-batches, denominators over all ranks. It records every gradient, every field and every log.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tridentrl.algos.context import Denominators, MicroBatch
from tridentrl.algos.rollouts import Rollouts

VOCAB = 6


@dataclass(frozen=True)
class Sample:
    """One prompt and response with its reward."""

    group: int
    prompt: list[int]
    response: list[int]
    reward: float
    mask: list[int] | None = None
    truncated: bool = False

    @property
    def trained(self) -> list[int]:
        return self.mask or [1] * len(self.response)

    @property
    def previous(self) -> list[int]:
        """The token before each response token: the state of the table models."""
        return [self.prompt[-1], *self.response[:-1]]


def pack(samples: list[Sample], rows: list[int]) -> Rollouts:
    """The batch as a rank sees it that holds the tokens of `rows`."""
    held = [samples[row] for row in rows]
    return Rollouts(
        group_ids_N=torch.tensor([s.group for s in samples]),
        prompt_lengths_N=torch.tensor([len(s.prompt) for s in samples]),
        response_lengths_N=torch.tensor([len(s.response) for s in samples]),
        truncated_N=torch.tensor([s.truncated for s in samples]),
        data_sources_N=("test",) * len(samples),
        rows_n=torch.tensor(rows, dtype=torch.int64),
        tokens_T=torch.tensor([token for s in held for token in [*s.prompt, *s.response]], dtype=torch.int64),
        response_mask_R=torch.tensor([float(m) for s in held for m in s.trained]),
    )


def table(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).float()


@dataclass
class Update:
    """What one optimizer step saw and did, the same on every rank except for `fields`."""

    gradient: Tensor
    metrics: dict[str, float]
    fields: dict[str, Tensor]
    mask: Tensor
    denominators: Denominators


@dataclass
class TableContext:
    """Implements `Context`. `micro_batch`: samples per micro-batch."""

    samples: list[Sample]
    kl_coef: float = 0.0
    micro_batch: int = 100
    data_group: Any = None
    lr: float = 1.0
    actor: Tensor = field(default_factory=lambda: table(1, VOCAB, VOCAB))
    reference: Tensor = field(default_factory=lambda: table(2, VOCAB, VOCAB))
    critic: Tensor = field(default_factory=lambda: table(3, VOCAB))
    calls: list[str] = field(default_factory=list)
    actor_updates: list[Update] = field(default_factory=list)
    critic_updates: list[Update] = field(default_factory=list)
    logged: dict[str, float] = field(default_factory=dict)
    junk: float = 0.0
    """Added to everything a model says about a token that is not trained."""
    engine: Tensor | None = None
    """Another table, for the policy as the rollout engine sees it; None: the actor's own, to the last bit."""
    greedy: list[Sample] = field(default_factory=list)
    """What is generated greedily."""
    later: list[list[Sample]] = field(default_factory=list)
    """What the prompts lead to that are asked for beyond the step's own."""
    max_response_length: int = 5
    rewards: list[float] = field(default_factory=list)
    """Of the last rollouts."""

    def generate(self, prompts: Any, *, n: Any, greedy: bool = False) -> Rollouts:
        self.calls.append(f"generate {'greedily' if greedy else n}")
        rollouts = self._pack(self.greedy if greedy else self.samples)
        return rollouts.with_fields(engine_logprobs=self._policy(self.actor if self.engine is None else self.engine, rollouts)[0])

    def more_prompts(self) -> Any:
        self.calls.append("more prompts")
        self.samples = self.later.pop(0)

    def demonstrations(self, prompts: Any) -> Rollouts:
        return self._pack(self.samples)

    def _pack(self, samples: list[Sample]) -> Rollouts:
        self.rewards = [s.reward for s in samples]
        ranks, rank = (self.data_group.size(), self.data_group.rank()) if self.data_group else (1, 0)
        return pack(samples, list(range(len(samples)))[rank::ranks])

    def reward(self, rollouts: Rollouts, *, name: str = "reward") -> Tensor:
        return torch.tensor(self.rewards)

    def actor_logprobs(self, rollouts: Rollouts) -> Tensor:
        return self._policy(self.actor, rollouts)[0]

    def reference_logprobs(self, rollouts: Rollouts) -> Tensor:
        self.calls.append("reference")
        return self._policy(self.reference, rollouts)[0]

    def values(self, rollouts: Rollouts) -> Tensor:
        return self._spoil(self.critic[_transitions(rollouts)[0]], rollouts)

    def _policy(self, weights: Tensor, rollouts: Rollouts) -> tuple[Tensor, Tensor]:
        previous, chosen = _transitions(rollouts)
        logp = weights.log_softmax(-1)
        entropy = -(logp.exp() * logp).sum(-1)
        return self._spoil(logp[previous, chosen], rollouts), self._spoil(entropy[previous], rollouts)

    def _spoil(self, x_R: Tensor, rollouts: Rollouts) -> Tensor:
        return x_R + torch.where(rollouts.response_mask_R > 0, 0.0, self.junk)

    def update_actor(self, rollouts: Rollouts, loss: Callable[..., Any], *, epochs: int = 1, mini_batch_size: int | None = None) -> None:
        def evaluate(weights: Tensor, part: Rollouts, micro: MicroBatch) -> Any:
            return loss(*self._policy(weights, part), micro)

        self.actor = self._train(self.actor, rollouts, evaluate, epochs, mini_batch_size, self.actor_updates)

    def update_critic(self, rollouts: Rollouts, loss: Callable[..., Any], *, epochs: int = 1, mini_batch_size: int | None = None) -> None:
        def evaluate(weights: Tensor, part: Rollouts, micro: MicroBatch) -> Any:
            return loss(self._spoil(weights[_transitions(part)[0]], part), micro)

        self.critic = self._train(self.critic, rollouts, evaluate, epochs, mini_batch_size, self.critic_updates)

    def _train(
        self, weights: Tensor, rollouts: Rollouts, evaluate: Callable[..., Any], epochs: int, size: int | None, updates: list[Update]
    ) -> Tensor:
        for members in list(torch.arange(len(rollouts)).split(size or len(rollouts))) * epochs:
            batch = rollouts[torch.isin(torch.arange(len(rollouts)), members)]
            trained = [float(part.sum()) for part in batch.response_mask_R.split(batch.lengths_n.tolist())]
            sizes = self._sum(torch.tensor([sum(trained), float(sum(count > 0 for count in trained))]))
            denominators = Denominators(tokens=float(sizes[0]), sequences=float(sizes[1]), longest=self.max_response_length)
            gradient, metrics = torch.zeros_like(weights), dict[str, float]()
            for held in batch.rows_n.split(self.micro_batch):
                part = batch[torch.isin(torch.arange(len(batch)), held)]
                micro = MicroBatch(
                    response_mask=part.response_mask_R, lengths=part.lengths_n, fields=dict(part.fields), denominators=denominators
                )
                leaf = weights.clone().requires_grad_()
                loss, parts = evaluate(leaf, part, micro)
                assert loss.isfinite()
                gradient += torch.autograd.grad(loss, leaf)[0]
                for name, value in parts.items():
                    merge = max if name.endswith("_max") else float.__add__
                    metrics[name] = merge(metrics.get(name, 0.0), value.item())
            gradient = self._sum(gradient)
            updates.append(Update(gradient, metrics, dict(batch.fields), batch.response_mask_R, denominators))
            weights = weights - self.lr * gradient
        return weights

    def _sum(self, x: Tensor) -> Tensor:
        if self.data_group:
            dist.all_reduce(x, group=self.data_group)
        return x

    @contextlib.contextmanager
    def timer(self, name: str) -> Iterator[None]:
        self.calls.append(f"timer {name}")
        yield

    def log(self, metrics: Mapping[str, float]) -> None:
        self.logged.update(metrics)


def _transitions(rollouts: Rollouts) -> tuple[Tensor, Tensor]:
    """(previous token, chosen token) of every response token held here, [R] each."""
    previous, chosen, start = list[int](), list[int](), 0
    tokens = rollouts.tokens_T.tolist()
    for row in rollouts.rows_n.tolist():
        first = start + int(rollouts.prompt_lengths_N[row])
        end = first + int(rollouts.response_lengths_N[row])
        previous += tokens[first - 1 : end - 1]
        chosen += tokens[first:end]
        start = end
    return torch.tensor(previous, dtype=torch.int64), torch.tensor(chosen, dtype=torch.int64)
