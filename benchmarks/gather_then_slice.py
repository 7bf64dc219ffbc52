"""What most trainers do to hand weights to their rollout engine: make every tensor whole on every rank, then cut out what is wanted.

Tensor by tensor: the stage that has it sends each shard along the pipeline, the tensor-parallel ranks (for experts, the ranks that
share them) all-gather the shards, the whole tensors are put together in Hugging Face form and sliced. At most one fused parameter is whole
at a time. What all ranks of a group hold alike is not gathered. Models whose head is tied are not covered.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from tridentrl.configs.model_spec import ModelSpec
from tridentrl.parallel.grid import Grid
from tridentrl.weights.execute import Tensors
from tridentrl.weights.layouts import hf_shapes, megatron_layout, megatron_shapes
from tridentrl.weights.pieces import Piece, Shape, slices


@dataclass(frozen=True)
class Unit:
    """One parameter of one stage, as every group of ranks that holds it between them sees it."""

    stage: int
    name: str
    shape: Shape
    """Of one shard, padding included."""
    shards: tuple[tuple[Piece, ...], ...]
    """By member of the group, what its shard holds; a single one when all hold the same."""


def units(spec: ModelSpec, grid: Grid) -> list[Unit]:
    """In the order in which all ranks gather them."""
    found = []
    for stage in range(grid.pp):
        ranks = [stage * grid.stage + i for i in range(max(grid.tp, grid.sharing))]
        layouts = [_by_local_name(megatron_layout(spec, grid, rank)) for rank in ranks]
        for name, shape in megatron_shapes(spec, grid, ranks[0]).items():
            shards = [tuple(layout[name]) for layout in layouts[: _group_size(grid, name)]]
            same = all(shard == shards[0] for shard in shards)
            found.append(Unit(stage, name, shape, tuple(shards[:1] if same else shards)))
    return found


def bytes_received(some: Sequence[Unit], grid: Grid, rank: int, *, itemsize: int) -> int:
    """What `rank` receives: the shards of other stages, and the others' shards of every tensor that is gathered."""
    stage = grid.coord(rank).pp_rank
    return itemsize * sum(torch.Size(unit.shape).numel() * ((unit.stage != stage) + len(unit.shards) - 1) for unit in some)


class GatherThenSlice:
    """Ready for one rank. All ranks make it and run it together."""

    def __init__(self, spec: ModelSpec, grid: Grid, wanted: Sequence[Piece], *, whole_model: bool = False) -> None:
        """whole_model: slice only when the last tensor is whole, as the simplest trainers do."""
        self.grid, self.whole_model, self.units = grid, whole_model, units(spec, grid)
        self.shapes = hf_shapes(spec)
        self.wanted: dict[str, list[Piece]] = defaultdict(list)
        for piece in wanted:
            self.wanted[piece.hf_name].append(piece)
        self.rank, world = dist.get_rank(), grid.world
        self.groups: dict[int, dist.ProcessGroup] = {}
        for size in sorted({grid.tp, grid.sharing}):
            blocks = [range(first, first + size) for first in range(0, world, size)]
            self.groups[size] = self._mine(blocks)
        self.pipeline = self._mine([range(first, world, grid.stage) for first in range(grid.stage)])

    def _mine(self, blocks: Sequence[range]) -> dist.ProcessGroup:
        groups = {block: dist.new_group(list(block)) for block in blocks}
        return next(group for block, group in groups.items() if self.rank in block)

    @torch.no_grad()
    def run(self, source_tensors: Tensors, target_tensors: Tensors) -> int:
        """Fill `target_tensors`; returns the bytes that this rank received."""
        whole: dict[str, torch.Tensor] = {}
        received = 0
        for unit in self.units:
            received += self._gather(unit, source_tensors, target_tensors, whole)
            if not self.whole_model:
                self._slice(whole, target_tensors)
        self._slice(whole, target_tensors)
        return received

    def _gather(self, unit: Unit, source_tensors: Tensors, target_tensors: Tensors, whole: dict[str, torch.Tensor]) -> int:
        grid, received = self.grid, 0
        if unit.stage == grid.coord(self.rank).pp_rank:
            shard = source_tensors[unit.name]
        else:
            shard = next(iter(target_tensors.values())).new_empty(unit.shape)
            received += shard.nbytes
        if grid.pp > 1:
            dist.broadcast(shard, unit.stage * grid.stage + self.rank % grid.stage, group=self.pipeline)
        shards = [shard]
        if len(unit.shards) > 1:
            shards = [torch.empty_like(shard) for _ in unit.shards]
            dist.all_gather(shards, shard, group=self.groups[_group_size(grid, unit.name)])
            received += shard.nbytes * (len(shards) - 1)
        for pieces, data in zip(unit.shards, shards, strict=True):
            for piece in pieces:
                if piece.hf_name not in whole:
                    whole[piece.hf_name] = data.new_empty(self.shapes[piece.hf_name])
                whole[piece.hf_name][slices(piece.hf_box)] = data[slices(piece.local_box)]
        return received

    def _slice(self, whole: dict[str, torch.Tensor], target_tensors: Tensors) -> None:
        for name, tensor in whole.items():
            for piece in self.wanted[name]:
                target_tensors[piece.local_name][slices(piece.local_box)] = tensor[slices(piece.hf_box)]
        whole.clear()


def _group_size(grid: Grid, name: str) -> int:
    return grid.sharing if ".local_experts." in name else grid.tp


def _by_local_name(pieces: Sequence[Piece]) -> dict[str, list[Piece]]:
    found: dict[str, list[Piece]] = defaultdict(list)
    for piece in pieces:
        found[piece.local_name].append(piece)
    return found
