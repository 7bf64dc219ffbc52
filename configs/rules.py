"""Rules between settings, and between settings and the models' shapes. Nothing here needs weights or a device.

Each rule is a function named as the sentence that must hold; it yields one text per violation: the value, the rule, the fix.
A rule about a size that is still `auto` is silent; `layout.resolve_layout` picks sizes that hold.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePath

from tridentrl.configs.convert import ConfigError
from tridentrl.configs.model_spec import ModelSpec
from tridentrl.configs.schema import Config

Violations = Iterator[str]


@dataclass(frozen=True, kw_only=True)
class Batches:
    """How an algorithm cuts one step's batch; its typed settings know."""

    samples_per_prompt: int = 1
    """Responses to each prompt."""
    trained_per_prompt: int | None = None
    """How many of them are trained; None: all."""
    mini_batch_size: int | None = None
    """Samples per optimizer step over all ranks; None: all samples of the step."""
    update_epochs: int = 1
    """Passes over the step's samples."""
    longest_prompt: int | None = None
    """Tokens of the longest prompt that the algorithm's settings cover; None: any."""

    @property
    def kept_per_prompt(self) -> int:
        """Responses to each prompt that optimizer steps see."""
        return self.samples_per_prompt if self.trained_per_prompt is None else self.trained_per_prompt


def violations(config: Config, models: Mapping[str, ModelSpec], *, world: int, batches: Batches | None = None) -> list[str]:
    """Every rule that is broken.

    models: shape of each model that is trained or read, by role (`actor`, `critic`, `reference`); the actor is also the engine's model.
    world: number of processes. batches: None when the algorithm is not known yet.
    """
    found = [
        *the_grid_fills_the_world(config, world),
        *context_parallel_is_one(config),
        *virtual_pipeline_needs_a_pipeline(config),
        *ranks_that_share_experts_fill_a_stage(config, world),
        *sequence_parallel_needs_tensor_parallel(config),
        *engines_fill_the_world(config, world),
        *the_hf_backend_runs_on_one_rank(config),
        *only_vllm_on_gpus_sleeps(config),
        *training_samples_follow_the_policy(config),
        *a_micro_batch_holds_the_longest_sequence(config),
        *the_run_has_a_folder_of_its_own(config),
        *something_ends_the_run(config),
        *the_schedule_has_an_end(config),
        *evaluation_has_files(config),
        *rows_are_held_out_one_way(config),
        *pairs_have_two_sides(config),
        *clips_have_a_range(config),
    ]
    for role, spec in models.items():
        found += [
            *tensor_parallel_divides_heads(role, spec, config.parallel.tensor, "parallel.tensor"),
            *tensor_parallel_divides_ffn(role, spec, config.parallel.tensor, "parallel.tensor"),
            *pipeline_divides_layers(role, spec, config),
            *the_sequence_fits_the_positions(role, spec, config),
            *experts_are_shared_evenly(role, spec, config),
            *experts_need_sequence_parallel(role, spec, config),
        ]
    if "actor" in models and config.rollout.backend == "vllm":
        found += [
            *tensor_parallel_divides_heads("rollout engine", models["actor"], config.rollout.tensor, "rollout.tensor"),
            *tensor_parallel_divides_ffn("rollout engine", models["actor"], config.rollout.tensor, "rollout.tensor"),
            *the_engine_divides_its_vocabulary(models["actor"], config.rollout.tensor),
        ]
    if batches is not None:
        found += mini_batches_use_every_sample(config, batches)
        found += group_sizes_cover_every_prompt(config, batches)
    return found


def check(config: Config, models: Mapping[str, ModelSpec], *, world: int, batches: Batches | None = None) -> None:
    """Raise one ConfigError with all violations, if there are any."""
    found = violations(config, models, world=world, batches=batches)
    if found:
        raise ConfigError(found)


def divisors(number: int) -> list[int]:
    """Ascending."""
    return [candidate for candidate in range(1, number + 1) if number % candidate == 0]


