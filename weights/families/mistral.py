"""Mistral 7B and its kin.

Megatron-Core's attention here has no sliding window. Up to the window's length full attention is the same computation, so a model with
`sliding_window` below `max_position_embeddings` is taken with its positions lowered to the window.
"""

from tridentrl.weights.families.family import Family, HfConfig


def positions_within_window(config: HfConfig) -> int:
    """The longest sequence for which full attention is what the model computes."""
    positions, window = int(config["max_position_embeddings"]), config.get("sliding_window")
    return positions if window is None else min(positions, int(window))


FAMILY = Family(
    name="mistral",
    model_types=("mistral",),
    defaults={"rms_norm_eps": 1e-6, "max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
    max_positions=positions_within_window,
)
