"""Does every algorithm learn? `make test-learning`: all of them on the task of `make demo`, from one start, with the same sizes.

One supervised warm-up makes the start; it is kept in the folder and taken again. Then every online algorithm of the registry runs with
benchmarks/learning.yaml, through the command line that users have, as one process. Beside them one run whose reward is a coin: it must not
learn. DPO and the reward model get pairs of a right and a wrong sum to the same problems.

What is measured are 500 held-out problems, greedy: of each, whether the response is the right sum; of pairs, whether the right sum gets the
higher log-prob or score, by plain transformers from the exported folder. A gain's standard error is that of the mean difference of the same
500 rows at the end and at the start. Exit code 1 when a promise is broken.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from learning_pairs import pair_log_ratios, pair_scores, write_pairs
from learning_report import draw, table
from learning_scores import forbidden_digit

HERE = Path(__file__).parent
TRAIN_ROWS, HELDOUT_ROWS, RESPONSES = 3400, 500, 4
LEAST_GAIN, LEAST_ERRORS = 0.15, 4.0
"""Held-out accuracy rises by at least so much, and by so many standard errors."""
LEAST_DPO_GAIN, LEAST_RANKED = 0.05, 0.9
"""Of pairs: the policy ranks most of them right before any training; a reward model ends so high."""
COST_LIMIT = 0.05
COST, MARGIN = "held-out cost", "held-out log-prob of right less wrong sum"

OWN_SETTINGS: dict[str, list[str]] = {
    "safe_rlhf": [
        f"cost.custom_fn.path={HERE / 'learning_scores.py'}",
        "cost.custom_fn.name=forbidden_digit",
        f"algorithm.cost_limit={COST_LIMIT}",
        "algorithm.lambda_lr=2",
    ],
    "reward_model": ["trainer.total_steps=200", "trainer.save_interval=25"],  # its head starts from nothing
}
"""Where an algorithm needs more than the shared settings."""
PAIRS = [
    "data.train_files=${output_dir}/data/pairs.jsonl",
    "data.val_files=null",
    "data.chosen_key=chosen",
    "data.rejected_key=rejected",
    "trainer.save_interval=5",
]
COIN = [f"reward.custom_fn.path={HERE / 'learning_scores.py'}", "reward.custom_fn.name=coin"]


@dataclass(frozen=True, kw_only=True)
class Result:
    """What one run did to the held-out problems."""

    name: str
    accuracy: dict[int, float]
    """By step, share of the 500: solved, or of pairs, ranked right."""
    error: float
    """Standard error of the gain."""
    seconds: float
    """The whole command, its start included."""
    extra: dict[str, list[float]] = field(default_factory=dict)
    """Further numbers, each at the start and at the end."""

    @property
    def start(self) -> float:
        return self.accuracy[min(self.accuracy)]

    @property
    def end(self) -> float:
        return self.accuracy[max(self.accuracy)]

    @property
    def gain(self) -> float:
        return self.end - self.start


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="only these runs: algorithms, or coin")
    parser.add_argument(
        "--folder", type=Path, default=Path("outputs/learning"), help="where everything is written, and the warm-up is kept"
    )
    parser.add_argument("--seed", type=int, default=1, help="of the problems, the model and all runs")
    parser.add_argument("--jobs", type=int, default=2, help="runs at once, one core each")
    parser.add_argument("--figure", type=Path, help="draw the curves into this file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="further settings of every run, after --")
    options = parser.parse_args()
    known = run_names()
    if unknown := sorted({*(options.only or ())} - {*known}):
        parser.error(f"no such run: {', '.join(unknown)}; choose from {', '.join(known)}")
    folder, load, start = options.folder / f"seed-{options.seed}", os.getloadavg()[0], time.monotonic()
    prepare(folder, seed=options.seed)
    with ThreadPoolExecutor(options.jobs) as pool:
        futures = [pool.submit(measure, folder, name, options.overrides, seed=options.seed) for name in options.only or known]
    results, failures = list[Result](), list[str]()
    for future in futures:
        try:
            results.append(future.result())
        except RuntimeError as error:  # a run that ended with an error
            failures.append(str(error))
    (folder / "results.json").write_text(json.dumps([asdict(result) for result in results], indent=2) + "\n")
    if options.figure:
        draw(results, options.figure)
    where = f"{options.jobs} runs at once on {os.cpu_count()} cores, load {load:.1f} before and {os.getloadavg()[0]:.1f} after"
    print(f"\nSeed {options.seed}, {where}, {time.monotonic() - start:.0f} s in all\n")
    print(table(results))
    broken = failures + [sentence for result in results for sentence in broken_promises(result)]
    print("\n".join(["", *broken]) if broken else "\nevery promise is kept")
    return 1 if broken else 0


def run_names() -> list[str]:
    """Every online algorithm of the registry, the run that must not learn, and those that learn from pairs."""
    from tridentrl.algos import get_algorithm_registry

    registry = get_algorithm_registry().items()
    online = [name for name, kind in registry if kind.online and kind.__module__.startswith("tridentrl.")]
    return [*online, "coin", "dpo", "reward_model"]


def prepare(folder: Path, *, seed: int) -> None:
    """The demo's problems and model, pairs, and the model after its warm-up, unless they are there."""
    sys.path.insert(0, str(HERE.parent / "examples"))
    from arithmetic import write_data, write_model

    if not (folder / "data").exists():
        write_data(folder / "data", train_rows=TRAIN_ROWS, heldout_rows=HELDOUT_ROWS, seed=seed)
        write_model(folder / "model", seed=seed)
        for part, files in {"pairs": ("train-*.arrow",), "heldout_pairs": ("heldout.arrow",)}.items():
            write_pairs(folder / "data" / f"{part}.jsonl", [row for name in files for row in problems_of(folder, name)], seed=seed)
    if not warmed(folder).exists():
        command(folder, "warmup", "--config-name", "demo-sft", seed=seed)


