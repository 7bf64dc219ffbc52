"""Rotary position embedding settings, from any form of config.json into one form, and back into both."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

DEFAULT_THETA = 10000.0
"""What Hugging Face assumes when a config (Llama 1 and 2 time) states no `rope_theta` at all."""
FIELDS = {"default": (), "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")}
"""Supported `rope_type`: the scaling fields that it needs."""


def rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """`rope_type`, `rope_theta` and the scaling fields, from `rope_parameters` or `rope_theta` with `rope_scaling`, or agreeing both.

    Raises ValueError when forms disagree, for per-layer blocks, and for types and partial rotation that are not supported.
    """
    new, scaling, theta = config.get("rope_parameters"), config.get("rope_scaling"), config.get("rope_theta")
    for key, block in (("rope_parameters", new), ("rope_scaling", scaling)):
        if block and any(isinstance(value, Mapping) for value in block.values()):
            raise ValueError(f"{key} in config.json has one block per kind of layer ({', '.join(block)}); only one for all is supported")
    if new and scaling:
        _agree("rope_parameters", _normal(new, theta), "rope_scaling", _normal({"rope_theta": new.get("rope_theta"), **scaling}, theta))
    block = new or scaling or {}
    if theta is not None and block.get("rope_theta") is not None:
        form = "rope_parameters" if new else "rope_scaling"
        _agree("rope_theta", {"rope_theta": float(theta)}, form, {"rope_theta": float(block["rope_theta"])})
    rope = _normal(block, theta)
    _check(rope, config.get("partial_rotary_factor"))
    return rope


def both_forms(rope: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json entries that transformers 4 (`rope_theta`, `rope_scaling`) and 5 (`rope_parameters`) both read."""
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    scaled = rope["rope_type"] != "default"
    return {"rope_parameters": dict(rope), "rope_theta": rope["rope_theta"], "rope_scaling": scaling if scaled else None}


def _normal(block: Mapping[str, Any], theta: Any) -> dict[str, Any]:
    rest = {key: value for key, value in block.items() if key not in ("type", "rope_type", "rope_theta")}
    base = block.get("rope_theta") if block.get("rope_theta") is not None else theta
    rope_type = block.get("rope_type") or block.get("type") or "default"
    return {"rope_type": rope_type, "rope_theta": DEFAULT_THETA if base is None else float(base), **rest}


def _agree(a_name: str, a: Mapping[str, Any], b_name: str, b: Mapping[str, Any]) -> None:
    different = sorted(key for key in {*a, *b} if a.get(key) != b.get(key))
    if different:
        fields = "; ".join(f"{key}: {a.get(key)} and {b.get(key)}" for key in different)
        raise ValueError(f"{a_name} and {b_name} disagree in config.json ({fields}); keep the one the model was trained with")


def _check(rope: Mapping[str, Any], top_level_partial: Any) -> None:
    rope_type = rope["rope_type"]
    if rope_type not in FIELDS:
        raise ValueError(
            f"rope_type {rope_type!r} is not supported (supported: {', '.join(FIELDS)}): Megatron-Core's rotary embedding here does not "
            "compute it, and ignoring it would change the model. Use a checkpoint without it, or remove the scaling and stay within "
            "the length the model was first trained with"
        )
    missing = [key for key in FIELDS[rope_type] if rope.get(key) is None]
    if missing:
        raise ValueError(f"rope_type {rope_type!r} needs {', '.join(missing)} in config.json")
    partial = rope.get("partial_rotary_factor", top_level_partial)
    if partial not in (None, 1, 1.0):
        raise ValueError(f"partial_rotary_factor={partial} is not supported: this family's layers rotate the whole head")
