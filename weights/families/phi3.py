"""Phi-3 and Phi-4: query, key and value are stored as one tensor, gate and up projection too."""

from dataclasses import replace

from tridentrl.configs.model_spec import ModelSpec
from tridentrl.weights.cuts import GateUp, QkvSlot
from tridentrl.weights.families.decoder import Head, Weight, decoder_weights
from tridentrl.weights.families.family import Family
from tridentrl.weights.families.mistral import positions_within_window


def _weights(spec: ModelSpec, head: Head) -> list[Weight]:
    return [_fused(weight, spec) for weight in decoder_weights(spec, head)]


def _fused(weight: Weight, spec: ModelSpec) -> Weight:
    """Rows [q | k | v] of `qkv_proj`, rows [gate | up] of `gate_up_proj`: the names, and the order, that vLLM has too."""
    if isinstance(weight.cut, QkvSlot):
        q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        assert weight.vllm
        return replace(weight, hf=weight.vllm, hf_row={"q": 0, "k": q, "v": q + kv}[weight.cut.slot])
    if isinstance(weight.cut, GateUp):
        assert weight.vllm
        return replace(weight, hf=weight.vllm, hf_row=weight.cut.slot * spec.ffn_size)
    return weight


FAMILY = Family(
    name="phi3",
    model_types=("phi3",),
    defaults={"rms_norm_eps": 1e-5, "max_position_embeddings": 4096},
    max_positions=positions_within_window,
    weights=_weights,
)
