"""Every setting there is, with its type, unit and default. A string below a field documents it (the docs site is made from them).

All sections are frozen: a value changes only by loading another configuration. Numbers carry their legal range in the type.
Where a field takes a list, one string alone is a list of one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt, MinLen

Count = Annotated[int, Ge(1)]
"""How many of something that cannot be absent."""
Index = Annotated[int, Ge(0)]
"""An integer that may be zero."""
Positive = Annotated[float, Gt(0)]
NotNegative = Annotated[float, Ge(0)]
Share = Annotated[float, Ge(0), Le(1)]
"""A fraction between 0 and 1, both included."""
Text = Annotated[str, MinLen(1)]
"""A string that is not empty."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Files, columns and batches."""

    train_files: Annotated[tuple[Text, ...], MinLen(1)]
    """Required. Paths of `.arrow`, `.parquet`, `.jsonl` or `.json` files; their rows follow each other in this order."""
    val_files: tuple[Text, ...] = ()
    """Held-out files for evaluation; empty: no evaluation, but for `val_share`."""
    val_share: Annotated[float, Ge(0), Lt(1)] = 0.0
    """Share of the training rows, chosen by `seed`, that is held out for evaluation where there are no `val_files`."""
    prompt_key: Text = "prompt"
    """Column with the prompt: a string, or a list of chat messages."""
    reward_fn_key: Text = "data_source"
    """Column that says which reward scores the row. Only under this default name may files lack it; the data source is then `default`."""
    answer_key: Text | None = None
    """Column with the ground truth; null: `reward_model.ground_truth` where the files have it, else rows have none."""
    response_key: Text | None = None
    """Column with the response to imitate (a string), for supervised algorithms."""
    chosen_key: Text | None = None
    """Column with the better response of a pair, for algorithms that learn from preferences: a string, a list with the assistant's message,
    or the whole conversation, which then holds the prompt too."""
    rejected_key: Text | None = None
    """Column with the worse one."""
    max_prompt_length: Count = 512
    """Tokens of the prompt after the chat template. Holds common math and code prompts."""
    truncation: Literal["error", "filter", "left", "right"] = "error"
    """A longer prompt: error at load, drop and count the row, cut its left or its right end. Error, because a cut prompt may be unsolvable.
    A response that a file brings and that is too long is an error, dropped, or cut at its right end for left and right alike."""
    train_batch_size: Count = 32
    """Prompts (not responses) per step, over all ranks."""
    val_batch_size: Count | None = None
    """Prompts per evaluation batch; null: all rows at once, the engine queues them itself."""
    val_max_rows: Count | None = None
    """Evaluate only the first so many rows; null: all."""
    shuffle: bool = True
    """New order of the training rows in every epoch, from (seed, epoch) alone."""
    drop_last: bool = True
    """Leave out the rows at the end of an epoch that do not fill a batch (they are counted). Every step then weighs the same."""
    apply_chat_template: Literal["auto"] | bool = "auto"
    """auto: chat lists go through the tokenizer's template, strings are taken as they are. true: a string becomes one user message first.
    false: strings only."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Where models come from: a folder or a hub name."""

    actor_pretrained_model_name_or_path: Text
    """Required. The policy to train."""
    critic_pretrained_model_name_or_path: Text | None = None
    """Body of the critic; null: the actor's. Its value head starts fresh."""
    cost_critic_pretrained_model_name_or_path: Text | None = None
    """Body of the critic of costs; null: the actor's."""
    reference_pretrained_model_name_or_path: Text | None = None
    """The frozen model that KL is measured to; null: the actor as it was at the start."""
    reward_model_pretrained_model_name_or_path: Text | None = None
    """Body of the reward model that `reward_model` and `distill_rm` train; null: the actor's. A head that it has is kept."""
    teacher_pretrained_model_name_or_path: Text | None = None
    """The frozen reward model that `distill_rm` learns from, which needs it."""
    tokenizer_name_or_path: Text | None = None
    """null: the actor's."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Off, because it may do anything."""


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Training layout. The data-parallel size is what the others leave: world / (tensor x pipeline x context)."""

    tensor: Count | Literal["auto"] = "auto"
    """Ranks that share each matrix. auto: the smallest legal layout."""
    pipeline: Count | Literal["auto"] = "auto"
    """Stages of consecutive layers."""
    virtual_pipeline: Count = 1
    """Model chunks per stage (interleaved schedule); 1: no interleaving. Smaller bubble, more messages."""
    context: Count = 1
    """Ranks that share each sequence. Only 1 is supported yet."""
    expert: Count = 1
    """Ranks, or groups of `expert_tensor` ranks, that share the experts of a layer, among the tensor x context x data ranks of a stage."""
    expert_tensor: Count = 1
    """Ranks that share each matrix of an expert; 1: every expert is whole on its rank, which moves the fewest tokens. May differ from
    `tensor`."""
    sequence_parallel: Literal["auto"] | bool = "auto"
    """Split activations between the tensor-parallel matrices along the sequence too. auto: on when tensor > 1, for its memory."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations computed again in the backward pass: none, attention only, or every layer."""
    offload: Literal["auto", "none", "optimizer", "all"] = "auto"
    """What of a model is in host memory while it has nothing to do: gradients and optimizer state, or its weights too. auto: optimizer on
    GPU, where the rollout engine needs the room; none on CPU."""


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """Generation."""

    backend: Literal["vllm", "hf"] = "vllm"
    """`hf` is plain transformers: slow, for comparison and for machines without vLLM."""
    tensor: Count | Literal["auto"] = "auto"
    """Ranks that share one engine; world / tensor engines run. auto: the smallest legal size, for the most engines."""
    max_response_length: Count = 256
    """Tokens generated at most per response, the end-of-sequence token included."""
    temperature: NotNegative = 1.0
    """Of sampling for training and of the trainer's log-probabilities. 1: the policy itself."""
    top_p: Annotated[float, Gt(0), Le(1)] = 1.0
    """Nucleus sampling. Training needs 1."""
    top_k: Annotated[int, Ge(-1)] = -1
    """Sample among the k likeliest tokens; -1 or 0: all. Training needs all."""
    stop: tuple[Text, ...] = ()
    """Strings that end a response, besides the model's end-of-sequence ids."""
    ignore_eos: bool = False
    """Always generate `max_response_length` tokens. For benchmarks."""
    gpu_memory_utilization: Annotated[float, Gt(0), Lt(1)] = 0.6
    """Share of GPU memory for the engine's weights and cache. Leaves room for the training state beside it."""
    sleep_level: Literal["auto", 0, 1, 2] = "auto"
    """What vLLM gives back while the trainer works: 0 nothing, 1 the cache, and its weights to host memory, 2 both, the weights are sent
    anew. auto: 2 on GPU, 0 on CPU."""
    max_num_seqs: Count = 256
    """Sequences an engine decodes at once. The engine's own default."""
    enforce_eager: Literal["auto"] | bool = "auto"
    """Run without CUDA graphs and compilation. auto: true on CPU, false on GPU."""
    prefix_caching: bool = True
    """Prefill a prompt once for all its samples."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Of the engine's weights. auto: as the trainer computes, float32 or bfloat16 by `trainer.precision`."""
    val_temperature: NotNegative = 0.0
    """Of sampling for evaluation; 0: greedy, so that two evaluations compare."""
    checksum_syncs: Index = 2
    """How many of the first weight syncs are proved by checksum. Two: the first load and the first update."""
    bucket_mb: Count = 256
    """Bound on the buffer of one weight exchange, MiB per rank."""


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW and its learning-rate schedule."""

    lr: Positive = 1e-6
    """Peak learning rate of the actor. Usual for RL on a pretrained model."""
    critic_lr: Positive = 1e-5
    """Peak learning rate of the critic. Higher: its head starts from nothing."""
    betas: tuple[Annotated[float, Ge(0), Lt(1)], Annotated[float, Ge(0), Lt(1)]] = (0.9, 0.999)
    """Decay of the first and second moment. Adam's own defaults."""
    eps: Positive = 1e-8
    """Added to the root of the second moment. Adam's own default."""
    weight_decay: NotNegative = 0.01
    """Decoupled weight decay, of matrices only: Megatron-Core leaves out biases and norms. AdamW's own default."""
    warmup_steps: Index = 0
    """Optimizer steps over which the rate rises linearly from 0."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Course of the rate after the warm-up, down to `min_lr_ratio` at the last step."""
    min_lr_ratio: Share = 0.0
    """Final rate as a share of the peak, for linear and cosine."""


