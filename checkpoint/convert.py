"""Between Hugging Face folders and Megatron-LM's checkpoints, in one process that holds one tensor or one output file at a time.

The Megatron side is a folder as Megatron-LM lays it out: `latest_checkpointed_iteration.txt`, and `release/` with a Megatron-Core
distributed checkpoint and the model's arguments. `config.json` and the tokenizer's files lie beside them, so that the folder can be
trained from, or converted back, without the original.

Checked here against Megatron-Core's own loader at other layouts. Not checked: Megatron-LM itself and Transformer Engine layers, which
ask for the `_extra_state` objects of more modules; those are written for all modules that are known to have one. If a version asks for
another, Megatron-LM's `--dist-ckpt-strictness log_all` loads the weights without it.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from tridentrl.checkpoint.manifest import MANIFEST, check_contents, read_manifest
from tridentrl.parallel.grid import Grid, padded_vocab
from tridentrl.weights.cuts import Columns, Cut, GateUp, Replicated
from tridentrl.weights.families import ModelSpec, spec_from_hf, weights_of
from tridentrl.weights.families.decoder import Head
from tridentrl.weights.folders import new_folder
from tridentrl.weights.hf_io import (
    GENERATION_FILES,
    TOKENIZER_FILES,
    check_tensors,
    copy_files,
    read_config,
    read_pieces,
    stored_tensors,
    stored_types,
    write_hf,
)
from tridentrl.weights.layouts import hf_layout, hf_shapes, megatron_layout
from tridentrl.weights.pieces import Box, Piece, clip_local, shape_of, shift, whole
from tridentrl.weights.torch_dist import OTHER_NAMES, RELEASE, TRACKER, Stored, TorchDistReader, checkpoint_in, stored

T = TypeVar("T")
Progress = Callable[[Sequence[T], str], Iterator[T]]
"""Passes items on and shows how far it is. The text says what is done with them."""
EXTRA_STATES = (
    *(f"decoder.layers.self_attention.{name}" for name in ("linear_qkv", "linear_proj", "core_attention", "q_layernorm", "k_layernorm")),
    *(f"decoder.layers.mlp.{name}" for name in ("linear_fc1", "linear_fc2")),
    "decoder.final_layernorm",
)
"""Modules for which a model of Megatron-Core asks for an object beside the weights (FP8 scales of Transformer Engine; empty here)."""


def no_progress(items: Sequence[T], text: str) -> Iterator[T]:
    yield from items


def hf_to_megatron(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    tensor: int = 1,
    pipeline: int = 1,
    overwrite: bool = False,
    progress: Progress[Any] = no_progress,
) -> None:
    """Write the model in `source` as a checkpoint cut for `tensor` x `pipeline` ranks (it loads at any other layout too).

    The data type stays; a model in several becomes fp32, which holds them all exactly. Raises ValueError when the model is not supported or
    the sizes do not fit it, OSError when it cannot be written.
    """
    _check_kept(source, Path(target))
    config = read_config(source)
    spec, head = spec_from_hf(config), _head(config)
    files = _model_tensors(source, spec, head)
    types = set(stored_types(files).values())
    dtype = types.pop() if len(types) == 1 else torch.float32
    grid = Grid(tp=tensor, pp=pipeline)
    parts = [_parts_of(rank, spec, head, grid, dtype) for rank in range(grid.world)]
    with new_folder(Path(target), overwrite=overwrite) as folder:
        copy_files(source, folder, (*TOKENIZER_FILES, *GENERATION_FILES))
        (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
        (folder / TRACKER).write_text(RELEASE)
        try:
            _write_torch_dist(folder / RELEASE, parts, _Assembler(files, spec, head, dtype), progress)
            common = {"args": megatron_args(spec, grid, dtype), "checkpoint_version": 3.0, "iteration": 0}
            torch.save(common, folder / RELEASE / "common.pt")
            save_config(CheckpointingConfig("torch_dist", 1), str(folder / RELEASE))
        except (OSError, RuntimeError) as error:  # torch reports a full disk as either
            raise OSError(f"cannot write {target} ({shutil.disk_usage(folder).free:,} bytes free on its disk): {error}") from None


def megatron_to_hf(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    config_folder: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    max_shard_bytes: int = 2 * 1024**3,
    progress: Progress[Any] = no_progress,
) -> None:
    """Write the weights of a checkpoint as a Hugging Face folder, with the config and tokenizer of `config_folder` (None: of `source`).

    `dtype` None: as stored. Memory: one file of `max_shard_bytes`, or the largest tensor.
    """
    _check_kept(source, Path(target))
    config_folder = config_folder or source
    config = read_config(config_folder)
    spec = spec_from_hf(config)
    reader = _reader(source, spec)

    def fill(shard: Sequence[Piece], tensors: Mapping[str, torch.Tensor]) -> None:
        for piece in progress(shard, "reading"):
            reader.fill([piece], tensors)

    write_hf(
        spec,
        config,
        fill,
        target,
        head=reader.head,
        dtype=dtype or reader.dtype,
        tokenizer_folder=config_folder,
        group=None,
        max_shard_bytes=max_shard_bytes,
        overwrite=overwrite,
        device=torch.device("cpu"),
    )


def differences(a: str | os.PathLike[str], b: str | os.PathLike[str], *, progress: Progress[Any] = no_progress) -> list[str]:
    """One line for each tensor that is not the same, bit for bit, in two model folders; either may be of Hugging Face or of Megatron."""
    readers = [_Model(folder) for folder in (a, b)]
    names = list(dict.fromkeys([*readers[0].shapes, *readers[1].shapes]))
    lines = []
    for name in progress(names, "comparing"):
        absent = [reader for reader in readers if name not in reader.shapes]
        if absent:
            lines.append(f"{name}: not in {absent[0].folder}")
            continue
        x, y = (reader.read(name) for reader in readers)
        if x.shape != y.shape or x.dtype != y.dtype:
            lines.append(f"{name}: {x.dtype} {tuple(x.shape)} and {y.dtype} {tuple(y.shape)}")
            continue
        # As integers, so that -0 is not 0 and a NaN is itself.
        bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
        count = int((x.view(bits) != y.view(bits)).sum())
        if count:
            lines.append(f"{name}: {count} of {x.numel()} elements differ")
    return lines


class _Model:
    """Whole tensors of a model folder by their Hugging Face names."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = folder
        config = read_config(folder)
        spec, head = spec_from_hf(config), _head(config)
        self.types: Mapping[str, torch.dtype] = {}
        self.files: Mapping[str, Path] = {}
        self.reader: TorchDistReader | None = None
        if checkpoint_in(folder):
            self.reader = _reader(folder, spec)
            head = self.reader.head
        else:
            self.files = _model_tensors(folder, spec, head)
            self.types = stored_types(self.files)
        self.shapes = hf_shapes(spec, head=head)
        self.pieces: dict[str, list[Piece]] = defaultdict(list)
        for piece in hf_layout(spec, head=head):
            self.pieces[piece.hf_name].append(piece)

    def read(self, name: str) -> torch.Tensor:
        dtype = self.reader.dtype if self.reader else self.types[name]
        tensor = {name: torch.empty(self.shapes[name], dtype=dtype)}
        if self.reader:
            self.reader.fill(self.pieces[name], tensor)
        else:
            read_pieces(self.files, self.pieces[name], tensor)
        return tensor[name]


