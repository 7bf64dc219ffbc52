"""From a ModelSpec to Megatron-Core's GPTModel chunks of this rank. The only file that builds models."""

from __future__ import annotations

import functools
import logging
import math
from typing import Any, Literal

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_layer_with_transformer_engine_spec
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from torch import Tensor

from tridentrl.configs.model_spec import Activation, ModelSpec
from tridentrl.parallel.cpu import megatron_facade
from tridentrl.parallel.grid import Grid, padded_vocab
from tridentrl.parallel.layers import PackedAttention, RMSNorm

log = logging.getLogger(__name__)

Head = Literal["lm", "value"]
Recompute = Literal["none", "selective", "full"]
ACTIVATIONS: dict[Activation, Any] = {"silu": F.silu, "gelu_tanh": functools.partial(F.gelu, approximate="tanh")}


class ValueHead(torch.nn.Module):
    """One number per token from the hidden state, replicated over the tensor-parallel ranks; called as Megatron calls an output layer."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        weight = torch.zeros(1, config.hidden_size, dtype=config.params_dtype, device=torch.cuda.current_device())
        self.weight = torch.nn.Parameter(weight)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.sequence_parallel = config.sequence_parallel

    def forward(self, hidden: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None) -> tuple[Tensor, None]:
        """hidden [t (over tp when sequence parallel), 1, hidden] -> values [t, 1, 1] in fp32."""
        values = F.linear(hidden, self.weight).float()
        if self.sequence_parallel:
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        return values, None


class ValueModel(GPTModel):
    """GPTModel whose last stage ends in a ValueHead. Never ties it to the embedding."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "share_embeddings_and_output_weights": False})
        if self.post_process:
            self.output_layer = ValueHead(self.config)


@functools.cache
def uses_transformer_engine() -> bool:
    """Transformer Engine layers on CUDA where the package is installed; Megatron-Core's local layers otherwise."""
    if not torch.cuda.is_available():
        return False
    try:
        import transformer_engine.pytorch  # noqa: F401
    except ImportError:
        return False
    return True


def transformer_config(
    spec: ModelSpec, grid: Grid, *, bf16: bool, sequence_parallel: bool = False, recompute: Recompute = "none"
) -> TransformerConfig:
    """Megatron's description of `spec` on `grid`. Packed sequences of any length, losses over global denominators."""
    dtype = torch.bfloat16 if bf16 else torch.float32
    recompute_fields: dict[str, Any] = {}
    if recompute == "full":
        recompute_fields = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    elif recompute == "selective":
        recompute_fields = {"recompute_granularity": "selective"}
    expert_fields: dict[str, Any] = {}
    if spec.num_experts:
        expert_fields = {
            "num_moe_experts": spec.num_experts,
            "moe_router_topk": spec.experts_per_token,
            "moe_ffn_hidden_size": spec.expert_ffn_size,
            # A softmax over the chosen is the softmax over all, made to sum to 1.
            "moe_router_pre_softmax": not spec.normalized_routing,
            "moe_router_dtype": "fp32",
            "moe_router_load_balancing_type": "none",
            "expert_model_parallel_size": grid.ep,
            "expert_tensor_parallel_size": grid.etp,
        }
    return TransformerConfig(
        num_layers=spec.num_layers,
        hidden_size=spec.hidden_size,
        num_attention_heads=spec.num_heads,
        num_query_groups=spec.num_kv_heads,
        kv_channels=spec.head_dim,
        ffn_hidden_size=spec.ffn_size,
        normalization="RMSNorm",
        layernorm_epsilon=spec.norm_eps,
        layernorm_zero_centered_gamma=spec.norm_offset,
        qk_layernorm=spec.qk_norm,
        gated_linear_unit=True,
        activation_func=ACTIVATIONS[spec.activation],
        add_bias_linear=False,
        add_qkv_bias=spec.qkv_bias,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        tensor_model_parallel_size=grid.tp,
        pipeline_model_parallel_size=grid.pp,
        virtual_pipeline_model_parallel_size=grid.vpp if grid.vpp > 1 else None,
        context_parallel_size=grid.cp,
        sequence_parallel=sequence_parallel and grid.tp > 1,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=bf16,
        calculate_per_token_loss=True,
        variable_seq_lengths=True,
        # Needed by variable_seq_lengths even where there are no experts (Megatron-Core 0.16).
        moe_token_dispatcher_type="alltoall",
        # On gloo a freed send buffer is overwritten in flight, and batched P2P gives wrong gradients for pipeline 2 x virtual.
        deallocate_pipeline_outputs=False,
        batch_p2p_comm=False,
        overlap_p2p_comm=grid.vpp > 1,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        **recompute_fields,
        **expert_fields,
    )


