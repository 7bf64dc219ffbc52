"""Rules between settings and model shapes: which inputs break them, and that all are told at once.

Not covered: that a legal layout fits into memory, and that Megatron-Core and vLLM accept it (tests of the engines).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tridentrl.configs.convert import ConfigError
from tridentrl.configs.layout import describe_batches, resolve_layout
from tridentrl.configs.load import load_config
from tridentrl.configs.model_spec import ModelSpec
from tridentrl.configs.rules import Batches, check, violations
from tridentrl.configs.schema import Config


def spec(**changes: Any) -> ModelSpec:
    sizes = dict(num_layers=4, hidden_size=64, num_heads=8, num_kv_heads=2, head_dim=8, ffn_size=128, vocab_size=97, max_positions=1024)
    return ModelSpec(
        **{"family": "llama", "hf_type": "llama", "tied": False, "qkv_bias": False, "qk_norm": False, "norm_eps": 1e-6, **sizes, **changes}
    )


THIRDS = spec(num_heads=6, num_kv_heads=3, ffn_size=96, vocab_size=192)
"""Divides among three ranks in every way."""


EXPERTS = spec(hf_type="qwen3_moe", num_experts=4, experts_per_token=2, expert_ffn_size=48, ffn_size=50)


def load(*overrides: str) -> Config:
    return load_config(["data.train_files=a", "model.actor_pretrained_model_name_or_path=m", *overrides])


def fixed(*overrides: str) -> Config:
    """A configuration whose sizes are numbers."""
    return load("parallel.tensor=1", "parallel.pipeline=1", "rollout.tensor=1", *overrides)


def broken(*overrides: str, model: ModelSpec | None = None, world: int = 1) -> list[str]:
    return violations(fixed(*overrides), {"actor": model or spec()}, world=world)


def test_the_defaults_break_no_rule() -> None:
    assert broken() == []


@pytest.mark.parametrize(
    ("overrides", "model", "world", "words"),
    [
        (["parallel.tensor=2"], spec(num_heads=25, num_kv_heads=1), 2, "parallel.tensor=2: the actor has 25 attention heads"),
        (["parallel.tensor=4"], spec(ffn_size=10), 4, "feed-forward layers of 10, which must divide among 4 ranks"),
        (["parallel.tensor=2"], spec(num_heads=6, num_kv_heads=3), 2, "3 key-value heads, which must be a multiple or a divisor of 2"),
        (["parallel.pipeline=2"], spec(num_layers=5), 2, "has 5 layers, which must divide among 2 chunks"),
        (["parallel.pipeline=2", "parallel.virtual_pipeline=3"], spec(num_layers=8), 2, "8 layers, which must divide among 6 chunks"),
        (["parallel.virtual_pipeline=2"], None, 1, "parallel.virtual_pipeline=2: stages are split into chunks only"),
        (["parallel.tensor=2", "parallel.pipeline=2"], None, 6, "the 6 processes must be a multiple of that; start 4 or 8 processes"),
        (["parallel.tensor=4"], None, 2, "start 4 processes"),
        (["parallel.expert=2"], None, 2, "parallel.expert=2: the actor is a llama, which has no experts to share"),
        (["parallel.expert=3"], EXPERTS, 3, "4 experts, which must divide among 3 ranks; set parallel.expert to one of 1, 2, 4"),
        (["parallel.expert=4", "parallel.pipeline=2"], EXPERTS, 4, "must fill the 2 ranks of a pipeline stage"),
        (["parallel.expert=2", "parallel.expert_tensor=4"], EXPERTS, 4, "parallel.expert=2 x parallel.expert_tensor=4: groups of 8 ranks"),
        (["parallel.expert_tensor=2"], None, 2, "parallel.expert_tensor=2: the actor is a llama, which has no experts to share"),
        (["parallel.expert_tensor=5"], EXPERTS, 5, "experts of 48, which must divide among 5 ranks; set parallel.expert_tensor to"),
        (["parallel.tensor=2", "parallel.sequence_parallel=false"], EXPERTS, 2, "parallel.sequence_parallel=false: the actor has experts"),
        (["rollout.tensor=32"], spec(num_experts=4, expert_ffn_size=48, num_heads=32), 32, "feed-forward layers of 48"),
        (["rollout.sleep_level=2", "trainer.device=cpu"], None, 1, "rollout.sleep_level=2 with trainer.device=cpu and rollout.backend="),
        (["rollout.sleep_level=1", "rollout.backend=hf"], None, 1, "only vLLM on a GPU can give its memory back; set it to auto or 0"),
        (["parallel.context=2"], None, 2, "parallel.context=2: context parallelism is not supported yet"),
        (["parallel.sequence_parallel=true"], None, 1, "parallel.sequence_parallel=true: it divides the sequence"),
        (["rollout.tensor=3"], THIRDS, 4, "engines of 3 ranks must fill the 4 processes; set rollout.tensor to one of 1, 2, 4"),
        (["rollout.tensor=3"], replace(THIRDS, vocab_size=97), 3, "vLLM pads the vocabulary of 97 to 128 rows, which must divide among 3"),
        (["rollout.tensor=2", "rollout.backend=hf"], None, 2, "rollout.tensor=2: the hf backend holds the whole model on each rank"),
        (["data.max_prompt_length=800"], None, 1, "=800 + rollout.max_response_length=256 = 1056 tokens: the actor has 1024 positions"),
        (["rollout.temperature=0"], None, 1, "rollout.temperature=0.0: greedy decoding explores nothing"),
        (["rollout.top_p=0.7"], None, 1, "rollout.top_p=0.7: the engine would sample from a cut distribution"),
        (["rollout.top_k=20"], None, 1, "rollout.top_k=20: the engine would sample from a cut distribution"),
        (["trainer.micro_batch_tokens=767"], None, 1, "=767: one micro-batch must hold the longest sequence"),
        (["trainer.total_steps=null"], None, 1, "nothing would end the run"),
        (["trainer.total_steps=null", "trainer.epochs=1", "optimizer.schedule=cosine"], None, 1, "the rate falls over"),
        (["data.val_max_rows=3"], None, 1, "there is nothing to evaluate"),
        (["data.val_share=0.1", "data.val_files=b"], None, 1, "data.val_share=0.1: data.val_files are held out already"),
    ],
)  # fmt: skip
def test_one_broken_rule_is_one_text_with_value_rule_and_fix(overrides: list[str], model: ModelSpec | None, world: int, words: str) -> None:
    (text,) = broken(*overrides, model=model, world=world)
    assert words in text and any(fix in text for fix in ("; set ", "; start ", "; make "))


@pytest.mark.parametrize(
    ("overrides", "model", "world"),
    [
        (["parallel.tensor=2", "parallel.expert=2", "parallel.expert_tensor=4"], EXPERTS, 8),
        (["parallel.tensor=4", "parallel.expert=4"], EXPERTS, 4),  # each expert is whole, so 50 rows of it need not divide
        (["parallel.tensor=2"], spec(vocab_size=97), 2),  # Megatron pads the vocabulary
        (["parallel.tensor=8"], spec(num_kv_heads=2), 8),  # more ranks than key-value heads: heads are copied
        (["parallel.tensor=2"], spec(num_heads=8, num_kv_heads=4), 2),
        (["parallel.pipeline=2", "parallel.virtual_pipeline=2"], spec(num_layers=4), 4),
        (["rollout.val_temperature=0"], None, 1),
        (["rollout.top_k=0", "rollout.top_p=1"], None, 1),
        (["trainer.micro_batch_tokens=768"], None, 1),
        (["data.max_prompt_length=768"], None, 1),
    ],
)
def test_what_looks_odd_and_is_legal_passes(overrides: list[str], model: ModelSpec | None, world: int) -> None:
    assert broken(*overrides, model=model, world=world) == []


def test_all_violations_of_trainer_critic_reference_and_engine_come_in_one_error() -> None:
    config = fixed("parallel.tensor=2", "parallel.pipeline=2", "rollout.tensor=3", "rollout.temperature=0")
    models = {"actor": spec(num_heads=25, num_kv_heads=25), "critic": spec(num_layers=5), "reference": spec(ffn_size=11)}
    with pytest.raises(ConfigError) as caught:
        check(config, models, world=4, batches=Batches(samples_per_prompt=2, mini_batch_size=5))
    expected = [
        "rollout.tensor=3: engines of 3 ranks",
        "rollout.temperature=0.0",
        "the actor has 25 attention heads",
        "the actor has 25 key-value heads",
        "the critic has 5 layers",
        "the reference has feed-forward layers of 11",
        "the rollout engine has 25 attention heads",
        "the rollout engine has 25 key-value heads",
        "the rollout engine has feed-forward layers of 128",
        "vLLM pads the vocabulary of 97",
        "algorithm.mini_batch_size=5",
    ]
    assert len(caught.value.problems) == len(expected)
    for words, problem in zip(expected, caught.value.problems, strict=True):
        assert words in problem and problem in str(caught.value)


@pytest.mark.parametrize(
    ("prompts", "samples_per_prompt", "mini", "words"),
    [
        (6, 4, 4, None),
        (6, 4, None, None),
        (6, 1, 3, None),
        (6, 4, 5, "24 = 4 x 5 + 4; set algorithm.mini_batch_size=4 or 6"),
        (6, 1, 8, "6 = 0 x 8 + 6; set algorithm.mini_batch_size=6"),
        (7, 1, 2, "7 = 3 x 2 + 1; set algorithm.mini_batch_size=1 or 7"),
    ],
)  # fmt: skip
def test_mini_batches_use_every_sample_that_was_rolled_out(
    prompts: int, samples_per_prompt: int, mini: int | None, words: str | None
) -> None:
    config = fixed(f"data.train_batch_size={prompts}")
    found = violations(config, {}, world=2, batches=Batches(samples_per_prompt=samples_per_prompt, mini_batch_size=mini))
    assert len(found) == (0 if words is None else 1) and (words is None or words in found[0])


def test_the_start_log_states_prompts_responses_steps_and_accumulation() -> None:
    config = fixed(
        "data.train_batch_size=6", "data.max_prompt_length=60", "rollout.max_response_length=40", "trainer.micro_batch_tokens=110"
    )
    text = describe_batches(config, Batches(samples_per_prompt=4, mini_batch_size=12, update_epochs=2), world=2)
    # 12 responses on 2 ranks are 6 each, one at a time in 110 tokens.
    assert text == (
        "each step: 6 prompts x 4 = 24 responses; 4 optimizer steps of 12 responses (2 epochs) over 2 data-parallel ranks, "
        "each accumulated from 6 micro-batches a rank if all sequences have the longest 100 tokens"
    )
    text = describe_batches(config, Batches(samples_per_prompt=4, trained_per_prompt=2), world=1)
    assert "24 responses, 12 of them trained; 1 optimizer step of 12 responses over 1 data-parallel rank" in text


def test_auto_becomes_the_smallest_legal_layout() -> None:
    config = resolve_layout(load(), {"actor": spec()}, world=4, device="cpu")
    assert (config.parallel.tensor, config.parallel.pipeline, config.rollout.tensor, config.parallel.sequence_parallel) == (1, 1, 1, False)
    assert (config.trainer.precision, config.trainer.device, config.rollout.dtype, config.rollout.enforce_eager) == (
        "fp32",
        "cpu",
        "float32",
        True,
    )
    assert (config.parallel.offload, config.rollout.sleep_level) == ("none", 0)
    # Chunks need two stages, and ten layers in five chunks a stage leave one layer each.
    config = resolve_layout(load("parallel.virtual_pipeline=5"), {"actor": spec(num_layers=10)}, world=4, device="cuda")
    assert (config.parallel.tensor, config.parallel.pipeline) == (1, 2)
    assert (config.trainer.precision, config.rollout.dtype, config.rollout.enforce_eager) == ("bf16-mixed", "bfloat16", False)
    assert (config.parallel.offload, config.rollout.sleep_level) == ("optimizer", 2)
    hf = resolve_layout(load("rollout.backend=hf"), {"actor": spec()}, world=1, device="cuda")
    assert (hf.parallel.offload, hf.rollout.sleep_level) == ("optimizer", 0)


def test_what_is_set_stays_and_the_rest_fits_to_it() -> None:
    config = resolve_layout(
        load("parallel.tensor=2", "rollout.tensor=4", "trainer.precision=fp32"), {"actor": spec()}, world=4, device="cuda"
    )
    assert (config.parallel.tensor, config.parallel.pipeline, config.rollout.tensor) == (2, 1, 4)
    assert config.parallel.sequence_parallel is True and config.rollout.dtype == "float32"
    assert resolve_layout(config, {"actor": spec()}, world=4, device="cuda") == config


def test_no_legal_layout_is_an_error_with_every_reason() -> None:
    with pytest.raises(ConfigError, match="has 25 attention heads") as caught:
        resolve_layout(load("parallel.tensor=2", "rollout.top_k=5"), {"actor": spec(num_heads=25, num_kv_heads=5)}, world=2, device="cpu")
    assert len(caught.value.problems) == 3  # heads, key-value heads, top_k


def test_rules_about_models_hold_for_each_role_alone() -> None:
    config = fixed("parallel.tensor=2", "rollout.tensor=1")
    odd = replace(spec(), num_heads=5, num_kv_heads=5)
    assert violations(config, {"critic": odd}, world=2)[0].startswith("parallel.tensor=2: the critic has 5 attention heads")
    assert violations(config, {"actor": spec(), "reference": odd}, world=2)[0].startswith("parallel.tensor=2: the reference has 5")


def test_a_prompt_without_a_group_size_is_refused_before_the_run() -> None:
    config = load("data.max_prompt_length=1024")
    assert violations(config, {}, world=1, batches=Batches(longest_prompt=1024)) == []
    (found,) = violations(config, {}, world=1, batches=Batches(longest_prompt=256))
    assert "prompts of up to 256 tokens, and data.max_prompt_length=1024 lets longer ones in; give a size for 1024 too" in found
