"""Qwen3 (dense): RMSNorm on every query and key head, a head size of its own, no biases."""

from collections.abc import Iterator

from tridentrl.weights.families.family import Family, HfConfig
from tridentrl.weights.families.llama import refuse_lone_biases
from tridentrl.weights.families.qwen2 import refuse_sliding_window


def _refusals(config: HfConfig) -> Iterator[str]:
    yield from refuse_lone_biases(config)
    yield from refuse_sliding_window(config)


FAMILY = Family(
    name="qwen3",
    model_types=("qwen3",),
    defaults={"rms_norm_eps": 1e-6, "max_position_embeddings": 32768, "head_dim": 128},
    qk_norm=True,
    refusals=_refusals,
)