def build_chunks(spec: ModelSpec, config: TransformerConfig, grid: Grid, *, head: Head) -> list[torch.nn.Module]:
    """The model chunks of this rank, one for each virtual pipeline stage, with Megatron's own initial weights."""
    with megatron_facade():
        chunks: list[torch.nn.Module] = []
        for chunk in range(grid.vpp):
            vp_stage = chunk if grid.vpp > 1 else None
            model = (GPTModel if head == "lm" else ValueModel)(
                config,
                _block_spec(config, spec, vp_stage),
                vocab_size=padded_vocab(spec.vocab_size, grid.tp),
                max_sequence_length=spec.max_positions,
                pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
                post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
                position_embedding_type="rope",
                rotary_base=spec.rope["rope_theta"],
                share_embeddings_and_output_weights=spec.tied,
                vp_stage=vp_stage,
            )
            if spec.rope.get("rope_type", "default") != "default":
                model.rotary_pos_emb.inv_freq = _scaled_frequencies(spec).to(model.rotary_pos_emb.inv_freq.device)
            for name, parameter in model.named_parameters():
                if ".experts." in name:
                    # Megatron-Core marks them so only where expert parallelism is above 1; but wherever experts are cut over other ranks
                    # than dense weights are, their gradients must be summed over other ranks too.
                    parameter.allreduce = False
            if spec.scaled_embedding and model.pre_process:
                model.embedding.register_forward_hook(functools.partial(_scale_embedding, scale=math.sqrt(spec.hidden_size)))
            if torch.cuda.is_available():
                model = model.cuda()
            chunks.append(Float16Module(config, model) if config.bf16 else model)
        return chunks


def _scale_embedding(module: torch.nn.Module, inputs: Any, output: Tensor, *, scale: float) -> Tensor:
    """Embeddings times `scale`, which is rounded to their data type first, as transformers and vLLM do."""
    return output * torch.tensor(scale, dtype=output.dtype).item()


def _block_spec(config: TransformerConfig, spec: ModelSpec, vp_stage: int | None) -> Any:
    experts = spec.num_experts or None
    if uses_transformer_engine():
        return get_gpt_layer_with_transformer_engine_spec(qk_layernorm=spec.qk_norm, num_experts=experts, moe_grouped_gemm=False)
    layer = get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=spec.qk_norm, num_experts=experts, moe_grouped_gemm=False)
    layer.submodules.input_layernorm = RMSNorm
    layer.submodules.pre_mlp_layernorm = RMSNorm
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = PackedAttention
    if spec.qk_norm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    layers = get_num_layers_to_build(config, vp_stage=vp_stage)
    return TransformerBlockSubmodules(layer_specs=[layer] * layers, layer_norm=RMSNorm)


def _scaled_frequencies(spec: ModelSpec) -> Tensor:
    """Inverse frequencies [head_dim / 2] of a scaled rope, from transformers: Megatron-Core hard-codes parts of the Llama-3 scaling."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = LlamaConfig(
        hidden_size=spec.hidden_size,
        num_attention_heads=spec.num_heads,
        head_dim=spec.head_dim,
        max_position_embeddings=spec.max_positions,
        rope_parameters=dict(spec.rope),
    )
    frequencies, attention_scaling = ROPE_INIT_FUNCTIONS[spec.rope["rope_type"]](config, "cpu")
    assert attention_scaling == 1.0, f"rope type {spec.rope['rope_type']} scales attention, which Megatron's rope does not"
    return frequencies
