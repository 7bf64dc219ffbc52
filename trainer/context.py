"""The verbs of `algos.context.Context` on the real engines. Shapes as in `algos.rollouts`."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from tridentrl.algos.context import Denominators, MicroBatch, PolicyLoss, ValueLoss
from tridentrl.algos.rollouts import Rollouts
from tridentrl.data.prompts import PromptRow
from tridentrl.engine.hybrid import HybridEngine
from tridentrl.engine.megatron import MegatronEngine, MicroLoss
from tridentrl.engine.memory import memory_in_use
from tridentrl.engine.packing import PackedMicroBatch
from tridentrl.engine.rollout import Request, Sampling, sample_seed
from tridentrl.kernels.advantages import masked_mean, reward_metrics
from tridentrl.kernels.losses import kl_estimate
from tridentrl.kernels.masks import neutralise, sum_per_sample
from tridentrl.parallel.grid import Grid
from tridentrl.trainer.exchange import exchange, given, sequences_of
from tridentrl.trainer.judge import Judge
from tridentrl.trainer.nonfinite import save_batch
from tridentrl.trainer.step_log import StepLog
from tridentrl.weights.execute import Receipt

log = logging.getLogger(__name__)

MOSTLY_CUT = 0.5
"""Share of responses cut for length above which a warning is logged, once a run."""
MOST_SKIPS_IN_A_ROW = 5
"""Updates with a loss or gradient that is not finite, one after the other, that end the run."""
EVALUATION = -1
"""Stands for the step in the seeds of evaluation samples, so that every evaluation draws the same noise."""


@dataclass(kw_only=True)
class Engines:
    """The models of a run."""

    models: dict[str, MegatronEngine]
    """By role: those that the algorithm needs."""
    hybrid: HybridEngine | None = None
    """None where nothing is sampled."""

    def __getitem__(self, role: str) -> MegatronEngine:
        assert role in self.models, f"the algorithm did not ask for the role {role}"
        return self.models[role]


class TrainContext:
    """Implements `algos.context.Context`. One per run; `begin` starts each step."""

    def __init__(
        self,
        engines: Engines,
        judges: dict[str, Judge],
        grid: Grid,
        *,
        next_rows: Callable[[], Sequence[PromptRow]],
        nonfinite_folder: Path,
        sampling: Sampling,
        seed: int,
        kl_coef: float,
        device: torch.device,
    ) -> None:
        self.engines, self.judges, self.grid, self.sampling, self.seed = engines, judges, grid, sampling, seed
        self.next_rows, self.nonfinite_folder, self.kl_coef, self.device = next_rows, nonfinite_folder, kl_coef, device
        self.data_group = parallel_state.get_data_parallel_group() if grid.dp > 1 else None
        self.step = 0
        self.step_log = StepLog()
        self.updates = 0
        """Optimizer steps so far, of all models, less those skipped."""
        self._skipped_in_a_row = 0
        self.max_response_length = sampling.max_response_length
        self._prompts: Sequence[PromptRow] = []
        """Rows of the last rollouts; a rollout's group id is its row's position here."""
        self._drawn = 0
        """Samples of this step so far; the next one's number decides its seed."""
        self._warned_of_cuts = False
        self._stale = True
        """Whether the actor has changed since the rollout engine got its weights."""

    def begin(self, step: int) -> None:
        self.step, self.step_log, self._drawn = step, StepLog(), 0

    def state_dict(self) -> dict[str, Any]:
        """What counts on when a run is resumed. Plain values."""
        synced = self.engines.hybrid.version if self.engines.hybrid else 0
        # A resumed run brings its rollout engine up to date first, even where this one was: that sync has been counted here.
        scales = {section: judge.state_dict() for section, judge in self.judges.items()}
        return {"updates": self.updates, "weight_version": synced if self._stale else synced - 1, "scales": scales}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for section, judge in self.judges.items():
            judge.load_state_dict(state["scales"].get(section, {}))
        self.updates = state["updates"]
        if self.engines.hybrid:
            self.engines.hybrid.version = state["weight_version"]
            self.engines.hybrid.checksum_syncs += state["weight_version"]  # the first syncs after a resume are proved too

    # Rollouts

    def generate(self, prompts: Sequence[PromptRow], *, n: int | Sequence[int], greedy: bool = False) -> Rollouts:
        sampling = Sampling(**{**vars(self.sampling), "temperature": 0.0}) if greedy else self.sampling
        rollouts = self.sample(prompts, n=n, sampling=sampling, step=self.step)
        if greedy:
            self.log({"rollout/greedy_length_mean": rollouts.response_lengths_N.float().mean().item()})
            return rollouts
        lengths, cut = rollouts.response_lengths_N.float(), rollouts.truncated_N.float().mean().item()
        if cut > MOSTLY_CUT and not self._warned_of_cuts:
            self._warned_of_cuts = True
            log.warning(
                "step %d: %.0f %% of the responses were cut at rollout.max_response_length=%d before they ended; their rewards may say"
                " little. Raise it, or leave cut responses out with algorithm.mask_truncated=true",
                self.step,
                100 * cut,
                self.sampling.max_response_length,
            )
        self._log_tokens(rollouts)
        self.log(
            {
                "rollout/length_mean": lengths.mean().item(),
                "rollout/length_max": lengths.max().item(),
                "rollout/truncated_share": cut,
                "rollout/prompt_length_mean": rollouts.prompt_lengths_N.float().mean().item(),
                "rollout/weight_version": self._hybrid.version,
            }
        )
        return rollouts

    def sample(self, prompts: Sequence[PromptRow], *, n: int | Sequence[int], sampling: Sampling, step: int) -> Rollouts:
        """`n` responses to each row, row by row. A sample's number within the step decides its seed."""
        self._prompts = prompts
        self._sync_weights()
        rollout = self._hybrid.rollout
        rollout.wake("kv_cache")
        replicas = len(rollout.placement.replicas)
        counts = [n] * len(prompts) if isinstance(n, int) else n
        row_N = [number for number, count in enumerate(counts) for _ in range(count)]
        replica_N = [number % replicas for number in row_N]
        own, _ = rollout.placement.seat(dist.get_rank())
        mine = [i for i, replica in enumerate(replica_N) if replica == own]
        requests = [Request(prompt_ids=prompts[row_N[i]].prompt_ids, seed=sample_seed(self.seed, step, self._drawn + i)) for i in mine]
        self._drawn += len(row_N)
        with self.timer("generate"):
            completions = rollout.generate(requests, sampling) if requests else []
            return exchange(
                dict(zip(mine, completions, strict=True)),
                prompts_N=[prompts[number].prompt_ids for number in row_N],
                group_ids_N=row_N,
                data_sources_N=[prompts[number].data_source for number in row_N],
                replica_N=replica_N,
                placement=rollout.placement,
                grid=self.grid,
                device=self.device,
            )

    def more_prompts(self) -> Sequence[PromptRow]:
        return self.next_rows()

    def demonstrations(self, prompts: Sequence[PromptRow]) -> Rollouts:
        return self._given(prompts, [[row.response_ids or []] for row in prompts])

    def preferences(self, prompts: Sequence[PromptRow]) -> Rollouts:
        return self._given(prompts, [list(row.pair_ids or ()) for row in prompts])

    def _given(self, prompts: Sequence[PromptRow], responses: Sequence[Sequence[list[int]]]) -> Rollouts:
        self._prompts = prompts
        rollouts = given(prompts, responses, grid=self.grid, device=self.device)
        self._log_tokens(rollouts)
        return rollouts

    def _log_tokens(self, rollouts: Rollouts) -> None:
        responses, prompts = rollouts.response_lengths_N.sum().item(), rollouts.prompt_lengths_N.sum().item()
        self.log({"rollout/response_tokens": responses, "rollout/tokens": prompts + responses})

    def _sync_weights(self) -> None:
        self._hybrid.rollout.wake("weights")
        if not self._stale:
            return
        with self._at_work("reshard", self.engines["actor"], resting=False):
            mine = self._hybrid.sync()
        self._stale = False
        receipts: list[Receipt] = [mine] * self.grid.world
        dist.all_gather_object(receipts, mine)
        self.step_log.receipts.append(receipts)
        received, bound = sum(r.bytes_received for r in receipts), sum(r.lower_bound for r in receipts)
        self.log(
            {
                "reshard/bytes_received": float(received),
                "reshard/bytes_ratio": received / bound if bound else 1.0 + received,
                "reshard/bucket_bytes_max": float(max(r.bucket_bytes for r in receipts)),
            }
        )

    @property
    def _hybrid(self) -> HybridEngine:
        assert self.engines.hybrid, "this algorithm has no rollout engine"
        return self.engines.hybrid

    # Scores

    def reward(self, rollouts: Rollouts, *, name: str = "reward") -> Tensor:
        rewards_N = self.judged("reward", rollouts, name=name)
        return self.judges["reward"].adjusted(rewards_N, rollouts.data_sources_N)

    def cost(self, rollouts: Rollouts, *, name: str = "cost") -> Tensor:
        costs_N = self.judged("cost", rollouts, name=name)
        return self.judges["cost"].adjusted(costs_N, rollouts.data_sources_N)

    def judged(self, section: str, rollouts: Rollouts, *, name: str, watch: bool = True) -> Tensor:
        """Scores [N] as functions and models give them. `watch`: they count among those that should not all be one and the same."""
        assert section in self.judges, f"this algorithm asked for no {section}"
        judge, rows_N = self.judges[section], [self._prompts[group] for group in rollouts.group_ids_N.tolist()]
        with self.timer(section):
            rewards_N, metrics = judge.by_functions(rollouts, rows_N, self.grid, step=self.step, watch=watch)
        judge.by_models(rewards_N, rollouts, self.data_group, lambda engine: self._at_work(f"{section}_model", engine))
        self.step_log.add(metrics | reward_metrics(rewards_N), f"{name}/")
        return rewards_N

    def actor_logprobs(self, rollouts: Rollouts) -> Tensor:
        actor = self.engines["actor"]
        with self._at_work("old_logprob", actor):
            logprobs_R, entropy_R = actor.logprobs(sequences_of(rollouts), temperature=self.sampling.temperature)
            if "engine_logprobs" in rollouts.fields:
                self._log_mismatch(logprobs_R, rollouts)
            self.log({"rollout/entropy": masked_mean(entropy_R, rollouts.response_mask_R, group=self.data_group)})
        return logprobs_R

    def _log_mismatch(self, logprobs_R: Tensor, rollouts: Rollouts) -> None:
        """How far the trainer's log-probs are from those the engine sampled with."""
        mask_R = rollouts.response_mask_R
        logprobs_R, engine_R = neutralise(mask_R, logprobs_R, rollouts.fields["engine_logprobs"])
        gap_R, kl_R = (logprobs_R - engine_R).abs(), kl_estimate(engine_R, logprobs_R, "k3")
        largest = gap_R.max() if len(gap_R) else torch.zeros((), device=self.device)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        means = {"rollout/train_logprob_diff_mean": gap_R, "rollout/train_kl": kl_R}
        self.log({name: masked_mean(x_R, mask_R, group=self.data_group) for name, x_R in means.items()})
        self.log({"rollout/train_logprob_diff_max": largest.item()})

    def reference_logprobs(self, rollouts: Rollouts) -> Tensor:
        reference = self.engines["reference"]
        with self._at_work("ref", reference):
            return reference.logprobs(sequences_of(rollouts), temperature=self.sampling.temperature)[0]

    def values(self, rollouts: Rollouts, *, role: str = "critic") -> Tensor:
        with self._at_work("values", self.engines[role]):
            return self.engines[role].values(sequences_of(rollouts))

    # Updates

    def update_actor(
        self, rollouts: Rollouts, loss: PolicyLoss, *, epochs: int = 1, mini_batch_size: int | None = None, together: int = 1
    ) -> None:
        self._update("actor", rollouts, loss, epochs, mini_batch_size, together)
        self._stale = True

    def update_critic(
        self,
        rollouts: Rollouts,
        loss: ValueLoss,
        *,
        role: str = "critic",
        epochs: int = 1,
        mini_batch_size: int | None = None,
        together: int = 1,
    ) -> None:
        self._update(role, rollouts, loss, epochs, mini_batch_size, together)

    def _update(
        self, role: str, rollouts: Rollouts, loss: PolicyLoss | ValueLoss, epochs: int, mini_batch_size: int | None, together: int
    ) -> None:
        with self._at_work(f"update_{role}", self.engines[role], training=True):
            for epoch in range(epochs):
                for batch in self._mini_batches(rollouts, mini_batch_size, together, epoch):
                    self._optimizer_step(role, batch, loss, together)

    def _mini_batches(self, rollouts: Rollouts, size: int | None, together: int, epoch: int) -> Iterator[Rollouts]:
        """The split depends on nothing but seed, step and epoch: every layout makes the same mini-batches."""
        units, samples = len(rollouts) // together, len(rollouts)
        assert units * together == samples, f"{samples} samples do not come in units of {together}"
        generator = torch.Generator().manual_seed(sample_seed(self.seed, self.step, epoch))
        for members in torch.randperm(units, generator=generator).split((size or max(samples, together)) // together):
            chosen_N = torch.zeros(units, together, dtype=torch.bool)
            chosen_N[members] = True
            yield rollouts[chosen_N.flatten().to(self.device)]

    def _optimizer_step(self, role: str, batch: Rollouts, loss: PolicyLoss | ValueLoss, together: int) -> None:
        denominators = self._denominators(batch)
        if denominators.tokens == 0:
            self.step_log.add({"empty_batches": 1.0}, f"{role}/")
            return
        metrics = self.engines[role].update(
            sequences_of(batch, together), self._micro_loss(batch, loss, denominators), temperature=self.sampling.temperature
        )
        self.step_log.add(metrics, f"{role}/")
        if metrics["skipped_steps"] > 0:
            coord = self.grid.coord(dist.get_rank())
            if coord.tp_rank == coord.pp_rank == 0:
                save_batch(self.nonfinite_folder, batch, metrics, step=self.step, role=role, data_rank=coord.dp_rank)
        self._count_update(skipped=metrics["skipped_steps"] > 0, role=role)

    def _count_update(self, *, skipped: bool, role: str) -> None:
        """Raises RuntimeError when too many updates in a row were skipped: that does not heal by itself."""
        if not skipped:
            self.updates += 1
            self._skipped_in_a_row = 0
            return
        self._skipped_in_a_row += 1
        log.warning(
            "step %d: an update of the %s was skipped, its loss or gradient is not finite; the batch is in %s",
            self.step,
            role,
            self.nonfinite_folder,
        )
        if self._skipped_in_a_row == MOST_SKIPS_IN_A_ROW:
            raise RuntimeError(
                f"{MOST_SKIPS_IN_A_ROW} updates in a row had a loss or gradient that is not finite. Look at the rewards and at"
                " rollout/train_logprob_diff_max in metrics.jsonl, check the pretrained weights, and try a lower optimizer.lr"
            )

    def _denominators(self, batch: Rollouts) -> Denominators:
        """Trained tokens and samples of `batch` over all data-parallel ranks."""
        trained_n = sum_per_sample(batch.response_mask_R, batch.lengths_n)
        sizes = torch.stack([trained_n.sum(), (trained_n > 0).float().sum()])
        if self.data_group:
            dist.all_reduce(sizes, group=self.data_group)
        return Denominators(tokens=sizes[0].item(), sequences=sizes[1].item(), longest=self.max_response_length)

    def _micro_loss(self, batch: Rollouts, loss: PolicyLoss | ValueLoss, denominators: Denominators) -> MicroLoss:
        def micro_loss(outputs: tuple[Tensor, ...], packed: PackedMicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
            micro = MicroBatch(
                response_mask=batch.response_mask_R[packed.rows_r],
                lengths=torch.tensor(packed.lengths, device=self.device),
                fields={name: tensor[packed.rows_r] for name, tensor in batch.fields.items()},
                denominators=denominators,
            )
            return cast("Callable[..., tuple[Tensor, dict[str, Tensor]]]", loss)(*outputs, micro)

        return micro_loss

    # Memory

    @contextlib.contextmanager
    def _at_work(self, stage: str, engine: MegatronEngine, *, training: bool = False, resting: bool = True) -> Iterator[None]:
        """The stage `stage` of `engine`, which has what it needs on the device; with `resting`, the rollout engine sleeps meanwhile."""
        with contextlib.ExitStack() as stack:
            with self.timer("offload"):
                if resting:
                    self.rest_rollout()
                stack.enter_context(engine.at_work(training=training))
            with self.timer(stage):
                yield
            with self.timer("offload"):
                stack.close()

    @contextlib.contextmanager
    def all_at_work(self) -> Iterator[None]:
        """Inside, everything that trains is on the device: to be exported, saved or loaded."""
        self.rest_rollout()
        with contextlib.ExitStack() as stack:
            for engine in self.trained().values():
                stack.enter_context(engine.at_work(training=True))
            yield

    def trained(self) -> dict[str, MegatronEngine]:
        """The models with an optimizer, by role."""
        return {role: engine for role, engine in self.engines.models.items() if engine.training}

    def rest_rollout(self) -> None:
        """Send the rollout engine to sleep, where it can."""
        if self.engines.hybrid and self.engines.hybrid.rollout.sleep():
            self._stale = True

    # Records

    @contextlib.contextmanager
    def timer(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            self.step_log.seconds[name] += time.perf_counter() - start
            self.step_log.add_memory(name, memory_in_use(self.device))

    def log(self, metrics: Mapping[str, float]) -> None:
        self.step_log.add(metrics)