def _reader(folder: str | os.PathLike[str], spec: ModelSpec) -> TorchDistReader:
    checkpoint = checkpoint_in(folder)
    if checkpoint is None:
        raise ValueError(f"{folder} is no Megatron checkpoint: it has neither {TRACKER} nor .metadata (only torch_dist is read)")
    if (checkpoint.parent / MANIFEST).is_file():  # of a run of ours: torch's reader would not notice a flipped bit
        check_contents(checkpoint.parent, read_manifest(checkpoint.parent))
    return TorchDistReader(checkpoint, spec)


def _check_kept(source: str | os.PathLike[str], target: Path) -> None:
    """ValueError when replacing `target` would delete `source`."""
    if target.resolve() in (Path(source).resolve(), *Path(source).resolve().parents):
        raise ValueError(f"writing to {target} would delete {source}, from which it is made; give another folder")


def _model_tensors(folder: str | os.PathLike[str], spec: ModelSpec, head: Head) -> dict[str, Path]:
    """Each tensor of the model, checked, and its file; without what else the files hold (rotary buffers, the other kind's head)."""
    files = stored_tensors(folder)
    if absent := check_tensors(folder, files, head):
        raise ValueError(f"config.json in {folder} calls for a value model, and it has no {', '.join(absent)}; correct its architectures")
    return {name: files[name] for name in hf_shapes(spec, head=head)}


