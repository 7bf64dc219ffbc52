"""What the demo shows at its end: the numbers of a run folder as a table, a picture and a JSON file."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # a file, no window
import matplotlib.pyplot as plt
import yaml
from hf_accuracy import solved
from rich.table import Table

REWARD_COLOR, ACCURACY_COLOR, QUIET = "#9aa5b1", "#0b6e99", "#5f6b76"


@dataclass(frozen=True, kw_only=True)
class Curves:
    """A run's numbers by step."""

    reward: dict[int, float]
    """Mean reward of the step's samples, drawn at temperature 1 from training problems."""
    accuracy: dict[int, float]
    """Share of held-out problems solved, greedy, at each evaluation."""

    @property
    def before(self) -> float:
        return self.accuracy[min(self.accuracy)]

    @property
    def after(self) -> float:
        return self.accuracy[max(self.accuracy)]


def read_curves(run: Path) -> Curves:
    """From `metrics.jsonl` and `rollouts/step_N.jsonl` of a run folder."""
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    reward = {row["step"]: row["reward/mean"] for row in metrics if "reward/mean" in row}
    files = {int(path.stem.removeprefix("step_")): path for path in (run / "rollouts").glob("step_*.jsonl")}
    accuracy = {step: accuracy_of(path) for step, path in sorted(files.items())}
    return Curves(reward=reward, accuracy=accuracy)


def accuracy_of(rollouts: Path) -> float:
    rows = [json.loads(line) for line in rollouts.read_text().splitlines()]
    return sum(solved(row["reward"]) for row in rows) / len(rows)


def layouts(run: Path, *, processes: int) -> tuple[str, str]:
    """Training and rollout layout in words, from the resolved configuration that the run saved."""
    config = yaml.safe_load((run / "config.yaml").read_text())
    parallel, rollout = config["parallel"], config["rollout"]
    tensor, pipeline = parallel["tensor"], parallel["pipeline"]
    train = f"tensor {tensor} x pipeline {pipeline} x data {processes // (tensor * pipeline)}"
    return train, f"{processes // rollout['tensor']} {rollout['backend']} replicas of tensor {rollout['tensor']}"


def curve_table(curves: Curves, *, title: str) -> Table:
    """One line per evaluation; the reward is the mean over the steps since the line before."""
    table = Table(title=title, title_justify="left", header_style="bold")
    for column in ("step", "reward in training", "held-out accuracy", "gain"):
        table.add_column(column, justify="right")
    last = 0
    for step, accuracy in curves.accuracy.items():
        some = [reward for number, reward in curves.reward.items() if last < number <= step]
        mean = f"{sum(some) / len(some):.2f}" if some else "-"
        table.add_row(str(step), mean, f"{accuracy:.1%}", f"{100 * (accuracy - curves.before):+.1f} points" if step else "-")
        last = step
    return table


def draw(curves: Curves, path: Path, *, title: str, subtitle: str, accuracy_hf_export: float) -> None:
    """Reward of each step, and held-out accuracy at each evaluation with the export's beside it, as a PNG."""
    figure, axes = plt.subplots(figsize=(8, 4.8), dpi=150, layout="constrained")
    axes.plot(*_items(curves.reward), color=REWARD_COLOR, linewidth=1.2, label="reward in training (sampled)")
    axes.plot(*_items(curves.accuracy), color=ACCURACY_COLOR, linewidth=2.2, marker="o", markersize=5, label="held-out accuracy (greedy)")
    axes.axhline(curves.before, color=ACCURACY_COLOR, linewidth=1, linestyle=":", alpha=0.8)
    first, last = min(curves.accuracy), max(curves.accuracy)
    axes.plot(last, accuracy_hf_export, marker="D", markersize=10, markerfacecolor="none", markeredgecolor="#c2571a", linestyle="none",
              label=f"exported folder in transformers: {accuracy_hf_export:.1%}")  # fmt: skip
    for step, side in ((first, "left"), (last, "right")):
        axes.annotate(f"{curves.accuracy[step]:.1%}", (step, curves.accuracy[step]), xytext=(0, -18), textcoords="offset points",
                      ha=side, color=ACCURACY_COLOR, weight="bold")  # fmt: skip
    axes.set(xlabel="step", xlim=(-0.02 * last, 1.03 * last), ylim=(0, 1.04))
    axes.yaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(xmax=1))
    axes.grid(axis="y", color="#e4e8ec", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(title, loc="left", weight="bold", pad=24)
    axes.text(0, 1.03, subtitle, transform=axes.transAxes, color=QUIET, fontsize=9)
    axes.legend(loc="lower right", frameon=False, fontsize=9)
    figure.savefig(path)
    plt.close(figure)


def _items(values: dict[int, float]) -> tuple[list[int], list[float]]:
    return list(values), list(values.values())
