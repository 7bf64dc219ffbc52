"""The run: batches of prompts through the algorithm, with evaluation, records and saves around it."""

from __future__ import annotations

import itertools
import logging
import math
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from tqdm import tqdm
from transformers import AutoTokenizer

from tridentrl.checkpoint.store import CheckpointStore
from tridentrl.configs.layout import describe_batches
from tridentrl.configs.load import save_config, to_dict
from tridentrl.configs.schema import Config, TaskAlgorithm
from tridentrl.data.prompts import PromptDataset, PromptRow
from tridentrl.data.sampler import PromptSampler, evaluation_batches, planned_steps
from tridentrl.engine.megatron import MegatronEngine
from tridentrl.engine.rollout import Sampling
from tridentrl.rewards.pool import RewardPool
from tridentrl.rewards.routing import RewardRouter
from tridentrl.trainer.builders import (
    build_engines,
    build_judges,
    build_pool,
    build_router,
    check_tokenizers,
    end_of_sequence_ids,
    init_distributed,
    sampling_settings,
)
from tridentrl.trainer.context import Engines, TrainContext
from tridentrl.trainer.evaluation import evaluated_rows, evaluation_metrics
from tridentrl.trainer.metrics import MetricsWriter, drop_records_after, step_line, write_rows
from tridentrl.trainer.phases import Phase, make_phase, optimizer_steps, phase_of
from tridentrl.trainer.prepare import Prepared, prepare, sections
from tridentrl.trainer.resume import find_checkpoint, restore, run_contents, switches_of
from tridentrl.trainer.world import ALONE, World, world_from_torchrun
from tridentrl.weights.hf_io import export_hf, read_config
from tridentrl.weights.layouts import hf_shapes

log = logging.getLogger(__name__)