def _head(config: Mapping[str, Any]) -> Head:
    return "value" if any(str(name).endswith("ForSequenceClassification") for name in config.get("architectures") or ()) else "lm"


@dataclass(frozen=True)
class _Part:
    """One item of a rank's file: `box` of the unsplit parameter `name`."""

    item: WriteItem
    name: str
    box: Box


def _parts_of(rank: int, spec: ModelSpec, head: Head, grid: Grid, dtype: torch.dtype) -> list[_Part]:
    """What `rank` stores."""
    coord = grid.coord(rank)
    parts: list[_Part] = []
    seen: set[tuple[str, int | None]] = set()
    for weight in weights_of(spec, head):
        template = "0." + (weight.megatron_fused or weight.megatron)
        stage = {"embedding": 0, "final": grid.pp - 1}.get(weight.at, coord.pp_rank)
        if (template, weight.expert) in seen or stage != coord.pp_rank:
            continue
        seen.add((template, weight.expert))
        # Experts are whole on their rank; the first of the stage stores them all.
        tp, tp_rank = (grid.tp, coord.tp_rank) if weight.expert is None else (1, coord.tp_rank)
        shape, boxes = _cut(weight.cut, weight.cut.megatron(weight.shape, tp, 0).shape, tp, tp_rank)
        for layer in grid.layers(coord.pp_rank, 0, spec.num_layers) if weight.at == "layer" else (0,):
            name = template.format(layer, weight.expert)
            where = stored(name, spec)
            places = [where, *(replace(where, key=other) for ours, other in OTHER_NAMES.items() if ours == where.key)]
            parts += [_Part(_tensor_item(place, shape, box, dtype), name, box) for place in places for box in boxes]
    return parts


def _cut(cut: Cut, local: tuple[int, ...], tp: int, tp_rank: int) -> tuple[tuple[int, ...], list[Box]]:
    """Shape of the unsplit parameter of which a rank holds `local`, and the boxes of it that the rank stores."""
    if isinstance(cut, Replicated) or tp == 1:
        return local, [whole(local)] if tp_rank == 0 else []
    dim = 1 if isinstance(cut, Columns) else 0
    shape = tuple(size * tp if axis == dim else size for axis, size in enumerate(local))
    parts = 2 if isinstance(cut, GateUp) else 1  # [gate; up] are two tensors' worth of rows, each cut by itself
    block = tuple(size // parts if axis == dim else size for axis, size in enumerate(local))
    starts = [(part * tp + tp_rank) * block[dim] for part in range(parts)]
    return shape, [shift(whole(block), [start if axis == dim else 0 for axis in range(len(block))]) for start in starts]


def _tensor_item(where: Stored, shape: tuple[int, ...], box: Box, dtype: torch.dtype) -> WriteItem:
    offsets, sizes = where.offsets([low for low, _ in box]), where.sizes(shape_of(box))
    data = TensorWriteData(ChunkStorageMetadata(offsets, sizes), TensorProperties(dtype), where.sizes(shape, whole=True))
    return WriteItem(MetadataIndex(where.key, offsets), WriteItemType.SHARD, tensor_data=data)


def _extra_states(spec: ModelSpec) -> Iterator[str]:
    """Names of all objects of `EXTRA_STATES`; a layer's is numbered by the layer, an expert's by layer and expert."""
    experts, layers = spec.num_experts, spec.num_layers
    for module in EXTRA_STATES:
        for layer in range(layers if ".layers." in module else 1):
            if ".layers." not in module:
                yield f"{module}._extra_state/shard_0_1"
            elif experts and ".mlp." in module:
                stem = module.replace(".mlp.", ".mlp.experts.experts.")
                yield from (f"{stem}._extra_state/shard_{layer}.{expert}_{layers}.{experts}" for expert in range(experts))
            else:
                yield f"{module}._extra_state/shard_{layer}_{layers}"


class _Assembler:
    """Makes the tensor for an item when torch's writer asks for it, so that one exists at a time."""

    def __init__(self, files: Mapping[str, Path], spec: ModelSpec, head: Head, dtype: torch.dtype) -> None:
        self.files, self.spec, self.dtype = files, spec, dtype
        self.pieces: dict[str, list[Piece]] = defaultdict(list)
        for piece in megatron_layout(spec, Grid(), 0, head=head, fused_norms=True):
            self.pieces[piece.local_name].append(piece)

    def tensor(self, name: str, box: Box) -> torch.Tensor:
        """`box` of the unsplit parameter `name`; 0 where no Hugging Face tensor lies (padding of the vocabulary)."""
        value = torch.zeros(shape_of(box), dtype=self.dtype)
        parts = [part for piece in self.pieces[name] if (part := clip_local(piece, box))]
        back = [-low for low, _ in box]
        read_pieces(self.files, [Piece(part.hf_name, part.hf_box, name, shift(part.local_box, back)) for part in parts], {name: value})
        return value


class _Resolver:
    """The part of torch's SavePlanner that its file writer calls."""

    def __init__(self, parts: Mapping[MetadataIndex, _Part], assembler: _Assembler) -> None:
        self.parts, self.assembler = parts, assembler

    def resolve_data(self, item: WriteItem) -> torch.Tensor | io.BytesIO:
        if item.type == WriteItemType.BYTE_IO:
            empty = io.BytesIO()
            torch.save([None], empty)
            return empty
        assert item.tensor_data
        part = self.parts[item.index]
        return self.assembler.tensor(part.name, part.box).view(item.tensor_data.chunk.sizes)


def _write_torch_dist(folder: Path, by_rank: Sequence[Sequence[_Part]], assembler: _Assembler, progress: Progress[Any]) -> None:
    """The steps of torch.distributed.checkpoint.save, one rank after the other in this process."""
    objects = [WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO) for name in _extra_states(assembler.spec)]
    plans = [SavePlan([*(part.item for part in parts), *(objects if rank == 0 else ())]) for rank, parts in enumerate(by_rank)]
    plans, metadata = create_default_global_save_plan(plans)
    writer = FileSystemWriter(folder)
    plans = writer.prepare_global_plan([writer.prepare_local_plan(plan) for plan in plans])
    resolver: Any = _Resolver({part.item.index: part for parts in by_rank for part in parts}, assembler)
    writer.finish(metadata, [writer.write_data(plan, resolver).value() for plan in progress(plans, "writing shards")])


