"""What one step reports: metrics, seconds, memory, receipts of weight syncs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch.distributed as dist

from tridentrl.weights.execute import Receipt

SUMMED = ("rollout/tokens", "rollout/response_tokens", "reward/abstained", "reward/failed", "reward/timed_out", "reward/excluded")
"""Metrics that add up when they are reported several times in a step."""


@dataclass
class StepLog:
    """Metrics and seconds of one step. Metrics reported several times are averaged; those in `SUMMED` add up, and of a name
    that ends in `_max` the maximum is taken."""

    values: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    memory: dict[str, dict[str, float]] = field(default_factory=lambda: defaultdict(dict))
    """By stage, what this rank held at its end; the most, where a stage ran several times."""
    receipts: list[list[Receipt]] = field(default_factory=list)
    """For each weight sync of the step, the receipts of all ranks."""

    def add(self, metrics: Mapping[str, float], prefix: str = "") -> None:
        for name, value in metrics.items():
            self.values[prefix + name].append(float(value))

    def add_memory(self, stage: str, held: Mapping[str, float]) -> None:
        before = self.memory[stage]
        self.memory[stage] = {name: max(value, before.get(name, 0.0)) for name, value in held.items()}

    def metrics(self) -> dict[str, float]:
        reduced = {
            name: max(values) if name.endswith("_max") else sum(values) / (1 if name in SUMMED else len(values))
            for name, values in self.values.items()
        }
        return reduced | {f"timing_s/{name}": seconds for name, seconds in self.seconds.items()}

    def memory_metrics(self) -> dict[str, float]:
        """The ledger, `memory/<stage>/<what>`, each the most of all ranks. Collective over the world."""
        ranks: list[dict[str, dict[str, float]]] = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(ranks, dict(self.memory))
        most: dict[str, float] = {}
        for stage, held in ((stage, held) for rank in ranks for stage, held in rank.items()):
            for what, value in held.items():
                name = f"memory/{stage}/{what}"
                most[name] = max(value, most.get(name, 0.0))
        return most
