"""`make demo`: a small language model learns sums by RL, in minutes on two cores. `--algorithm=ppo`: the same with PPO and a critic.

Everything that trains here runs through the command line that users have; this file only writes the data, an untrained model, and
looks at the results.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console

PROCESSES = 2
TRAIN_ROWS, HELDOUT_ROWS = 3400, 500
LEAST_GAIN, MOST_EXPORT_ERROR = 0.25, 0.02

console = Console(highlight=False)


def main() -> int:
    start = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--algorithm", choices=("grpo", "ppo"), default="grpo")
    parser.add_argument("--seed", type=int, default=1, help="of the problems, the model and both runs")
    parser.add_argument("--folder", type=Path, help="where everything is written; default: outputs/demo, outputs/demo-ppo")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="further settings of the RL run")
    arguments = parser.parse_args()
    algorithm, seed = arguments.algorithm, arguments.seed
    folder = arguments.folder or Path("outputs/demo" if algorithm == "grpo" else f"outputs/demo-{algorithm}")
    move_aside(folder)

    headline("1. A task and an untrained model")
    make_inputs(folder, seed=seed)
    headline("2. Warm-up: supervised, both processes in data parallel")
    train("demo-sft", folder, seed=seed)
    headline(f"3. {algorithm.upper()}: Megatron-Core in tensor parallel 2, generation by two vLLM replicas")
    rl_start = time.time()
    train(f"demo-{algorithm}", folder, *arguments.overrides, seed=seed)
    headline("4. The exported folder in plain transformers")
    return report(folder, algorithm, start=start, rl_start=rl_start)


def move_aside(folder: Path) -> None:
    """An earlier demo is kept under another name."""
    if folder.exists():
        folder.rename(folder.with_name(f"{folder.name}.before-{time.strftime('%Y%m%d-%H%M%S')}"))


def make_inputs(folder: Path, *, seed: int) -> None:
    from arithmetic import write_data, write_model

    train_files, heldout = write_data(folder / "data", train_rows=TRAIN_ROWS, heldout_rows=HELDOUT_ROWS, seed=seed)
    parameters = write_model(folder / "model", seed=seed)
    console.print(f"{TRAIN_ROWS} problems to learn from in {', '.join(map(str, train_files))}")
    console.print(f"{HELDOUT_ROWS} other problems to measure by in {heldout}")
    console.print(f"a Qwen2 of {parameters / 1e6:.2f} million random weights, one token per character, in {folder / 'model'}")


def train(preset: str, folder: Path, *overrides: str, seed: int) -> None:
    """Run the trainer as a user would. Its failure ends the demo with its exit code."""
    words = ["-m", "tridentrl.trainer.main_fastrl", "--config-name", preset, f"--nproc_per_node={PROCESSES}"]
    words += [f"output_dir={folder}", f"seed={seed}", *overrides]
    console.print(f"[bold]$ python {shlex.join(words)}[/bold]\n", soft_wrap=True)
    code = subprocess.run([sys.executable, *words], env=os.environ | {"HF_HUB_OFFLINE": "1"}).returncode
    if code:
        sys.exit(code)


def report(folder: Path, algorithm: str, *, start: float, rl_start: float) -> int:
    """Measure the export, show and write the results; returns the exit code."""
    import pyarrow as pa
    from demo_report import curve_table, draw, layouts, read_curves
    from hf_accuracy import hf_accuracy

    run = folder / algorithm
    curves = read_curves(run)
    steps = max(curves.accuracy)
    heldout = pa.ipc.open_stream(folder / "data" / "heldout.arrow").read_all().to_pylist()
    accuracy = hf_accuracy(run / "hf" / f"step_{steps}", heldout, max_response_length=5)
    train_layout, rollout_layout = layouts(run, processes=PROCESSES)
    results = {
        "accuracy_before": curves.before,
        "accuracy_after": curves.after,
        "accuracy_hf_export": accuracy,
        "seconds": round(time.monotonic() - start, 1),
        "seconds_to_first_rollouts": round((run / "rollouts" / "step_0.jsonl").stat().st_mtime - rl_start, 1),
        "steps": steps,
        "train_layout": train_layout,
        "rollout_layout": rollout_layout,
    }
    (folder / "demo.json").write_text(json.dumps(results, indent=2) + "\n")
    title = f"{algorithm.upper()} teaches a small model to add"
    draw(
        curves,
        folder / "demo.png",
        title=title,
        subtitle=f"training: {train_layout}; rollout: {rollout_layout}; {results['seconds']:.0f} s in all",
        accuracy_hf_export=accuracy,
    )
    console.print(f"{accuracy:.1%} of the held-out problems; the trainer's own last evaluation says {curves.after:.1%}\n")
    console.print(curve_table(curves, title=title))
    console.print(
        f"\nafter {results['seconds']:.0f} s in all; the picture is {folder / 'demo.png'}, the numbers are in {folder / 'demo.json'}"
    )
    return verdict(gain=curves.after - curves.before, export_error=abs(accuracy - curves.after))


def verdict(*, gain: float, export_error: float) -> int:
    """1 with a sentence for each promise that was not kept."""
    broken = []
    if gain < LEAST_GAIN:
        broken.append(f"held-out accuracy rose by {100 * gain:.1f} points, {100 * LEAST_GAIN:.0f} were expected")
    if export_error > MOST_EXPORT_ERROR:
        broken.append(f"the exported folder differs from the trainer by {100 * export_error:.1f} points of accuracy")
    for sentence in broken:
        console.print(f"[bold red]{sentence}[/bold red]")
    return 1 if broken else 0


def headline(text: str) -> None:
    console.print()
    console.rule(f"[bold]{text}[/bold]", align="left")


if __name__ == "__main__":
    sys.exit(main())
