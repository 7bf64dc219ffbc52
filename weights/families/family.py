"""What a family file says about a kind of model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tridentrl.configs.model_spec import Activation, ModelSpec
from tridentrl.weights.families.decoder import Head, Weight, decoder_weights

HfConfig = Mapping[str, Any]
"""A parsed config.json."""


def no_refusals(config: HfConfig) -> Iterator[str]:
    """The family takes every config of its model types."""
    yield from ()


@dataclass(frozen=True, kw_only=True)
class Family:
    """One kind of model: which configs it answers to and how it differs from the common decoder."""

    name: str
    model_types: tuple[str, ...]
    """Values of `model_type` in config.json."""
    defaults: HfConfig = field(default_factory=dict)
    """What Hugging Face assumes for keys that an (old) config.json leaves out."""
    qkv_bias: bool = False
    qk_norm: bool = False
    norm_offset: bool = False
    scaled_embedding: bool = False
    activations: Mapping[str, Activation] = field(default_factory=lambda: {"silu": "silu", "swish": "silu"})
    """What a config's `hidden_act` may say, and what is computed then."""
    experts: Callable[[HfConfig], Mapping[str, Any]] = lambda config: {}
    """The fields of ModelSpec that say how many experts there are and how they are chosen."""
    refusals: Callable[[HfConfig], Iterator[str]] = no_refusals
    """Yields one sentence for every feature of this config that cannot be trained here."""
    max_positions: Callable[[HfConfig], int] = lambda config: int(config["max_position_embeddings"])
    weights: Callable[[ModelSpec, Head], list[Weight]] = decoder_weights
