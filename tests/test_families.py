"""Reading config.json: both generations of transformers, and everything that must be refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from weight_worlds import LLAMA3_ROPE

from tridentrl.parallel.model import ACTIVATIONS
from tridentrl.weights.families import BY_MODEL_TYPE, spec_from_hf
from tridentrl.weights.families.rope import both_forms

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}
SCALING = {key: value for key, value in LLAMA3_ROPE.items() if key != "rope_theta"}


def llama(**changes: Any) -> dict[str, Any]:
    return LLAMA | changes


@pytest.mark.parametrize("name", ["Gemma", "Llama", "Mistral", "Phi3", "Qwen2", "Qwen3"])
def test_the_spec_agrees_with_transformers(name: str) -> None:
    other = {"Gemma": {"hidden_act": "gelu_pytorch_tanh"}, "Phi3": {"pad_token_id": 0}}.get(name, {})
    sizes = {k: v for k, v in LLAMA.items() if k != "model_type"}
    config = getattr(transformers, name + "Config")(**sizes | other, tie_word_embeddings=True, dtype="bfloat16")
    spec = spec_from_hf(config.to_dict())
    model = getattr(transformers, name + "ForCausalLM")(config).model
    layer = model.layers[0].self_attn
    assert (spec.hf_type, spec.num_layers, spec.tied, spec.dtype) == (config.model_type, 2, True, "bfloat16")
    assert spec.head_dim == layer.head_dim
    assert spec.qkv_bias == (getattr(layer, "q_proj", getattr(layer, "qkv_proj", None)).bias is not None)
    assert spec.qk_norm == hasattr(layer, "q_norm")
    assert spec.norm_eps == config.rms_norm_eps == 1e-5
    # A fresh gain is 1: stored as such, or as an offset of 0.
    assert spec.norm_offset == (model.norm.weight.sum() == 0)
    x = torch.linspace(-3, 3, 20)
    activation = getattr(model.layers[0].mlp, "act_fn", getattr(model.layers[0].mlp, "activation_fn", None))
    assert torch.equal(activation(x), ACTIVATIONS[spec.activation](x))
    one = torch.tensor([[1]])
    assert torch.equal(model.embed_tokens(one), model.embed_tokens.weight[one] * (32**0.5 if spec.scaled_embedding else 1))


def test_both_rope_forms_mean_the_same() -> None:
    new = spec_from_hf(llama(rope_parameters={"rope_type": "default", "rope_theta": 500000}))
    old = spec_from_hf(llama(rope_theta=500000.0))
    assert new.rope == old.rope == {"rope_type": "default", "rope_theta": 500000.0}
    assert spec_from_hf(llama(rope_theta=5e5, rope_parameters={"rope_type": "default", "rope_theta": 5e5})).rope == new.rope
    assert spec_from_hf(llama()).rope["rope_theta"] == 10000.0


@pytest.mark.parametrize(
    "form",
    [
        {"rope_parameters": LLAMA3_ROPE},
        {"rope_theta": 500000.0, "rope_scaling": SCALING},
        {"rope_theta": 500000.0, "rope_scaling": {("type" if k == "rope_type" else k): v for k, v in SCALING.items()}},
        {"rope_theta": 500000.0, "rope_scaling": SCALING, "rope_parameters": LLAMA3_ROPE},
        {"rope_scaling": SCALING, "rope_parameters": LLAMA3_ROPE},
    ],
)
def test_llama3_scaling_keeps_every_field_in_every_form(form: dict[str, Any]) -> None:
    spec = spec_from_hf(llama(**form))
    assert spec.rope == LLAMA3_ROPE
    # What we write, transformers 5 turns into the same frequencies.
    want, got = (transformers.LlamaConfig(**llama(**settings)) for settings in ({"rope_parameters": LLAMA3_ROPE}, both_forms(spec.rope)))
    frequencies = [ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))[0] for config in (want, got)]
    assert torch.equal(*frequencies)


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ({"rope_theta": 10000.0, "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}, ["rope_theta", "10000", "500000"]),
        ({"rope_scaling": SCALING | {"factor": 4.0}, "rope_parameters": LLAMA3_ROPE}, ["factor", "4.0", "8.0"]),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}}, ["yarn", "default, llama3"]),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, ["linear"]),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e6, "factor": 8.0}}, ["low_freq_factor", "high_freq_factor"]),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, ["one block per kind of layer", "full_attention"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor=0.5"]),
    ],
)
def test_rope_settings_that_disagree_or_are_unknown_are_refused(form: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValueError) as error:
        spec_from_hf(llama(**form))
    assert all(word in str(error.value) for word in words), str(error.value)


def test_an_unknown_model_type_lists_the_known_ones_and_the_way_to_add_one() -> None:
    for model_type in ("gpt2", None):
        with pytest.raises(ValueError, match=r"docs/adding_a_family\.md") as error:
            spec_from_hf({"model_type": model_type})
        assert all(word in str(error.value) for word in [repr(model_type), *BY_MODEL_TYPE])


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (llama(attention_bias=True), ["attention_bias=true", "o_proj"]),
        (llama(mlp_bias=True), ["mlp_bias=true"]),
        (llama(hidden_act="gelu"), ["hidden_act='gelu'", "silu"]),
        (llama(quantization_config={"bits": 4}), ["quantization_config"]),
        (llama(num_key_value_heads=3), ["num_attention_heads=4", "num_key_value_heads=3"]),
        (llama(hidden_size=30), ["hidden_size=30", "head_dim"]),
        (llama(vocab_size=None), ["vocab_size", "None"]),
        (llama(model_type="qwen2", use_sliding_window=True), ["use_sliding_window=true"]),
        (llama(model_type="qwen3", layer_types=["full_attention", "sliding_attention"]), ["sliding_attention"]),
        (llama(model_type="qwen3", attention_bias=True), ["attention_bias=true"]),
        (llama(model_type="gemma", hidden_activation="gelu"), ["hidden_activation='gelu'"]),
        (llama(model_type="gemma", hidden_act="gelu", use_bidirectional_attention=True), ["use_bidirectional_attention=true"]),
        (llama(model_type="phi3", rope_scaling={"type": "longrope", "long_factor": [1.0], "short_factor": [1.0]}), ["longrope"]),
        (llama(model_type="phi3", partial_rotary_factor=0.75), ["partial_rotary_factor=0.75"]),
        (llama(model_type="qwen3_moe", mlp_only_layers=[1]), ["mlp_only_layers=[1]"]),
        (llama(model_type="qwen3_moe", decoder_sparse_step=2), ["decoder_sparse_step=2"]),
        (llama(model_type="qwen3_moe", num_experts=4, num_experts_per_tok=8), ["num_experts_per_tok=8", "num_experts=4"]),
        (llama(model_type="qwen3_moe", num_experts=4, num_local_experts=8), ["num_experts=4", "num_local_experts=8", "disagree"]),
        (llama(dtype="int8"), ["int8", "bfloat16"]),
        (llama(dtype="float32", torch_dtype="bfloat16"), ["float32", "bfloat16", "disagree"]),
    ],
)
def test_features_that_cannot_be_trained_are_refused_by_name(config: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValueError) as error:
        spec_from_hf(config)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_all_refusals_come_at_once() -> None:
    with pytest.raises(ValueError, match=r"hidden_act.*attention_bias.*mlp_bias"):
        spec_from_hf(llama(hidden_act="gelu", attention_bias=True, mlp_bias=True))


@pytest.mark.parametrize(("window", "positions"), [(None, 64), (16, 16), (4096, 64)])
@pytest.mark.parametrize("model_type", ["mistral", "phi3"])
def test_a_model_with_one_window_is_used_within_it(model_type: str, window: int | None, positions: int) -> None:
    assert spec_from_hf(llama(model_type=model_type, sliding_window=window)).max_positions == positions


def test_the_first_gemma_configs_mean_tanh_gelu_and_a_tied_head() -> None:
    config = {key: value for key, value in LLAMA.items() if key != "hidden_act"} | {"model_type": "gemma"}
    for form in ({}, {"hidden_act": "gelu"}, {"hidden_act": "gelu", "hidden_activation": None}, {"hidden_activation": "gelu_pytorch_tanh"}):
        spec = spec_from_hf(config | form)
        assert (spec.activation, spec.tied, spec.head_dim, spec.norm_offset, spec.scaled_embedding) == ("gelu_tanh", True, 256, True, True)


def test_experts_are_counted_under_the_names_of_both_generations() -> None:
    given = {"model_type": "qwen3_moe", "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
    sizes = {key: value for key, value in LLAMA.items() if key != "model_type"}
    new = transformers.Qwen3MoeConfig(**sizes, num_experts=6, **{k: v for k, v in given.items() if k != "model_type"}).to_dict()
    assert "num_experts" not in new
    for form in (new, llama(**given, num_experts=6), llama(**given, num_experts=6, num_local_experts=6)):
        spec = spec_from_hf(form)
        assert (spec.num_experts, spec.experts_per_token, spec.expert_ffn_size, spec.normalized_routing) == (6, 2, 24, True)
    bare, default = spec_from_hf(llama(model_type="qwen3_moe")), transformers.Qwen3MoeConfig()
    expected = (default.num_experts, default.num_experts_per_tok, default.moe_intermediate_size, default.norm_topk_prob)
    assert (bare.num_experts, bare.experts_per_token, bare.expert_ffn_size, bare.normalized_routing) == expected


def test_old_configs_that_leave_keys_out() -> None:
    config = {key: value for key, value in LLAMA.items() if key not in ("num_key_value_heads", "hidden_act", "rms_norm_eps")}
    spec = spec_from_hf(config | {"torch_dtype": "float16"})
    assert (spec.num_kv_heads, spec.head_dim, spec.norm_eps, spec.tied, spec.dtype) == (4, 8, 1e-6, False, "float16")
    assert spec_from_hf({**LLAMA, "model_type": "qwen3"}).head_dim == 128
    assert spec_from_hf(llama(head_dim=None)).head_dim == 8