def the_grid_fills_the_world(config: Config, world: int) -> Violations:
    parallel = config.parallel
    fixed = [size for size in (parallel.tensor, parallel.pipeline, parallel.context) if isinstance(size, int)]
    product = math.prod(fixed)
    if world % product:
        below, above = world // product * product, (world // product + 1) * product
        worlds = f"{below} or {above}" if below else f"{above}"
        sizes = f"parallel.tensor={parallel.tensor} x parallel.pipeline={parallel.pipeline} x parallel.context={parallel.context}"
        yield (
            f"{sizes}: {product} ranks hold one copy of the model, and the {world} processes must be a multiple of that; "
            f"start {worlds} processes (--nnodes, --nproc_per_node) or choose sizes whose product is one of {_listed(divisors(world))}"
        )


def context_parallel_is_one(config: Config) -> Violations:
    if config.parallel.context != 1:
        yield f"parallel.context={config.parallel.context}: context parallelism is not supported yet; set parallel.context=1"


def virtual_pipeline_needs_a_pipeline(config: Config) -> Violations:
    parallel = config.parallel
    if parallel.virtual_pipeline > 1 and parallel.pipeline == 1:
        yield (
            f"parallel.virtual_pipeline={parallel.virtual_pipeline}: stages are split into chunks only where there are at least two, and "
            "parallel.pipeline=1; set parallel.virtual_pipeline=1 or parallel.pipeline=2 or more"
        )


def ranks_that_share_experts_fill_a_stage(config: Config, world: int) -> Violations:
    expert, cut, pipeline = config.parallel.expert, config.parallel.expert_tensor, config.parallel.pipeline
    stage = world // pipeline if isinstance(pipeline, int) else world
    if stage % (expert * cut):
        yield (
            f"parallel.expert={expert} x parallel.expert_tensor={cut}: groups of {expert * cut} ranks must fill the {stage} ranks of a "
            f"pipeline stage; set the two so that their product is one of {_listed(divisors(stage))}"
        )


def experts_are_shared_evenly(role: str, spec: ModelSpec, config: Config) -> Violations:
    expert, cut = config.parallel.expert, config.parallel.expert_tensor
    if not spec.num_experts:
        for key, size in (("parallel.expert", expert), ("parallel.expert_tensor", cut)):
            if size > 1:
                yield f"{key}={size}: the {role} is a {spec.hf_type}, which has no experts to share; set {key}=1"
    if spec.num_experts % expert:
        yield (
            f"parallel.expert={expert}: the {role} has {spec.num_experts} experts, which must divide among {expert} ranks; "
            f"set parallel.expert to one of {_listed(divisors(spec.num_experts))}"
        )
    if spec.expert_ffn_size % cut:
        yield (
            f"parallel.expert_tensor={cut}: the {role} has experts of {spec.expert_ffn_size}, which must divide among {cut} ranks; "
            f"set parallel.expert_tensor to a divisor of {spec.expert_ffn_size}, such as "
            f"{max(size for size in divisors(spec.expert_ffn_size) if size < cut)}"
        )


def experts_need_sequence_parallel(role: str, spec: ModelSpec, config: Config) -> Violations:
    parallel = config.parallel
    if spec.num_experts and parallel.tensor != 1 and parallel.sequence_parallel is False:
        yield (
            f"parallel.sequence_parallel=false: the {role} has experts, and tensor-parallel ranks (parallel.tensor={parallel.tensor}) must "
            "each bring them tokens of their own; set parallel.sequence_parallel=auto"
        )


def sequence_parallel_needs_tensor_parallel(config: Config) -> Violations:
    if config.parallel.sequence_parallel is True and config.parallel.tensor == 1:
        yield (
            "parallel.sequence_parallel=true: it divides the sequence among tensor-parallel ranks, and parallel.tensor=1; "
            "set parallel.sequence_parallel=auto or parallel.tensor=2 or more"
        )


def engines_fill_the_world(config: Config, world: int) -> Violations:
    tensor = config.rollout.tensor
    if tensor != "auto" and world % tensor:
        yield (
            f"rollout.tensor={tensor}: engines of {tensor} ranks must fill the {world} processes; "
            f"set rollout.tensor to one of {_listed(divisors(world))}"
        )


def the_hf_backend_runs_on_one_rank(config: Config) -> Violations:
    if config.rollout.backend == "hf" and config.rollout.tensor not in ("auto", 1):
        yield (
            f"rollout.tensor={config.rollout.tensor}: the hf backend holds the whole model on each rank; "
            "set rollout.tensor=1 or rollout.backend=vllm"
        )


