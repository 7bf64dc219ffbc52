"""Rollouts by plain transformers, one whole model on each rank: for comparison, and for machines without vLLM."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from tridentrl.configs.model_spec import ModelSpec
from tridentrl.engine.placement import contiguous
from tridentrl.engine.rollout import Completion, Request, Sampling
from tridentrl.weights.layouts import hf_layout
from tridentrl.weights.pieces import Piece


class HfRollout:
    """A transformers model whose weights come from the trainer.

    batch_size: sequences generated at once. tokenizer_folder: needed for stop strings only.
    """

    def __init__(
        self,
        folder: str,
        spec: ModelSpec,
        *,
        dtype: torch.dtype,
        device: torch.device,
        tokenizer_folder: str | None = None,
        batch_size: int = 256,
        trust_remote_code: bool = False,
    ) -> None:
        self.spec, self.device, self.batch_size = spec, device, batch_size
        self.placement = contiguous(dist.get_world_size(), 1)
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
        self.model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code).to(device).eval()
        self.model.requires_grad_(False)
        self.tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder, trust_remote_code=trust_remote_code) if tokenizer_folder else None

    @torch.no_grad()
    def generate(self, requests: list[Request], sampling: Sampling) -> list[Completion]:
        completions: list[Completion] = []
        for first in range(0, len(requests), self.batch_size):
            completions += self._generate_batch(requests[first : first + self.batch_size], sampling)
        return completions

    def _generate_batch(self, requests: list[Request], sampling: Sampling) -> list[Completion]:
        """Left-padded prompts, one token at a time; shapes: b sequences, s tokens so far, V vocabulary."""
        longest = max(len(request.prompt_ids) for request in requests)
        rows = [[0] * (longest - len(request.prompt_ids)) + request.prompt_ids for request in requests]
        tokens_bs = torch.tensor(rows, device=self.device)
        seen_bs = torch.tensor(
            [[0] * (longest - len(request.prompt_ids)) + [1] * len(request.prompt_ids) for request in requests], device=self.device
        )
        generators = [torch.Generator().manual_seed(request.seed) for request in requests]
        ids: list[list[int]] = [[] for _ in requests]
        logprobs: list[list[float]] = [[] for _ in requests]
        stopped = [False] * len(requests)
        cache = None
        for _ in range(sampling.max_response_length):
            positions = (seen_bs.cumsum(1) - 1).clamp(min=0)[:, -tokens_bs.shape[1] :]
            output = self.model(
                input_ids=tokens_bs, attention_mask=seen_bs, position_ids=positions, past_key_values=cache, use_cache=True, logits_to_keep=1
            )
            cache = output.past_key_values
            next_b, logprobs_b = _draw(output.logits[:, -1].float().cpu(), generators, sampling.temperature)
            for i, (token, logprob) in enumerate(zip(next_b.tolist(), logprobs_b.tolist(), strict=True)):
                if not stopped[i]:
                    ids[i].append(token)
                    logprobs[i].append(logprob)
                    stopped[i] = token in sampling.stop_token_ids or self._completes_stop_string(ids[i], sampling.stop)
            if all(stopped):
                break
            tokens_bs = next_b[:, None].to(self.device)
            seen_bs = torch.cat([seen_bs, torch.ones_like(tokens_bs)], 1)
        return [
            Completion(response_ids=i, logprobs=logprob, truncated=not stop)
            for i, logprob, stop in zip(ids, logprobs, stopped, strict=True)
        ]

    def _completes_stop_string(self, ids: list[int], stop: tuple[str, ...]) -> bool:
        if not stop:
            return False
        assert self.tokenizer is not None
        text = self.tokenizer.decode(ids)
        return any(string in text for string in stop)

    def layout(self, tensor_rank: int) -> list[Piece]:
        return hf_layout(self.spec)

    def tensors(self) -> dict[str, Tensor]:
        """Live, by the names in Hugging Face's files, where each expert's weights are tensors of their own."""
        tensors: dict[str, Tensor] = {}
        for name, parameter in self.model.named_parameters():
            experts, _, kind = name.rpartition(".")
            if parameter.dim() == 3 and kind in ("gate_up_proj", "down_proj"):  # transformers 5 holds all experts of a layer in two
                for expert, part in enumerate(parameter.data.unbind()):
                    halves = zip(("gate_proj", "up_proj"), part.chunk(2), strict=True) if kind == "gate_up_proj" else [(kind, part)]
                    tensors |= {f"{experts}.{expert}.{projection}.weight": tensor for projection, tensor in halves}
            else:
                tensors[name] = parameter.data
        return tensors

    def sleep(self) -> bool:
        """It keeps its memory."""
        return False

    def wake(self, part: Literal["weights", "kv_cache"]) -> None:
        """It never slept."""

    def weights_changed(self) -> None:
        """Nothing is kept between calls of `generate`."""


def _draw(logits_bV: Tensor, generators: list[torch.Generator], temperature: float) -> tuple[Tensor, Tensor]:
    """One id for each row, by its own generator (greedy at temperature 0), and its log-probability."""
    logprobs_bV = torch.log_softmax(logits_bV / (temperature or 1.0), -1)
    if temperature == 0:
        next_b = logprobs_bV.argmax(-1)
    else:
        noise_bV = torch.stack([torch.empty_like(row).exponential_(generator=g) for row, g in zip(logprobs_bV, generators, strict=True)])
        next_b = (logprobs_bV - noise_bV.log()).argmax(-1)
    return next_b, logprobs_bV.gather(1, next_b[:, None])[:, 0]
