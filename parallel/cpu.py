"""Megatron-Core on a machine without CUDA: a facade that is active only while Megatron's own code runs.

Megatron-Core 0.16 to 0.19 asks torch.cuda for devices, streams and random states even where nothing needs a GPU. The facade
answers those questions for the CPU, and takes itself away afterwards: vLLM's sampler asks torch.cuda too and must get the true
answer. On a CUDA machine it does nothing at all. It can go once Megatron-Core runs on CPU by itself.
"""

from __future__ import annotations

import contextlib
import functools
import queue
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

_CPU = torch.device("cpu")
_FACTORIES = ("empty", "zeros", "ones", "full", "tensor", "arange", "empty_like", "zeros_like", "ones_like", "full_like")
_depth = 0
_saved: list[tuple[Any, str, Any]] = []


class _Null:
    """Stands for a stream or an event. A class and not an instance: annotations say `torch.cuda.Event | None`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: None

    def record_event(self, *args: Any, **kwargs: Any) -> _Null:
        return _Null()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Null)

    __hash__ = object.__hash__


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    """`factory`, but with `device="cuda"` meaning the CPU."""

    @functools.wraps(factory)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            kwargs["device"] = _CPU
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return wrapped


def _type_named_as_cuda(original: Callable[..., Any]) -> Callable[..., Any]:
    """The distributed optimizer sorts parameters by type names and knows only 'torch.cuda.FloatTensor' and its kin."""

    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        if isinstance(result, str) and not result.startswith("torch.cuda"):
            return result.replace("torch.", "torch.cuda.", 1)
        return result

    return type_


def _replacements() -> list[tuple[Any, str, Any]]:
    cuda = torch.cuda
    replacements: list[tuple[Any, str, Any]] = [
        (cuda, "current_device", lambda: _CPU),
        (cuda, "synchronize", lambda *args, **kwargs: None),
        (cuda, "current_stream", lambda *args, **kwargs: _Null()),
        (cuda, "default_stream", lambda *args, **kwargs: _Null()),
        (cuda, "Stream", _Null),
        (cuda, "Event", _Null),
        (cuda, "stream", lambda *args, **kwargs: contextlib.nullcontext()),
        (cuda, "get_rng_state", lambda *args, **kwargs: torch.get_rng_state()),
        (cuda.random, "get_rng_state", lambda *args, **kwargs: torch.get_rng_state()),
        (cuda, "set_rng_state", lambda state, *args, **kwargs: torch.set_rng_state(state)),
        (cuda, "manual_seed", torch.manual_seed),
        (torch.Tensor, "cuda", lambda self, *args, **kwargs: self),
        (torch.Tensor, "type", _type_named_as_cuda(torch.Tensor.type)),
    ]
    return replacements + [(torch, name, _on_cpu(getattr(torch, name))) for name in _FACTORIES]


@contextlib.contextmanager
def megatron_facade() -> Iterator[None]:
    """Every call into Megatron-Core happens inside this block. Nests; does nothing where CUDA is available."""
    global _depth
    if torch.cuda.is_available():
        yield
        return
    if _depth == 0:
        _patch_megatron_once()
        for owner, name, value in _replacements():
            _saved.append((owner, name, getattr(owner, name)))
            setattr(owner, name, value)
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1
        if _depth == 0:
            while _saved:
                owner, name, value = _saved.pop()
                setattr(owner, name, value)


@functools.cache
def _patch_megatron_once() -> None:
    """Changes inside megatron.core itself (0.16.1 to 0.19), for the CPU only; they can stay on, nobody else imports these modules."""
    import megatron.core.dist_checkpointing.strategies.filesystem_async as filesystem_async
    import megatron.core.tensor_parallel.random as megatron_random
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.tensor_parallel import mappings
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    megatron_random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    megatron_random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)

    # The default spawns a manager process that imports the main module again and is never joined.
    results: queue.Queue[Any] = queue.Queue()
    for name in ("_get_write_results_queue", "get_write_results_queue"):
        if hasattr(filesystem_async, name):
            setattr(filesystem_async, name, lambda *args, **kwargs: results)

    if not hasattr(moe_utils, "te_general_gemm"):
        # Without Transformer Engine 0.16.1 forgets to define the name that its router asks for.
        moe_utils.te_general_gemm = None
    token_dispatcher.maybe_move_tensor_to_cpu = _as_numpy
    _allow_unequal_shares(mappings)

    _accept_torch_adamw(DistributedOptimizer)


def _as_numpy(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """The token dispatcher turns numbers of tokens into numpy arrays, as all_to_all needs them, only when they come from a GPU."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _allow_unequal_shares(mappings: Any) -> None:
    """Ranks that share an expert's matrices bring it unequal numbers of tokens, for which gloo has neither all_gather nor reduce_scatter.

    Both are made of all_to_all here, which it does have.
    """
    equal_gather, equal_reduce_scatter = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim

    def gather(input_: torch.Tensor, group: dist.ProcessGroup, output_split_sizes: list[int] | None = None, *rest: Any) -> Any:
        if output_split_sizes is None or group.size() == 1:
            return equal_gather(input_, group, output_split_sizes, *rest)
        output = input_.new_empty(sum(output_split_sizes), *input_.shape[1:])
        copies = input_.repeat(group.size(), *(1 for _ in input_.shape[1:]))
        dist.all_to_all_single(output, copies, output_split_sizes, [len(input_)] * group.size(), group=group)
        return output

    def reduce_scatter(input_: torch.Tensor, group: dist.ProcessGroup, input_split_sizes: list[int] | None = None, *rest: Any) -> Any:
        if input_split_sizes is None or group.size() == 1:
            return equal_reduce_scatter(input_, group, input_split_sizes, *rest)
        mine = input_split_sizes[group.rank()]
        parts = input_.new_empty(group.size() * mine, *input_.shape[1:])
        dist.all_to_all_single(parts, input_.contiguous(), [mine] * group.size(), input_split_sizes, group=group)
        return parts.view(group.size(), mine, *input_.shape[1:]).sum(0)

    mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim = gather, reduce_scatter


