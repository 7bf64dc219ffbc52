"""Training state that leaves the device while its model rests, so that the rollout engine and the other models have the room.

A tensor stays where it is known: its storage is emptied and later filled again, so every view and every reference holds. Gradients are
not kept at all, as each update starts from zero.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import torch
from megatron.core.utils import unwrap_model
from torch import Tensor

from tridentrl.parallel.optimizer import Training

Kind = Literal["weights", "gradients", "optimizer"]
OFFLOADED: dict[str, tuple[Kind, ...]] = {
    "none": (),
    "optimizer": ("gradients", "optimizer"),
    "all": ("gradients", "optimizer", "weights"),
}
"""What each value of `parallel.offload` takes away."""


class Offload:
    """Moves `kinds` of one model's storages to host memory (`park`) and back (`bring_back`)."""

    def __init__(self, kinds: Sequence[Kind], chunks: Sequence[torch.nn.Module], training: Training | None) -> None:
        self.kinds = kinds
        self._chunks, self._training = chunks, training
        self._away: dict[Kind, list[tuple[torch.UntypedStorage, int, Tensor | None]]] = {}
        """By kind: storage, its size in bytes, its content in host memory (None for gradients)."""

    @property
    def away(self) -> frozenset[Kind]:
        """What is not on the device now."""
        return frozenset(self._away)

    @property
    def host_bytes(self) -> int:
        """What the contents that are away take in host memory."""
        return sum(host.nbytes for parked in self._away.values() for _, _, host in parked if host is not None)

    def park(self) -> None:
        """Empty the storages of all kinds that are to be offloaded."""
        for kind in self.kinds:
            if kind in self._away:
                continue
            self._away[kind] = []
            for storage in list(self._storages(kind)):
                size, host = storage.nbytes(), None
                if kind != "gradients":
                    host = torch.empty(size, dtype=torch.uint8, pin_memory=storage.device.type == "cuda")
                    host.copy_(_bytes(storage))
                storage.resize_(0)
                self._away[kind].append((storage, size, host))

    def bring_back(self, kinds: Iterable[Kind]) -> None:
        """Fill the storages of `kinds` again, gradients with zeros."""
        for kind in kinds:
            for storage, size, host in self._away.pop(kind, []):
                storage.resize_(size)
                content = _bytes(storage)
                content.zero_() if host is None else content.copy_(host)

    def _storages(self, kind: Kind) -> Iterator[torch.UntypedStorage]:
        """Each once. Empty ones are left out: those of another kind that is away already, and of steps not taken yet."""
        seen: set[int] = set()
        for tensor in self._tensors(kind):
            storage = tensor.untyped_storage()
            if storage.data_ptr() and storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                yield storage

    def _tensors(self, kind: Kind) -> Iterator[Tensor]:
        if kind == "weights":
            for chunk in unwrap_model(self._chunks):
                yield from (parameter.data for parameter in chunk.parameters())
        elif self._training is None:
            return
        elif kind == "gradients":
            for chunk in self._training.chunks:
                yield from (buffer.grad_data for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers))
        else:
            weights = {storage.data_ptr() for storage in self._storages("weights")}
            for optimizer in _torch_optimizers(self._training.optimizer):
                masters = [parameter.data for group in optimizer.param_groups for parameter in group["params"]]
                moments = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
                # In fp32 the masters are the weights themselves; Adam's step counters stay, they are read from the host.
                yield from (tensor for tensor in masters if tensor.untyped_storage().data_ptr() not in weights)
                yield from (tensor for tensor in moments if tensor.numel() > 1)


def _torch_optimizers(optimizer: Any) -> Iterator[Any]:
    """Below Megatron's wrappers, of dense and of expert parameters."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if part.optimizer is not None:
            yield part.optimizer


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    """The whole storage as uint8 [bytes], without a copy."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
