"""The reshard by plan against gathering every tensor and slicing it: `python benchmarks/reshard.py [measured] [computed] [hybridflow]`.

measured: both on real processes (gloo, forked on this machine), turn by turn in one run, results compared bit by bit.
computed: bytes per rank and the time that one rank plans, for models of 7B to 235B on up to 1,024 ranks, by arithmetic alone.
hybridflow: the table of transition overhead of HybridFlow (arXiv 2409.19256, table 2) from its formulas, with ours next to it.
All sizes are of bf16 weights; MB and GB are 1e6 and 1e9 bytes.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from gather_then_slice import bytes_received, units
from reshard_ranks import measure, model_bytes, model_of, parse_layout

from tridentrl.configs.model_spec import ModelSpec
from tridentrl.engine.hybrid import place_replicas
from tridentrl.weights.execute import most_peers, schedule
from tridentrl.weights.layouts import megatron_layout, vllm_layout
from tridentrl.weights.pieces import Piece
from tridentrl.weights.plan import boxes_by_name, common_elements, distinct_elements, no_garbage_collection, plan, same_layouts

BYTES = 2
NODE = 8
"""Ranks of a node in the computed tables."""

MEASURED = (
    "tp2 dp2 -> 1",
    "tp2 pp2 -> 1",
    "tp2 pp2 -> 2",
    "tp4 -> 2",
    "pp4 -> 4",
    "pp2 dp2 -> 2",
    "pp2 vpp2 dp2 -> 2",
    "dp4 -> 4",
    "tp4 -> 4",
    "tp2 dp2 ep2 -> 2",
    "tp2 dp2 ep2 etp2 -> 4",
    "tp2 pp2 dp2 -> 4",
    "tp4 dp2 -> 2",
)


def _model(layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocabulary: int, **more: object) -> ModelSpec:
    settings = {"family": "llama", "hf_type": "llama", "max_positions": 4096, "tied": False, "qkv_bias": False, "qk_norm": False}
    settings |= {"norm_eps": 1e-6, "head_dim": 128, "num_layers": layers, "hidden_size": hidden, "num_heads": heads}
    settings |= {"num_kv_heads": kv_heads, "ffn_size": ffn, "vocab_size": vocabulary}
    return ModelSpec(**settings | more)  # type: ignore[arg-type]


_QWEN = {"family": "qwen2", "hf_type": "qwen2", "qkv_bias": True}
_EXPERTS = {"family": "qwen3_moe", "hf_type": "qwen3_moe", "qk_norm": True, "num_experts": 128, "experts_per_token": 8}
MODELS = {
    "Qwen2.5 7B": _model(28, 3584, 28, 4, 18944, 152064, **_QWEN),
    "Qwen2.5 32B": _model(64, 5120, 40, 8, 27648, 152064, **_QWEN),
    "Llama 3 70B": _model(80, 8192, 64, 8, 28672, 128256),
    "Qwen3 235B-A22B": _model(94, 4096, 64, 4, 12288, 151936, expert_ffn_size=1536, **_EXPERTS),
    "Llama 2 7B": _model(32, 4096, 32, 32, 11008, 32000),
    "Llama 2 13B": _model(40, 5120, 40, 40, 13824, 32000),
    "Code Llama 34B": _model(48, 8192, 64, 8, 22016, 32000),
    "Llama 2 70B": _model(80, 8192, 64, 8, 28672, 32000),
}
COMPUTED = (
    ("Qwen2.5 7B", "tp4 dp2 -> 2"),
    ("Qwen2.5 7B", "tp4 pp2 dp8 -> 1"),
    ("Qwen2.5 7B", "tp4 pp4 dp64 -> 2"),
    ("Qwen2.5 32B", "tp8 dp1 -> 4"),
    ("Qwen2.5 32B", "tp8 pp2 dp4 -> 4"),
    ("Qwen2.5 32B", "tp8 pp4 dp32 -> 4"),
    ("Llama 3 70B", "tp8 pp4 dp2 -> 8"),
    ("Llama 3 70B", "tp8 pp4 dp8 -> 8"),
    ("Llama 3 70B", "tp8 pp8 dp16 -> 8"),
    ("Llama 3 70B", "tp8 pp4 dp32 -> 4"),
    ("Qwen3 235B-A22B", "tp4 pp2 dp8 ep8 -> 8"),
    ("Qwen3 235B-A22B", "tp4 pp2 dp32 ep32 -> 8"),
    ("Qwen3 235B-A22B", "tp4 pp2 dp128 ep32 -> 8"),
)
PAPER = {
    "figure 7": ("Llama 2 7B", ("tp2 dp2 -> 1",)),
    "figure 8": ("Llama 2 7B", ("tp4 dp2 -> 2",)),
    "figure 15, 7B": ("Llama 2 7B", ("tp8 dp2 -> 1", "tp8 dp2 -> 2", "tp8 dp2 -> 4", "tp8 dp2 -> 8")),
    "figure 15, 13B": ("Llama 2 13B", ("tp8 dp2 -> 1", "tp8 dp2 -> 2", "tp8 dp2 -> 4", "tp8 dp2 -> 8")),
    "of our choice, 34B": ("Code Llama 34B", ("tp8 pp2 dp2 -> 4",)),
    "of our choice, 70B": ("Llama 2 70B", ("tp8 pp4 dp4 -> 8",)),
}
"""Training and generation sizes in the paper's figures; figures 7 and 8 name no model. Its generation pipeline size is 1 in all of them."""