def only_vllm_on_gpus_sleeps(config: Config) -> Violations:
    level = config.rollout.sleep_level
    if level in (1, 2) and (config.trainer.device == "cpu" or config.rollout.backend != "vllm"):
        yield (
            f"rollout.sleep_level={level} with trainer.device={config.trainer.device} and rollout.backend={config.rollout.backend}:"
            " only vLLM on a GPU can give its memory back; set it to auto or 0"
        )


def training_samples_follow_the_policy(config: Config) -> Violations:
    rollout = config.rollout
    if rollout.temperature == 0:
        yield (
            "rollout.temperature=0.0: greedy decoding explores nothing and its log-probabilities are not defined; "
            "set rollout.temperature=1.0 (evaluation has its own: rollout.val_temperature)"
        )
    if rollout.top_p < 1:
        yield (
            f"rollout.top_p={rollout.top_p}: the engine would sample from a cut distribution while the trainer scores the whole one, so "
            "their log-probabilities would differ; set rollout.top_p=1.0"
        )
    if rollout.top_k > 0:
        yield (
            f"rollout.top_k={rollout.top_k}: the engine would sample from a cut distribution while the trainer scores the whole one, so "
            "their log-probabilities would differ; set rollout.top_k=-1"
        )


def a_micro_batch_holds_the_longest_sequence(config: Config) -> Violations:
    budget, longest = config.trainer.micro_batch_tokens, _longest(config)
    if budget < longest:
        yield (
            f"trainer.micro_batch_tokens={budget}: one micro-batch must hold the longest sequence, "
            f"{_longest_in_words(config)}; set trainer.micro_batch_tokens={longest} or more"
        )


def the_run_has_a_folder_of_its_own(config: Config) -> Violations:
    name = PurePath(config.exp_name)
    if name.is_absolute() or not name.parts or ".." in name.parts:
        yield f"exp_name={config.exp_name} must name a folder below output_dir={config.output_dir}; give a name without leading / and .."


def something_ends_the_run(config: Config) -> Violations:
    if config.trainer.total_steps is None and config.trainer.epochs is None:
        yield "trainer.total_steps=null and trainer.epochs=null: nothing would end the run; set one of them"


def the_schedule_has_an_end(config: Config) -> Violations:
    if config.optimizer.schedule != "constant" and config.trainer.total_steps is None:
        yield (
            f"optimizer.schedule={config.optimizer.schedule}: the rate falls over trainer.total_steps, which is null; "
            "set trainer.total_steps or optimizer.schedule=constant"
        )


def evaluation_has_files(config: Config) -> Violations:
    if config.data.val_max_rows is not None and not config.data.val_files:
        yield f"data.val_max_rows={config.data.val_max_rows}: there is nothing to evaluate; set data.val_files or data.val_max_rows=null"


def rows_are_held_out_one_way(config: Config) -> Violations:
    if config.data.val_share and config.data.val_files:
        yield f"data.val_share={config.data.val_share}: data.val_files are held out already; set one of the two"


def clips_have_a_range(config: Config) -> Violations:
    for section in ("reward", "cost"):
        clip = getattr(config, section).clip
        if clip is not None and not clip[0] < clip[1]:
            yield f"{section}.clip={list(clip)}: the first is the lowest score and must be below the second; swap them"


def pairs_have_two_sides(config: Config) -> Violations:
    chosen, rejected = config.data.chosen_key, config.data.rejected_key
    if (chosen is None) != (rejected is None):
        given, missing = ("chosen_key", "rejected_key") if rejected is None else ("rejected_key", "chosen_key")
        yield f"data.{given}={chosen or rejected} without data.{missing}: a pair has two responses; set both or neither"


def tensor_parallel_divides_heads(role: str, spec: ModelSpec, tensor: int | str, key: str) -> Violations:
    if isinstance(tensor, str):
        return
    legal = _listed([size for size in divisors(spec.num_heads) if _kv_heads_fit(spec, size)])
    if spec.num_heads % tensor:
        yield (
            f"{key}={tensor}: the {role} has {spec.num_heads} attention heads, which must divide among {tensor} ranks; "
            f"set {key} to one of {legal}"
        )
    if not _kv_heads_fit(spec, tensor):
        yield (
            f"{key}={tensor}: the {role} has {spec.num_kv_heads} key-value heads, which must be a multiple or a divisor of {tensor}; "
            f"set {key} to one of {legal}"
        )


