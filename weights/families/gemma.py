"""Gemma 1: norm gains stored as their offset from 1, embeddings times sqrt(hidden_size), a tied head, tanh GELU, its own head size."""

from collections.abc import Iterator

from tridentrl.weights.families.family import Family, HfConfig
from tridentrl.weights.families.llama import refuse_lone_biases


def _refusals(config: HfConfig) -> Iterator[str]:
    yield from refuse_lone_biases(config)
    # The first configs said hidden_act=gelu and meant the tanh form; `hidden_activation` was added to say so, and overrides it.
    if config.get("hidden_activation") not in (None, "gelu_pytorch_tanh"):
        yield f"hidden_activation={config['hidden_activation']!r} is not gelu_pytorch_tanh, which Gemma was trained with"
    if config.get("use_bidirectional_attention"):
        yield "use_bidirectional_attention=true lets tokens see later ones; only causal attention is built here"


FAMILY = Family(
    name="gemma",
    model_types=("gemma",),
    defaults={
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 8192,
        "head_dim": 256,
        "num_key_value_heads": 16,
        "hidden_act": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
    },
    norm_offset=True,
    scaled_embedding=True,
    activations={"gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu_tanh"},
    refusals=_refusals,
)
