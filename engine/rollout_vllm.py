"""Rollouts by vLLM inside the training processes (external launcher): tensor-parallel replicas over the ranks of a placement."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from tridentrl.configs.model_spec import ModelSpec
from tridentrl.engine.placement import Placement
from tridentrl.engine.rollout import Completion, Request, Sampling
from tridentrl.engine.vllm_compat import forget_shared_memory_names, keep_until_exit, prepare_vllm
from tridentrl.weights.layouts import vllm_layout
from tridentrl.weights.pieces import Piece


class VllmRollout:
    """A vLLM engine whose weights start as noise and come from the trainer.

    folder: Hugging Face folder with config.json; its weights are not read. tokenizer_folder: needed for stop strings only.
    max_length: tokens of prompt and response together. sleep_level: as in the setting of that name; above 0 needs a GPU.
    """

    def __init__(
        self,
        folder: str,
        spec: ModelSpec,
        *,
        placement: Placement,
        max_length: int,
        dtype: torch.dtype,
        run_id: str,
        seed: int = 0,
        tokenizer_folder: str | None = None,
        max_num_seqs: int = 256,
        prefix_caching: bool = True,
        enforce_eager: bool = True,
        gpu_memory_utilization: float = 0.6,
        sleep_level: int = 0,
        kv_cache_gib: int = 1,
        trust_remote_code: bool = False,
    ) -> None:
        cpu = not torch.cuda.is_available()
        prepare_vllm(run_id, placement, cpu=cpu, kv_cache_gib=kv_cache_gib)
        from vllm import LLM

        self.spec, self.placement, self.sleep_level = spec, placement, sleep_level
        self._asleep: set[str] = set()
        self.llm = LLM(
            model=folder,
            load_format="dummy",
            tokenizer=tokenizer_folder,
            skip_tokenizer_init=tokenizer_folder is None,
            trust_remote_code=trust_remote_code,
            # Sampling defaults come from our configuration, never from the model folder.
            generation_config="vllm",
            # The probabilities that samples are really drawn from, temperature included.
            logprobs_mode="processed_logprobs",
            dtype=str(dtype).removeprefix("torch."),
            max_model_len=max_length,
            max_num_seqs=max_num_seqs,
            seed=seed,
            tensor_parallel_size=placement.tensor,
            distributed_executor_backend="external_launcher",
            enable_prefix_caching=prefix_caching,
            enforce_eager=enforce_eager,
            gpu_memory_utilization=gpu_memory_utilization,
            enable_sleep_mode=sleep_level > 0,
            disable_log_stats=True,
        )
        keep_until_exit(self.llm)
        if cpu:
            forget_shared_memory_names(run_id)
        self._tensors: dict[str, Tensor] = self.llm.apply_model(_named_tensors)[0]

    def generate(self, requests: list[Request], sampling: Sampling) -> list[Completion]:
        from vllm import SamplingParams

        params = [
            SamplingParams(
                temperature=sampling.temperature,
                max_tokens=sampling.max_response_length,
                seed=request.seed,
                logprobs=0,
                # The stop ids below are the whole rule; vLLM's own end-of-sequence check would add the model folder's id.
                ignore_eos=True,
                stop_token_ids=list(sampling.stop_token_ids),
                stop=list(sampling.stop),
                detokenize=bool(sampling.stop),
            )
            for request in requests
        ]
        outputs = self.llm.generate([{"prompt_token_ids": request.prompt_ids} for request in requests], params, use_tqdm=False)
        return [_completion(output.outputs[0]) for output in outputs]

    def layout(self, tensor_rank: int) -> list[Piece]:
        return vllm_layout(self.spec, self.placement.tensor, tensor_rank)

    def tensors(self) -> dict[str, Tensor]:
        return self._tensors

    def sleep(self) -> bool:
        if self.sleep_level and not self._asleep:
            self.llm.sleep(level=self.sleep_level)
            self._asleep = {"weights", "kv_cache"}
        return self.sleep_level == 2

    def wake(self, part: Literal["weights", "kv_cache"]) -> None:
        if part in self._asleep:
            torch.cuda.empty_cache()  # vLLM takes its memory from the driver, not from torch
            self.llm.wake_up(tags=[part])
            self._asleep.remove(part)

    def weights_changed(self) -> None:
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not reset its prefix cache after the weights changed: cached prompts would use old weights")


def _named_tensors(model: torch.nn.Module) -> dict[str, Tensor]:
    """Live tensors; one that holds all experts of a layer counts as many, `<name>.<expert>`, as in the layouts."""
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        if parameter.dim() == 3:
            tensors |= {f"{name}.{expert}": part for expert, part in enumerate(parameter.data.unbind())}
        else:
            tensors[name] = parameter.data
    return tensors


def _completion(output: Any) -> Completion:
    ids = list(output.token_ids)
    logprobs = [step[token].logprob for token, step in zip(ids, output.logprobs, strict=True)]
    return Completion(response_ids=ids, logprobs=logprobs, truncated=output.finish_reason == "length")