class RLTrainer:
    """Builds everything that `config` asks for on this rank, then `run` trains. All ranks do the same.

    Under torchrun the ranks are found in the environment; else this process is the only one. Raises ValueError for bad input
    before any model is built.
    """

    def __init__(self, config: Config, world: World | None = None) -> None:
        world = world or world_from_torchrun(os.environ) or ALONE
        world.export(os.environ)  # Megatron-Core and vLLM look there
        self.world = world
        self.prepared: Prepared = prepare(config, world=world.world_size)
        self.config = self.prepared.config
        self.phases = self.prepared.phases
        self.switches: tuple[Phase, ...] = ()
        """Those of them that `switch_algorithm` has added."""
        self.run_folder = Path(self.config.output_dir) / self.config.exp_name
        self.tokenizer = load_tokenizer(self.prepared)
        self._load_data()
        self.leads = world.rank == 0
        self.writer: MetricsWriter | None = None
        check_tokenizers(self.prepared, self.tokenizer)
        self.pools: dict[str, RewardPool] = {}
        routers = self._new_routers(self.phases)
        self._lock = own_folder(self.run_folder) if self.leads else None
        self._add_pools(routers)
        self.device = init_distributed(world, cuda=self.config.trainer.device == "cuda")
        self.checkpoints = CheckpointStore(
            self.run_folder / "checkpoints", keep_last=self.config.trainer.keep_last, background=self.config.trainer.async_save
        )
        self.resumed = find_checkpoint(self.prepared, self.checkpoints, self.sampler)
        self.steps_done = self.resumed.manifest.step if self.resumed else 0
        if self.resumed and (switches := switches_of(self.resumed)):
            self._plan(switches)
        self.phase = phase_of(self.phases, self.steps_done + 1)
        self.complete = self.steps_done >= self.total_steps
        if not self.complete:
            self._build()
            self._start_records()

    def _load_data(self) -> None:
        config, data = self.config, self.config.data
        limit = config.rollout.max_response_length
        self.train_data = PromptDataset(data.train_files, data, self.tokenizer, split="train", max_response_length=limit)
        self.val_data = (
            PromptDataset(data.val_files, data, self.tokenizer, split="val", max_response_length=limit) if data.val_files else None
        )
        if data.val_share and not self.val_data:
            self.train_data, self.val_data = self.train_data.split(data.val_share, config.seed)
        self.sampler = PromptSampler(
            len(self.train_data), data.train_batch_size, seed=config.seed, shuffle=data.shuffle, drop_last=data.drop_last
        )
        self._require_sources(config.algorithm.tasks)
        self.total_steps, self.limit = planned_steps(config.trainer.total_steps, config.trainer.epochs, self.sampler.steps_per_epoch)

    def _new_routers(self, phases: Sequence[Phase]) -> dict[str, RewardRouter]:
        """Of every section that some phase asks and nobody serves yet."""
        new = [section for section in sections(phases) if section not in self.pools]
        return {section: build_router(self.config, section, self.train_data, self.val_data) for section in new}

    def _add_pools(self, routers: Mapping[str, RewardRouter]) -> None:
        self.pools |= {section: build_pool(self.config, section, router) for section, router in routers.items()}

    def _start_records(self) -> None:
        """The run folder: the one that the resumed checkpoint lies in, less what came after it. Any other is moved aside, never lost."""
        if self.resumed and self.run_folder.resolve() in self.resumed.folder.resolve().parents:
            self.checkpoints.set_aside_after(self.resumed.manifest.step)
            if self.leads:
                drop_records_after(self.run_folder, self.resumed.manifest.step)
        elif self.leads and self.run_folder.exists() and any(self.run_folder.iterdir()):
            log.info("%s was there already and is now %s", self.run_folder, move_aside(self.run_folder))
        if self.leads:
            first = self.steps_done + 1 if self.resumed else 0
            self.writer = MetricsWriter(self.run_folder, self.config.trainer.loggers, config=to_dict(self.config), first_step=first)
            save_config(self.config, self.run_folder / "config.yaml")

    def _build(self) -> None:
        config, prepared = self.config, self.prepared
        if self.leads:
            log.info("training layout: %s; rollout: %s, tensor %s", prepared.grid, config.rollout.backend, config.rollout.tensor)
            log.info("%s", describe_batches(config, self.phase.batches, world=prepared.world))
            for name, data in (("train", self.train_data), ("val", self.val_data)):
                if data and data.dropped:
                    log.info("%s rows left out: %s", name, dict(data.dropped))
            for phase in self.phases:
                if phase.at >= self.total_steps:
                    log.warning("algorithm.schedule: %s at %d never runs, the run has %d steps", phase.name, phase.at, self.total_steps)
            if self.sampler.dropped_per_epoch:
                log.info("%d training rows of each epoch do not fill a batch and are left out", self.sampler.dropped_per_epoch)
        self.engines = Engines(models={})
        saved = [role for role in self.resumed.manifest.roles if role in prepared.specs] if self.resumed else []
        self._build_missing(self.phase, saved)
        sampling = sampling_settings(config, end_of_sequence_ids(next(iter(prepared.folders.values())), self.tokenizer))
        self.context = TrainContext(
            self.engines,
            build_judges(prepared, self.pools, self.tokenizer, self.device),
            prepared.grid,
            next_rows=self._next_rows,
            nonfinite_folder=self.run_folder / "nonfinite",
            sampling=sampling,
            seed=config.seed,
            kl_coef=config.trainer.kl_coef,
            device=self.device,
        )
        if self.resumed:
            restore(self.resumed, self.prepared, self.context, self.phase)
        if self.leads and self.phase.algorithm.online:
            log.info("sampling: %s; for evaluation at temperature %g", sampling, config.rollout.val_temperature)

    def _build_missing(self, phase: Phase, more: Sequence[str] = ()) -> list[str]:
        """What `phase` needs and nobody has, and the roles `more`; returns the roles that were built."""
        return build_engines(
            self.prepared,
            self.engines,
            dict.fromkeys([*phase.algorithm.roles(kl_coef=self.config.trainer.kl_coef), *more]),
            self.device,
            online=phase.algorithm.online,
            optimizer_steps=optimizer_steps(self.phases, self.total_steps, self.config.data.train_batch_size),
            ranks_per_node=self.world.local_world_size,
        )

    def switch_algorithm(self, name: str, config: Mapping[str, Any] | None = None) -> None:
        """From the next step on, run the algorithm `name` with its own settings `config`. Collective over the world.

        Models, their optimizers, process groups and the rollout engine stay; a model that nobody has yet is built. A resumed run goes on
        with the switch. Raises ValueError, before anything changes, where `algorithm.name` and `algorithm.*` would be refused.
        """
        self._switch(name, config or {}, self.phase.tasks)

    def set_task_algorithm(self, task: str, name: str, config: Mapping[str, Any] | None = None) -> None:
        """From the next step on, train the rows of data source `task` with the algorithm `name`. As `switch_algorithm` in all else."""
        self._require_sources({task})
        self._switch(self.phase.name, self.phase.config, {**self.phase.tasks, task: TaskAlgorithm(name=name, config=config or {})})

    def _switch(self, name: str, config: Mapping[str, Any], tasks: Mapping[str, TaskAlgorithm]) -> None:
        phase = make_phase(self.steps_done, name, config, tasks)
        if not self.complete and (phase.name, phase.config, phase.tasks) != (self.phase.name, self.phase.config, self.phase.tasks):
            phase.keep_state_of(self.phase)
            self._plan((*self.switches, phase))
            self._enter(phase)

    def _require_sources(self, tasks: Iterable[str]) -> None:
        known = sorted(set(self.train_data.data_sources))
        for task in tasks:
            if task not in known:
                raise ValueError(f"algorithm.tasks.{task}: no row of data.train_files has that data source; they have {', '.join(known)}")

    def _plan(self, switches: Sequence[Phase]) -> None:
        """Let the phases be the planned ones with `switches`, each of which replaces what was planned from its step on."""
        phases = self.phases
        for switch in switches:
            phases = (*(phase for phase in phases if phase.at < switch.at), switch)
        prepared = prepare(self.config, world=self.world.world_size, later=phases)
        check_tokenizers(prepared, self.tokenizer)
        self._add_pools(self._new_routers(phases))
        self.prepared, self.phases, self.switches = prepared, phases, tuple(switches)

    def _enter(self, phase: Phase) -> None:
        there = list(self.engines.models)
        unserved = {section: pool for section, pool in self.pools.items() if section not in self.context.judges}
        self.context.judges |= build_judges(self.prepared, unserved, self.tokenizer, self.device)
        self.context.rest_rollout()
        built = self._build_missing(phase)
        self.phase = phase
        if self.leads:
            reused = ", ".join(described(role, self.engines[role]) for role in there)
            new = ", ".join(described(role, self.engines[role]) for role in built)
            log.info(
                "Loaded %s controller. Reusing %s from existing workers.%s", phase.name.upper(), reused, f" Built {new}." if new else ""
            )

    def run(self, until: int | None = None) -> dict[str, float]:
        """Train to the last step, or only to step `until`, to go on with another call; nothing where that has been reached.

        Returns the metrics of the last step and the last evaluation. Collective over the world.
        """
        if self.complete:
            return self._already_complete()
        trainer, end = self.config.trainer, min(until or self.total_steps, self.total_steps)
        metrics = self.evaluate(0) if trainer.eval_at_start and self.steps_done == 0 else {}
        for step in tqdm(range(self.steps_done + 1, end + 1), disable=None if self.leads else True, unit="step", dynamic_ncols=True):
            phase = phase_of(self.phases, step)
            if phase is not self.phase:
                self._enter(phase)
            metrics |= self._run_step(step)
            self.steps_done = step
            last = step == self.total_steps
            if last or (trainer.eval_interval and step % trainer.eval_interval == 0):
                metrics |= self.evaluate(step)
            if last:
                self._require_updates()
            if last or (trainer.save_interval and step % trainer.save_interval == 0):
                self.save(step)
            self.checkpoints.poll()
        if self.steps_done < self.total_steps:
            return metrics
        self.complete = True
        self.checkpoints.finish()
        if self.leads:
            log.info("finished after %d steps (%s); everything is in %s", self.total_steps, self.limit, self.run_folder)
        self.close()
        return metrics

    def _require_updates(self) -> None:
        """A run that changed nothing is an error, and nothing is saved of it."""
        if not self.context.updates:
            raise RuntimeError(
                "the run made no update. Either every sample was left out (reward/excluded, reward/failed in metrics.jsonl: does the reward"
                " return None?), or no token was trained (actor/empty_batches: algorithm.mask_truncated with answers that are all cut?),"
                " or every update was not finite (actor/skipped_steps)"
            )

    def _already_complete(self) -> dict[str, float]:
        if self.leads:
            assert self.resumed
            log.info("already complete: %s has step %d, and %s", self.resumed.folder, self.steps_done, self.limit)
        self.close()
        return {}

    def _run_step(self, step: int) -> dict[str, float]:
        start = time.perf_counter()
        self.context.begin(step)
        self.phase.algorithm.step(self.context, self._next_rows())
        metrics = self.context.step_log.metrics() | self.context.step_log.memory_metrics()
        staged = sum(self.context.step_log.seconds.values())
        if self.writer:
            seconds = time.perf_counter() - start
            metrics |= {
                "timing_s/step": seconds,
                # The controller, the data and the records: all that no stage accounts for.
                "timing_s/other": seconds - staged,
                "perf/tokens_per_s": metrics["rollout/tokens"] / seconds,
                "perf/response_tokens_per_s": metrics["rollout/response_tokens"] / seconds,
            }
            self.writer.write(step, metrics)
            self.writer.write_receipts(step, self.context.step_log.receipts)
            tqdm.write(step_line(step, metrics))
        return metrics

    def _next_rows(self) -> list[PromptRow]:
        """The next batch of training rows. What has been taken is in the next checkpoint."""
        return self.train_data[next(self.sampler)]

    def evaluate(self, step: int) -> dict[str, float]:
        """Score every held-out row once; writes the rows to `rollouts/step_N.jsonl`. Collective over the world."""
        if not self.val_data or not self.phase.algorithm.online:
            return {}
        start = time.perf_counter()
        self.context.begin(step)
        sampling = Sampling(**{**vars(self.context.sampling), "temperature": self.config.rollout.val_temperature})
        rows: list[dict[str, Any]] = []
        for batch in evaluation_batches(len(self.val_data), self.config.data.val_batch_size):
            rows += evaluated_rows(self.context, self.val_data[batch], sampling)
        metrics = evaluation_metrics(rows)
        metrics |= {name: value for name, value in self.context.step_log.metrics().items() if name.startswith("reshard/")}
        metrics["timing_s/evaluate"] = time.perf_counter() - start
        if self.writer:
            self.writer.write(step, metrics)
            self.writer.write_receipts(step, self.context.step_log.receipts)
            write_rows(self.run_folder / "rollouts" / f"step_{step}.jsonl", rows[: self.config.trainer.log_rollouts])
            tqdm.write(f"[Step {step}] held-out reward {metrics['val/reward/mean']:.3f} over {len(rows)} rows")
        return metrics

    def save(self, step: int) -> Path:
        """Export what trains as Hugging Face folders, `hf/step_N` (of PPO's critic: `hf/step_N-critic`), then write the checkpoint.

        In this order, so that a run with a checkpoint of its last step lacks nothing. Returns the first folder.
        """
        folder = self.run_folder / "hf" / f"step_{step}"
        with self.context.all_at_work():
            for number, (role, engine) in enumerate(self.context.trained().items()):
                self._export(role, engine, folder.with_name(f"{folder.name}-{role}") if number else folder)
            self.checkpoints.save(step, run_contents(self.prepared, self.context, self.sampler, self.phase, self.switches))
        return folder

    def _export(self, role: str, engine: MegatronEngine, folder: Path) -> None:
        source, dtype = self.prepared.folders[role], self.config.trainer.export_dtype
        export_hf(
            engine.spec,
            read_config(source),
            engine.layouts(),
            engine.tensors(),
            folder,
            head=engine.head,
            dtype=None if dtype == "auto" else getattr(torch, dtype),
            tokenizer_folder=self.prepared.tokenizer_folder,
            generation_folder=source,
            overwrite=True,  # of a step that is trained again after a resume
        )

    def close(self) -> None:
        """End the reward workers and flush the records."""
        for pool in self.pools.values():
            pool.close()
        if self.writer:
            self.writer.close()
        if self._lock:
            self._lock.release()


