"""The registry of model families, by the `model_type` of a Hugging Face config."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tridentrl.configs.model_spec import ModelSpec as ModelSpec  # the type of what this package makes
from tridentrl.weights.families import gemma, llama, mistral, phi3, qwen2, qwen3, qwen3_moe
from tridentrl.weights.families.decoder import Head, Weight
from tridentrl.weights.families.family import Family, HfConfig
from tridentrl.weights.families.rope import rope_parameters

FAMILIES: dict[str, Family] = {module.FAMILY.name: module.FAMILY for module in (gemma, llama, mistral, phi3, qwen2, qwen3, qwen3_moe)}
BY_MODEL_TYPE: dict[str, Family] = {model_type: family for family in FAMILIES.values() for model_type in family.model_types}

DTYPES = ("float32", "bfloat16", "float16")
SIZES = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "num_heads": "num_attention_heads",
    "ffn_size": "intermediate_size",
    "vocab_size": "vocab_size",
}
"""ModelSpec field: config.json key, for the sizes that every config must state."""


def weights_of(spec: ModelSpec, head: Head = "lm") -> list[Weight]:
    """Every tensor of the model with its names and cuts."""
    return FAMILIES[spec.family].weights(spec, head)


def spec_from_hf(hf_config: Mapping[str, Any]) -> ModelSpec:
    """Read a parsed config.json (transformers 4 and 5 forms). Raises one ValueError with everything that cannot be taken."""
    model_type = hf_config.get("model_type")
    family = BY_MODEL_TYPE.get(str(model_type))
    if family is None:
        raise ValueError(
            f"model_type {model_type!r} is not supported; supported: {', '.join(sorted(BY_MODEL_TYPE))}. "
            "docs/adding_a_family.md says how to add one"
        )
    config = {**family.defaults, **hf_config}
    problems = [*_missing_or_wrong_sizes(config), *_common_refusals(config, family), *family.refusals(config)]
    if problems:
        raise ValueError(f"this {model_type} model cannot be used: " + "; ".join(problems))
    heads = int(config["num_attention_heads"])
    sizes: dict[str, Any] = {name: int(config[key]) for name, key in SIZES.items()}
    return ModelSpec(
        family=family.name,
        hf_type=str(model_type),
        **sizes,
        num_kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or config["hidden_size"] // heads),
        max_positions=family.max_positions(config),
        tied=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
        norm_eps=float(config["rms_norm_eps"]),
        norm_offset=family.norm_offset,
        activation=family.activations[config.get("hidden_act", "silu")],
        scaled_embedding=family.scaled_embedding,
        **family.experts(config),
        rope=rope_parameters(config),
        dtype=_dtype(config),
    )


def _missing_or_wrong_sizes(config: HfConfig) -> Iterator[str]:
    missing = [key for key in SIZES.values() if not isinstance(config.get(key), int) or config[key] < 1]
    if missing:
        yield "config.json needs a positive whole number for " + ", ".join(f"{key} (it has {config.get(key)!r})" for key in missing)
        return
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    kv_heads = config.get("num_key_value_heads") or heads
    if heads % kv_heads:
        yield f"num_attention_heads={heads} is not a multiple of num_key_value_heads={kv_heads}"
    if not config.get("head_dim") and hidden % heads:
        yield f"hidden_size={hidden} is not a multiple of num_attention_heads={heads}, and config.json has no head_dim"


def _common_refusals(config: HfConfig, family: Family) -> Iterator[str]:
    activation = config.get("hidden_act", "silu")
    if activation not in family.activations:
        yield f"hidden_act={activation!r} is not an activation of this family ({', '.join(family.activations)})"
    if config.get("quantization_config"):
        yield "quantization_config is set; only float weights can be trained, so dequantize the model and save it again"
    kinds = sorted(set(config.get("layer_types") or ()) - {"full_attention"})
    if kinds:
        yield f"layer_types has {', '.join(kinds)}; only full_attention layers are built here"


def _dtype(config: HfConfig) -> str:
    """The stored data type; `dtype` is transformers 5's name, `torch_dtype` the older one. A config without either means float32."""
    names = {str(config[key]).removeprefix("torch.") for key in ("dtype", "torch_dtype") if config.get(key) is not None}
    if len(names) > 1:
        raise ValueError(f"dtype={config['dtype']!r} and torch_dtype={config['torch_dtype']!r} disagree in config.json; remove one of them")
    name = names.pop() if names else "float32"
    if name not in DTYPES:
        raise ValueError(f"dtype {name!r} in config.json is not one of {', '.join(DTYPES)}; save the model in one of them")
    return name