def warmed(folder: Path) -> Path:
    return folder / "warmup" / "hf" / "step_220"


def problems_of(folder: Path, pattern: str) -> list[dict[str, Any]]:
    import pyarrow as pa

    return [row for path in sorted((folder / "data").glob(pattern)) for row in pa.ipc.open_stream(path).read_all().to_pylist()]


def command(folder: Path, name: str, *words: str, seed: int) -> float:
    """One run of the trainer; its output goes to a file. Returns seconds; RuntimeError with the end of the output when it fails."""
    start, log = time.monotonic(), folder / f"{name}.log"
    line = [sys.executable, "-m", "tridentrl.trainer.main_fastrl", *words, f"output_dir={folder}", f"exp_name={name}", f"seed={seed}"]
    with log.open("w") as file:
        code = subprocess.run(line, env=os.environ | {"HF_HUB_OFFLINE": "1"}, stdout=file, stderr=subprocess.STDOUT).returncode
    if code:
        raise RuntimeError(f"{name} ended with {code}; the end of {log}:\n" + "\n".join(log.read_text().splitlines()[-15:]))
    seconds = time.monotonic() - start
    print(f"{name}: {seconds:.0f} s", flush=True)
    return seconds


def measure(folder: Path, name: str, overrides: Sequence[str], *, seed: int) -> Result:
    seconds = command(folder, name, "--config", str(HERE / "learning.yaml"), *settings_of(name), *overrides, seed=seed)
    if name == "dpo":
        return ranked_by_policy(folder, seconds=seconds)
    if name == "reward_model":
        return ranked_by_score(folder, seconds=seconds)
    return solved(folder, name, seconds=seconds)


def settings_of(name: str) -> list[str]:
    """Of one run, beside the shared ones."""
    from tridentrl.algos import get_algorithm_registry

    algorithm = "grpo" if name == "coin" else name
    kind = get_algorithm_registry()[algorithm]
    settings, own = [f"algorithm.name={algorithm}"], OWN_SETTINGS.get(algorithm, [])
    if not kind.online:
        return [*settings, *PAIRS, *own]
    size = "group_size" if hasattr(kind.Config, "group_size") else "samples_per_prompt"
    return [*settings, f"algorithm.{size}={RESPONSES}", *own, *(COIN if name == "coin" else ())]


