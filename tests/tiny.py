"""Tiny random Hugging Face models in fp32, one per family, with every weight far from its neighbours' values and from zero."""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from typing import Any

import torch
import transformers

from tridentrl.configs.model_spec import ModelSpec
from tridentrl.weights.families import spec_from_hf
from tridentrl.weights.hf_io import read_config

BASE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"tie_word_embeddings": False}),
    "llama3": ("Llama", {"tie_word_embeddings": True, "rope_parameters": LLAMA3_ROPE}),
    "mistral": ("Mistral", {"sliding_window": None, "tie_word_embeddings": False}),
    "gemma": ("Gemma", {"head_dim": 32}),
    "phi3": ("Phi3", {}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3_moe": (
        "Qwen3Moe",
        {
            "head_dim": 32,
            "tie_word_embeddings": False,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "norm_topk_prob": True,
        },
    ),
    "qwen3": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": False}),
}


@functools.cache
def tiny_folder(kind: str, **changes: Any) -> str:
    """A folder with the model of `kind`, the same in every test run; `changes` go into its config. Call it before ranks are forked."""
    name, extra = KINDS[kind]
    torch.manual_seed(sum(map(ord, kind)))
    config = getattr(transformers, f"{name}Config")(**{**BASE, **extra, **changes})
    model = getattr(transformers, f"{name}ForCausalLM")(config).float()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            if "norm" in parameter_name:
                parameter.copy_(0.1 * noise + (kind != "gemma"))
            else:
                parameter.copy_((0.3 if "bias" in parameter_name else 0.08) * noise)
    folder = tempfile.mkdtemp(prefix=f"tiny-{kind}-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    model.save_pretrained(folder)
    return folder


def tiny_spec(folder: str) -> ModelSpec:
    return spec_from_hf(read_config(folder))


def tiny_model(folder: str, dtype: torch.dtype = torch.float32) -> Any:
    """The same model in transformers."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()
    if model.config.model_type == "qwen3_moe":
        model.set_experts_implementation("eager")  # the default's grouped product has no float64
    return model
