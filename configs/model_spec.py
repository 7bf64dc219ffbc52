"""The facts of a decoder-only model that layouts, builders and rules need, free of any framework."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Activation = Literal["silu", "gelu_tanh"]
"""Of the gate of the feed-forward layers; `gelu_tanh` is the tanh approximation of GELU (arXiv 1606.08415, section 2)."""


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """Shape of one decoder-only transformer. Sizes count elements, never bytes. Made by `weights.families.spec_from_hf`."""

    family: str
    """Name of the file in `weights/families/` that lists the tensors."""
    hf_type: str
    """`model_type` of the Hugging Face config."""
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    """Size of one attention head; need not be hidden_size / num_heads."""
    ffn_size: int
    vocab_size: int
    """Rows of the embedding as Hugging Face stores it, without any padding."""
    max_positions: int
    tied: bool
    """Whether the output projection shares the embedding's storage; decided by the config alone."""
    qkv_bias: bool
    qk_norm: bool
    """RMSNorm of size head_dim on queries and keys (Qwen3)."""
    norm_eps: float
    norm_offset: bool = False
    """Norm gains are stored as their offset from 1 (Gemma)."""
    activation: Activation = "silu"
    scaled_embedding: bool = False
    """Embeddings are multiplied by sqrt(hidden_size), rounded to their data type, before the first layer (Gemma)."""
    num_experts: int = 0
    """Feed-forward networks of each layer, of which a router picks some for each token; 0: one, for all tokens."""
    experts_per_token: int = 0
    expert_ffn_size: int = 0
    normalized_routing: bool = False
    """The weights of a token's chosen experts are made to sum to 1."""
    rope: Mapping[str, Any] = field(default_factory=dict)
    """`rope_parameters` in transformers 5 form: `rope_type`, `rope_theta` and the scaling fields."""
    dtype: str = "float32"
    """Data type of the stored weights (`float32`, `bfloat16`, `float16`)."""
