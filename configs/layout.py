"""What `auto` means on this machine: layouts, precision, and the text on batches for the start log."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from tridentrl.configs.convert import ConfigError
from tridentrl.configs.model_spec import ModelSpec
from tridentrl.configs.rules import Batches, divisors, violations
from tridentrl.configs.schema import Config


def resolve_layout(config: Config, models: Mapping[str, ModelSpec], *, world: int, device: Literal["cpu", "cuda"]) -> Config:
    """A configuration without any `auto`: the fewest ranks per model copy (most data parallelism) and per engine that are legal.

    models: shape by role, as in `rules.violations`. Raises ConfigError with all violations when no choice is legal.
    """
    precision = config.trainer.precision if config.trainer.precision != "auto" else "fp32" if device == "cpu" else "bf16-mixed"
    rollout, parallel = config.rollout, config.parallel
    engine_sleeps = device == "cuda" and rollout.backend == "vllm"
    config = replace(
        config,
        parallel=replace(parallel, offload=parallel.offload if parallel.offload != "auto" else "optimizer" if device == "cuda" else "none"),
        trainer=replace(config.trainer, device=device, precision=precision),
        rollout=replace(
            rollout,
            enforce_eager=device == "cpu" if rollout.enforce_eager == "auto" else rollout.enforce_eager,
            sleep_level=rollout.sleep_level if rollout.sleep_level != "auto" else 2 if engine_sleeps else 0,
            dtype=rollout.dtype if rollout.dtype != "auto" else "float32" if precision == "fp32" else "bfloat16",
        ),
    )
    config = _smallest(config, models, world)
    found = violations(config, models, world=world)
    if found:
        raise ConfigError(found)
    return config


def _smallest(config: Config, models: Mapping[str, ModelSpec], world: int) -> Config:
    """The candidate with the fewest violations; among equals the fewest ranks per model copy, then the shallowest pipeline."""
    sizes = divisors(world)
    parallel = config.parallel
    tensors = sizes if parallel.tensor == "auto" else [parallel.tensor]
    pipelines = sizes if parallel.pipeline == "auto" else [parallel.pipeline]
    engines = sizes if config.rollout.tensor == "auto" else [config.rollout.tensor]

    def with_grid(tensor: int, pipeline: int) -> Config:
        sequence = tensor > 1 if parallel.sequence_parallel == "auto" else parallel.sequence_parallel
        grid = replace(parallel, tensor=tensor, pipeline=pipeline, sequence_parallel=sequence)
        return replace(config, parallel=grid)

    grids = sorted(itertools.product(tensors, pipelines), key=lambda grid: (grid[0] * grid[1], grid[1]))
    config = min((with_grid(*grid) for grid in grids), key=lambda candidate: len(violations(candidate, models, world=world)))
    rollouts = [replace(config, rollout=replace(config.rollout, tensor=engine)) for engine in engines]
    return min(rollouts, key=lambda candidate: len(violations(candidate, models, world=world)))


def describe_batches(config: Config, batches: Batches, *, world: int) -> str:
    """The arithmetic of one step in words, for the start log. `config` is resolved."""
    parallel, prompts = config.parallel, config.data.train_batch_size
    assert isinstance(parallel.tensor, int) and isinstance(parallel.pipeline, int), "resolve_layout comes first"
    copies = world // (parallel.tensor * parallel.pipeline * parallel.context)
    responses, trained = prompts * batches.samples_per_prompt, prompts * batches.kept_per_prompt
    mini = trained if batches.mini_batch_size is None else batches.mini_batch_size
    steps = -(-trained // mini) * batches.update_epochs
    longest = config.data.max_prompt_length + config.rollout.max_response_length
    per_micro = config.trainer.micro_batch_tokens // longest
    micro = -(-mini // (copies * per_micro))
    return (
        f"each step: {prompts} prompts x {batches.samples_per_prompt} = {_count(responses, 'response')}"
        f"{f', {trained} of them trained' if trained != responses else ''}; {_count(steps, 'optimizer step')} of {_count(mini, 'response')}"
        f"{f' ({batches.update_epochs} epochs)' if batches.update_epochs > 1 else ''} over {_count(copies, 'data-parallel rank')}, "
        f"each accumulated from {_count(micro, 'micro-batch')} a rank if all sequences have the longest {longest} tokens"
    )


def _count(number: int, noun: str) -> str:
    if number == 1:
        return f"{number} {noun}"
    return f"{number} {noun}es" if noun.endswith("ch") else f"{number} {noun}s"
