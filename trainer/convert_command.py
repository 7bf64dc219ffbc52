"""The command `tridentrl convert`."""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
BAD_INPUT = 2


def main(argv: Sequence[str]) -> int:
    """Exit status: 0 done, or the same; 1 `verify` found differences; 2 the input cannot be converted."""
    arguments = _parser().parse_args(argv)
    warnings.simplefilter("ignore")  # of libraries, about GPU packages that a converter does not need
    import torch

    from tridentrl.checkpoint.convert import differences, hf_to_megatron, megatron_to_hf

    try:
        if arguments.what == "verify":
            lines = differences(arguments.a, arguments.b, progress=_bar)
            print("\n".join([*lines, f"{len(lines)} tensors differ"]) if lines else "identical, bit for bit")
            return 1 if lines else 0
        if arguments.what == "hf-to-megatron":
            sizes = {"tensor": arguments.tensor, "pipeline": arguments.pipeline}
            hf_to_megatron(arguments.source, arguments.target, **sizes, overwrite=arguments.overwrite, progress=_bar)
        else:
            dtype = None if arguments.dtype is None else getattr(torch, DTYPES[arguments.dtype])
            megatron_to_hf(
                arguments.source,
                arguments.target,
                dtype=dtype,
                config_folder=arguments.config,
                overwrite=arguments.overwrite,
                max_shard_bytes=arguments.file_mb * 1024**2,
                progress=_bar,
            )
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return BAD_INPUT
    print(f"wrote {arguments.target}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tridentrl convert", description="Convert models without loss, in one process.")
    commands = parser.add_subparsers(dest="what", required=True)
    there = commands.add_parser("hf-to-megatron", help="a Hugging Face folder into a checkpoint for Megatron-LM (torch_dist)")
    there.add_argument("--tensor", type=_count, default=1, metavar="N", help="tensor-parallel ranks that it is cut for (it loads at any)")
    there.add_argument("--pipeline", type=_count, default=1, metavar="N", help="pipeline stages that it is cut for (it loads at any)")
    back = commands.add_parser("megatron-to-hf", help="a torch_dist checkpoint into a Hugging Face folder")
    back.add_argument("--dtype", choices=DTYPES, help="of the written weights; as stored if left out")
    back.add_argument("--file-mb", type=_count, default=1024, metavar="N", help="size limit of a written file, and of memory; 1024")
    back.add_argument("--config", metavar="FOLDER", help="where config.json and the tokenizer are; SRC if left out")
    for command in (there, back):
        command.add_argument("source", metavar="SRC")
        command.add_argument("target", metavar="DST")
        command.add_argument("--overwrite", action="store_true", help="replace DST if it exists")
    verify = commands.add_parser("verify", help="compare two folders of either kind bit for bit, and list the tensors that differ")
    verify.add_argument("a", metavar="A")
    verify.add_argument("b", metavar="B")
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def _bar(items: Sequence[Any], text: str) -> Iterator[Any]:
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    yield from track(items, text, console=console, disable=not console.is_terminal, transient=True)
