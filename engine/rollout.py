"""What every rollout engine offers: exact sampled ids with the engine's own log-probabilities, from weights that are replaced in place."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

from tridentrl.engine.placement import Placement
from tridentrl.weights.pieces import Piece


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How responses are drawn. The same on every rank; nothing is taken from the model folder's generation_config."""

    max_response_length: int
    """Tokens, the end-of-sequence id included."""
    temperature: float
    """0 is greedy."""
    stop_token_ids: tuple[int, ...]
    """A response ends with the first of these, which belongs to it; empty to ignore the end of sequence."""
    stop: tuple[str, ...] = ()
    """A response ends with the token that completes one of these strings; that token belongs to it."""


@dataclass(frozen=True, kw_only=True)
class Request:
    prompt_ids: list[int]
    seed: int
    """Decides the sample together with the weights, whatever the layout or the other requests."""


@dataclass(frozen=True, kw_only=True)
class Completion:
    response_ids: list[int]
    logprobs: list[float]
    """log-probability (nats) of each id under the engine's softmax(logits / temperature); unscaled logits when greedy."""
    truncated: bool
    """The engine stopped for length, not because of a stop id or string."""


class RolloutEngine(Protocol):
    """All ranks of a replica call `generate` with the same requests and get the same completions."""

    placement: Placement

    def generate(self, requests: list[Request], sampling: Sampling) -> list[Completion]: ...

    def layout(self, tensor_rank: int) -> list[Piece]:
        """Where the Hugging Face tensors lie in `tensors()` on rank `tensor_rank` of a replica."""
        ...

    def tensors(self) -> dict[str, Tensor]:
        """The live parameters."""
        ...

    def sleep(self) -> bool:
        """Give device memory back until `wake`, where the engine can. Returns whether the weights are lost and must be sent again."""
        ...

    def wake(self, part: Literal["weights", "kv_cache"]) -> None:
        """Take the memory for `part` again. Weights come before their transfer, the cache after it, before `generate`."""
        ...

    def weights_changed(self) -> None:
        """Forget everything computed from the old weights, cached prefixes above all. Raises RuntimeError when that fails."""
        ...


def sample_seed(run_seed: int, step: int, sample: int) -> int:
    """A 31-bit seed for sample number `sample` of `step`: depends on nothing else, so neither layout nor resume changes what is drawn."""
    digest = hashlib.blake2b(f"{run_seed}/{step}/{sample}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") & 0x7FFF_FFFF
