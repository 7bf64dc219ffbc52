"""The batch of an update that was skipped for a loss or gradient that is not finite, kept on disk to be looked at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import torch

from tridentrl.algos.rollouts import Rollouts


def save_batch(folder: Path, batch: Rollouts, metrics: Mapping[str, float], *, step: int, role: str, data_rank: int) -> Path:
    """Write this data-parallel rank's part of the batch to `step_<step>-<role>-<data_rank>.pt`; a later one of the same step replaces it.

    The file holds plain values and CPU tensors for `torch.load`: `batch` as in `algos.rollouts.Rollouts`, and `metrics` of the update.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step_{step}-{role}-{data_rank}.pt"
    torch.save({"batch": asdict(batch.to(torch.device("cpu"))), "metrics": dict(metrics)}, path)
    return path
