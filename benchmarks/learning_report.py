"""The table and the chart of benchmarks/learning.py."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import matplotlib

matplotlib.use("Agg")  # a file, no window
import matplotlib.pyplot as plt

COLUMNS = 4
CURVE, OTHERS, QUIET = "#0b6e99", "#cfd6dc", "#5f6b76"


class Measured(Protocol):
    name: str
    accuracy: dict[int, float]
    error: float
    seconds: float
    extra: dict[str, list[float]]

    @property
    def start(self) -> float: ...
    @property
    def end(self) -> float: ...
    @property
    def gain(self) -> float: ...


def table(results: Sequence[Measured]) -> str:
    """As Markdown."""
    lines = ["| run | start | end | gain, points | +- | steps | s | also |", "| --- | --- | --- | --- | --- | --- | --- | --- |"]
    for result in results:
        also = "; ".join(f"{name} {values[0]:.3f} to {values[1]:.3f}" for name, values in result.extra.items())
        cells = [result.name, f"{result.start:.1%}", f"{result.end:.1%}", f"{100 * result.gain:+.1f}", f"{100 * result.error:.1f}"]
        lines.append(f"| {' | '.join([*cells, str(max(result.accuracy)), f'{result.seconds:.0f}', also])} |")
    return "\n".join(lines)


def draw(results: Sequence[Measured], path: Path) -> None:
    """One small chart per run with held-out accuracy by step; in grey, the others that solve the same problems."""
    rows = -(-len(results) // COLUMNS)
    figure, grid = plt.subplots(rows, COLUMNS, figsize=(10, 2.1 * rows + 0.4), dpi=100, sharey=True, squeeze=False, layout="constrained")
    pairs = {"dpo", "reward_model"}
    for axes, result in zip(grid.flat, results, strict=False):
        for other in results:
            if not pairs & {other.name, result.name}:
                axes.plot(*zip(*other.accuracy.items(), strict=True), color=OTHERS, linewidth=0.8)
        axes.plot(*zip(*result.accuracy.items(), strict=True), color=CURVE, linewidth=2, marker="o", markersize=3)
        axes.set_title(result.name, loc="left", fontsize=10, weight="bold")
        what = "pairs ranked right" if result.name in pairs else "sums solved"
        axes.text(
            0.98, 0.04, f"{what}\n{result.start:.1%} to {result.end:.1%}", transform=axes.transAxes, ha="right", fontsize=8, color=QUIET
        )
        axes.set_ylim(0, 1.02)
        axes.yaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(xmax=1))
        axes.grid(axis="y", color="#e4e8ec", linewidth=0.7)
        axes.spines[["top", "right"]].set_visible(False)
    for axes in list(grid.flat)[len(results) :]:
        axes.set_visible(False)
    figure.supxlabel("step", fontsize=9)
    figure.savefig(path)
    plt.close(figure)
