"""Data-parallel wrapping, the distributed Adam optimizer and the learning-rate schedule of one trained model."""

from __future__ import annotations

import dataclasses
import inspect
import logging
from dataclasses import dataclass
from typing import Any, Literal

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer import TransformerConfig

from tridentrl.parallel.cpu import megatron_facade

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """AdamW (arXiv 1711.05101) with a learning-rate schedule counted in optimizer steps."""

    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    gradient_clip: float = 0.1
    """Largest global L2 norm of the gradient; 0 turns clipping off."""
    warmup_steps: int = 0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    total_steps: int = 1
    """Optimizer steps until the schedule reaches its end."""
    min_lr_ratio: float = 0.0


@dataclass
class Training:
    """What a trained model has beyond its chunks."""

    chunks: list[Any]
    """The chunks wrapped in Megatron's DistributedDataParallel."""
    optimizer: Any
    scheduler: OptimizerParamScheduler


def make_trainable(config: TransformerConfig, chunks: list[torch.nn.Module], settings: OptimizerSettings) -> Training:
    """Wrap `chunks` for training. Gradients are plain sums over micro-batches and data-parallel ranks: losses bring their denominators."""
    with megatron_facade():
        ddp_config = DistributedDataParallelConfig(use_distributed_optimizer=True, overlap_grad_reduce=False, grad_reduce_in_fp32=True)
        wrapped = [DistributedDataParallel(config, ddp_config, chunk) for chunk in chunks]
        optimizer = get_megatron_optimizer(_optimizer_config(config, settings), wrapped)
        config.finalize_model_grads_func = _sum_gradients
        config.grad_scale_func = optimizer.scale_loss
        scheduler = OptimizerParamScheduler(
            optimizer,
            init_lr=0.0,
            max_lr=settings.lr,
            min_lr=settings.lr * settings.min_lr_ratio,
            lr_warmup_steps=settings.warmup_steps,
            lr_decay_steps=max(settings.total_steps, settings.warmup_steps + 1),
            lr_decay_style=settings.schedule,
            start_wd=settings.weight_decay,
            end_wd=settings.weight_decay,
            wd_incr_steps=0,
            wd_incr_style="constant",
        )
    return Training(wrapped, optimizer, scheduler)


def adam_implementation() -> str:
    """Which Adam Megatron-Core picked at import: Transformer Engine's, Apex's or torch's."""
    from megatron.core import optimizer

    module = inspect.getmodule(optimizer.Adam)
    return module.__name__.split(".")[0] if module else "torch"


def _optimizer_config(config: TransformerConfig, settings: OptimizerSettings) -> OptimizerConfig:
    fields: dict[str, Any] = {
        "optimizer": "adam",
        "lr": settings.lr,
        "min_lr": settings.lr * settings.min_lr_ratio,
        "adam_beta1": settings.betas[0],
        "adam_beta2": settings.betas[1],
        "adam_eps": settings.eps,
        "weight_decay": settings.weight_decay,
        "clip_grad": settings.gradient_clip,
        "use_distributed_optimizer": True,
        "bf16": config.bf16,
        "params_dtype": config.params_dtype,
    }
    known = {field.name for field in dataclasses.fields(OptimizerConfig)}
    assert fields.keys() <= known, f"this Megatron-Core lacks the optimizer settings {sorted(fields.keys() - known)}"
    return OptimizerConfig(**fields)


def _sum_gradients(model: list[Any], num_tokens: Any = None, **kwargs: Any) -> None:
    """Megatron's reduction without its division by `num_tokens`."""
    finalize_model_grads(model, None, **kwargs)
