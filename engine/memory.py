"""How much memory this process holds right now, for the ledger in the metrics."""

from __future__ import annotations

import psutil
import torch

GIB = 1024**3


def memory_in_use(device: torch.device) -> dict[str, float]:
    """GiB. `host`: resident memory of this process. On CUDA also `allocated` by tensors, `reserved` from the device, and the `peak` of
    allocated since the last call; what vLLM holds while its sleep mode is on is not among them."""
    memory = {"host_gb": psutil.Process().memory_info().rss / GIB}
    if device.type == "cuda":
        memory |= {
            "allocated_gb": torch.cuda.memory_allocated(device) / GIB,
            "reserved_gb": torch.cuda.memory_reserved(device) / GIB,
            "peak_gb": torch.cuda.max_memory_allocated(device) / GIB,
        }
        torch.cuda.reset_peak_memory_stats(device)
    return memory
