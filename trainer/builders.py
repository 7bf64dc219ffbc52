"""From a prepared configuration to process groups, models, rollout engine and reward workers on this rank."""

from __future__ import annotations

import contextlib
import datetime
import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoTokenizer

from tridentrl.configs.model_spec import ModelSpec
from tridentrl.configs.schema import Config, RewardConfig
from tridentrl.data.prompts import PromptDataset
from tridentrl.engine.hybrid import HybridEngine, place_replicas
from tridentrl.engine.megatron import MegatronEngine
from tridentrl.engine.rollout import RolloutEngine, Sampling
from tridentrl.engine.rollout_hf import HfRollout
from tridentrl.engine.rollout_vllm import VllmRollout
from tridentrl.parallel.groups import init_groups
from tridentrl.parallel.model import Head, uses_transformer_engine
from tridentrl.parallel.optimizer import OptimizerSettings, adam_implementation
from tridentrl.rewards.pool import RewardPool
from tridentrl.rewards.routing import RewardRouter
from tridentrl.trainer.context import Engines
from tridentrl.trainer.judge import Judge, error_of_section
from tridentrl.trainer.launcher import run_ident
from tridentrl.trainer.prepare import Prepared
from tridentrl.trainer.scoring import Scorer
from tridentrl.trainer.world import World
from tridentrl.weights.hf_io import read_config

log = logging.getLogger(__name__)

CRITICS = ("critic", "cost_critic")
"""Roles that train with `optimizer.critic_lr`."""
VALUED = (*CRITICS, "reward_model", "teacher")
"""Roles with a value head in place of the language model's."""
FROZEN = ("reference", "teacher")
"""Roles without an optimizer."""
NO_HEAD = "has no head that scores (score.weight); give a sequence classification model with one label"
"""What is wrong with a language model where a reward model belongs."""
COLLECTIVE_TIMEOUT = datetime.timedelta(minutes=30)
"""How long one rank waits for the others: longer than the slowest rollout or reward of a step."""


