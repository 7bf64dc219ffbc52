"""Where numbers and samples go: metrics.jsonl, TensorBoard, W&B, and one line per step on the screen. Only rank 0 writes."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tridentrl.weights.execute import Receipt


class MetricsWriter:
    """Writes each step's metrics to every logger in `loggers` (`jsonl`, `tensorboard`, `wandb`) below the folder `run`.

    `first_step`: of this process; later steps that an interrupted run left in TensorBoard are hidden.
    """

    def __init__(self, run: Path, loggers: Sequence[str], *, config: Mapping[str, Any], first_step: int = 0) -> None:
        run.mkdir(parents=True, exist_ok=True)
        self._jsonl = (run / "metrics.jsonl").open("a", encoding="utf-8") if "jsonl" in loggers else None
        self._receipts = run / "reshard.jsonl"
        self._tensorboard: Any = None
        self._wandb: Any = None
        if "tensorboard" in loggers:
            from torch.utils.tensorboard import SummaryWriter

            self._tensorboard = SummaryWriter(str(run / "tensorboard"), purge_step=first_step or None)
        if "wandb" in loggers:
            try:
                import wandb
            except ImportError:
                raise ValueError("trainer.loggers has wandb, which is not installed: pip install wandb, or take it out") from None
            self._wandb = wandb.init(project="tridentrl", name=run.name, dir=str(run), config=dict(config))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """One step's numbers. A number that is not finite is written as null to the file, since JSON has none."""
        if self._jsonl:
            finite = {name: value if math.isfinite(value) else None for name, value in sorted(metrics.items())}
            self._jsonl.write(json.dumps({"step": step, **finite}) + "\n")
            self._jsonl.flush()
        if self._tensorboard:
            for name, value in metrics.items():
                self._tensorboard.add_scalar(name, value, step)
        if self._wandb:
            self._wandb.log(dict(metrics), step=step)

    def write_receipts(self, step: int, syncs: Sequence[Sequence[Receipt]]) -> None:
        """One line of `reshard.jsonl` for each weight sync: what every rank received, the least it had to, memory and seconds."""
        with self._receipts.open("a", encoding="utf-8") as file:
            for receipts in syncs:
                ranks = [
                    {
                        "rank": rank,
                        "bytes_received": receipt.bytes_received,
                        "lower_bound": receipt.lower_bound,
                        "ratio": receipt.ratio,
                        "bucket_bytes": receipt.bucket_bytes,
                        "seconds": round(receipt.seconds, 6),
                    }
                    for rank, receipt in enumerate(receipts)
                ]
                file.write(json.dumps({"step": step, "weight_version": receipts[0].version, "ranks": ranks}) + "\n")

    def close(self) -> None:
        if self._jsonl:
            self._jsonl.close()
        if self._tensorboard:
            self._tensorboard.close()
        if self._wandb:
            self._wandb.finish()


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Rows as JSON lines; the file appears complete or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".partial")
    with temporary.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    temporary.replace(path)


def drop_records_after(run: Path, step: int) -> None:
    """Take the lines of later steps, and a last line that a kill cut short, out of the `.jsonl` files of the run."""
    for path in (run / "metrics.jsonl", run / "reshard.jsonl"):
        if path.exists():
            lines = [line for line in path.read_text(encoding="utf-8").split("\n")[:-1] if json.loads(line)["step"] <= step]
            temporary = path.with_name(path.name + ".partial")
            temporary.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
            temporary.replace(path)


def step_line(step: int, metrics: Mapping[str, float]) -> str:
    """`[Step 20] KL: 0.763, Reward: 0.28, Loss: 1.712, 812 tokens/s`, with what there is."""
    parts = [
        f"{label}: {metrics[name]:.{digits}f}"
        for label, name, digits in (("KL", "kl/mean", 3), ("Reward", "reward/mean", 2), ("Loss", "actor/loss", 3))
        if name in metrics
    ]
    return f"[Step {step}] " + ", ".join([*parts, f"{metrics['perf/tokens_per_s']:,.0f} tokens/s"])
