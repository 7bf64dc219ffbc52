"""Qwen3 (dense): RMSNorm on every query and key head, a head size of its own, no biases."""

from collections.abc import Iterator

from tridentrl.weights.families.family import Family, HfConfig
from tridentrl.weights.families.llama import refuse_lone_biases
from tridentrl.weights.families.qwen2 import refuse_sliding_window


def refuse_unlike_layers(config: HfConfig) -> Iterator[str]:
    """What neither the dense model nor the one with experts may have."""
    yield from refuse_lone_biases(config)
    yield from refuse_sliding_window(config)


FAMILY = Family(
    name="qwen3",
    model_types=("qwen3",),
    defaults={"rms_norm_eps": 1e-6, "max_position_embeddings": 32768, "head_dim": 128},
    qk_norm=True,
    refusals=refuse_unlike_layers,
)
