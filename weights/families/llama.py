"""Llama 2 and 3, SmolLM2 and everything else that says `model_type: llama`."""

from collections.abc import Iterator

from tridentrl.weights.families.family import Family, HfConfig


def refuse_lone_biases(config: HfConfig) -> Iterator[str]:
    """Megatron-Core has biases on every linear layer, on the fused qkv alone, or on none."""
    for key, where in (("attention_bias", "attention's o_proj"), ("mlp_bias", "the MLP")):
        if config.get(key):
            yield f"{key}=true puts a bias on {where}; Megatron-Core has biases on all linear layers, on qkv alone, or on none"


FAMILY = Family(
    name="llama", model_types=("llama",), defaults={"rms_norm_eps": 1e-6, "max_position_embeddings": 2048}, refusals=refuse_lone_biases
)
