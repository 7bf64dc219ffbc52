"""Converters against Megatron-Core's own saver and loader on real ranks, and against the original files.

Not covered here: Megatron-LM itself, and Transformer Engine layers.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from megatron.core import dist_checkpointing
from megatron.core.utils import unwrap_model
from ranks import run_ranks
from safetensors.torch import load_file, save_file
from test_checkpoint import contents, file_size_limit, flip_a_bit
from tiny import KINDS, tiny_folder, tiny_model, tiny_spec
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from tridentrl.checkpoint.convert import differences, hf_to_megatron, megatron_to_hf
from tridentrl.checkpoint.store import CheckpointStore
from tridentrl.engine.megatron import MegatronEngine
from tridentrl.parallel.cpu import megatron_facade
from tridentrl.parallel.grid import Grid
from tridentrl.parallel.groups import init_groups
from tridentrl.parallel.optimizer import OptimizerSettings
from tridentrl.trainer.convert_command import main

FAMILIES = ["gemma", "phi3", "qwen2", "qwen3_moe"]
"""One of each way to be stored: offsets and tied; fused; biases and tied; query and key norms, and experts."""


def engines_loaded_by_megatron(grid: Grid, converted: dict[str, str], folders: dict[str, str]) -> dict[str, list[str]]:
    """By family, the parameters that Megatron's own loader, or ours, does not fill as the original's files do."""
    init_groups(grid, seed=1)
    wrong: dict[str, list[str]] = {}
    for kind, folder in folders.items():
        expected, theirs, ours = (MegatronEngine(tiny_spec(folder), grid, max_tokens=64) for _ in range(3))
        expected.load(folder)
        ours.load(converted[kind])
        chunks = unwrap_model(theirs.chunks)
        with megatron_facade():
            wanted = {f"model{i}": chunk.sharded_state_dict() for i, chunk in enumerate(chunks)}
            state = dist_checkpointing.load(wanted, str(Path(converted[kind], "release")))
        for i, chunk in enumerate(chunks):
            chunk.load_state_dict(state[f"model{i}"], strict=True)
        wrong[kind] = [
            name
            for engine in (theirs, ours)
            for name, tensor in engine.tensors().items()
            if not torch.equal(tensor, expected.tensors()[name])
        ]
        assert state["args"].num_layers == 4
        assert state["checkpoint_version"] == 3.0
    return wrong


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Every family, cut for tensor 2 x pipeline 2."""
    root = tmp_path_factory.mktemp("megatron")
    for kind in FAMILIES:
        hf_to_megatron(tiny_folder(kind), root / kind, tensor=2, pipeline=2)
    return {kind: str(root / kind) for kind in FAMILIES}


@pytest.mark.parametrize("grid", [Grid(), Grid(tp=4), Grid(tp=2, pp=2), Grid(pp=2, vpp=2)], ids=str)
def test_one_conversion_loads_at_every_layout(grid: Grid, converted: dict[str, str]) -> None:
    for wrong in run_ranks(grid.world, engines_loaded_by_megatron, grid, converted, {kind: tiny_folder(kind) for kind in FAMILIES}):
        assert wrong == {kind: [] for kind in FAMILIES}


def saved_by_megatron(grid: Grid, folders: dict[str, str], root: Path) -> None:
    init_groups(grid, seed=1)
    for kind, folder in folders.items():
        engine = MegatronEngine(tiny_spec(folder), grid, max_tokens=64)
        engine.load(folder)
        (root / kind).mkdir(exist_ok=True)
        with megatron_facade():
            state = {f"model{i}": chunk.sharded_state_dict() for i, chunk in enumerate(unwrap_model(engine.chunks))}
            dist_checkpointing.save({**state, "iteration": 3}, str(root / kind))