def _accept_torch_adamw(optimizer_class: Any) -> None:
    """DistributedOptimizer expects the state of a fused Adam: one step count per group. torch's AdamW keeps one per parameter."""
    plain_state_dict, plain_load = optimizer_class.state_dict, optimizer_class.load_state_dict

    def state_dict(self: Any) -> Any:
        if isinstance(self.optimizer, torch.optim.Adam | torch.optim.AdamW):
            for group in self.optimizer.param_groups:
                for param in group["params"]:
                    state = self.optimizer.state[param]
                    if not state:
                        zeros = torch.zeros_like
                        state.update(step=torch.tensor(0.0), exp_avg=zeros(param), exp_avg_sq=zeros(param))
        return plain_state_dict(self)

    def load_state_dict(self: Any, loaded: Any) -> None:
        plain_load(self, loaded)
        for state in self.optimizer.state.values():
            if torch.is_tensor(state.get("step")):
                # One step tensor shared by all parameters would count once per parameter.
                state["step"] = state["step"].clone()

    @torch.no_grad()
    def set_main_param_and_states(self: Any, model_param: Any, tensors: dict[str, torch.Tensor]) -> None:
        group, order = self.model_param_group_index_map[model_param]
        main = self.optimizer.param_groups[group]["params"][order]
        state = self.optimizer.state[main]
        for name, value in tensors.items():
            if name == "param":
                main.copy_(value)
            elif name in state and name != "step":
                state[name].copy_(value)

    optimizer_class.state_dict = state_dict
    optimizer_class.load_state_dict = load_state_dict
    optimizer_class._set_main_param_and_optimizer_states = set_main_param_and_states
