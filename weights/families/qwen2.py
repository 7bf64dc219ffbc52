"""Qwen2 and Qwen2.5 (dense): biases on query, key and value projections only."""

from collections.abc import Iterator

from tridentrl.weights.families.family import Family, HfConfig


def refuse_sliding_window(config: HfConfig) -> Iterator[str]:
    """Qwen's window is per layer (`max_window_layers`), so no limit on positions makes full attention equal to it."""
    if config.get("use_sliding_window"):
        yield "use_sliding_window=true needs windowed attention in some layers, which the Megatron-Core layers here do not have"


FAMILY = Family(
    name="qwen2",
    model_types=("qwen2",),
    defaults={"rms_norm_eps": 1e-6, "max_position_embeddings": 32768},
    qkv_bias=True,
    refusals=refuse_sliding_window,
)