def solved(folder: Path, name: str, *, seconds: float) -> Result:
    """From the responses to the held-out problems that the run wrote down; a sum is right when its text is the answer."""
    answers = [row["answer"] for row in problems_of(folder, "heldout.arrow")]
    right, costs = dict[int, list[float]](), dict[int, float]()
    for path in (folder / name / "rollouts").glob("step_*.jsonl"):
        rows = sorted((json.loads(line) for line in path.read_text().splitlines()), key=lambda row: row["row"])
        step = int(path.stem.removeprefix("step_"))
        right[step] = [float(row["response"] == answer) for row, answer in zip(rows, answers, strict=True)]
        costs[step] = mean([forbidden_digit(row["response"]) for row in rows])
    right, first, last = dict(sorted(right.items())), min(right), max(right)
    metrics = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    rewards = [row["reward/mean"] for row in metrics if "reward/mean" in row]
    extra = {"reward in training, first and last 3 steps": [mean(rewards[:3]), mean(rewards[-3:])]}
    if name in ("ppo", "safe_rlhf"):  # PPO beside it shows what happens without the limit
        extra[COST] = [costs[first], costs[last]]
    accuracy = {step: mean(values) for step, values in right.items()}
    return Result(name=name, accuracy=accuracy, error=error_of_gain(right[first], right[last]), seconds=seconds, extra=extra)


def ranked_by_policy(folder: Path, *, seconds: float) -> Result:
    """Of held-out pairs: log pi(chosen) - log pi(rejected), before and at each export."""
    pairs = folder / "data" / "heldout_pairs.jsonl"
    margins = {0: pair_log_ratios(warmed(folder), pairs)}
    margins |= {step: pair_log_ratios(path, pairs) for step, path in exports(folder, "dpo").items()}
    right = {step: [float(margin > 0) for margin in values] for step, values in margins.items()}
    last = max(margins)
    extra = {MARGIN: [mean(margins[0]), mean(margins[last])]}
    accuracy = {step: mean(values) for step, values in right.items()}
    return Result(name="dpo", accuracy=accuracy, error=error_of_gain(right[0], right[last]), seconds=seconds, extra=extra)


def ranked_by_score(folder: Path, *, seconds: float) -> Result:
    """Of held-out pairs: whether the right sum has the higher score, at each export. A head of random numbers stands at a half."""
    pairs = folder / "data" / "heldout_pairs.jsonl"
    right = {step: [float(margin > 0) for margin in pair_scores(path, pairs)] for step, path in exports(folder, "reward_model").items()}
    chance = [0.0, 1.0] * (HELDOUT_ROWS // 2)
    accuracy = {0: mean(chance)} | {step: mean(values) for step, values in right.items()}
    error = error_of_gain([mean(chance)] * HELDOUT_ROWS, right[max(right)])
    return Result(name="reward_model", accuracy=accuracy, error=error, seconds=seconds)


def exports(folder: Path, name: str) -> dict[int, Path]:
    found = {int(path.name.removeprefix("step_")): path for path in (folder / name / "hf").glob("step_*")}
    return dict(sorted(found.items()))


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def error_of_gain(before: Sequence[float], after: Sequence[float]) -> float:
    """Standard error of the mean difference of the same rows."""
    gains = [new - old for old, new in zip(before, after, strict=True)]
    center = mean(gains)
    return (sum((gain - center) ** 2 for gain in gains) / (len(gains) - 1) / len(gains)) ** 0.5


def broken_promises(result: Result) -> list[str]:
    """A sentence for each."""
    name, gain = result.name, result.gain
    least = max(LEAST_DPO_GAIN if name == "dpo" else LEAST_GAIN, LEAST_ERRORS * result.error)
    if name == "coin":
        return [f"coin: rose by {gain:.1%} although its reward is a coin; below {least:.1%} was expected"] if gain >= least else []
    broken = [f"{name}: rose by {gain:.1%}, at least {least:.1%} was expected"] if gain < least else []
    if name == "reward_model" and result.end < LEAST_RANKED:
        broken.append(f"{name}: ranks {result.end:.1%} of held-out pairs right, at least {LEAST_RANKED:.0%} was expected")
    if name == "dpo" and result.extra[MARGIN][1] <= result.extra[MARGIN][0]:
        broken.append(f"{name}: the margin of held-out pairs did not rise")
    if name == "safe_rlhf" and result.extra[COST][1] > COST_LIMIT:
        broken.append(f"{name}: held-out cost ended at {result.extra[COST][1]:.3f}, its limit is {COST_LIMIT}")
    return broken


if __name__ == "__main__":
    sys.exit(main())
