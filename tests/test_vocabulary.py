"""The rows that pad the vocabulary: nothing of them reaches the loss, and training leaves them alone. Kernels: tests/test_logprob.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from ranks import run_ranks
from test_checkpoint import update
from tiny import tiny_folder, tiny_spec

from tridentrl.engine.megatron import MegatronEngine
from tridentrl.parallel.grid import Grid
from tridentrl.parallel.groups import init_groups
from tridentrl.parallel.optimizer import OptimizerSettings

JUNK = 3.0


def trained(grid: Grid, folder: str) -> Any:
    """Metrics of two updates with 0 and with JUNK in the padding rows, and those rows after them."""
    init_groups(grid, seed=1)
    metrics, padding = [], []
    for value in (0.0, JUNK):
        settings = OptimizerSettings(lr=1e-2, gradient_clip=1.0)
        engine = MegatronEngine(tiny_spec(folder), grid, max_tokens=64, sequence_parallel=True, optimizer=settings)
        engine.load(folder)
        first = 64 * grid.coord(dist.get_rank()).tp_rank  # 97 rows of 128, on two ranks
        rows = [
            tensor[max(97 - first, 0) :]
            for name, tensor in engine.tensors().items()
            if name.endswith(("word_embeddings.weight", "output_layer.weight"))
        ]
        for tensor in rows:
            tensor.fill_(value)
        engine._weights_replaced()
        metrics.append([update(engine), update(engine)])
        padding.append([tensor.clone() for tensor in rows])
    return metrics, padding


@pytest.mark.parametrize("kind", ["qwen2", "llama"], ids=["tied", "untied"])
@pytest.mark.parametrize("grid", [Grid(tp=2), Grid(tp=2, pp=2)], ids=str)
def test_padding_rows_change_no_number_and_are_never_changed(kind: str, grid: Grid) -> None:
    held = 0
    for metrics, (zeros, junk) in run_ranks(grid.world, trained, grid, tiny_folder(kind)):
        assert metrics[0] == metrics[1]
        assert metrics[0][0]["loss"] != metrics[0][1]["loss"]
        assert all((rows == 0.0).all() for rows in zeros)
        assert all((rows == JUNK).all() for rows in junk)
        held += sum(len(rows) for rows in junk)
    # 31 rows of the embedding, and of the head where it is a tensor of its own (or the last stage's copy).
    assert held == 31 * (1 if kind == "qwen2" and grid.pp == 1 else 2)