@dataclass(frozen=True, kw_only=True)
class SchedulePoint:
    """An entry of `algorithm.schedule`."""

    at: Index
    """The algorithm takes over after so many steps."""
    name: Text
    """Name in the registry."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Its own settings."""


@dataclass(frozen=True, kw_only=True)
class TaskAlgorithm:
    """A value of `algorithm.tasks`."""

    name: Text
    """Name in the registry."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Its own settings."""


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig:
    """Which algorithm runs. Every other key under `algorithm` is one of its own settings, checked against its typed Config."""

    name: Text = "grpo"
    """Name in the registry. GRPO needs no critic, so it is the lightest."""
    path: Text | None = None
    """Python file to import first, for an algorithm of your own."""
    schedule: tuple[Mapping[str, Any], ...] = ()
    """Algorithms that take over from one another, a list of `{at: 500, name: grpo, config: {...}}`: `at` is the number of steps before. An
    entry at 0 stands in place of `algorithm.name`."""
    tasks: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Algorithms of single data sources, `{math: {name: grpo, config: {...}}}`; rows of other sources are trained by `algorithm.name`."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Not a key: the further keys, as they were written."""
    origins: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    """Not a key: where each further key was written, for `typed(..., origins=...)`."""


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """The run."""

    total_steps: Count | None = 100
    """Steps (one batch of prompts each) to run at most; null: `epochs` decides."""
    epochs: Count | None = None
    """Passes over the training rows at most; null: `total_steps` decides. The first limit reached ends the run."""
    eval_interval: Count | None = 20
    """Steps between evaluations; null: only at the start and the end."""
    save_interval: Count | None = 50
    """Steps between saves, each a checkpoint to resume from and a Hugging Face folder; null: only at the end."""
    resume: Text = "auto"
    """auto: go on from the newest complete checkpoint of this run, if it has one. never: start anew, an earlier run of the name is moved
    aside. Else the folder of a checkpoint to go on from. Auto, so that the same command starts a run and continues it."""
    keep_last: Count | None = 2
    """Checkpoints that stay; older ones are deleted once a newer one is safe. null: all. Two, to have one should the newest be damaged."""
    async_save: bool = False
    """Write checkpoints beside training. Costs host memory for a copy of what is saved."""
    eval_at_start: bool = True
    """Evaluate before the first step, to have the baseline."""
    gradient_clip_val: NotNegative = 0.1
    """Bound on the global gradient norm; 0: no clipping. Small, because one odd batch must not move the policy far."""
    kl_coef: NotNegative = 0.001
    """Weight of the KL to the reference."""
    precision: Literal["auto", "fp32", "bf16-mixed"] = "auto"
    """bf16-mixed computes in bfloat16 and keeps float32 master weights. auto: fp32 on CPU, bf16-mixed on GPU."""
    export_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Of the exported Hugging Face folders; auto: as the pretrained model was stored."""
    micro_batch_tokens: Count = 4096
    """Tokens (prompts and responses) of one micro-batch on each data-parallel rank. Changes memory and speed, never a gradient."""
    loggers: tuple[Literal["tensorboard", "jsonl", "wandb"], ...] = ("tensorboard", "jsonl")
    """Where metrics go besides the screen."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda when there is one."""
    log_rollouts: Index | None = None
    """Rows written per evaluation to `rollouts/step_N.jsonl`; null: all."""


