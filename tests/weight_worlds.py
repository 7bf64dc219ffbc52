"""Small models, and weights moved by pieces alone in one process: what the tests of layouts, plans and files share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from tridentrl.configs.model_spec import ModelSpec
from tridentrl.weights.pieces import Piece, Shape, slices

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def tiny_spec(**changes: Any) -> ModelSpec:
    """Eight query heads of size 4 over two kv heads, hidden 32, odd vocabulary."""
    sizes: dict[str, Any] = {
        "family": "llama",
        "hf_type": "llama",
        "num_layers": 2,
        "hidden_size": 32,
        "num_heads": 8,
        "num_kv_heads": 2,
        "head_dim": 4,
        "ffn_size": 16,
        "vocab_size": 97,
        "max_positions": 64,
        "tied": False,
        "qkv_bias": False,
        "qk_norm": False,
        "norm_eps": 1e-6,
        "rope": {"rope_type": "default", "rope_theta": 10000.0},
    }
    return ModelSpec(**sizes | changes)


def element_ids(shapes: Mapping[str, Shape]) -> dict[str, np.ndarray]:
    """Every element of every tensor gets a number of its own, from 1 on."""
    ids, start = {}, 1
    for name, shape in shapes.items():
        size = int(np.prod(shape))
        ids[name] = np.arange(start, start + size).reshape(shape)
        start += size
    return ids


def scatter(pieces: Iterable[Piece], shapes: Mapping[str, Shape], hf: Mapping[str, np.ndarray], fill: float = 0) -> dict[str, np.ndarray]:
    """Local tensors of `shapes`, filled from whole Hugging Face tensors; elements outside all pieces are `fill`."""
    local = {name: np.full(shape, fill, dtype=next(iter(hf.values())).dtype) for name, shape in shapes.items()}
    for piece in pieces:
        local[piece.local_name][slices(piece.local_box)] = hf[piece.hf_name][slices(piece.hf_box)]
    return local
