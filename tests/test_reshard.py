"""Reshard and checksum on real gloo ranks, compared with direct slicing of the whole tensors.

Not covered: NCCL and CUDA tensors.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from weight_worlds import scatter, tiny_spec

from tridentrl.configs.model_spec import ModelSpec
from tridentrl.parallel.grid import Grid
from tridentrl.weights.checksum import box_hash, position_keys, verify
from tridentrl.weights.execute import Receipt, Resharder, first_elements, reshard, schedule
from tridentrl.weights.layouts import hf_shapes, megatron_layout, megatron_shapes, vllm_layout, vllm_shapes
from tridentrl.weights.pieces import Piece, intersect, volume
from tridentrl.weights.plan import ReshardPlan, plan

BUCKET = 2048
STALE = -7.0


def hf_weights(spec: ModelSpec, seed: int = 0) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(seed)
    return {name: generator.standard_normal(shape).astype(np.float32) for name, shape in hf_shapes(spec).items()}


def as_torch(arrays: dict[str, np.ndarray], dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(array).to(dtype) for name, array in arrays.items()}


def worlds(spec: ModelSpec, grid: Grid, tp: int) -> ReshardPlan:
    ranks = range(grid.world)
    return plan({r: megatron_layout(spec, grid, r) for r in ranks}, {r: vllm_layout(spec, tp, r % tp) for r in ranks})


def train_side(spec: ModelSpec, grid: Grid, seed: int = 0) -> dict[str, torch.Tensor]:
    rank = dist.get_rank()
    return as_torch(scatter(megatron_layout(spec, grid, rank), megatron_shapes(spec, grid, rank), hf_weights(spec, seed)))


def rollout_side(spec: ModelSpec, tp: int, weights: dict[str, np.ndarray], dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    tp_rank = dist.get_rank() % tp
    return as_torch(scatter(vllm_layout(spec, tp, tp_rank), vllm_shapes(spec, tp, tp_rank), weights, fill=STALE), dtype)


def stale(spec: ModelSpec, tp: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return {name: torch.full(shape, STALE, dtype=dtype) for name, shape in vllm_shapes(spec, tp, dist.get_rank() % tp).items()}


def sync_twice(spec: ModelSpec, grid: Grid, tp: int, dtype: torch.dtype) -> list[Receipt]:
    """Two syncs with other weights through one Resharder; asserts the targets, their storage and the sources after each."""
    todo = worlds(spec, grid, tp)
    targets = stale(spec, tp, dtype)
    storages = {name: tensor.data_ptr() for name, tensor in targets.items()}
    resharder = Resharder(todo, group=None, bucket_bytes=BUCKET, dtype=dtype)
    receipts = []
    for version in (1, 2):
        sources = train_side(spec, grid, seed=version)
        before = {name: tensor.clone() for name, tensor in sources.items()}
        receipts.append(resharder.run(sources, targets, version=version))
        expected = rollout_side(spec, tp, hf_weights(spec, seed=version), dtype)
        for name, value in expected.items():
            assert torch.equal(targets[name], value), name
            assert targets[name].data_ptr() == storages[name]
        assert all(torch.equal(sources[name], value) for name, value in before.items())
        verify(todo, sources, targets, group=None, dtype=dtype)
    return receipts


@pytest.mark.parametrize(
    ("grid", "tp", "tied", "dtype"),
    [
        (Grid(tp=2, pp=2), 1, True, torch.float32),
        (Grid(tp=2, pp=2), 2, False, torch.bfloat16),
        (Grid(tp=4), 2, False, torch.float32),
        (Grid(tp=2, dp=2), 4, True, torch.bfloat16),
        (Grid(pp=2, vpp=2, dp=2), 2, False, torch.float32),
    ],
)
def test_every_sync_fills_the_live_tensors_with_the_fewest_bytes(grid: Grid, tp: int, tied: bool, dtype: torch.dtype) -> None:
    spec = tiny_spec(num_layers=4, tied=tied, qkv_bias=True, qk_norm=True)
    todo = worlds(spec, grid, tp)
    for rank, receipts in enumerate(run_ranks(4, sync_twice, spec, grid, tp, dtype)):
        for version, receipt in enumerate(receipts, start=1):
            assert receipt.version == version
            assert receipt.bytes_received == receipt.lower_bound == todo.lower_bound[rank] * dtype.itemsize // 4
            assert receipt.ratio == 1.0
            assert receipt.bucket_bytes <= 2 * BUCKET
            assert receipt.seconds > 0


def apart() -> tuple[float, float, float]:
    """Ranks 0 and 1 train, rank 2 generates, rank 3 has nothing to do and takes part."""
    spec, grid, rank = tiny_spec(), Grid(tp=2), dist.get_rank()
    todo = plan({r: megatron_layout(spec, grid, r) for r in (0, 1)}, {2: vllm_layout(spec, 1, 0)})
    sources = train_side(spec, grid) if rank < 2 else {}
    targets = {name: torch.full(shape, STALE) for name, shape in vllm_shapes(spec, 1, 0).items()} if rank == 2 else {}
    receipt = reshard(todo, sources, targets, group=None, bucket_bytes=BUCKET, version=1)
    if rank == 2:
        expected = as_torch(scatter(vllm_layout(spec, 1, 0), vllm_shapes(spec, 1, 0), hf_weights(spec), fill=STALE))
        assert all(torch.equal(targets[name], value) for name, value in expected.items())
    verify(todo, sources, targets, group=None, dtype=torch.float32)
    return receipt.bytes_received, receipt.lower_bound, receipt.ratio


def test_separate_rollout_ranks_and_idle_ranks() -> None:
    size = 4 * sum(int(np.prod(shape)) for shape in hf_shapes(tiny_spec()).values())
    assert run_ranks(4, apart) == [(0, 0, 1.0), (0, 0, 1.0), (size, size, 1.0), (0, 0, 1.0)]


def in_subgroup() -> None:
    """A plan's ranks count within its group: here the group is world ranks 1 and 2."""
    group = dist.new_group([1, 2])
    if dist.get_rank() in (1, 2):
        box = ((0, 6), (0, 2))
        todo = plan({0: [Piece("w", box, "s", box)]}, {1: [Piece("w", box, "t", box)]})
        mine = torch.arange(12.0).view(6, 2)
        sources, targets = ({"s": mine}, {}) if dist.get_rank() == 1 else ({}, {"t": torch.zeros(6, 2)})
        reshard(todo, sources, targets, group=group, bucket_bytes=12)
        assert dist.get_rank() == 1 or torch.equal(targets["t"], mine)