@dataclass(frozen=True, kw_only=True)
class CustomFnConfig:
    """A reward function of your own."""

    path: Text | None = None
    """Python file; null: none."""
    name: Text = "compute_score"
    """The function in that file."""


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """What scores a row, and what happens when that fails. `models` goes before `custom_fn`, that before `by_source` and `default`."""

    custom_fn: CustomFnConfig = field(default_factory=CustomFnConfig)
    """Scores every row when its path is given."""
    default: Text | None = None
    """Built-in reward of rows whose data source `by_source` does not list; null: such a row is an error."""
    by_source: Mapping[str, Text] = field(default_factory=dict)
    """Built-in reward by data source."""
    models: Mapping[str, Text] = field(default_factory=dict)
    """Folder or hub name of a sequence classification model with one label that scores a data source, in place of a function. It needs the
    policy's tokenizer, and runs in the training layout."""
    normalize: bool = False
    """Take the running mean off a model's scores and divide by their running standard deviation, for each data source. Training only."""
    clip: tuple[float, float] | None = None
    """Lowest and highest score that training sees; null: as they are."""
    workers: Count = 2
    """Processes per rank that run reward functions."""
    timeout_s: Positive = 30.0
    """Seconds one call may take."""
    on_error: Literal["stop", "exclude"] = "stop"
    """A call that fails or times out: end the run, or leave the sample out of loss and metrics and count it."""
    max_failure_share: Share = 0.1
    """With exclude: a larger share of failed calls in one step ends the run all the same."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """The whole configuration of a run."""

    exp_name: Text = "default"
    """Name of the run; its files lie in `{output_dir}/{exp_name}`."""
    output_dir: Text = "outputs"
    """Folder of all runs."""
    seed: Index = 1
    """Of initial heads, data order and sampling."""
    data: DataConfig
    """Files, columns and batches."""
    model: ModelConfig
    """Where models come from."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """Training layout."""
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    """Generation."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """AdamW and its schedule."""
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    """What is optimised."""
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    """The run."""
    reward: RewardConfig = field(default_factory=RewardConfig)
    """Scoring."""
    cost: RewardConfig = field(default_factory=RewardConfig)
    """Scoring of what must stay low, for algorithms with a constraint. The same keys."""
