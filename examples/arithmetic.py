"""The demo's task and model: sums by reasoning-gym as arrow files, and a small Qwen2 that reads one character per token."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from reasoning_gym import create_dataset
from tokenizers import pre_tokenizers
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer
from transformers.utils import logging

DATASET = "chain_sum"
SPECIAL = ("<pad>", "<eos>")


def problems(seed: int) -> Iterator[dict[str, Any]]:
    """Rows of different problems: three one-digit numbers, added or subtracted. There are 4,000.

    The prompt is the bare expression, as in `4+9-3=`; `extra_info` has what reasoning-gym's own verifier asks for.
    """
    seen = set()
    for entry in create_dataset(DATASET, min_terms=3, max_terms=3, min_digits=1, max_digits=1, size=10**6, seed=seed):
        expression = entry["metadata"]["expression"].replace(" ", "")
        if expression not in seen:
            seen.add(expression)
            yield {
                "prompt": f"{expression}=",
                "answer": entry["answer"],
                "data_source": DATASET,
                "reward_model": {"style": "rule", "ground_truth": entry["answer"]},
                "extra_info": {"source_dataset": DATASET, "question": entry["question"], "metadata": json.dumps(entry["metadata"])},
            }


def write_data(folder: Path, *, train_rows: int, heldout_rows: int, seed: int) -> tuple[list[Path], Path]:
    """Two training files and one held-out file, without a problem in common. Returns their paths."""
    folder.mkdir(parents=True)
    rows = problems(seed)
    heldout = write_arrow(folder / "heldout.arrow", list(islice(rows, heldout_rows)))
    sizes = (train_rows // 2, train_rows - train_rows // 2)
    train = [write_arrow(folder / f"train-{i:05}-of-00002.arrow", list(islice(rows, size))) for i, size in enumerate(sizes)]
    return train, heldout


def write_arrow(path: Path, rows: list[dict[str, Any]]) -> Path:
    table = pa.Table.from_pylist(rows)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)
    return path


def character_tokenizer() -> Qwen2Tokenizer:
    """Qwen2's tokenizer without merges: one token per character (of ASCII; else per byte), and decoding gives any text back.

    It is Qwen2's class because AutoTokenizer gives every Qwen2 model that one, whatever the folder says (transformers 5.19).
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*SPECIAL, *alphabet])}
    return Qwen2Tokenizer(vocab=vocabulary, merges=[], unk_token="<pad>", eos_token="<eos>", pad_token="<pad>")


def write_model(folder: Path, *, seed: int) -> int:
    """A fresh Qwen2 with its tokenizer as a Hugging Face folder; returns the number of parameters."""
    tokenizer = character_tokenizer()
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,  # of size 32, the smallest that vLLM's CPU attention has
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},  # ten positions to tell apart, not a million
        initializer_range=0.08,  # about 1 over the root of the width: learns several times faster than with 0.02
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    logging.disable_progress_bar()
    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(config).float()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())
