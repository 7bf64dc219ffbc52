"""The plan against brute force on element numbers: every target element arrives exactly once and no byte is received that was there."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from weight_worlds import element_ids, scatter, tiny_spec

from tridentrl.configs.model_spec import ModelSpec
from tridentrl.parallel.grid import Grid
from tridentrl.weights.layouts import hf_layout, hf_shapes, megatron_layout, megatron_shapes, vllm_layout, vllm_shapes
from tridentrl.weights.pieces import Piece, Shape, slices, volume
from tridentrl.weights.plan import ReshardPlan, plan

Layouts = Mapping[int, Sequence[Piece]]
ITEMSIZE = 2


def megatron_world(spec: ModelSpec, grid: Grid) -> tuple[Layouts, dict[int, dict[str, Shape]]]:
    ranks = range(grid.world)
    return {r: megatron_layout(spec, grid, r) for r in ranks}, {r: megatron_shapes(spec, grid, r) for r in ranks}


def vllm_world(spec: ModelSpec, world: int, tp: int) -> tuple[Layouts, dict[int, dict[str, Shape]]]:
    return {r: vllm_layout(spec, tp, r % tp) for r in range(world)}, {r: vllm_shapes(spec, tp, r % tp) for r in range(world)}


def carry_out(
    todo: ReshardPlan,
    spec: ModelSpec,
    sources: Layouts,
    source_shapes: dict[int, dict[str, Shape]],
    target_shapes: dict[int, dict[str, Shape]],
) -> dict[int, tuple[set[int], set[int], int]]:
    """Run the plan on element numbers and compare every target with direct slicing of the whole tensors.

    Returns per target rank (elements wanted, elements its sources hold, elements received from others).
    """
    ids = element_ids(hf_shapes(spec))
    held = {r: scatter(sources[r], source_shapes[r], ids) for r in sources}
    filled = {r: {name: np.zeros(shape, dtype=int) for name, shape in target_shapes[r].items()} for r in todo.targets}
    written = {r: {name: np.zeros(shape, dtype=int) for name, shape in target_shapes[r].items()} for r in todo.targets}
    received: Counter[int] = Counter()
    copies = [(r, r, move) for r, moves in todo.local.items() for move in moves]
    copies += [(s, d, move) for (s, d), moves in todo.moves.items() for move in moves]
    for source, destination, move in copies:
        filled[destination][move.target][slices(move.target_box)] = held[source][move.source][slices(move.source_box)]
        written[destination][move.target][slices(move.target_box)] += 1
        received[destination] += volume(move.hf_box) if source != destination else 0
    for rank, moves in todo.echoes.items():
        for move in moves:
            filled[rank][move.target][slices(move.target_box)] = filled[rank][move.source][slices(move.source_box)]
            written[rank][move.target][slices(move.target_box)] += 1
    result = {}
    for rank, pieces in todo.targets.items():
        expected = scatter(pieces, target_shapes[rank], ids)
        for name, value in expected.items():
            assert np.array_equal(filled[rank][name], value), (rank, name)
            assert np.array_equal(written[rank][name], value > 0), (rank, name)
        wanted = {int(i) for value in expected.values() for i in value.flat if i}
        mine = {int(i) for value in held.get(rank, {}).values() for i in value.flat if i}
        result[rank] = (wanted, mine, received[rank])
    return result


def assert_exact_and_minimal(spec: ModelSpec, source: tuple[Layouts, dict], target: tuple[Layouts, dict]) -> ReshardPlan:
    todo = plan(source[0], target[0], itemsize=ITEMSIZE)
    for rank, (wanted, mine, received) in carry_out(todo, spec, *source, target[1]).items():
        fewest = ITEMSIZE * len(wanted - mine)
        assert todo.bytes_received[rank] == received * ITEMSIZE == fewest == todo.lower_bound[rank]
    return todo


GRIDS = [
    Grid(tp=t, pp=p, vpp=v, dp=d) for t, p, v, d in [(1, 1, 1, 1), (2, 1, 1, 2), (1, 2, 2, 1), (4, 2, 1, 1), (2, 4, 2, 1), (8, 1, 1, 1)]
]


@pytest.mark.parametrize(("tied", "kv_heads"), [(False, 2), (True, 2), (False, 8), (True, 1)])
def test_training_to_rollout_is_exact_and_receives_the_fewest_bytes(tied: bool, kv_heads: int) -> None:
    spec = tiny_spec(num_layers=8, hidden_size=16, num_kv_heads=kv_heads, tied=tied, qkv_bias=True, qk_norm=True)
    for grid, tp in itertools.product(GRIDS, [1, 2, 4, 8]):
        if grid.world % tp == 0:
            assert_exact_and_minimal(spec, megatron_world(spec, grid), vllm_world(spec, grid.world, tp))


def test_between_two_training_layouts_and_into_files() -> None:
    spec = tiny_spec(num_layers=4, hidden_size=16, tied=True)
    for before, after in itertools.permutations([Grid(tp=4), Grid(tp=2, pp=2), Grid(pp=2, vpp=2, dp=2)], 2):
        assert_exact_and_minimal(spec, megatron_world(spec, before), megatron_world(spec, after))
    files = {0: hf_layout(spec)}, {0: hf_shapes(spec)}
    for grid in (Grid(tp=4), Grid(tp=2, pp=2)):
        assert_exact_and_minimal(spec, megatron_world(spec, grid), files)
        assert_exact_and_minimal(spec, files, megatron_world(spec, grid))


def test_rollout_ranks_apart_from_training_ranks_receive_everything_once() -> None:
    spec = tiny_spec(num_layers=2, hidden_size=16)
    sources, source_shapes = megatron_world(spec, Grid(tp=2))
    targets = {2: vllm_layout(spec, 2, 0), 3: vllm_layout(spec, 2, 1)}
    todo = assert_exact_and_minimal(spec, (sources, source_shapes), (targets, {r: vllm_shapes(spec, 2, r - 2) for r in (2, 3)}))
    assert not todo.local
    assert todo.bytes_received[0] == todo.bytes_received[1] == 0


WIDE = [
    (tp, pp, vpp, rollout_tp, kv)
    for tp, pp, vpp, rollout_tp, kv in itertools.product([1, 2, 4, 8], [1, 2, 4, 8], [1, 2, 8], [1, 2, 4, 8], [1, 2, 8])
    if (pp > 1 or vpp == 1) and tp * pp % rollout_tp == 0 and tp * pp * pp * vpp <= 64
] + [(8, 8, 1, 8, 2), (8, 8, 1, 2, 8), (4, 2, 8, 8, 2), (2, 4, 8, 4, 1), (2, 8, 2, 8, 8)]
"""All that are small (ranks x layers at most 64, which keeps the test quick), and some large ones."""


def test_the_wide_grid_receives_the_lower_bound() -> None:
    """tp, pp, vpp and rollout tp up to 8, kv heads below, at and above tp; volumes only, exactness is the test above."""
    assert len(WIDE) > 150
    for tp, pp, vpp, rollout_tp, kv in WIDE:
        spec = tiny_spec(num_layers=pp * vpp, num_kv_heads=kv, head_dim=8, tied=kv == 2)
        grid = Grid(tp=tp, pp=pp, vpp=vpp)
        sources = {r: megatron_layout(spec, grid, r) for r in range(grid.world)}
        targets = vllm_world(spec, grid.world, rollout_tp)[0]
        todo = plan(sources, targets)
        assert todo.bytes_received == todo.lower_bound
        moved = Counter({r: sum(volume(m.hf_box) for m in moves) for r, moves in todo.local.items()})
        for (_, destination), moves in todo.moves.items():
            moved[destination] += sum(volume(m.hf_box) for m in moves)
        assert moved == {r: sum(volume(p.hf_box) for p in pieces) for r, pieces in targets.items()}


def test_a_box_held_twice_is_received_once_and_copied_at_home() -> None:
    sources = {0: [Piece("w", ((0, 4),), "a", ((0, 4),))]}
    targets = {1: [Piece("w", ((0, 4),), "first", ((0, 4),)), Piece("w", ((2, 4),), "second", ((0, 2),))]}
    todo = plan(sources, targets, itemsize=4)
    assert todo.bytes_received == {0: 0, 1: 16} == todo.lower_bound
    (echo,) = todo.echoes[1]
    assert (echo.source, echo.source_box, echo.target, echo.target_box) == ("first", ((2, 4),), "second", ((0, 2),))


def test_sources_that_overlap_partly_still_cover_once() -> None:
    sources = {0: [Piece("w", ((0, 6), (0, 4)), "a", ((0, 6), (0, 4)))], 1: [Piece("w", ((4, 9), (0, 4)), "b", ((1, 6), (0, 4)))]}
    targets = {1: [Piece("w", ((0, 9), (0, 4)), "t", ((0, 9), (0, 4)))]}
    todo = plan(sources, targets, itemsize=1)
    assert todo.bytes_received[1] == todo.lower_bound[1] == 16
    assert [m.source_box for m in todo.local[1]] == [((1, 3), (0, 4)), ((3, 6), (0, 4))]


def test_own_memory_then_own_node_then_the_least_busy_replica() -> None:
    whole = ((0, 10),)
    sources = {r: [Piece("w", whole, "s", whole)] for r in (0, 1, 2, 3)}
    targets = {r: [Piece("w", whole, "t", whole)] for r in (2, 4, 5, 6, 7)}
    todo = plan(sources, targets, node_of={r: r % 2 for r in range(8)})
    assert list(todo.local) == [2]
    # Even ranks share a node, odd ranks another: 4 and 6 take from 0 and 2, 5 and 7 from 1 and 3, each sender once.
    assert list(todo.moves) == [(0, 4), (1, 5), (2, 6), (3, 7)]
    far = plan({0: sources[0]}, {1: targets[5]}, node_of={0: 0, 1: 1})
    assert list(far.moves) == [(0, 1)]


def test_the_plan_is_the_same_every_time() -> None:
    spec, grid = tiny_spec(num_layers=4), Grid(tp=2, pp=2, dp=2)
    world = megatron_world(spec, grid)[0], vllm_world(spec, 8, 4)[0]
    assert plan(*world) == plan(*world)
    shuffled = [dict(reversed(list(layout.items()))) for layout in world]
    assert plan(*shuffled).moves == plan(*world).moves


def test_replicas_share_the_sending_evenly() -> None:
    spec, grid = tiny_spec(num_layers=8, vocab_size=128), Grid(tp=2, dp=4)
    todo = plan(megatron_world(spec, grid)[0], vllm_world(spec, 8, 1)[0])
    sent: Counter[int] = Counter()
    for (source, _), moves in todo.moves.items():
        sent[source] += sum(volume(move.hf_box) for move in moves)
    largest_move = 64 * 32  # half of the embedding
    assert len(sent) == 8
    assert max(sent.values()) - min(sent.values()) <= largest_move


def test_a_gap_in_the_sources_names_tensor_and_box() -> None:
    target = {0: [Piece("w", ((0, 8), (0, 2)), "t", ((0, 8), (0, 2)))]}
    holed = {0: [Piece("w", ((0, 3), (0, 2)), "a", ((0, 3), (0, 2))), Piece("w", ((5, 8), (0, 2)), "b", ((0, 3), (0, 2)))]}
    with pytest.raises(ValueError, match=r"w\[3:5, 0:2\]"):
        plan(holed, target)
    with pytest.raises(ValueError, match=r"all of w\[0:8, 0:2\].*\[0:6, 0:2\]"):
        plan({0: [Piece("w", ((0, 6), (0, 2)), "a", ((0, 6), (0, 2)))]}, target)
    with pytest.raises(ValueError, match="no source holds w, which rank 0 needs for t"):
        plan({0: []}, target)


def assert_every_rank_plans_its_part_alone(sources: Layouts, targets: Layouts, node_of: Mapping[int, int] | None) -> None:
    """What each rank plans by itself is exactly its part of the plan of all, so both ends of every move know it."""
    everything = plan(sources, targets, node_of=node_of)
    planned: set[tuple[int, int]] = set()
    for rank in sorted({*sources, *targets}):
        # Copies, so that no rank's plan can depend on which ranks happen to share a list.
        own = plan({r: list(p) for r, p in sources.items()}, {r: list(p) for r, p in targets.items()}, rank=rank, node_of=node_of)
        assert own.moves == {pair: moves for pair, moves in everything.moves.items() if rank in pair}
        for part, whole in ((own.local, everything.local), (own.echoes, everything.echoes)):
            assert part == {r: moves for r, moves in whole.items() if r == rank}
        assert own.bytes_received == {rank: everything.bytes_received[rank]}
        assert own.lower_bound == own.bytes_received
        planned |= own.moves.keys()
    assert planned == everything.moves.keys()


def moe_spec() -> ModelSpec:
    experts = {"num_experts": 4, "experts_per_token": 2, "expert_ffn_size": 16}
    return tiny_spec(family="qwen3_moe", hf_type="qwen3_moe", qk_norm=True, num_layers=4, **experts)


@pytest.mark.parametrize("ranks_per_node", [None, 3, 4])
@pytest.mark.parametrize(
    ("grid", "tp"),
    [(Grid(tp=2, pp=2, dp=2), 4), (Grid(tp=4, dp=3), 2), (Grid(pp=4, dp=3), 4), (Grid(tp=2, pp=2, vpp=2, dp=3), 1), (Grid(tp=8), 8)],
    ids=str,
)
def test_every_rank_can_plan_its_part_alone(grid: Grid, tp: int, ranks_per_node: int | None) -> None:
    spec = tiny_spec(num_layers=4, tied=True)
    node_of = {r: r // ranks_per_node for r in range(grid.world)} if ranks_per_node else None
    assert_every_rank_plans_its_part_alone(megatron_world(spec, grid)[0], vllm_world(spec, grid.world, tp)[0], node_of)


def test_every_rank_can_plan_its_part_alone_with_experts_and_with_boxes_held_twice() -> None:
    grid = Grid(tp=2, pp=2, dp=2, ep=4)
    assert_every_rank_plans_its_part_alone(megatron_world(moe_spec(), grid)[0], vllm_world(moe_spec(), 8, 2)[0], None)
    sources = {r: [Piece("w", ((0, 6),), "a", ((0, 6),))] for r in (0, 1)}
    twice = [Piece("w", ((0, 4),), "first", ((0, 4),)), Piece("w", ((2, 6),), "second", ((0, 4),))]
    assert_every_rank_plans_its_part_alone(sources, {r: twice for r in (1, 2, 3, 4)}, None)


def test_a_rest_goes_round_all_holders_size_by_size() -> None:
    """Three replicas of four large and two small boxes, and receivers that three do not divide."""
    sizes = [8, 1, 8, 8, 1, 8]
    pieces = [Piece(f"w{i}", ((0, size),), f"s{i}", ((0, size),)) for i, size in enumerate(sizes)]
    for receivers in range(1, 8):
        todo = plan({r: pieces for r in range(3)}, {10 + r: pieces for r in range(receivers)}, itemsize=1)
        sent = {r: [volume(m.hf_box) for (source, _), moves in todo.moves.items() if source == r for m in moves] for r in range(3)}
        for size in (1, 8):
            counts = [boxes.count(size) for boxes in sent.values()]
            assert sum(counts) == receivers * sizes.count(size)
            assert max(counts) - min(counts) <= 1
        # Three senders have receivers / 3 each; a receiver whose third boundary falls inside it hears two or three of them.
        senders = [len({source for source, to in todo.moves if to == 10 + r}) for r in range(receivers)]
        assert senders == {1: [3], 2: [2, 2], 4: [1, 2, 2, 1], 5: [1, 2, 1, 2, 1], 7: [1, 1, 2, 1, 2, 1, 1]}.get(receivers, [1] * receivers)


def test_far_receivers_hear_first_who_sends_little_at_home() -> None:
    """Holders 0 and 1 on node 0 and 2 on node 1, one receiver at home on node 1, five on node 2: two for each holder."""
    box = ((0, 1),)
    node_of = {0: 0, 1: 0, 2: 1, 3: 1} | {r: 2 for r in range(4, 9)}
    todo = plan({r: [Piece("w", box, "s", box)] for r in range(3)}, {r: [Piece("w", box, "t", box)] for r in range(3, 9)}, node_of=node_of)
    assert list(todo.moves) == [(0, 4), (0, 5), (1, 6), (1, 7), (2, 3), (2, 8)]


def test_a_7b_model_on_64_ranks_is_planned_in_seconds() -> None:
    spec = tiny_spec(
        num_layers=32, hidden_size=4096, num_heads=32, num_kv_heads=8, head_dim=128, ffn_size=14336, vocab_size=128256, max_positions=8192
    )
    grid = Grid(tp=8, pp=4, dp=2)
    start = time.perf_counter()
    todo = plan(
        {r: megatron_layout(spec, grid, r) for r in range(64)},
        {r: vllm_layout(spec, 2, r % 2) for r in range(64)},
        node_of={r: r // 8 for r in range(64)},
        itemsize=2,
    )
    assert time.perf_counter() - start < 8
    assert todo.bytes_received == todo.lower_bound


def test_a_rank_among_1024_plans_a_70b_model_in_seconds() -> None:
    """Every stage and column is held by 16 replicas, and wanted by the 112 ranks of its vLLM seat whose stage is another: 7 for each."""
    spec = tiny_spec(
        num_layers=80, hidden_size=8192, num_heads=64, num_kv_heads=8, head_dim=128, ffn_size=28672, vocab_size=128256, max_positions=8192
    )
    grid = Grid(tp=8, pp=8, dp=16)
    start = time.perf_counter()
    sources = {r: megatron_layout(spec, grid, r) for r in range(1024)}
    targets = {r: vllm_layout(spec, 8, r % 8) for r in range(1024)}
    todo = plan(sources, targets, rank=333, node_of={r: r // 8 for r in range(1024)}, itemsize=2)
    assert time.perf_counter() - start < 15
    assert todo.bytes_received == todo.lower_bound
    large = {pair: moves for pair, moves in todo.moves.items() if any("proj" in move.hf_name for move in moves)}
    # Rank 333 is column 5, replica 9, stage 2: it serves places 63 to 69 among the 112 nodes that lack stage 2 (all but 32 to 47).
    assert [to for source, to in large if source == 333] == [8 * node + 5 for node in range(79, 86)]
    assert sum(to == 333 for _, to in large) == 7
    assert len(todo.moves) <= 2 * 7 * 4  # norms, which the whole stage holds, come from at most three others of each stage
