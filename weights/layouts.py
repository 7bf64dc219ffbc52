"""Where every weight of a model lies: in the Hugging Face files, on a Megatron rank, on a vLLM rank.

Local Megatron names are `{chunk}.{parameter}`: the virtual pipeline chunk, then GPTModel's parameter name with the layer number that
this chunk gives it. Pure arithmetic: any rank can compute any other rank's layout.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from tridentrl.configs.model_spec import ModelSpec
from tridentrl.parallel.grid import Grid
from tridentrl.weights.cuts import Shard, share
from tridentrl.weights.families import weights_of
from tridentrl.weights.families.decoder import Head, Weight
from tridentrl.weights.pieces import Piece, Shape, shift, whole

Placed = tuple[str, str, Weight, Shard]
"""(Hugging Face name, local name, declaration, this rank's share)."""


def hf_layout(spec: ModelSpec, *, head: Head = "lm") -> list[Piece]:
    """Identity pieces: every Hugging Face tensor lies whole in a local tensor of the same name."""
    return _pieces(_hf(spec, head))


def hf_shapes(spec: ModelSpec, *, head: Head = "lm") -> dict[str, Shape]:
    """Name and shape of every tensor in the Hugging Face files, in the order of the forward pass."""
    shapes: dict[str, Shape] = {}
    for hf_name, _, _, shard in _hf(spec, head):
        (_, box), rest = shard.parts[0], shard.shape[1:]
        rows = max(box[0][1], shapes.get(hf_name, (0,))[0])
        shapes[hf_name] = (rows, *rest)
    return shapes


def megatron_layout(spec: ModelSpec, grid: Grid, rank: int, *, head: Head = "lm", fused_norms: bool = False) -> list[Piece]:
    """Pieces of `rank`. `fused_norms`: Transformer Engine layers, whose projections own the norm before them.

    Raises ValueError when the grid does not fit the model.
    """
    return _pieces(_megatron(spec, grid, rank, head, fused_norms))


def megatron_shapes(spec: ModelSpec, grid: Grid, rank: int, *, head: Head = "lm", fused_norms: bool = False) -> dict[str, Shape]:
    """Full local shape of every parameter of `rank`, padding included."""
    return _shapes(_megatron(spec, grid, rank, head, fused_norms))


def vllm_layout(spec: ModelSpec, tp: int, tp_rank: int) -> list[Piece]:
    """Pieces of one rank of a vLLM instance with `tp` ranks; names as in vLLM's `named_parameters()`."""
    return _pieces(_vllm(spec, tp, tp_rank))


def vllm_shapes(spec: ModelSpec, tp: int, tp_rank: int) -> dict[str, Shape]:
    """Full local shape of every vLLM parameter, padding included."""
    return _shapes(_vllm(spec, tp, tp_rank))


def _hf(spec: ModelSpec, head: Head) -> Iterator[Placed]:
    for weight in weights_of(spec, head):
        box = shift(whole(weight.shape), (weight.hf_row, *(0 for _ in weight.shape[1:])))
        for layer in range(spec.num_layers if weight.at == "layer" else 1):
            name = weight.hf.format(layer)
            # `hf_row` is added to the first box of every part in `_pieces`, so only the local box carries it here.
            yield name, name, weight, Shard(weight.shape, ((whole(weight.shape), box),))


def _megatron(spec: ModelSpec, grid: Grid, rank: int, head: Head, fused_norms: bool) -> Iterator[Placed]:
    coord = grid.coord(rank)
    first, last = coord.pp_rank == 0, coord.pp_rank == grid.pp - 1
    weights = weights_of(spec, head)
    if spec.tied and head == "lm" and grid.pp > 1:
        # The last stage of a pipeline cannot share storage with the first: Megatron keeps a second copy there.
        weights = [*weights, replace(_embedding(weights), megatron="output_layer.weight", at="final")]
    for chunk in range(grid.vpp):
        layers = grid.layers(coord.pp_rank, chunk, spec.num_layers)
        here = {"embedding": first and chunk == 0, "layer": True, "final": last and chunk == grid.vpp - 1}
        for weight in weights:
            if not here[weight.at]:
                continue
            name = weight.megatron_fused if fused_norms and weight.megatron_fused else weight.megatron
            slot = 0
            if weight.expert is None:
                shard = weight.cut.megatron(weight.shape, grid.tp, coord.tp_rank)
            else:
                holder, slot = divmod(weight.expert, share("experts", spec.num_experts, grid.ep, "expert-parallel"))
                if holder != grid.ep_rank(rank):
                    continue
                shard = weight.cut.megatron(weight.shape, grid.etp, grid.etp_rank(rank))
            for local, layer in enumerate(layers if weight.at == "layer" else (0,)):
                yield weight.hf.format(layer), f"{chunk}.{name.format(local, slot)}", weight, shard


def _vllm(spec: ModelSpec, tp: int, tp_rank: int) -> Iterator[Placed]:
    if not 0 <= tp_rank < tp:
        raise ValueError(f"tensor-parallel rank {tp_rank} is outside [0, {tp})")
    for weight in weights_of(spec, "lm"):
        shard = weight.cut.vllm(weight.shape, tp, tp_rank)
        name = weight.vllm or weight.hf
        for layer in range(spec.num_layers if weight.at == "layer" else 1):
            yield weight.hf.format(layer), name.format(layer), weight, shard


def _embedding(weights: list[Weight]) -> Weight:
    return next(weight for weight in weights if weight.at == "embedding")


def _pieces(placed: Iterable[Placed]) -> list[Piece]:
    pieces = []
    for hf_name, local_name, weight, shard in placed:
        for hf_box, local_box in shard.parts:
            if weight.hf_row:
                hf_box = ((hf_box[0][0] + weight.hf_row, hf_box[0][1] + weight.hf_row), *hf_box[1:])
            pieces.append(Piece(hf_name, hf_box, local_name, local_box))
    return pieces


def _shapes(placed: Iterable[Placed]) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {}
    for _, local_name, _, shard in placed:
        known = shapes.setdefault(local_name, shard.shape)
        assert known == shard.shape, f"{local_name}: {known} and {shard.shape} for parts of one tensor"
    return shapes
