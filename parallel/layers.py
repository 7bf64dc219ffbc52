"""The two layer parts that Megatron-Core's local specification lacks without Transformer Engine: RMSNorm and packed attention.

Shape legend: t packed tokens, h heads of this tensor-parallel rank, g key/value heads of it, d size of a head.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.module import MegatronModule
from torch import Tensor


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm over the last dim, computed in fp32 as transformers does (arXiv 1910.07467, eq. 4).

    With the config's `layernorm_zero_centered_gamma` the weight is the gain's offset from 1, and the product too is in fp32.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.offset = config.layernorm_zero_centered_gamma
        initial = torch.zeros if self.offset else torch.ones
        self.weight = torch.nn.Parameter(initial(hidden_size, dtype=config.params_dtype, device=torch.cuda.current_device()))
        # Megatron sums such gradients over the tensor-parallel ranks, each of which sees a part of the tokens.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        x32 = x.float()
        x32 = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + self.eps)
        if self.offset:
            # 1 + weight in bf16 would lose the offset's low bits.
            return (x32 * (1.0 + self.weight.float())).to(x.dtype)
        return self.weight * x32.to(x.dtype)


class PackedAttention(MegatronModule):
    """Causal attention over packed sequences by torch's scaled_dot_product_attention.

    Sequences are gathered into right-padded rectangles, one for each power of two of their lengths, so that at most half of
    a rectangle is padding and no [t, t] mask is ever made; right padding needs no mask under causality.
    """

    def __init__(self, config: Any, layer_number: int, *_: Any, softmax_scale: float | None = None, **__: Any) -> None:
        super().__init__(config=config)
        self.layer_number = layer_number
        self.softmax_scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """query [t, h, d], key and value [t, g, d] -> [t, h * d]. Other formats are refused: the engine packs everything."""
        assert packed_seq_params is not None and packed_seq_params.qkv_format == "thd" and attention_mask is None
        query, key, value = (x.squeeze(1) if x.dim() == 4 else x for x in (query, key, value))
        lengths = packed_seq_params.cu_seqlens_q.diff().tolist()
        parts, order = [], []
        for rows in _rectangles(lengths, query.device):
            valid = rows >= 0
            q, k, v = (x[rows.clamp(min=0)].transpose(1, 2) for x in (query, key, value))
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.softmax_scale, enable_gqa=q.shape[1] != k.shape[1])
            parts.append(out.transpose(1, 2)[valid])
            order.append(rows[valid])
        out_th = torch.empty_like(query).index_copy(0, torch.cat(order), torch.cat(parts))
        return out_th.reshape(query.shape[0], -1)


def _rectangles(lengths: list[int], device: torch.device) -> list[Tensor]:
    """Row numbers [sequences, longest] into the packed tokens, -1 where a sequence has ended; one tensor per length class."""
    classes: dict[int, list[tuple[int, int]]] = {}
    start = 0
    for length in lengths:
        if length:
            classes.setdefault((length - 1).bit_length(), []).append((start, length))
        start += length
    rectangles = []
    for members in classes.values():
        starts, sizes = torch.tensor(members, device=device).unbind(1)
        steps = torch.arange(int(sizes.max()), device=device)
        rectangles.append(torch.where(steps < sizes[:, None], starts[:, None] + steps, -1))
    return rectangles