def own_folder(run_folder: Path) -> FileLock:
    """Hold the run folder for this run alone until the lock is released or the process ends. ValueError when another run holds it, or
    when the folder holds something else than a run."""
    if run_folder.exists() and any(run_folder.iterdir()) and not (run_folder / "config.yaml").exists():
        raise ValueError(f"{run_folder} is there and is no run of ours (it has no config.yaml); choose another exp_name or output_dir")
    run_folder.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(run_folder.with_name(f".{run_folder.name}.lock"))
    try:
        lock.acquire(blocking=False)
    except Timeout:
        raise ValueError(f"another run writes to {run_folder} now; wait for it to end or choose another exp_name") from None
    return lock


def move_aside(run_folder: Path) -> Path:
    """Give an earlier run's folder another name, and return that."""
    stamp = f"{run_folder.name}.before-{time.strftime('%Y%m%d-%H%M%S')}"
    names = itertools.chain([run_folder.with_name(stamp)], (run_folder.with_name(f"{stamp}-{n}") for n in itertools.count(2)))
    old = next(name for name in names if not name.exists())
    run_folder.rename(old)
    return old


def load_tokenizer(prepared: Prepared) -> Any:
    """The tokenizer of the configuration; ValueError names its key."""
    model = prepared.config.model
    key = "model.tokenizer_name_or_path" if model.tokenizer_name_or_path else "model.actor_pretrained_model_name_or_path"
    try:
        return AutoTokenizer.from_pretrained(prepared.tokenizer_folder, trust_remote_code=model.trust_remote_code)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"{key}: {prepared.tokenizer_folder} has no tokenizer that transformers can load: {reason}") from None


def described(role: str, engine: MegatronEngine) -> str:
    """A model with its size, such as Actor(135M)."""
    size = sum(math.prod(shape) for shape in hf_shapes(engine.spec, head=engine.head).values())
    unit, name = next(((unit, name) for unit, name in ((1e9, "B"), (1e6, "M"), (1e3, "K")) if size >= unit), (1, ""))
    return f"{role.replace('_', ' ').title().replace(' ', '')}({size / unit:.3g}{name})"
