"""The tensors of a pre-norm decoder with grouped-query attention and a gated MLP, each declared once.

A family that differs adds, drops or replaces entries of this list in its own file.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tridentrl.configs.model_spec import ModelSpec
from tridentrl.weights.cuts import Columns, Cut, GateUp, QkvSlot, Replicated, VocabRows
from tridentrl.weights.pieces import Shape

Head = Literal["lm", "value"]
"""What the last stage ends in: the language model's head, or one number per token (critic, reward model)."""


@dataclass(frozen=True, kw_only=True)
class Weight:
    """One Hugging Face tensor, or one row range of it, and its place in the other two worlds. `{}` in a name is the layer number."""

    hf: str
    shape: Shape
    """Shape of this weight as Hugging Face stores it (of the row range when `hf_row` is not the whole story)."""
    hf_row: int = 0
    """First row inside the Hugging Face tensor, for families that store several weights fused in one tensor."""
    megatron: str
    megatron_fused: str | None = None
    """Megatron name when the norm is fused into the projection that follows it (Transformer Engine layers)."""
    vllm: str | None = None
    """vLLM name; None: the Hugging Face name."""
    cut: Cut
    at: Literal["embedding", "layer", "final"]
    """First stage, every layer, or last stage."""
    expert: int | None = None
    """Which of its layer's experts this belongs to. The second `{}` of its Megatron name is that expert's number on its rank."""


def decoder_weights(spec: ModelSpec, head: Head = "lm") -> list[Weight]:
    """All tensors of the model in the order of the forward pass; a tied head is not a tensor of its own."""
    vocab = (spec.vocab_size, spec.hidden_size)
    embedding = Weight(
        hf="model.embed_tokens.weight", shape=vocab, megatron="embedding.word_embeddings.weight", cut=VocabRows(), at="embedding"
    )
    norm = Weight(
        hf="model.norm.weight", shape=(spec.hidden_size,), megatron="decoder.final_layernorm.weight", cut=Replicated(), at="final"
    )
    weights = [embedding, *attention_weights(spec), *mlp_weights(spec), norm]
    if head == "value":
        shape = (1, spec.hidden_size)
        weights.append(Weight(hf="score.weight", shape=shape, megatron="output_layer.weight", cut=Replicated(), at="final"))
    elif not spec.tied:
        weights.append(Weight(hf="lm_head.weight", shape=vocab, megatron="output_layer.weight", cut=VocabRows(), at="final"))
    return weights


def attention_weights(spec: ModelSpec) -> list[Weight]:
    """Input norm, fused query-key-value projection (with bias and per-head norms where the family has them), output projection."""
    hidden, hf, megatron = spec.hidden_size, "model.layers.{}.", "decoder.layers.{}.self_attention."
    weights = [
        Weight(
            hf=hf + "input_layernorm.weight",
            shape=(hidden,),
            megatron="decoder.layers.{}.input_layernorm.weight",
            megatron_fused=megatron + "linear_qkv.layer_norm_weight",
            cut=Replicated(),
            at="layer",
        )
    ]
    slots: tuple[Literal["q", "k", "v"], ...] = ("q", "k", "v")
    for slot in slots:
        rows = (spec.num_heads if slot == "q" else spec.num_kv_heads) * spec.head_dim
        for kind, shape in [("weight", (rows, hidden)), *([("bias", (rows,))] if spec.qkv_bias else [])]:
            weights.append(
                Weight(
                    hf=f"{hf}self_attn.{slot}_proj.{kind}",
                    shape=shape,
                    megatron=f"{megatron}linear_qkv.{kind}",
                    vllm=f"{hf}self_attn.qkv_proj.{kind}",
                    cut=QkvSlot(slot, spec.num_heads, spec.num_kv_heads, spec.head_dim),
                    at="layer",
                )
            )
    if spec.qk_norm:
        for slot in ("q", "k"):
            name = f"{megatron}{slot}_layernorm.weight"
            norm = f"{hf}self_attn.{slot}_norm.weight"
            weights.append(Weight(hf=norm, shape=(spec.head_dim,), megatron=name, cut=Replicated(), at="layer"))
    projection = (hidden, spec.num_heads * spec.head_dim)
    weights.append(
        Weight(hf=hf + "self_attn.o_proj.weight", shape=projection, megatron=megatron + "linear_proj.weight", cut=Columns(), at="layer")
    )
    return weights


def mlp_weights(spec: ModelSpec) -> list[Weight]:
    """Norm before the MLP, gate and up projection (one tensor in both engines), down projection."""
    hidden, hf, megatron = spec.hidden_size, "model.layers.{}.", "decoder.layers.{}."
    weights = [
        Weight(
            hf=hf + "post_attention_layernorm.weight",
            shape=(hidden,),
            megatron=megatron + "pre_mlp_layernorm.weight",
            megatron_fused=megatron + "mlp.linear_fc1.layer_norm_weight",
            cut=Replicated(),
            at="layer",
        )
    ]
    halves: tuple[tuple[Literal[0, 1], str], ...] = ((0, "gate_proj"), (1, "up_proj"))
    for slot, name in halves:
        weights.append(
            Weight(
                hf=f"{hf}mlp.{name}.weight",
                shape=(spec.ffn_size, hidden),
                megatron=megatron + "mlp.linear_fc1.weight",
                vllm=hf + "mlp.gate_up_proj.weight",
                cut=GateUp(slot),
                at="layer",
            )
        )
    down = (hidden, spec.ffn_size)
    weights.append(
        Weight(hf=hf + "mlp.down_proj.weight", shape=down, megatron=megatron + "mlp.linear_fc2.weight", cut=Columns(), at="layer")
    )
    return weights
