"""One greedy (or cooler) response to each held-out row, scored as in training but neither scaled nor clipped."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from tridentrl.algos.rollouts import Rollouts
from tridentrl.data.prompts import PromptRow
from tridentrl.engine.rollout import Sampling
from tridentrl.kernels.losses import kl_estimate
from tridentrl.trainer.context import EVALUATION, TrainContext


def evaluated_rows(context: TrainContext, prompts: Sequence[PromptRow], sampling: Sampling) -> list[dict[str, Any]]:
    """One record per prompt, in the order of the files, on every rank."""
    rollouts = context.sample(prompts, n=1, sampling=sampling, step=EVALUATION)
    scores_N = {section: context.judged(section, rollouts, name=section, watch=False).tolist() for section in context.judges}
    texts = context.judges["reward"].functions.responses(rollouts)
    mine = []
    for number, text, kl in zip(rollouts.rows_n.tolist(), texts, _kl_per_sample(context, rollouts), strict=True):
        row, scores = prompts[number], {section: values[number] for section, values in scores_N.items()}
        mine.append(
            {
                "row": row.row_id,
                "data_source": row.data_source,
                "prompt": row.prompt_text,
                "response": text,
                **{section: None if score != score else score for section, score in scores.items()},
                "kl": kl,
                "length": int(rollouts.response_lengths_N[number]),
                "truncated": bool(rollouts.truncated_N[number]),
                "weight_version": context.engines.hybrid.version if context.engines.hybrid else 0,
            }
        )
    gathered: list[list[dict[str, Any]]] = [[] for _ in range(context.grid.world)]
    coord = context.grid.coord(dist.get_rank())
    dist.all_gather_object(gathered, mine if coord.tp_rank == coord.pp_rank == 0 else [])
    return sorted((row for part in gathered for row in part), key=lambda row: row["row"])


def evaluation_metrics(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """`val/...` of the records; rewards also by data source. Rows without a score, or a KL, do not count in its mean."""
    metrics = {"val/length_mean": _mean([row["length"] for row in rows])}
    for section in ("reward", "cost"):
        scores = [row[section] for row in rows if row.get(section) is not None]
        if section == "reward" or scores:
            metrics[f"val/{section}/mean"] = _mean(scores)
        by_source = defaultdict(list)
        for row in rows:
            if row.get(section) is not None:
                by_source[row["data_source"]].append(row[section])
        metrics |= {f"val/{section}/{source}": _mean(values) for source, values in by_source.items()}
    if kls := [row["kl"] for row in rows if row["kl"] is not None]:
        metrics["val/kl_mean"] = _mean(kls)
    return metrics


def _kl_per_sample(context: TrainContext, rollouts: Rollouts) -> list[float | None]:
    """Mean over a response's tokens of the k3 estimate of KL(actor || reference); None without a reference."""
    if "reference" not in context.engines.models:
        return [None] * len(rollouts.rows_n)
    kl_R = kl_estimate(context.actor_logprobs(rollouts), context.reference_logprobs(rollouts), "k3")
    return [part.mean().item() if len(part) else 0.0 for part in kl_R.split(rollouts.lengths_n.tolist())]


def _mean(values: list[Any]) -> float:
    return sum(values) / len(values) if values else float("nan")
