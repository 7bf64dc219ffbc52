"""Time and peak memory of the converters on a random Llama: `python benchmarks/convert.py [--gigabytes 1] [--folder /tmp]`.

Peak memory is that of the whole process (its resident set, mapped file pages included); "before" is what imports alone take.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from tridentrl.weights.families import spec_from_hf
from tridentrl.weights.layouts import hf_shapes

CHILD = """
import sys
import tridentrl.checkpoint.convert
from tridentrl.trainer.convert_command import main
def peak():
    return next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))
before = peak()
code = main(sys.argv[1:])
print(before, peak())
sys.exit(code)
"""
HIDDEN, FFN, VOCABULARY = 2048, 5632, 32000
LAYER = 4 * HIDDEN * HIDDEN + 3 * HIDDEN * FFN
SHARD_BYTES = 500_000_000


def make_model(folder: Path, num_bytes: int) -> int:
    """A bf16 Llama of about `num_bytes`; returns the bytes it has."""
    layers = 2 * max(1, (num_bytes // 2 - 2 * VOCABULARY * HIDDEN) // LAYER // 2)
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": layers,
        "num_attention_heads": 16,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "dtype": "bfloat16",
    }
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    files: list[dict[str, torch.Tensor]] = [{}]
    for name, shape in hf_shapes(spec_from_hf(config)).items():
        if sum(tensor.nbytes for tensor in files[-1].values()) > SHARD_BYTES:
            files.append({})
        files[-1][name] = torch.randn(shape).bfloat16()
    weight_map = {}
    for number, tensors in enumerate(files):
        file = f"model-{number + 1:05d}-of-{len(files):05d}.safetensors"
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return sum(tensor.nbytes for tensors in files for tensor in tensors.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--folder", default=None, help="where to work (twice the model's size is needed, three times for a moment)")
    arguments = parser.parse_args()
    quiet = {**os.environ, "PYTHONWARNINGS": "ignore"}
    with tempfile.TemporaryDirectory(dir=arguments.folder) as work:
        source, middle, back = (str(Path(work, name)) for name in ("hf", "megatron", "back"))
        size = make_model(Path(source), int(arguments.gigabytes * 1e9))
        print(f"model: {size / 1e6:.0f} MB in bf16; largest tensor {2 * VOCABULARY * HIDDEN / 1e6:.0f} MB")
        print(f"{'command':<40} {'seconds':>8} {'before MB':>10} {'peak MB':>8}")
        for command in (
            ["hf-to-megatron", source, middle, "--tensor", "2", "--pipeline", "2"],
            ["megatron-to-hf", middle, back, "--file-mb", "256"],
            ["verify", source, back],
        ):
            start = time.perf_counter()
            result = subprocess.run([sys.executable, "-c", CHILD, *command], stdout=subprocess.PIPE, text=True, check=True, env=quiet)
            before, peak = (int(number) / 1e3 for number in result.stdout.split()[-2:])
            print(f"{command[0]:<40} {time.perf_counter() - start:>8.1f} {before:>10.0f} {peak:>8.0f}")


if __name__ == "__main__":
    main()