def chunks_in(folder: Path) -> tuple[dict[str, Any], set[str]]:
    stored = FileSystemReader(folder).read_metadata().state_dict_metadata
    tensors = {
        key: (value.size, value.properties.dtype, sorted((tuple(c.offsets), tuple(c.sizes)) for c in value.chunks))
        for key, value in stored.items()
        if isinstance(value, TensorStorageMetadata)
    }
    return tensors, stored.keys() - tensors.keys()


def test_what_is_stored_is_what_megatron_stores_at_that_layout(converted: dict[str, str], tmp_path: Path) -> None:
    run_ranks(4, saved_by_megatron, Grid(tp=2, pp=2), {kind: tiny_folder(kind) for kind in FAMILIES}, tmp_path)
    for kind in FAMILIES:
        theirs, their_objects = chunks_in(tmp_path / kind)
        ours, our_objects = chunks_in(Path(converted[kind], "release"))
        if kind == "qwen3_moe":
            # Transformer Engine layers, which this machine lacks, call the norm before experts so.
            assert ours.pop("decoder.layers.pre_mlp_layernorm.weight") == ours["decoder.layers.mlp.linear_fc1.layer_norm_weight"]
            # Megatron's gated experts are stored as two halves even where they are not cut, as our engine's ranks hold them.
            for experts in (ours, theirs):
                assert experts.pop("decoder.layers.mlp.experts.experts.linear_fc1.weight")[0] == (4, 4, 128, 64)
        assert ours == theirs
        assert their_objects <= our_objects
        megatron_to_hf(tmp_path / kind, tmp_path / f"{kind}-hf", config_folder=tiny_folder(kind))
        assert differences(tmp_path / f"{kind}-hf", tiny_folder(kind)) == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dtype", "cuts"), [(torch.float32, [(2, 2)]), (torch.bfloat16, [(4, 1), (1, 4)])])
def test_there_and_back_is_bit_exact(kind: str, dtype: torch.dtype, cuts: list[tuple[int, int]], tmp_path: Path) -> None:
    tiny_model(tiny_folder(kind), dtype).save_pretrained(tmp_path / "in")
    stored = load_file(tmp_path / "in" / "model.safetensors")
    for tensor, pipeline in cuts:
        hf_to_megatron(tmp_path / "in", tmp_path / "m", tensor=tensor, pipeline=pipeline, overwrite=True)
        megatron_to_hf(tmp_path / "m", tmp_path / "out", overwrite=True, max_shard_bytes=40_000)
        files = sorted((tmp_path / "out").glob("*.safetensors"))
        back = {name: value for file in files for name, value in load_file(file).items()}
        assert len(files) > 2
        assert back.keys() == stored.keys()
        assert all(value.dtype == dtype and torch.equal(value, stored[name]) for name, value in back.items())
        assert differences(tmp_path / "m", tmp_path / "in") == []
    _, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()), info