def tensor_parallel_divides_ffn(role: str, spec: ModelSpec, tensor: int | str, key: str) -> Violations:
    if spec.num_experts and key == "parallel.tensor":
        return  # the trainer cuts experts by parallel.expert_tensor
    ffn_size = spec.expert_ffn_size or spec.ffn_size
    if isinstance(tensor, int) and ffn_size % tensor:
        nearest = max(size for size in divisors(ffn_size) if size < tensor)
        yield (
            f"{key}={tensor}: the {role} has feed-forward layers of {ffn_size}, which must divide among {tensor} ranks; "
            f"set {key} to a divisor of {ffn_size}, such as {nearest}"
        )


def pipeline_divides_layers(role: str, spec: ModelSpec, config: Config) -> Violations:
    pipeline, virtual = config.parallel.pipeline, config.parallel.virtual_pipeline
    if pipeline != "auto" and spec.num_layers % (pipeline * virtual):
        legal = [size for size in divisors(spec.num_layers) if spec.num_layers % (size * virtual) == 0]
        fix = f"set parallel.pipeline to one of {_listed(legal)}" if legal else "set parallel.virtual_pipeline=1"
        yield (
            f"parallel.pipeline={pipeline} x parallel.virtual_pipeline={virtual}: the {role} has {spec.num_layers} layers, "
            f"which must divide among {pipeline * virtual} chunks; {fix}"
        )


def the_sequence_fits_the_positions(role: str, spec: ModelSpec, config: Config) -> Violations:
    if _longest(config) > spec.max_positions:
        yield (
            f"{_longest_in_words(config)}: the {role} has {spec.max_positions} positions; make the two sum to {spec.max_positions} or less"
        )


def the_engine_divides_its_vocabulary(spec: ModelSpec, tensor: int | str) -> Violations:
    padded = -(-spec.vocab_size // 64) * 64
    if isinstance(tensor, int) and padded % tensor:
        nearest = max(size for size in divisors(padded) if size < tensor)
        yield (
            f"rollout.tensor={tensor}: vLLM pads the vocabulary of {spec.vocab_size} to {padded} rows, which must divide among {tensor} "
            f"ranks; set rollout.tensor to a divisor of {padded}, such as {nearest}"
        )


def mini_batches_use_every_sample(config: Config, batches: Batches) -> Violations:
    mini, samples = batches.mini_batch_size, config.data.train_batch_size * batches.kept_per_prompt
    if mini is not None and samples % mini:
        sizes = divisors(samples)
        below, above = [size for size in sizes if size < mini], [size for size in sizes if size > mini]
        near = " or ".join(str(size) for size in [*below[-1:], *above[:1]])
        yield (
            f"algorithm.mini_batch_size={mini} samples: a step trains {config.data.train_batch_size} prompts (data.train_batch_size) x "
            f"{batches.kept_per_prompt} responses = {samples} samples, which must divide into mini-batches, and {samples} = "
            f"{samples // mini} x {mini} + {samples % mini}; set algorithm.mini_batch_size={near}"
        )


def group_sizes_cover_every_prompt(config: Config, batches: Batches) -> Violations:
    covered, longest = batches.longest_prompt, config.data.max_prompt_length
    if covered is not None and covered < longest:
        yield (
            f"algorithm.group_size has sizes for prompts of up to {covered} tokens, and data.max_prompt_length={longest} lets longer ones "
            f"in; give a size for {longest} too, or set data.max_prompt_length={covered}"
        )


def _kv_heads_fit(spec: ModelSpec, tensor: int) -> bool:
    return spec.num_kv_heads % tensor == 0 or tensor % spec.num_kv_heads == 0


def _longest(config: Config) -> int:
    return config.data.max_prompt_length + config.rollout.max_response_length


def _longest_in_words(config: Config) -> str:
    return (
        f"data.max_prompt_length={config.data.max_prompt_length} + rollout.max_response_length={config.rollout.max_response_length} "
        f"= {_longest(config)} tokens"
    )


def _listed(numbers: list[int]) -> str:
    return ", ".join(str(number) for number in numbers)
