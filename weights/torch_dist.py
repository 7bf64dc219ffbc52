"""Megatron-Core's distributed checkpoints (`torch_dist`): where each tensor of a model is in them, and reading it in one process.

A checkpoint stores whole tensors, cut in any way: all layers of one parameter are one tensor with the layer as its first dim, and all
experts of it have the expert as the second. Names are those of Transformer Engine layers (norms belong to the projection that follows),
whichever layers wrote it.
"""

from __future__ import annotations

import os
import pickle
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from tridentrl.configs.model_spec import ModelSpec
from tridentrl.parallel.grid import Grid
from tridentrl.weights.families.decoder import Head
from tridentrl.weights.layouts import megatron_layout, megatron_shapes
from tridentrl.weights.pieces import Piece, Shape, slices
from tridentrl.weights.plan import Move, plan

TRACKER = "latest_checkpointed_iteration.txt"
"""Megatron-LM's pointer to the newest checkpoint beside it."""
RELEASE = "release"
"""What the pointer says, and the folder is called, for weights that no run of Megatron-LM has trained."""
_LAYER = re.compile(r"0\.decoder\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(.+)")
OTHER_NAMES = {"decoder.layers.pre_mlp_layernorm.weight": "decoder.layers.mlp.linear_fc1.layer_norm_weight"}
"""The norm before experts: its name in Transformer Engine layers, and the one that Megatron-Core's local layers give it."""
_MODEL = ("embedding.", "decoder.", "output_layer.")


@dataclass(frozen=True, slots=True)
class Stored:
    """Place of a parameter of the unsplit model: `key` in the checkpoint, and (number, count) for the layer and the expert it is of."""

    key: str
    index: tuple[tuple[int, int], ...] = ()

    def offsets(self, offsets: Sequence[int]) -> torch.Size:
        """`offsets` within the parameter as offsets within the stored tensor."""
        return torch.Size([*(number for number, _ in self.index), *offsets])

    def sizes(self, sizes: Sequence[int], *, whole: bool = False) -> torch.Size:
        """`sizes` of a part of the parameter as sizes within the stored tensor; `whole`: of the stored tensor itself."""
        return torch.Size([*(count if whole else 1 for _, count in self.index), *sizes])


def stored(name: str, spec: ModelSpec) -> Stored:
    """Where the parameter that a layout with `Grid()` and fused norms calls `name` is stored."""
    match = _LAYER.fullmatch(name)
    if not match:
        return Stored(name.removeprefix("0."))
    layer = (int(match[1]), spec.num_layers)
    of_expert = _EXPERT.fullmatch(match[2])
    if of_expert:
        return Stored(f"decoder.layers.mlp.experts.experts.{of_expert[2]}", (layer, (int(of_expert[1]), spec.num_experts)))
    return Stored(f"decoder.layers.{match[2]}", (layer,))


def checkpoint_in(folder: str | os.PathLike[str]) -> Path | None:
    """The checkpoint that `folder` is, or that its tracker file points to; None when it is neither.

    Raises ValueError when the tracker points to nothing that is complete.
    """
    root = Path(folder)
    if (root / ".metadata").is_file():
        return root
    if not (root / TRACKER).is_file():
        return None
    said = (root / TRACKER).read_text().strip()
    if said != RELEASE and not said.isdecimal():
        raise ValueError(f"{root / TRACKER} says {said!r}, which is neither an iteration nor {RELEASE!r}")
    inner = root / (RELEASE if said == RELEASE else f"iter_{int(said):07d}")
    if not (inner / ".metadata").is_file():
        raise ValueError(f"{root / TRACKER} points to {inner}, which is no complete torch_dist checkpoint: it has no .metadata")
    return inner