def test_a_value_model_goes_there_and_back(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.AutoConfig.from_pretrained(tiny_folder("llama"), num_labels=1)
    transformers.LlamaForSequenceClassification(config).save_pretrained(tmp_path / "in")
    hf_to_megatron(tmp_path / "in", tmp_path / "m", tensor=2, pipeline=2)
    megatron_to_hf(tmp_path / "m", tmp_path / "out")
    assert "score.weight" in load_file(tmp_path / "out" / "model.safetensors")
    assert differences(tmp_path / "in", tmp_path / "out") == []


def test_verify_names_every_tensor_that_is_not_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b, m = str(tmp_path / "a"), str(tmp_path / "b"), str(tmp_path / "m")
    for folder in (a, b):
        tiny_model(tiny_folder("llama")).save_pretrained(folder)
    state = load_file(Path(b, "model.safetensors"))
    state["model.norm.weight"][3] += 1e-6
    state["model.layers.2.self_attn.k_proj.weight"].view(torch.int32)[5, 7] ^= 1
    state["lm_head.weight"] = state["lm_head.weight"].bfloat16()
    save_file(state, Path(b, "model.safetensors"), metadata={"format": "pt"})
    hf_to_megatron(a, m, tensor=2)
    for other in (a, m):
        assert main(["verify", other, b]) == 1
        assert capsys.readouterr().out.splitlines() == [
            "model.layers.2.self_attn.k_proj.weight: 1 of 2048 elements differ",
            "model.norm.weight: 1 of 64 elements differ",
            "lm_head.weight: torch.float32 (97, 64) and torch.bfloat16 (97, 64)",
            "3 tensors differ",
        ]
    assert main(["verify", a, m]) == 0
    assert capsys.readouterr().out == "identical, bit for bit\n"


def test_the_command_converts_and_keeps_config_and_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, there, back = str(tmp_path / "in"), str(tmp_path / "m"), str(tmp_path / "out")
    tiny_model(tiny_folder("qwen2")).save_pretrained(source)
    Path(source, "tokenizer.json").write_text('{"a": 1}')
    assert main(["hf-to-megatron", source, there, "--tensor", "2", "--pipeline", "2"]) == 0
    assert Path(there, "latest_checkpointed_iteration.txt").read_text() == "release"
    assert json.loads(Path(there, "release", "metadata.json").read_text())["sharded_backend"] == "torch_dist"
    assert main(["megatron-to-hf", there, back, "--dtype", "bf16"]) == 0
    assert Path(back, "tokenizer.json").read_text() == '{"a": 1}'
    stored = load_file(Path(source, "model.safetensors"))
    written = load_file(Path(back, "model.safetensors"))
    assert all(torch.equal(value, stored[name].bfloat16()) for name, value in written.items())
    assert json.loads(Path(back, "config.json").read_text())["dtype"] == "bfloat16"
    assert main(["megatron-to-hf", there, back]) == 2
    assert "exists already" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "m", "out"]


