"""Settings of the whole test run, made before anything heavy is imported."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRITON_INTERPRET", "1")  # kernels run on CPU tensors; read when triton is imported

import tridentrl  # noqa: F401  # first: takes the repository root off sys.path

# isort: split
import torch

torch.set_num_threads(1)  # an OpenMP pool does not survive the forks of tests/ranks.py