def megatron_args(spec: ModelSpec, grid: Grid, dtype: torch.dtype) -> argparse.Namespace:
    """The arguments of Megatron-LM that describe the model, under the names of its command line (`--use-checkpoint-args` reads them).

    They cannot say everything: a family with scaled embeddings or tanh GELU has no arguments there.
    """
    scaled = spec.rope.get("rope_type") == "llama3"
    return argparse.Namespace(
        num_layers=spec.num_layers,
        hidden_size=spec.hidden_size,
        ffn_hidden_size=spec.ffn_size,
        num_attention_heads=spec.num_heads,
        group_query_attention=spec.num_kv_heads != spec.num_heads,
        num_query_groups=spec.num_kv_heads,
        kv_channels=spec.head_dim,
        seq_length=spec.max_positions,
        max_position_embeddings=spec.max_positions,
        position_embedding_type="rope",
        add_position_embedding=False,
        use_rotary_position_embeddings=True,
        rotary_base=int(spec.rope["rope_theta"]),
        rotary_percent=1.0,
        rotary_interleaved=False,
        use_rope_scaling=scaled,
        rope_scaling_factor=spec.rope.get("factor", 8.0),
        normalization="RMSNorm",
        norm_epsilon=spec.norm_eps,
        apply_layernorm_1p=spec.norm_offset,
        swiglu=spec.activation == "silu",
        squared_relu=False,
        add_bias_linear=False,
        add_qkv_bias=spec.qkv_bias,
        qk_layernorm=spec.qk_norm,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        apply_query_key_layer_scaling=False,
        untie_embeddings_and_output_weights=not spec.tied,
        make_vocab_size_divisible_by=128,
        padded_vocab_size=padded_vocab(spec.vocab_size, grid.tp),
        tensor_model_parallel_size=grid.tp,
        pipeline_model_parallel_size=grid.pp,
        virtual_pipeline_model_parallel_size=None,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
        num_experts=spec.num_experts or None,
        moe_ffn_hidden_size=spec.expert_ffn_size or None,
        moe_router_topk=spec.experts_per_token or 2,
        moe_router_pre_softmax=bool(spec.num_experts) and not spec.normalized_routing,
        moe_router_load_balancing_type="none",
        moe_layer_freq=1,
        ckpt_format="torch_dist",
        use_dist_ckpt=True,
        consumed_train_samples=0,
        consumed_valid_samples=0,
    )
