"""Settings of the whole test run, made before anything heavy is imported."""

from __future__ import annotations

import os
from collections.abc import Iterator

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRITON_INTERPRET", "1")  # kernels run on CPU tensors; read when triton is imported

import tridentrl  # noqa: F401  # first: takes the repository root off sys.path

# isort: split
import pytest
import torch

torch.set_num_threads(1)  # an OpenMP pool does not survive the forks of tests/ranks.py


@pytest.fixture(autouse=True)
def own_environment() -> Iterator[None]:
    """A run in the test process writes its place among the ranks into the environment; the next test must not see it."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