def test_what_cannot_be_converted_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(*argv: str) -> str:
        assert main(argv) == 2
        return capsys.readouterr().err

    source, there = tiny_folder("llama"), str(tmp_path / "m")
    assert "4 attention heads do not divide by tensor-parallel size 5" in refused("hf-to-megatron", source, there, "--tensor", "5")
    assert "4 layers do not divide by pipeline 3" in refused("hf-to-megatron", source, there, "--pipeline", "3")
    assert "no Megatron checkpoint" in refused("megatron-to-hf", source, there)
    assert "no config.json" in refused("hf-to-megatron", str(tmp_path / "nowhere"), there)
    assert list(tmp_path.iterdir()) == []
    hf_to_megatron(source, there)
    message = refused("megatron-to-hf", there, str(tmp_path / "out"), "--config", tiny_folder("qwen3"))
    assert "missing: decoder.layers.self_attention.q_layernorm.weight" in message
    assert "linear_qkv.weight has shape (4, 128, 64) instead of (4, 256, 64)" in message
    message = refused("megatron-to-hf", there, str(tmp_path / "out"), "--config", tiny_folder("llama3"))
    assert "unexpected: output_layer.weight" in message
    (data,) = Path(there, "release").glob("*.distcp")
    data.write_bytes(data.read_bytes()[:1000])
    assert "damaged" in refused("megatron-to-hf", there, str(tmp_path / "out"))
    Path(there, "latest_checkpointed_iteration.txt").write_text("12")
    assert "iter_0000012" in refused("megatron-to-hf", there, str(tmp_path / "out"))
    Path(there, "latest_checkpointed_iteration.txt").write_text("")
    assert "latest_checkpointed_iteration.txt says ''" in refused("megatron-to-hf", there, str(tmp_path / "out"))
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def changed(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> Path:
    """The tiny Llama in bf16, its tensors passed through `change`."""
    tiny_model(tiny_folder("llama"), torch.bfloat16).save_pretrained(folder)
    state = load_file(folder / "model.safetensors")
    change(state)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_only_the_models_own_tensors_decide_its_data_type(tmp_path: Path) -> None:
    """Old Llama files hold rotary frequencies in fp32. A model that is itself in two types becomes fp32, with every value as it was."""
    frequencies = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    source = changed(tmp_path / "in", lambda state: state.update(frequencies))
    hf_to_megatron(source, tmp_path / "m")
    assert differences(source, tmp_path / "m") == []
    assert chunks_in(tmp_path / "m" / "release")[0]["decoder.final_layernorm.weight"][1] == torch.bfloat16

    finer = torch.linspace(0.1, 0.2, 64)
    source = changed(tmp_path / "mixed", lambda state: state.update({"model.norm.weight": finer}))
    hf_to_megatron(source, tmp_path / "m", overwrite=True)
    megatron_to_hf(tmp_path / "m", tmp_path / "out")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(written["model.norm.weight"], finer)
    assert all(torch.equal(written[name], tensor.float()) for name, tensor in load_file(source / "model.safetensors").items())
    assert {tensor.dtype for tensor in written.values()} == {torch.float32}


def test_nothing_but_a_model_is_overwritten_and_never_the_source(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parent = changed(tmp_path / "models", lambda state: None)
    source = changed(parent / "llama", lambda state: None)
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "thesis").write_text("mine")
    (tmp_path / "link").symlink_to(parent)
    hf_to_megatron(source, parent / "m")
    before = sorted(tmp_path.rglob("*"))
    for command, made_from, target, words in (
        ("hf-to-megatron", source, tmp_path / "work", "no model folder"),
        ("hf-to-megatron", source, source, "would delete"),
        ("hf-to-megatron", source, parent, "would delete"),
        ("hf-to-megatron", source, tmp_path / "link", "would delete"),
        ("megatron-to-hf", parent / "m", parent, "would delete"),
    ):
        assert main([command, str(made_from), str(target), "--overwrite"]) == 2
        assert words in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before


def test_a_value_model_without_its_head_is_named(tmp_path: Path) -> None:
    source = changed(tmp_path / "in", lambda state: None)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"architectures": ["LlamaForSequenceClassification"]}))
    for action in (lambda: hf_to_megatron(source, tmp_path / "m"), lambda: differences(source, source)):
        with pytest.raises(ValueError, match=r"value model, and it has no score\.weight"):
            action()


def test_a_full_disk_is_told_with_folder_and_free_space(tmp_path: Path) -> None:
    source = tiny_folder("llama")
    for limit in (40_000, 5_000):  # bytes of a file: within the weights, within the index
        with file_size_limit(limit), pytest.raises(OSError, match=rf"cannot write {tmp_path / 'm'} \([0-9,]+ bytes free"):
            hf_to_megatron(source, tmp_path / "m")
    assert not list(tmp_path.iterdir())


def saved_by_a_run(folder: Path, root: Path) -> None:
    init_groups(Grid(), seed=1)
    engine = MegatronEngine(tiny_spec(str(folder)), Grid(), max_tokens=64, optimizer=OptimizerSettings(lr=1e-3))
    engine.load(str(folder))
    CheckpointStore(root).save(1, contents({"actor": engine}))


def test_a_damaged_checkpoint_of_a_run_is_not_converted(tmp_path: Path) -> None:
    run_ranks(1, saved_by_a_run, Path(tiny_folder("llama")), tmp_path)
    actor = tmp_path / "step_1" / "actor"
    megatron_to_hf(actor, tmp_path / "out", config_folder=tiny_folder("llama"))
    assert differences(tmp_path / "out", tiny_folder("llama")) == []
    flip_a_bit(actor / "__0_0.distcp")  # torch reads it without a word
    with pytest.raises(ValueError, match=r"__0_0\.distcp is damaged: its checksum"):
        megatron_to_hf(actor, tmp_path / "again", config_folder=tiny_folder("llama"))
