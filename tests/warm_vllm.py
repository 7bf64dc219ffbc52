"""Import this to have vLLM's modules loaded before ranks are forked: they cost each rank five seconds otherwise."""

from __future__ import annotations

import os

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import vllm.entrypoints.llm
import vllm.model_executor.models.llama
import vllm.model_executor.models.qwen2
import vllm.model_executor.models.qwen3
import vllm.v1.attention.backends.cpu_attn
import vllm.v1.engine.core
import vllm.v1.engine.llm_engine
import vllm.v1.executor.uniproc_executor
import vllm.v1.worker.cpu_model_runner
import vllm.v1.worker.cpu_worker  # noqa: F401
