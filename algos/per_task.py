"""Several algorithms in one step: each row of a batch under that of its task, one optimizer step for all.

A task is a data source. The tasks' algorithms run one after the other on their rows, up to their updates; these are then made as one.
Every loss is divided by the tokens and samples of the whole batch, so that a token (or sample) weighs the same whichever task it is of:
with the same algorithm for all tasks the step is the step without tasks. (But whitening, and the weight of a KL that is steered, are each
task's own; such a weight moves before the update and not after it.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from tridentrl.algos.algorithm import Algorithm
from tridentrl.algos.context import Context, MicroBatch, PolicyLoss, Prompt, ValueLoss
from tridentrl.algos.rollouts import Rollouts, concatenated
from tridentrl.kernels.advantages import masked_mean, reward_metrics

TASK = "task"
"""Field that says which task a token is of."""


@dataclass(frozen=True)
class _Update:
    """What a task's algorithm asked for."""

    rollouts: Rollouts
    loss: PolicyLoss | ValueLoss


class PerTask(Algorithm):
    """`tasks` by data source; `default` takes the rows of all other sources.

    Raises ValueError when the algorithms cannot share a step.
    """

    def __init__(self, default: Algorithm, tasks: Mapping[str, Algorithm]) -> None:
        if "default" in tasks:
            raise ValueError(
                "algorithm.tasks.default: that name stands for the rows of all sources without a task; set algorithm.name for them, or give"
                " the rows another data source"
            )
        self.default, self.tasks = default, dict(tasks)
        self.config = default.config
        self.sections = tuple(dict.fromkeys(section for part in self._parts().values() for section in part.sections))
        for name, algorithm in self._parts().items():
            config, what = algorithm.config, f"algorithm.tasks: the algorithm of {name}"
            if not algorithm.online:
                raise ValueError(f"{what} learns from given responses, and tasks share rollouts; give it a run of its own")
            if config.epochs != self.config.epochs or config.mini_batch_size is not None:
                raise ValueError(
                    f"{what} has epochs={config.epochs} and mini_batch_size={config.mini_batch_size}; all tasks take one optimizer step"
                    f" together: set mini_batch_size=null and epochs={self.config.epochs} everywhere"
                )
            if getattr(config, "dynamic_sampling", False):
                raise ValueError(f"{what} would draw further prompts of all tasks; set its dynamic_sampling=false")

    def _parts(self) -> dict[str, Algorithm]:
        return {"default": self.default, **self.tasks}

    def roles(self, *, kl_coef: float) -> tuple[str, ...]:
        return tuple(dict.fromkeys(role for part in self._parts().values() for role in part.roles(kl_coef=kl_coef)))

    @property
    def samples_per_prompt(self) -> int:
        return max(part.samples_per_prompt for part in self._parts().values())

    @property
    def longest_prompt(self) -> int | None:
        return min((part.longest_prompt for part in self._parts().values() if part.longest_prompt is not None), default=None)

    def state_dict(self) -> dict[str, Any]:
        return {name: part.state_dict() for name, part in self._parts().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, part in self._parts().items():
            part.load_state_dict(state[name])

    def step(self, ctx: Context, prompts: Sequence[Prompt]) -> None:
        contexts: dict[str, _TaskContext] = {}
        for name, part in self._parts().items():
            rows = [row for row in prompts if (row.data_source if row.data_source in self.tasks else "default") == name]
            if rows:
                contexts[name] = _TaskContext(ctx, name)
                part.step(cast(Context, contexts[name]), rows)
        # Of all tasks together, under the names that a run without tasks has.
        rewards = reward_metrics(torch.cat([rewards for context in contexts.values() for rewards in context.rewards]))
        ctx.log({f"reward/{name}": value for name, value in rewards.items()})
        # As in an algorithm of its own, the critics learn first.
        roles = {role for context in contexts.values() for role in context.updates}
        for role in sorted(roles, key=lambda role: (role == "actor", role)):
            self._update(ctx, role, {name: context.updates[role] for name, context in contexts.items() if role in context.updates})

    def _update(self, ctx: Context, role: str, updates: Mapping[str, _Update]) -> None:
        """One optimizer step per epoch on the samples of all tasks."""
        fields = {name for update in updates.values() for name in update.rollouts.fields}
        parts = []
        for number, update in enumerate(updates.values()):
            nothing = torch.zeros_like(update.rollouts.response_mask_R)
            absent = {name: nothing for name in fields - update.rollouts.fields.keys()}
            parts.append(update.rollouts.with_fields(**absent, **{TASK: nothing + number}))
        rollouts = concatenated(parts)
        shares = [
            masked_mean((rollouts.fields[TASK] == number).float(), rollouts.response_mask_R, group=ctx.data_group)
            for number in range(len(parts))
        ]
        losses = [(name, update.loss, share) for (name, update), share in zip(updates.items(), shares, strict=True)]

        def loss(*outputs_and_batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
            *outputs, batch = outputs_and_batch
            return _summed(losses, outputs, batch)

        if role == "actor":
            ctx.update_actor(rollouts, loss, epochs=self.config.epochs)
        else:
            ctx.update_critic(rollouts, loss, role=role, epochs=self.config.epochs)


def _summed(
    losses: Sequence[tuple[str, PolicyLoss | ValueLoss, float]], outputs: Sequence[Tensor], batch: MicroBatch
) -> tuple[Tensor, dict[str, Tensor]]:
    """Sum of the tasks' losses on their own samples of a micro-batch, metrics of each task (means over its tokens) and of all."""
    task_r = batch.fields[TASK]
    filled_s = batch.lengths[batch.lengths > 0]
    task_s = task_r[filled_s.cumsum(0) - 1]
    loss, metrics = outputs[0].sum() * 0.0, dict[str, Tensor]()
    for number, (name, part_loss, share) in enumerate(losses):
        mine_r = task_r == number
        if not mine_r.any():
            continue
        part = MicroBatch(
            response_mask=batch.response_mask[mine_r],
            lengths=filled_s[task_s == number],
            fields={field: tensor[mine_r] for field, tensor in batch.fields.items()},
            denominators=batch.denominators,
        )
        part_sum, part_metrics = cast(Any, part_loss)(*(output[mine_r] for output in outputs), part)
        loss = loss + part_sum
        for metric, value in part_metrics.items():
            if metric.endswith("_max"):
                metrics[metric] = torch.maximum(metrics.get(metric, value), value)
                metrics[f"{name}/{metric}"] = value
            else:
                metrics[metric] = metrics.get(metric, 0.0) + value
                metrics[f"{name}/{metric}"] = value / share if share else value
    return loss, metrics


class _TaskContext:
    """The context of one task's algorithm: its metrics get the task's name, its updates are kept for later. All else is the real one's."""

    def __init__(self, ctx: Context, task: str) -> None:
        self._ctx, self._task = ctx, task
        self.updates: dict[str, _Update] = {}
        self.rewards: list[Tensor] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)

    def log(self, metrics: Mapping[str, float]) -> None:
        self._ctx.log({f"{self._task}/{name}": value for name, value in metrics.items()})

    def reward(self, rollouts: Rollouts, *, name: str = "reward") -> Tensor:
        rewards = self._ctx.reward(rollouts, name=f"{self._task}/{name}")
        if name == "reward":
            self.rewards.append(rewards)
        return rewards

    def update_actor(self, rollouts: Rollouts, loss: PolicyLoss, **settings: Any) -> None:
        self._keep("actor", rollouts, loss)

    def update_critic(self, rollouts: Rollouts, loss: ValueLoss, *, role: str = "critic", **settings: Any) -> None:
        self._keep(role, rollouts, loss)

    def _keep(self, role: str, rollouts: Rollouts, loss: PolicyLoss | ValueLoss) -> None:
        assert role not in self.updates, f"an algorithm of a task updates the {role} once in a step"
        self.updates[role] = _Update(rollouts, loss)