def test_a_plan_within_a_subgroup() -> None:
    run_ranks(3, in_subgroup)


def duplicated() -> list[list[float]]:
    box = ((0, 4),)
    todo = plan({0: [Piece("w", box, "s", box)]}, {1: [Piece("w", box, "one", box), Piece("w", box, "two", ((1, 5),))]})
    sources, targets = {"s": torch.tensor([1.0, 2, 3, 4])}, {}
    if dist.get_rank() == 1:
        sources, targets = {}, {"one": torch.zeros(4), "two": torch.zeros(5)}
    receipt = reshard(todo, sources, targets, group=None, bucket_bytes=64)
    assert receipt.bytes_received == 16 * dist.get_rank()
    verify(todo, sources, targets, group=None, dtype=torch.float32)
    return [tensor.tolist() for tensor in targets.values()]


def test_a_box_held_twice_arrives_once() -> None:
    assert run_ranks(2, duplicated) == [[], [[1, 2, 3, 4], [0, 1, 2, 3, 4]]]


def mismatch(damage: Callable[[dict[str, torch.Tensor]], None]) -> str:
    """Sync, let rank 1 damage its targets, and return what `verify` says here."""
    spec, grid = tiny_spec(qkv_bias=True), Grid(tp=2)
    todo, sources, targets = worlds(spec, grid, 2), train_side(spec, grid), stale(spec, 2)
    reshard(todo, sources, targets, group=None, bucket_bytes=BUCKET)
    verify(todo, sources, targets, group=None, dtype=torch.float32)
    if dist.get_rank() == 1:
        damage(targets)
    with pytest.raises(RuntimeError) as error:
        verify(todo, sources, targets, group=None, dtype=torch.float32)
    return str(error.value)


def flip_a_bit(targets: dict[str, torch.Tensor]) -> None:
    targets["model.layers.1.mlp.down_proj.weight"].view(torch.int32)[3, 5] ^= 1


def flip_a_sign(targets: dict[str, torch.Tensor]) -> None:
    targets["model.norm.weight"][7] *= -1


def swap_gate_and_up(targets: dict[str, torch.Tensor]) -> None:
    fused = targets["model.layers.0.mlp.gate_up_proj.weight"]
    fused.copy_(fused.roll(fused.shape[0] // 2, 0))


def shift_rows(targets: dict[str, torch.Tensor]) -> None:
    bias = targets["model.layers.0.self_attn.qkv_proj.bias"]
    bias[:16] = bias[:16].roll(4)


def skip_a_tensor(targets: dict[str, torch.Tensor]) -> None:
    targets["lm_head.weight"].fill_(STALE)


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (flip_a_bit, ["model.layers.1.mlp.down_proj.weight"]),
        (flip_a_sign, ["model.norm.weight"]),
        (swap_gate_and_up, ["model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight"]),
        (shift_rows, ["model.layers.0.self_attn.q_proj.bias"]),
        (skip_a_tensor, ["lm_head.weight"]),
    ],
)
def test_damage_is_named_on_every_rank(damage: Callable[[dict[str, torch.Tensor]], None], named: list[str]) -> None:
    first, second = run_ranks(2, mismatch, damage)
    assert first == second
    assert f"{len(named)} tensors differ" in first
    assert all(f"{name} (in " in first for name in named)
    assert first.count("on rank 1") == len(named)
    assert "rank 0" not in first