@dataclass(frozen=True)
class Computed:
    """One model on one layout. Bytes received, of all ranks the largest unless it says otherwise."""

    gather: int
    bound: int
    """Of all ranks."""
    bound_sum: int
    gather_sum: int
    planned: int
    """Received by the plan; of the ranks that were planned, among them one with the largest bound."""
    planned_bound: int
    """Lower bound of the same rank."""
    far: float
    """Share of the planned ranks' bytes that comes from other nodes."""
    peers: int
    layouts_s: float
    """CPU seconds for the training layouts of all ranks, as every rank makes them; like all times here, free of what else runs."""
    seats_s: float
    plan_s: float
    """Median of the planned ranks, buckets included."""


def compute(spec: ModelSpec, layout: str, *, sample: int) -> Computed:
    """Bytes of all ranks, and the plans of `sample` ranks spread over the grid and of one with the most to receive."""
    grid, tensor = parse_layout(layout)
    start = time.process_time()
    with no_garbage_collection():
        sources = {rank: megatron_layout(spec, grid, rank) for rank in range(grid.world)}
    layouts_s = time.process_time() - start
    start = time.process_time()
    placement = place_replicas(spec, grid, sources, tensor=tensor, ranks_per_node=NODE)
    seats_s = time.process_time() - start
    shares = [vllm_layout(spec, tensor, seat) for seat in range(tensor)]
    targets = {rank: shares[seat] for replica in placement.replicas for seat, rank in enumerate(replica)}
    bounds = lower_bounds(sources, targets)
    every_unit = units(spec, grid)
    gathers = [bytes_received(every_unit, grid, stage * grid.stage, itemsize=BYTES) for stage in range(grid.pp)]
    node_of = {rank: rank // NODE for rank in sources}
    plans, seconds = {}, []
    fullest = max(bounds, key=lambda rank: bounds[rank])
    for rank in sorted({fullest, *(i * (grid.world - 1) // max(sample - 1, 1) for i in range(sample))}):
        start = time.process_time()
        plans[rank] = plan(sources, targets, rank=rank, node_of=node_of, itemsize=BYTES)
        schedule(plans[rank], rank, bucket_elements=1 << 25, peers=most_peers(plans[rank]))
        seconds.append(time.process_time() - start)
    worst = max(plans, key=lambda rank: plans[rank].bytes_received[rank])
    received = {True: 0, False: 0}
    for rank, todo in plans.items():
        for (sender, receiver), moves in todo.moves.items():
            if receiver == rank:
                received[node_of[sender] != node_of[rank]] += sum(distinct_elements({m.hf_name: [m.hf_box]}) for m in moves)
    return Computed(
        gather=max(gathers),
        bound=max(bounds.values()),
        bound_sum=sum(bounds.values()),
        gather_sum=sum(gathers) * grid.stage,
        planned=plans[worst].bytes_received[worst],
        planned_bound=bounds[worst],
        far=received[True] / max(sum(received.values()), 1),
        peers=max(most_peers(todo) for todo in plans.values()),
        layouts_s=layouts_s,
        seats_s=seats_s,
        plan_s=statistics.median(seconds),
    )


def lower_bounds(sources: Mapping[int, Sequence[Piece]], targets: Mapping[int, Sequence[Piece]]) -> dict[int, int]:
    """By rank, the bytes of its target that it does not hold; each pair of layouts is compared once."""
    held = [(boxes_by_name(pieces), set(ranks)) for pieces, ranks in same_layouts(sources)]
    bounds = {}
    for pieces, ranks in same_layouts(targets):
        wanted = boxes_by_name(pieces)
        size = distinct_elements(wanted)
        for boxes, holders in held:
            if both := holders.intersection(ranks):
                bounds |= dict.fromkeys(both, BYTES * (size - common_elements(boxes, wanted)))
    return bounds


@dataclass(frozen=True)
class Transition:
    """A row of HybridFlow's table 2 for one system: fractions of the model's bytes, per rank."""

    communication: Fraction
    peak: Fraction
    redundancy: Fraction


def transitions(*, t: int, p: int, d: int, t_g: int, p_g: int = 1) -> dict[str, Transition]:
    """t, p, d: tensor, pipeline and data sizes in training; t_g, p_g: tensor and pipeline sizes in generation."""
    tp, tpd, generation = t * p, t * p * d, t_g * p_g
    return {
        "DS-Chat": Transition(Fraction(tpd - 1, tpd), Fraction(1), Fraction(1, tpd)),
        "HybridFlow-V": Transition(Fraction(tp - 1, tp), Fraction(1), Fraction(1, tp)),
        "HybridFlow": Transition(Fraction(tp - generation, generation * tp), Fraction(1, generation), Fraction(0)),
    }


def show(title: str, header: Sequence[str], rows: Sequence[Sequence[str]], *, markdown: bool) -> None:
    """A table in columns, or in Markdown."""
    if markdown:
        print(f"\n### {title}\n", *(f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *rows)), sep="\n", flush=True)
        return
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    print(f"\n{title}")
    for row in (header, *rows):
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip(), flush=True)


def show_measured(layouts: Sequence[str], *, megabytes: float, repeats: int, bucket_mb: float, markdown: bool) -> bool:
    """Whether every method filled every tensor right and the plan received the lower bound."""
    rows, right = [], True
    load = os.getloadavg()[0]
    for layout in layouts:
        grid, tensor = parse_layout(layout)
        spec = model_of(megabytes, experts=grid.sharing > 1)
        for outcome in measure(spec, grid, tensor, repeats=repeats, bucket_bytes=int(bucket_mb * 1e6)):
            moved, fewest = sum(outcome.received), sum(outcome.lower_bound)
            right &= outcome.exact and (outcome.method != "plan" or outcome.received == outcome.lower_bound)
            sizes = [f"{number / 1e6:.1f}" for number in (model_bytes(spec), max(outcome.received), moved, fewest)]
            ratio = f"{moved / fewest:.2f}" if fewest else ("1.00" if not moved else "all in vain")
            cells = [ratio, f"{outcome.peak_mb:.1f}", f"{outcome.seconds:.3f}", "yes" if outcome.exact else "NO"]
            rows.append([layout, outcome.method, *sizes, *cells])
    header = [
        "layout",
        "method",
        "model MB",
        "most MB per rank",
        "all ranks MB",
        "lower bound MB",
        "ratio",
        "extra memory MB",
        "s",
        "exact",
    ]
    title = f"Measured: gloo ranks on {os.cpu_count()} cores, load {load:.1f} before and {os.getloadavg()[0]:.1f} after, "
    title += f"time is the median of {repeats}, buckets of {bucket_mb:g} MB each way"
    show(title, header, rows, markdown=markdown)
    return right


def show_computed(cases: Sequence[tuple[str, str]], *, sample: int, markdown: bool) -> None:
    rows = []
    for model, layout in cases:
        spec, (grid, _) = MODELS[model], parse_layout(layout)
        case = compute(spec, layout, sample=sample)
        sizes = [f"{number / 1e9:.2f}" for number in (model_bytes(spec), case.gather, case.bound, case.planned)]
        ratios = [f"{case.gather_sum / case.bound_sum:.2f}", f"{case.planned / case.planned_bound:.2f}"]
        times = [f"{seconds:.2f}" for seconds in (case.layouts_s, case.seats_s, case.plan_s)]
        rows.append([model, layout, str(grid.world), *sizes, *ratios, f"{case.far:.0%}", str(case.peers), *times])
    header = ["model", "layout", "ranks", "model GB", "gather GB per rank", "lower bound GB", "plan GB"]
    header += ["gather / bound", "plan / bound", "from other nodes", "most peers", "layouts CPU s", "seats CPU s", "plan CPU s"]
    show(
        f"Computed: nodes of {NODE} ranks, {sample} or {sample + 1} ranks planned of each; load {os.getloadavg()[0]:.1f}",
        header,
        rows,
        markdown=markdown,
    )


def show_hybridflow(*, markdown: bool) -> None:
    rows = []
    for where, (model, layouts) in PAPER.items():
        size = model_bytes(MODELS[model])
        for layout in layouts:
            grid, tensor = parse_layout(layout)
            case = compute(MODELS[model], layout, sample=2)
            paper = transitions(t=grid.tp, p=grid.pp, d=grid.dp, t_g=tensor)
            moved = [f"{float(row.communication) * size / 1e9:.2f}" for row in paper.values()]
            peaks = [f"{float(row.peak) * size / 1e9:.2f}" for row in paper.values()]
            spare = [f"{float(row.redundancy) * size / 1e9:.2f}" for row in paper.values()]
            training, generation = size / (grid.tp * grid.pp), size / tensor
            ours = [f"{case.planned / 1e9:.2f}", f"{(training + generation) / 1e9:.2f}", f"{training / 1e9:.2f}"]
            cells = [" / ".join([*column, mine]) for column, mine in zip((moved, peaks, spare), ours, strict=True)]
            rows.append([where, model, layout, f"{size / 1e9:.2f}", *cells])
    header = ["paper", "model", "layout", "model GB", "received GB", "peak GB of weights", "redundant GB"]
    title = "HybridFlow's table 2 in GB per rank: DS-Chat / HybridFlow-V / HybridFlow / ours"
    show(title, header, rows, markdown=markdown)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=["measured", "computed", "hybridflow"], help="any of measured, computed, hybridflow")
    parser.add_argument("--megabytes", type=float, default=100.0, help="size of the measured models")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--bucket-mb", type=float, default=8.0, help="limit of a message buffer, per direction")
    parser.add_argument("--layouts", nargs="+", default=MEASURED, help="measured layouts, such as 'tp2 pp2 -> 1'")
    parser.add_argument("--sample", type=int, default=5, help="ranks that are planned in each computed row")
    parser.add_argument("--markdown", action="store_true")
    options = parser.parse_args()
    if unknown := sorted({*options.parts} - {"measured", "computed", "hybridflow"}):
        parser.error(f"no such part: {', '.join(unknown)}; choose from measured, computed, hybridflow")
    right = True
    if "measured" in options.parts:
        sizes = {"megabytes": options.megabytes, "repeats": options.repeats, "bucket_mb": options.bucket_mb}
        right = show_measured(options.layouts, **sizes, markdown=options.markdown)
    if "computed" in options.parts:
        show_computed(COMPUTED, sample=options.sample, markdown=options.markdown)
    if "hybridflow" in options.parts:
        show_hybridflow(markdown=options.markdown)
    return 0 if right else 1


if __name__ == "__main__":
    raise SystemExit(main())
