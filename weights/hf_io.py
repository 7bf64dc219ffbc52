"""Hugging Face folders: read the slices that a rank needs, write a complete folder from wherever the weights lie. No pickle, ever."""

from __future__ import annotations

import json
import os
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from tridentrl.configs.model_spec import ModelSpec
from tridentrl.weights.execute import Resharder, Tensors
from tridentrl.weights.families import spec_from_hf
from tridentrl.weights.families.decoder import Head
from tridentrl.weights.families.rope import both_forms
from tridentrl.weights.folders import begin_folder, complete_folder
from tridentrl.weights.layouts import hf_layout, hf_shapes
from tridentrl.weights.pieces import Piece, Shape, slices, volume
from tridentrl.weights.plan import plan
from tridentrl.weights.torch_dist import TorchDistReader, checkpoint_in

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
HEADS: dict[Head, str] = {"lm": "lm_head.weight", "value": "score.weight"}
STORED_TYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""Names of data types in safetensors files."""
GENERATION_FILES = ("generation_config.json",)
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
"""Files that travel unchanged from a source folder to an export."""


def read_config(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """The parsed config.json of a model folder. Raises ValueError when the folder or the file is missing or not JSON."""
    path = Path(folder) / "config.json"
    try:
        config = json.loads(path.read_text())
    except FileNotFoundError:
        raise ValueError(f"{folder} is not a Hugging Face model folder: it has no config.json") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path} holds {config!r:.40} instead of the keys of a model; download it again")
    return config


def stored_tensors(folder: str | os.PathLike[str]) -> dict[str, Path]:
    """Tensor name: the safetensors file that has it. Raises ValueError when there is none, or a listed file is missing."""
    root = Path(folder)
    if (root / SINGLE).is_file():  # before an index, as transformers does
        with _opened(root / SINGLE) as file:
            return dict.fromkeys(file.keys(), root / SINGLE)
    if (root / INDEX).is_file():
        try:
            files = {name: root / file for name, file in json.loads((root / INDEX).read_text())["weight_map"].items()}
        except (ValueError, TypeError, KeyError, AttributeError):
            raise ValueError(f"{root / INDEX} is damaged: it has no weight_map that can be read; download it again") from None
        absent = sorted({path.name for path in files.values() if not path.is_file()})
        if absent:
            raise ValueError(f"{root / INDEX} lists files that are not there: {', '.join(absent)}; download the model again")
        return files
    if any(root.glob("*.bin")):
        raise ValueError(
            f"{root} has its weights only as pickle files (*.bin), which can run code when read and are never opened here; convert them "
            "once with transformers: AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder)"
        )
    raise ValueError(f"{root} has neither {SINGLE} nor {INDEX}, so there are no weights to read")


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """A safetensors file, memory-mapped; ValueError when it is cut short or damaged."""
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except SafetensorError as error:
        raise ValueError(f"{path} cannot be read ({error}); it is damaged or incomplete, copy or download it again") from None


def load_pieces(folder: str | os.PathLike[str], pieces: Sequence[Piece], tensors: Tensors, *, head: Head = "lm") -> list[str]:
    """Read every piece from the folder's files into `tensors` in place, converted to their dtypes. Elements outside pieces stay.

    Reads only the slices that `pieces` name. With head="value" a folder of a causal LM may lack `score.weight`; the names that were not
    there are returned and the caller initialises them. Raises one ValueError that lists all missing, unexpected and misshapen tensors.
    The folder may also be one that `tridentrl convert hf-to-megatron` wrote.
    """
    checkpoint = checkpoint_in(folder)
    if checkpoint is not None:
        spec = spec_from_hf(read_config(folder))
        reader = TorchDistReader(checkpoint, spec)
        absent = [] if reader.head == head or (head == "lm" and spec.tied) else [HEADS[head]]
        if absent and head == "lm":
            raise ValueError(f"{checkpoint} holds a value model; missing: {HEADS[head]}")
        reader.fill([piece for piece in pieces if piece.hf_name not in absent], tensors)
        return absent
    files = stored_tensors(folder)
    absent = check_tensors(folder, files, head)
    read_pieces(files, [piece for piece in pieces if piece.hf_name not in absent], tensors)
    return absent


def read_pieces(files: Mapping[str, Path], pieces: Sequence[Piece], tensors: Tensors) -> None:
    """Read `pieces` from `files` (see `stored_tensors`) into `tensors` in place, unchecked."""
    wanted: dict[Path, list[Piece]] = defaultdict(list)
    for piece in pieces:
        wanted[files[piece.hf_name]].append(piece)
    with torch.no_grad():
        for path in sorted(wanted):
            with _opened(path) as file:
                for piece in wanted[path]:
                    tensors[piece.local_name][slices(piece.local_box)].copy_(file.get_slice(piece.hf_name)[slices(piece.hf_box)])


def check_tensors(folder: str | os.PathLike[str], files: Mapping[str, Path], head: Head) -> list[str]:
    """Compare the folder's tensors with what its config.json calls for; returns the value head's name if that alone is absent."""
    spec = spec_from_hf(read_config(folder))
    expected, found = hf_shapes(spec, head=head), _stored_shapes(files)
    absent = [name for name in expected if name not in files or name not in found]
    optional = [name for name in absent if head == "value" and name == HEADS["value"]]
    # A tied head may be stored as well (the config decides, not the file), and each kind of model may carry the other kind's head.
    # Old Llama files hold the rotary frequencies, which follow from the config.
    unexpected = [
        name for name in found if name not in expected and name not in HEADS.values() and not name.endswith("rotary_emb.inv_freq")
    ]
    problems = []
    if set(absent) - set(optional):
        problems.append("missing: " + _some([name for name in absent if name not in optional]))
    if unexpected:
        problems.append("unexpected: " + _some(unexpected))
    wrong = [f"{name} {found[name]} instead of {shape}" for name, shape in expected.items() if found.get(name, shape) != shape]
    if wrong:
        problems.append("of the wrong shape: " + _some(wrong))
    if problems:
        raise ValueError(f"the tensors in {folder} do not fit its config.json (model_type {spec.hf_type}); {'; '.join(problems)}")
    return optional


def _stored_shapes(files: Mapping[str, Path]) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {}
    for path in sorted(set(files.values())):
        with _opened(path) as file:
            shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 (not a dict)
    return shapes


def stored_types(files: Mapping[str, Path]) -> dict[str, torch.dtype]:
    """Data type of every tensor in `files`. Raises ValueError for one that no model here is made of."""
    types: dict[str, torch.dtype] = {}
    for path in sorted(set(files.values())):
        with _opened(path) as file:
            for name in file.keys():  # noqa: SIM118 (not a dict)
                if files.get(name) != path:
                    continue
                written = file.get_slice(name).get_dtype()
                if written not in STORED_TYPES:
                    raise ValueError(f"{name} in {path} is stored as {written}; only {', '.join(STORED_TYPES)} can be converted")
                types[name] = STORED_TYPES[written]
    return types


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")


def copy_files(source: str | os.PathLike[str], target: Path, names: Sequence[str]) -> None:
    """Those of `names` that `source` has."""
    for name in names:
        if (Path(source) / name).is_file():
            shutil.copyfile(Path(source) / name, target / name)


def export_hf(
    spec: ModelSpec,
    hf_config: Mapping[str, Any],
    source_pieces: Mapping[int, Sequence[Piece]],
    tensors: Tensors,
    folder: str | os.PathLike[str],
    *,
    head: Head = "lm",
    dtype: torch.dtype | None = None,
    tokenizer_folder: str | os.PathLike[str] | None = None,
    generation_folder: str | os.PathLike[str] | None = None,
    group: dist.ProcessGroup | None = None,
    max_shard_bytes: int = 2 * 1024**3,
    bucket_bytes: int = 64 * 1024**2,
    overwrite: bool = False,
) -> None:
    """Write the model as a Hugging Face folder. All ranks of `group` (None: the world, or this process alone) call it together.

    `source_pieces` has the layout of every rank, `tensors` are this rank's, only read. Rank 0 holds one file (`max_shard_bytes`) at a
    time. `dtype` None: that of the config the model came from. The folder appears complete or not at all; an existing one is replaced
    only with `overwrite`. generation_config.json comes from `generation_folder`
    (None: the tokenizer's). Raises ValueError for an existing folder, OSError when rank 0 cannot write, on every rank.
    """
    dtype = dtype or getattr(torch, spec.dtype)

    def fill(shard: Sequence[Piece], gathered: Tensors) -> None:
        todo = plan(source_pieces, {0: shard}, itemsize=dtype.itemsize)
        Resharder(todo, group=group, bucket_bytes=bucket_bytes, dtype=dtype).run(tensors, gathered)

    write_hf(
        spec,
        hf_config,
        fill,
        folder,
        head=head,
        dtype=dtype,
        tokenizer_folder=tokenizer_folder,
        generation_folder=generation_folder or tokenizer_folder,
        group=group,
        max_shard_bytes=max_shard_bytes,
        overwrite=overwrite,
        device=_device(tensors),
    )


def write_hf(
    spec: ModelSpec,
    hf_config: Mapping[str, Any],
    fill: Callable[[Sequence[Piece], Tensors], None],
    folder: str | os.PathLike[str],
    *,
    head: Head,
    dtype: torch.dtype,
    tokenizer_folder: str | os.PathLike[str] | None,
    generation_folder: str | os.PathLike[str] | None = None,
    group: dist.ProcessGroup | None,
    max_shard_bytes: int,
    overwrite: bool,
    device: torch.device,
) -> None:
    """As `export_hf`, from wherever `fill` brings the weights: it is called once per file, on every rank, with the pieces of that file
    and its tensors (none but on rank 0)."""
    writer = _Writer(Path(folder), group)
    writer.on_rank_0(partial(writer.begin, overwrite))
    try:
        shards = _shards(hf_layout(spec, head=head), dtype.itemsize, max_shard_bytes)
        for i, shard in enumerate(shards):
            file = SINGLE if len(shards) == 1 else f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
            shapes = {name: shape for name, shape in hf_shapes(spec, head=head).items() if name in {piece.hf_name for piece in shard}}
            gathered = {name: torch.empty(shape, dtype=dtype, device=device) for name, shape in shapes.items()} if writer.leads else {}
            fill(shard, gathered)
            writer.on_rank_0(partial(writer.add, file, gathered))
        config = exported_config(spec, hf_config, dtype=dtype, head=head)
        writer.on_rank_0(partial(writer.finish, config, tokenizer_folder, generation_folder or tokenizer_folder))
    except BaseException:
        writer.discard()
        raise


def exported_config(spec: ModelSpec, hf_config: Mapping[str, Any], *, dtype: torch.dtype, head: Head = "lm") -> dict[str, Any]:
    """config.json of an export: the original's keys, with data type and rotary settings in the forms of transformers 4 and 5."""
    name = str(dtype).removeprefix("torch.")
    config = {**hf_config, "dtype": name, "torch_dtype": name, **both_forms(spec.rope)}
    if spec.num_experts:
        config |= {"num_experts": spec.num_experts, "num_local_experts": spec.num_experts}  # for transformers 4 and 5
    if head == "value":
        models = [str(model).split("For")[0] + "ForSequenceClassification" for model in hf_config.get("architectures") or ()]
        config |= {"architectures": models, "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    return config


class _Writer:
    """Rank 0's side of an export, and how the other ranks learn of its success or failure."""

    def __init__(self, folder: Path, group: dist.ProcessGroup | None) -> None:
        self.folder, self.group = folder, group
        self.temporary: Path | None = None
        self.leads = not dist.is_initialized() or dist.get_rank(group) == 0
        self.weight_map: dict[str, str] = {}
        self.total_bytes = 0

    def on_rank_0(self, action: Callable[[], None]) -> None:
        """Run `action` on rank 0 and raise its error on every rank, so that nobody waits for a rank that gave up."""
        outcome: list[ValueError | OSError | None] = [None]
        if self.leads:
            try:
                action()
            except (ValueError, OSError) as error:
                outcome = [error]
        if dist.is_initialized():
            dist.broadcast_object_list(outcome, group=self.group, group_src=0)
        if outcome[0] is not None:
            raise outcome[0]

    def discard(self) -> None:
        """Remove what was written, if anything was."""
        if self.temporary is not None:
            shutil.rmtree(self.temporary, ignore_errors=True)

    def begin(self, overwrite: bool) -> None:
        self.temporary = begin_folder(self.folder, overwrite=overwrite)

    def add(self, file: str, tensors: Tensors) -> None:
        assert self.temporary
        path = self.temporary / file
        try:
            save_file({name: tensor.cpu() for name, tensor in tensors.items()}, path, metadata={"format": "pt"})
        except SafetensorError as error:
            free = shutil.disk_usage(path.parent).free
            raise OSError(f"cannot write {path} ({free} bytes free on its disk): {error}") from None
        self.weight_map |= dict.fromkeys(tensors, file)
        self.total_bytes += sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())

    def finish(
        self,
        config: Mapping[str, Any],
        tokenizer_folder: str | os.PathLike[str] | None,
        generation_folder: str | os.PathLike[str] | None,
    ) -> None:
        if set(self.weight_map.values()) != {SINGLE}:
            self._json(INDEX, {"metadata": {"total_size": self.total_bytes}, "weight_map": self.weight_map})
        self._json("config.json", config)
        assert self.temporary
        for source, names in ((tokenizer_folder, TOKENIZER_FILES), (generation_folder, GENERATION_FILES)):
            if source is not None:
                copy_files(source, self.temporary, names)
        complete_folder(self.temporary, self.folder)

    def _json(self, name: str, content: Mapping[str, Any]) -> None:
        assert self.temporary
        (self.temporary / name).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


def _shards(pieces: Sequence[Piece], itemsize: int, max_bytes: int) -> list[list[Piece]]:
    """The pieces in order, in files of at most `max_bytes`; a tensor is never cut, so one larger than that has a file of its own."""
    by_name: dict[str, list[Piece]] = defaultdict(list)
    for piece in pieces:
        by_name[piece.hf_name].append(piece)
    shards: list[list[Piece]] = []
    used = 0
    for parts in by_name.values():
        size = itemsize * sum(volume(part.hf_box) for part in parts)
        if not shards or used + size > max_bytes:
            shards.append([])
            used = 0
        shards[-1] += parts
        used += size
    return shards


def _device(tensors: Tensors) -> torch.device:
    return next(iter(tensors.values())).device