def wrong_shard() -> str:
    """Both ranks hold the other's rows: right shapes, right values, wrong places."""
    spec, grid = tiny_spec(), Grid(tp=2)
    todo, sources, targets = worlds(spec, grid, 2), train_side(spec, grid), stale(spec, 2)
    reshard(todo, sources, targets, group=None, bucket_bytes=BUCKET)
    other = as_torch(scatter(vllm_layout(spec, 2, 1 - dist.get_rank()), vllm_shapes(spec, 2, 0), hf_weights(spec)))
    name = "model.layers.0.self_attn.o_proj.weight"
    targets[name].copy_(other[name])
    with pytest.raises(RuntimeError) as error:
        verify(todo, sources, targets, group=None, dtype=torch.float32)
    return str(error.value)


def test_a_swapped_shard_is_named_with_both_ranks() -> None:
    message = run_ranks(2, wrong_shard)[0]
    assert "model.layers.0.self_attn.o_proj.weight (in model.layers.0.self_attn.o_proj.weight) on rank 0, 1" in message


def splitmix64(hf_box_corner: tuple[int, ...]) -> int:
    """The key in Python integers."""
    factors = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F)
    z = sum(i * f for i, f in zip(hf_box_corner, factors, strict=False)) % 2**64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
    return z ^ z >> 31 | 1


def test_the_hash_is_the_sum_of_bits_times_position_keys() -> None:
    box = ((3, 6), (10, 14))
    keys = position_keys(box, torch.device("cpu"))
    assert [[int(k) % 2**64 for k in row] for row in keys] == [[splitmix64((r, c)) for c in range(10, 14)] for r in range(3, 6)]
    values = torch.randn(3, 4)
    bits = values.numpy().view(np.int32).astype(object)
    expected = sum(int(bits[r][c]) * splitmix64((r + 3, c + 10)) for r in range(3) for c in range(4)) % 2**64
    assert int(box_hash(values, ((0, 3), (0, 4)), box, torch.float32)) % 2**64 == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hashes_of_disjoint_boxes_add_up(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(50, 8)
    whole = box_hash(values, ((0, 50), (0, 8)), ((0, 50), (0, 8)), dtype)
    monkeypatch.setattr("tridentrl.weights.checksum.CHUNK", 20)
    parts = [((0, 17), (0, 8)), ((17, 50), (0, 3)), ((17, 50), (3, 8))]
    assert torch.stack([box_hash(values, box, box, dtype) for box in parts]).sum() == whole


@pytest.mark.parametrize("room", [1, 2, 3, 7, 12, 23, 24])
def test_a_box_is_cut_into_first_elements_and_the_rest_in_order(room: int) -> None:
    box = ((2, 4), (0, 3), (5, 9))
    order, todo, sizes = [], [box], []
    while todo:
        head, rest = first_elements(todo.pop(), room)
        assert head is not None
        sizes.append(volume(head))
        order += [
            tuple(index)
            for index in np.ndindex(2, 3, 4)
            if intersect(head, tuple((i + b[0], i + b[0] + 1) for i, b in zip(index, box, strict=True)))
        ]
        todo.extend(reversed(rest))
    assert order == list(np.ndindex(2, 3, 4))
    assert max(sizes) <= room


def test_large_pieces_are_cut_so_that_no_bucket_is_exceeded() -> None:
    box = ((0, 10), (0, 7))
    todo = plan({0: [Piece("w", box, "s", box)]}, {1: [Piece("w", box, "t", box)]})
    for elements in (1, 5, 7, 16, 70, 1000):
        sizes = [sum(bucket.size for bucket in step.sends) for step in schedule(todo, 0, bucket_elements=elements)]
        assert sum(sizes) == 70
        assert max(sizes) <= elements
        assert len(sizes) == -(-70 // elements)
    with pytest.raises(ValueError, match="bucket_bytes"):
        schedule(todo, 0, bucket_elements=0)


def test_targets_of_another_dtype_are_refused() -> None:
    box = ((0, 2),)
    todo = plan({0: [Piece("w", box, "s", box)]}, {0: [Piece("w", box, "t", box)]})
    resharder = Resharder(todo, group=None, bucket_bytes=8, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"t \(torch.float32\)"):
        resharder.run({"s": torch.ones(2)}, {"t": torch.ones(2)})
    with pytest.raises(ValueError, match="one data type"):
        reshard(todo, {}, {"t": torch.ones(2), "u": torch.ones(2).half()}, group=None, bucket_bytes=8)
