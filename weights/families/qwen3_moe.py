"""Qwen3 with experts: every layer's feed-forward network is many, and a router picks a few for each token."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal

from tridentrl.configs.model_spec import ModelSpec
from tridentrl.weights.cuts import Columns, GateUp, Replicated
from tridentrl.weights.families.decoder import Head, Weight, decoder_weights
from tridentrl.weights.families.family import Family, HfConfig
from tridentrl.weights.families.qwen3 import refuse_unlike_layers


def _weights(spec: ModelSpec, head: Head) -> list[Weight]:
    """The dense decoder's list with router and experts in the place of the feed-forward weights."""
    dense = [weight for weight in decoder_weights(spec, head) if "mlp.linear_fc" not in weight.megatron]
    norm = next(i for i, weight in enumerate(dense) if "pre_mlp_layernorm" in weight.megatron)
    dense[norm] = replace(dense[norm], megatron_fused=None)  # Transformer Engine too keeps the norm apart: the router reads its output
    return [*dense[: norm + 1], *_expert_weights(spec), *dense[norm + 1 :]]


def _expert_weights(spec: ModelSpec) -> list[Weight]:
    hidden, ffn = spec.hidden_size, spec.expert_ffn_size
    hf, megatron = "model.layers.{}.mlp.", "decoder.layers.{}.mlp."
    router = (spec.num_experts, hidden)
    weights = [Weight(hf=hf + "gate.weight", shape=router, megatron=megatron + "router.weight", cut=Replicated(), at="layer")]
    halves: tuple[tuple[Literal[0, 1], str], ...] = ((0, "gate_proj"), (1, "up_proj"))
    for expert in range(spec.num_experts):
        local = megatron + "experts.local_experts.{}."
        for slot, name in halves:
            weights.append(
                Weight(
                    hf=f"{hf}experts.{expert}.{name}.weight",
                    shape=(ffn, hidden),
                    megatron=local + "linear_fc1.weight",
                    vllm=f"{hf}experts.routed_experts.w13_weight.{expert}",
                    cut=GateUp(slot),
                    at="layer",
                    expert=expert,
                )
            )
        weights.append(
            Weight(
                hf=f"{hf}experts.{expert}.down_proj.weight",
                shape=(hidden, ffn),
                megatron=local + "linear_fc2.weight",
                vllm=f"{hf}experts.routed_experts.w2_weight.{expert}",
                cut=Columns(),
                at="layer",
                expert=expert,
            )
        )
    return weights


def _count(config: HfConfig) -> int:
    """`num_local_experts` is the name that transformers 5 writes, `num_experts` that of 4 and of the hub."""
    counts = {int(config[name]) for name in ("num_experts", "num_local_experts") if config.get(name) is not None} or {128}
    if len(counts) > 1:
        raise ValueError(f"num_experts={config['num_experts']} and num_local_experts={config['num_local_experts']} disagree in config.json")
    return counts.pop()


def _experts(config: HfConfig) -> Mapping[str, Any]:
    return {
        "num_experts": _count(config),
        "experts_per_token": int(config["num_experts_per_tok"]),
        "expert_ffn_size": int(config["moe_intermediate_size"]),
        "normalized_routing": bool(config["norm_topk_prob"]),
    }


def _refusals(config: HfConfig) -> Iterator[str]:
    yield from refuse_unlike_layers(config)
    if config["decoder_sparse_step"] != 1 or config.get("mlp_only_layers"):
        yield (
            f"decoder_sparse_step={config['decoder_sparse_step']} and mlp_only_layers={config.get('mlp_only_layers')} give some layers "
            "experts and others none; only experts in every layer are built here"
        )
    if not 1 < config["num_experts_per_tok"] <= _count(config):
        yield f"num_experts_per_tok={config['num_experts_per_tok']} is not between 2 and num_experts={_count(config)}"


FAMILY = Family(
    name="qwen3_moe",
    model_types=("qwen3_moe",),
    defaults={
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32768,
        "num_key_value_heads": 4,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
    },
    qk_norm=True,
    experts=_experts,
    refusals=_refusals,
    weights=_weights,
)
