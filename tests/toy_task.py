"""A task small enough for tests: sums of two numbers, one token per character, a model that starts at random."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

PAD, EOS = 0, 1
CHARACTERS = ["<pad>", "<eos>", "<unk>", *"0123456789+= abcdefghijklmnopqrstuvwxyz"]


def toy_tokenizer() -> Any:
    vocabulary = {character: number for number, character in enumerate(CHARACTERS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def toy_folder(folder: Path, **changes: Any) -> str:
    """Model and tokenizer in `folder`; four layers, head size 32, which vLLM's CPU attention needs."""
    settings = {
        "vocab_size": len(CHARACTERS),
        "hidden_size": 128,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
    }
    torch.manual_seed(0)
    model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**{**settings, **changes})).float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)  # far enough from uniform that samples differ in likelihood
    model.save_pretrained(folder)
    toy_tokenizer().save_pretrained(folder)
    return str(folder)


def toy_rows(count: int, *, seed: int) -> list[dict[str, Any]]:
    generator = random.Random(seed)
    rows = []
    for _ in range(count):
        a, b = generator.randint(0, 99), generator.randint(0, 99)
        rows.append({"prompt": f"{a}+{b}=", "answer": str(a + b), "data_source": "sums", "extra_info": {"terms": [a, b]}})
    return rows


def write_arrow(path: Path, rows: list[dict[str, Any]]) -> str:
    table = pa.Table.from_pylist(rows)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)
    return str(path)


def toy_overrides(folder: Path, *, rows: int = 64, val_rows: int = 10) -> list[str]:
    """Settings for a run on this task, with model and data files made in `folder`."""
    return [
        f"model.actor_pretrained_model_name_or_path={toy_folder(folder / 'model')}",
        f"data.train_files={write_arrow(folder / 'train.arrow', toy_rows(rows, seed=1))}",
        f"data.val_files={write_arrow(folder / 'val.arrow', toy_rows(val_rows, seed=2))}",
        f"output_dir={folder / 'outputs'}",
        "data.answer_key=answer",
        "data.max_prompt_length=16",
        "data.train_batch_size=4",
        "rollout.max_response_length=6",
        "trainer.micro_batch_tokens=64",
        "trainer.loggers=[jsonl]",
        "reward.workers=1",
        "optimizer.lr=3e-4",
        "optimizer.eps=1e-5",  # no update of full size from a gradient that is all rounding
        "trainer.gradient_clip_val=1.0",
    ]
