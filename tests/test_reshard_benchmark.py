"""What benchmarks/reshard.py measures and computes, against numbers by hand. Its times and memory are not checked here."""

from __future__ import annotations

import sys
from fractions import Fraction
from pathlib import Path

import pytest

BENCHMARKS = str(Path(__file__).parents[1] / "benchmarks")
sys.path.insert(0, BENCHMARKS)
try:
    from reshard import MODELS, PAPER, compute, parse_layout, show, transitions
    from reshard_ranks import measure, model_of
finally:
    sys.path.remove(BENCHMARKS)

LAYER = 2 * 128 * 128 + 2 * 128 * 64 + 3 * 128 * 448
MATRICES = 2 * 8192 * 128 + 8 * LAYER
"""Elements of the smallest measured model: embedding, head, and in each of 8 layers q, o, k, v, gate, up, down."""
NORM = 128


def test_measured_ways_agree_bit_by_bit_and_receive_what_arithmetic_says() -> None:
    """TP2 x PP2 to TP2. Two bytes per element, summed over four ranks."""
    grid, tensor = parse_layout("tp2 pp2 -> 2")
    spec = model_of(1, experts=False)
    assert (spec.hidden_size, spec.ffn_size, spec.num_layers, spec.vocab_size) == (128, 448, 8, 8192)
    by_plan, by_tensor, whole = measure(spec, grid, tensor, repeats=1, bucket_bytes=100_000)
    assert by_plan.exact and by_tensor.exact and whole.exact
    # Each rank wants half of every matrix and has that half of its own stage; of the norms, stage 0 lacks 9 and stage 1 lacks 8.
    assert sum(by_plan.received) == 2 * (MATRICES + NORM * (2 * 9 + 2 * 8))
    assert by_plan.received == by_plan.lower_bound
    # Gathering: each rank receives all of every matrix but its own quarter of the model, on average.
    assert sum(by_tensor.received) == 2 * (4 * MATRICES - MATRICES + NORM * (2 * 9 + 2 * 8))
    assert by_tensor.received == whole.received == by_tensor.formula


def test_experts_are_gathered_over_the_ranks_that_share_them() -> None:
    grid, tensor = parse_layout("tp2 dp2 ep2 etp2 -> 2")
    spec = model_of(1, experts=True)
    by_plan, by_tensor, _ = measure(spec, grid, tensor, repeats=1, bucket_bytes=100_000)
    assert by_plan.exact and by_tensor.exact
    assert by_plan.received == by_plan.lower_bound
    h, experts = spec.hidden_size, 4 * 8 * 3 * spec.hidden_size * spec.expert_ffn_size
    dense = 2 * 8192 * h + 4 * (2 * h * h + 2 * h * h // 2)
    assert by_tensor.received == (2 * (dense // 2 + experts * 3 // 4),) * 4 == by_tensor.formula
    # vLLM wants half of every expert and the rank holds half of half of the experts: a quarter is missing, where the halves are the same.
    assert sum(by_plan.received) == 4 * 2 * experts // 4


def test_hybridflow_rows() -> None:
    """By hand from the formulas of its table 2: communication, peak memory, redundancy."""
    rows = {name: (row.communication, row.peak, row.redundancy) for name, row in transitions(t=8, p=1, d=2, t_g=2).items()}
    assert rows == {
        "DS-Chat": (Fraction(15, 16), 1, Fraction(1, 16)),
        "HybridFlow-V": (Fraction(7, 8), 1, Fraction(1, 8)),
        "HybridFlow": (Fraction(3, 8), Fraction(1, 2), 0),
    }
    deep = transitions(t=4, p=2, d=3, t_g=2, p_g=2)
    assert [row.communication for row in deep.values()] == [Fraction(23, 24), Fraction(7, 8), Fraction(1, 8)]
    assert deep["HybridFlow"].peak == Fraction(1, 4)
    same = transitions(t=8, p=1, d=2, t_g=8)["HybridFlow"]
    assert (same.communication, same.peak) == (0, Fraction(1, 8))


def test_we_receive_what_hybridflow_receives_in_its_figure_15() -> None:
    """7B, 1-8-2 to TP2: 3/8 of all but the norms, which every rank has. Llama 2 7B has 6,738,415,616 parameters, 65 norms of 4,096."""
    model, layouts = PAPER["figure 15, 7B"]
    assert "tp8 dp2 -> 2" in layouts
    case = compute(MODELS[model], "tp8 dp2 -> 2", sample=3)
    matrices = 6_738_415_616 - 65 * 4096
    assert case.planned == case.planned_bound == case.bound == 2 * matrices * 3 // 8
    assert case.gather == 2 * matrices * 7 // 8
    assert (case.bound_sum, case.gather_sum) == (16 * case.bound, 16 * case.gather)
    assert case.far == 0


def test_a_pipeline_over_nodes_receives_from_other_nodes() -> None:
    """Eight tensor ranks per node and stage: what a rank lacks of its column, the other stage's half, lies on another node."""
    case = compute(MODELS["Llama 2 7B"], "tp8 pp2 -> 8", sample=2)
    embedding, norms = 32000 * 4096 // 8, 32 * 4096
    layers = (6_738_415_616 - 65 * 4096 - 2 * 32000 * 4096) // 8 // 2
    assert case.bound == 2 * (layers + embedding + norms + 4096)  # stage 0 lacks the last norm too
    assert case.planned == case.bound
    assert case.far == 1


@pytest.mark.parametrize("text", ["tp2", "tp2 -> ", "xx2 -> 1", "tp3 -> 2"])
def test_a_wrong_layout_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"layout '.*'"):
        parse_layout(text)


def test_tables_in_both_forms(capsys: pytest.CaptureFixture[str]) -> None:
    for markdown in (False, True):
        show("Title", ["a", "long"], [["1", "2"], ["333", "4"]], markdown=markdown)
    assert capsys.readouterr().out == (
        "\nTitle\na    long\n1    2\n333  4\n" + "\n### Title\n\n| a | long |\n| --- | --- |\n| 1 | 2 |\n| 333 | 4 |\n"
    )