def init_distributed(world: World, *, cuda: bool) -> torch.device:
    """Join torch.distributed as `world` says, and return this rank's device. Nothing happens where it is initialised already."""
    device = torch.device("cuda", world.local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
        alone = {"store": dist.HashStore()} if world.world_size == 1 else {"init_method": "env://"}
        dist.init_process_group(backend, rank=world.rank, world_size=world.world_size, timeout=COLLECTIVE_TIMEOUT, **alone)
    return device


def end_of_sequence_ids(folder: str, tokenizer: Any) -> tuple[int, ...]:
    """Every id that ends a response: the lists of generation_config.json and config.json, and the tokenizer's own."""
    from transformers import GenerationConfig

    ids: list[int] = []
    with contextlib.suppress(OSError):  # the file is optional
        ids += _as_list(GenerationConfig.from_pretrained(folder).eos_token_id)
    ids += _as_list(read_config(folder).get("eos_token_id")) + _as_list(tokenizer.eos_token_id)
    return tuple(sorted(set(ids)))


def _as_list(ids: int | list[int] | None) -> list[int]:
    return [] if ids is None else [ids] if isinstance(ids, int) else list(ids)


def sampling_settings(config: Config, stop_token_ids: tuple[int, ...]) -> Sampling:
    """Of training rollouts."""
    rollout = config.rollout
    return Sampling(
        max_response_length=rollout.max_response_length,
        temperature=rollout.temperature,
        stop_token_ids=() if rollout.ignore_eos else stop_token_ids,
        stop=rollout.stop,
    )


def build_engines(
    prepared: Prepared,
    engines: Engines,
    roles: Iterable[str],
    device: torch.device,
    *,
    online: bool,
    optimizer_steps: int,
    ranks_per_node: int,
) -> list[str]:
    """Add those of `roles` that `engines` lacks, loaded from their folders, and if `online` the rollout engine. Collective over the world.

    Returns the roles that were built.
    """
    config = prepared.config
    if not engines.models:
        init_groups(prepared.grid, seed=config.seed)
        layers = "Transformer Engine" if uses_transformer_engine() else "Megatron-Core local"
        log.info("layers: %s; Adam: %s", layers, adam_implementation())
    built = [role for role in roles if role not in engines.models]
    for role in built:
        engines.models[role] = _model(prepared, role, device, optimizer_steps=optimizer_steps)
    if online and engines.hybrid is None:
        actor = engines["actor"]
        rollout = _rollout(prepared, actor, device, ranks_per_node)
        bucket_bytes = config.rollout.bucket_mb * 1024**2
        engines.hybrid = HybridEngine(
            actor, rollout, checksum_syncs=config.rollout.checksum_syncs, bucket_bytes=bucket_bytes, ranks_per_node=ranks_per_node
        )
        rollout.sleep()
    return built


def _model(prepared: Prepared, role: str, device: torch.device, *, optimizer_steps: int) -> MegatronEngine:
    config, optimizer = prepared.config, prepared.config.optimizer
    settings = (
        None
        if role in FROZEN
        else OptimizerSettings(
            lr=optimizer.critic_lr if role in CRITICS else optimizer.lr,
            betas=optimizer.betas,
            eps=optimizer.eps,
            weight_decay=optimizer.weight_decay,
            gradient_clip=config.trainer.gradient_clip_val,
            warmup_steps=optimizer.warmup_steps,
            schedule=optimizer.schedule,
            total_steps=optimizer_steps,
            min_lr_ratio=optimizer.min_lr_ratio,
        )
    )
    engine = _engine(prepared, prepared.specs[role], device, head="value" if role in VALUED else "lm", optimizer=settings)
    folder = prepared.folders[role]
    try:
        if role not in VALUED:
            engine.load(folder)
        elif engine.load_value_model(folder, seed=config.seed):
            if role in FROZEN:
                raise ValueError(f"{folder} {NO_HEAD}")
            log.info("%s: %s has no value head, a fresh one is drawn from seed %d", role, folder, config.seed)
    except ValueError as error:
        raise ValueError(f"the pretrained {role}: {error}") from None
    engine.offload.park()  # the models and the rollout engine that are built after it need the room
    return engine


def _engine(
    prepared: Prepared, spec: ModelSpec, device: torch.device, *, head: Head, optimizer: OptimizerSettings | None
) -> MegatronEngine:
    config = prepared.config
    return MegatronEngine(
        spec,
        prepared.grid,
        head=head,
        bf16=config.trainer.precision == "bf16-mixed",
        max_tokens=config.trainer.micro_batch_tokens,
        sequence_parallel=config.parallel.sequence_parallel is True,
        recompute=config.parallel.recompute,
        optimizer=optimizer,
        offload=config.parallel.offload,
        device=device,
    )


def _rollout(prepared: Prepared, actor: MegatronEngine, device: torch.device, ranks_per_node: int) -> RolloutEngine:
    config, folder, spec = prepared.config, prepared.folders["actor"], prepared.specs["actor"]
    rollout = config.rollout
    dtype = getattr(torch, rollout.dtype)
    if rollout.backend == "hf":
        return HfRollout(
            folder,
            spec,
            dtype=dtype,
            device=device,
            tokenizer_folder=prepared.tokenizer_folder if rollout.stop else None,
            batch_size=rollout.max_num_seqs,
            trust_remote_code=config.model.trust_remote_code,
        )
    assert isinstance(rollout.tensor, int) and isinstance(rollout.sleep_level, int)
    placement = place_replicas(spec, prepared.grid, actor.layouts(), tensor=rollout.tensor, ranks_per_node=ranks_per_node)
    return VllmRollout(
        folder,
        spec,
        placement=placement,
        max_length=config.data.max_prompt_length + rollout.max_response_length,
        dtype=dtype,
        run_id=run_ident(),
        seed=config.seed,
        tokenizer_folder=prepared.tokenizer_folder if rollout.stop else None,
        max_num_seqs=rollout.max_num_seqs,
        prefix_caching=rollout.prefix_caching,
        enforce_eager=rollout.enforce_eager is True,
        gpu_memory_utilization=rollout.gpu_memory_utilization,
        sleep_level=rollout.sleep_level,
        trust_remote_code=config.model.trust_remote_code,
    )


def build_router(config: Config, section: str, train: PromptDataset, val: PromptDataset | None) -> RewardRouter:
    """Which function of `section` (`reward` or `cost`) scores what; ValueError when a data source of either set has none and no model."""
    scoring: RewardConfig = getattr(config, section)
    sets = {"data.train_files": train} | ({"data.val_files": val} if val else {})
    with error_of_section(section):
        return RewardRouter(
            data_sources={
                key: Counter(source for source in dataset.data_sources if source not in scoring.models) for key, dataset in sets.items()
            },
            custom_path=scoring.custom_fn.path,
            custom_name=scoring.custom_fn.name,
            default=scoring.default,
            by_source=scoring.by_source,
        )


def build_pool(config: Config, section: str, router: RewardRouter) -> RewardPool:
    """Worker processes of this rank."""
    scoring: RewardConfig = getattr(config, section)
    return RewardPool(
        router,
        workers=scoring.workers,
        timeout_s=scoring.timeout_s,
        on_error=scoring.on_error,
        max_failure_share=scoring.max_failure_share,
    )


def build_judges(prepared: Prepared, pools: Mapping[str, RewardPool], tokenizer: Any, device: torch.device) -> dict[str, Judge]:
    """What scores responses, by section, the models loaded. Collective over the world."""
    models = {name: _scoring_model(prepared, name, device) for name in prepared.scoring}
    judges = {}
    for section, pool in pools.items():
        scoring: RewardConfig = getattr(prepared.config, section)
        by_source = {source: models[name] for source, name in scoring.models.items()}
        judges[section] = Judge(section, scoring, Scorer(pool, tokenizer), by_source)
    return judges


def _scoring_model(prepared: Prepared, name: str, device: torch.device) -> MegatronEngine:
    folder, spec = prepared.scoring[name]
    engine = _engine(prepared, spec, device, head="value", optimizer=None)
    try:
        if engine.load_value_model(folder, seed=0):
            raise ValueError(f"it {NO_HEAD}")
    except ValueError as error:
        raise ValueError(f"the scoring model {name}: {error}") from None
    engine.offload.park()
    return engine


def check_tokenizers(prepared: Prepared, tokenizer: Any) -> None:
    """Scoring models and teachers read the token ids of the model that is trained: ValueError names one whose tokenizer gives others."""
    readers = {f"the scoring model {name}": (model, "policy") for name, model in prepared.scoring.items()}
    if "teacher" in prepared.specs:
        folder = prepared.folders["teacher"]
        readers[f"the teacher {folder}"] = (folder, prepared.specs["teacher"]), "student"
    for name, ((folder, spec), trained) in readers.items():
        try:
            same = AutoTokenizer.from_pretrained(folder).get_vocab() == tokenizer.get_vocab()
        except (OSError, ValueError):  # it has none, so it was made for ids
            same = spec.vocab_size >= len(tokenizer)
        if not same:
            raise ValueError(
                f"{name} has another tokenizer than the {trained}, and it would be given the {trained}'s token ids; "
                f"use one of the {trained}'s family"
            )