class TorchDistReader:
    """Reads the weights of one model from a checkpoint by Hugging Face coordinates. Optimizer state in it is passed over.

    Holds one parameter of one layer at a time. Raises ValueError when the tensors are not those of `spec`.
    """

    def __init__(self, checkpoint: Path, spec: ModelSpec) -> None:
        self.folder, self.spec = checkpoint, spec
        self._files = FileSystemReader(checkpoint)
        try:
            # This index is a pickle: the format has no other. Read checkpoints of people you trust.
            self._metadata: Metadata = self._files.read_metadata()
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            raise ValueError(f"{checkpoint / '.metadata'} cannot be read ({error}); the checkpoint is damaged or incomplete") from None
        self._files.set_up_storage_reader(self._metadata, True)
        self._tensors = {
            key: value for key, value in self._metadata.state_dict_metadata.items() if isinstance(value, TensorStorageMetadata)
        }
        self._keys = {ours: other for ours, other in OTHER_NAMES.items() if spec.num_experts and ours not in self._tensors}
        head = self._tensors.get("output_layer.weight")
        self.head: Head = "value" if head is not None and head.size == (1, spec.hidden_size) else "lm"
        self._shapes = megatron_shapes(spec, Grid(), 0, head=self.head, fused_norms=True)
        self._pieces: dict[str, list[Piece]] = defaultdict(list)
        for piece in megatron_layout(spec, Grid(), 0, head=self.head, fused_norms=True):
            self._pieces[piece.hf_name].append(piece)
        self._last: tuple[str, torch.Tensor] | None = None
        self._check()

    @property
    def dtype(self) -> torch.dtype:
        """Of the embedding."""
        return self._tensors["embedding.word_embeddings.weight"].properties.dtype

    @torch.no_grad()
    def fill(self, targets: Sequence[Piece], tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy what `targets` name into `tensors` in place, converted to their data types."""
        sources = [piece for name in {target.hf_name for target in targets} for piece in self._pieces.get(name, ())]
        by_source: dict[str, list[Move]] = defaultdict(list)
        for move in plan({0: sources}, {0: targets}).local.get(0, ()):
            by_source[move.source].append(move)
        for source, moves in by_source.items():
            parameter = self._parameter(source)
            for move in moves:
                tensors[move.target][slices(move.target_box)].copy_(parameter[slices(move.source_box)])

    def _parameter(self, name: str) -> torch.Tensor:
        """One layer's parameter, whole. The last one is kept, since query, key and value are asked for one after another."""
        if self._last is None or self._last[0] != name:
            self._last = None
            where, shape = stored(name, self.spec), self._shapes[name]
            key = self._keys.get(where.key, where.key)
            value = torch.empty(where.sizes(shape), dtype=self._tensors[key].properties.dtype)
            chunk = ChunkStorageMetadata(where.offsets([0] * len(shape)), where.sizes(shape))
            items = create_read_items_for_chunk_list(key, self._tensors[key], [chunk])
            try:
                self._files.read_data(LoadPlan(items), _Into(value))  # type: ignore[arg-type]
            except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
                raise ValueError(f"{key} cannot be read from {self.folder} ({error}); the checkpoint is damaged") from None
            self._last = (name, value.view(shape))
        return self._last[1]

    def _check(self) -> None:
        found = {key: tuple(value.size) for key, value in self._tensors.items() if key.startswith(_MODEL)}
        expected: dict[str, Shape] = {}
        for name, shape in self._shapes.items():
            where = stored(name, self.spec)
            expected[self._keys.get(where.key, where.key)] = tuple(where.sizes(shape, whole=True))
        if self.spec.num_experts:
            found = {key: shape for key, shape in found.items() if key not in OTHER_NAMES.values() or key in expected}
        vocabulary = [key for key in expected if key.endswith(("word_embeddings.weight", "output_layer.weight")) and self.head == "lm"]
        for key in {*vocabulary, "embedding.word_embeddings.weight"} & found.keys():
            # However many rows of padding there are.
            rows, *rest = found[key]
            expected[key] = (rows, *expected[key][1:]) if rows >= self.spec.vocab_size else (self.spec.vocab_size, *rest)
        problems = [f"missing: {key}" for key in sorted(expected.keys() - found.keys())]
        problems += [f"unexpected: {key}" for key in sorted(found.keys() - expected.keys())]
        for key in sorted(expected.keys() & found.keys()):
            if found[key] != expected[key]:
                problems.append(f"{key} has shape {found[key]} instead of {expected[key]}")
        if problems:
            more = f"; and {len(problems) - 10} more" if len(problems) > 10 else ""
            raise ValueError(f"the tensors in {self.folder} are not those of a {self.spec.hf_type}: " + "; ".join(problems[:10]) + more)


class _Into:
    """The part of torch's LoadPlanner that its file reader calls: where what was read belongs."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value

    def resolve_tensor(self, item: ReadItem) -> torch.Tensor:
        return self.value[tuple(slice(start, start + size) for start, size in zip(item.dest_offsets, item.lengths, strict=True))]

    def commit_tensor(self, item: ReadItem, tensor: torch.Tensor) -> None:
        """`tensor` is a view of `value`."""
