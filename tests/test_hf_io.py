"""Configs and files, against transformers itself: what it saves we read, what we write it loads without a missing or unexpected key."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from ranks import run_ranks
from safetensors.torch import load_file, save_file
from weight_worlds import LLAMA3_ROPE, scatter

from tridentrl.configs.model_spec import ModelSpec
from tridentrl.parallel.grid import Grid
from tridentrl.weights.families import spec_from_hf
from tridentrl.weights.hf_io import export_hf, load_pieces, read_config, stored_tensors
from tridentrl.weights.layouts import hf_layout, hf_shapes, megatron_layout, megatron_shapes, vllm_layout, vllm_shapes

Model = transformers.PreTrainedModel
SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama_tied": ("Llama", {"tie_word_embeddings": True}),
    "llama3": ("Llama", {"rope_parameters": LLAMA3_ROPE}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "gemma": ("Gemma", {"head_dim": 16}),
    "phi3": ("Phi3", {"pad_token_id": 0}),
    "qwen3_moe": ("Qwen3Moe", {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}),
    "qwen2": ("Qwen2", {}),
    "qwen2_tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3_tied": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
}
GRIDS = [Grid(), Grid(tp=2), Grid(tp=4), Grid(pp=2), Grid(tp=2, pp=2)]


def make_model(kind: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Model:
    """A random model in which every tensor, norms and biases too, has values of its own."""
    torch.manual_seed(0)
    name, options = MODELS[kind]
    config = getattr(transformers, name + "Config")(**SIZES | options | changes)
    model = getattr(transformers, name + "ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter))
    return model.to(dtype)


def save(model: Model, folder: Path, **options: Any) -> Path:
    model.save_pretrained(folder, **options)
    return folder


def megatron_tensors(folder: Path, spec: ModelSpec, grid: Grid, rank: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    tensors = {name: torch.full(shape, float("nan"), dtype=dtype) for name, shape in megatron_shapes(spec, grid, rank).items()}
    assert load_pieces(folder, megatron_layout(spec, grid, rank), tensors) == []
    return tensors


def assert_same_model(folder: Path, model: Model) -> None:
    """transformers loads `folder` with no key missing or left over, bit-equal weights, the tie and logits of `model`."""
    loaded, info = type(model).from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    for (name, ours), (_, theirs) in zip(loaded.state_dict().items(), model.state_dict().items(), strict=True):
        assert ours.dtype == theirs.dtype, name
        assert torch.equal(ours, theirs), name
    tied = model.config.tie_word_embeddings
    assert loaded.config.tie_word_embeddings == tied
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
    ids = torch.arange(12)[None]
    assert torch.equal(loaded.eval()(ids).logits, model.eval()(ids).logits)


@pytest.mark.parametrize("kind", MODELS)
def test_files_hold_exactly_the_declared_tensors(kind: str, tmp_path: Path) -> None:
    save(make_model(kind), tmp_path)
    stored = {name: tuple(tensor.shape) for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    assert hf_shapes(spec_from_hf(read_config(tmp_path))) == stored


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hf_to_megatron_to_hf_is_bit_exact_by_pieces_alone(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = make_model(kind, dtype)
    spec = spec_from_hf(read_config(save(model, tmp_path)))
    stored = load_file(tmp_path / "model.safetensors")
    for grid in GRIDS:
        back = {name: torch.full(shape, float("nan"), dtype=dtype) for name, shape in hf_shapes(spec).items()}
        for rank in range(grid.world):
            local = megatron_tensors(tmp_path, spec, grid, rank, dtype)
            for piece in megatron_layout(spec, grid, rank):
                rows = back[piece.hf_name][tuple(slice(*bound) for bound in piece.hf_box)]
                rows.copy_(local[piece.local_name][tuple(slice(*bound) for bound in piece.local_box)])
        assert all(torch.equal(back[name], tensor) for name, tensor in stored.items())


@pytest.mark.parametrize("kind", MODELS)
def test_export_is_the_same_model_for_transformers(kind: str, tmp_path: Path) -> None:
    model = make_model(kind)
    spec = spec_from_hf(config := read_config(save(model, tmp_path / "in")))
    tensors = megatron_tensors(tmp_path / "in", spec, Grid(), 0)
    export_hf(spec, config, {0: megatron_layout(spec, Grid(), 0)}, tensors, tmp_path / "out")
    assert_same_model(tmp_path / "out", model)
    written = read_config(tmp_path / "out")
    assert written["vocab_size"] == 97
    assert spec_from_hf(written) == spec
    # transformers 4 reads these two keys, 5 reads rope_parameters.
    assert written["rope_theta"] == model.config.rope_parameters["rope_theta"]
    scaling = {key: value for key, value in LLAMA3_ROPE.items() if key != "rope_theta"}
    assert written["rope_scaling"] == (scaling if kind == "llama3" else None)
    assert written["rope_parameters"] == model.config.rope_parameters


def exported(folder: Path, grid: Grid, out: Path, max_shard_bytes: int) -> None:
    import torch.distributed as dist

    rank = dist.get_rank()
    config = read_config(folder)
    spec = spec_from_hf(config)
    tensors = megatron_tensors(folder, spec, grid, rank)
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    layouts = {r: megatron_layout(spec, grid, r) for r in range(grid.world)}
    export_hf(spec, config, layouts, tensors, out, tokenizer_folder=folder, max_shard_bytes=max_shard_bytes, bucket_bytes=4096)
    for name, tensor in tensors.items():  # padding is NaN here
        assert torch.equal(tensor.nan_to_num(99), before[name].nan_to_num(99)), name


@pytest.mark.parametrize(("kind", "grid"), [("llama", Grid(tp=2, pp=2)), ("qwen2_tied", Grid(tp=4)), ("qwen3_tied", Grid(tp=2, pp=2))])
def test_ranks_export_in_shards_with_an_index(kind: str, grid: Grid, tmp_path: Path) -> None:
    model = make_model(kind)
    save(model, tmp_path / "in")
    (tmp_path / "in" / "tokenizer.json").write_text('{"a": 1}')
    run_ranks(4, exported, tmp_path / "in", grid, tmp_path / "out", 20_000)
    assert_same_model(tmp_path / "out", model)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 3
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert set(index["weight_map"]) == set(hf_shapes(spec_from_hf(read_config(tmp_path / "in"))))
    assert index["metadata"]["total_size"] == 4 * sum(p.numel() for p in model.parameters())
    sizes = {file: sum(t.numel() * 4 for t in load_file(tmp_path / "out" / file).values()) for file in files}
    assert max(sizes.values()) <= 20_000
    assert (tmp_path / "out" / "tokenizer.json").read_text() == '{"a": 1}'
    assert (tmp_path / "out" / "generation_config.json").is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]
    # Our own reader takes the sharded folder too.
    spec = spec_from_hf(read_config(tmp_path / "out"))
    assert torch.equal(
        megatron_tensors(tmp_path / "out", spec, Grid(), 0)["0.decoder.final_layernorm.weight"], model.state_dict()["model.norm.weight"]
    )


@pytest.mark.parametrize(("asked", "written"), [(None, "bfloat16"), (torch.float32, "float32"), (torch.float16, "float16")])
def test_export_dtype_is_what_was_asked_and_what_the_config_says(asked: torch.dtype | None, written: str, tmp_path: Path) -> None:
    model = make_model("qwen2", torch.bfloat16)
    spec = spec_from_hf(config := read_config(save(model, tmp_path / "in")))
    masters = megatron_tensors(tmp_path / "in", spec, Grid(), 0, torch.float32)
    export_hf(spec, config, {0: megatron_layout(spec, Grid(), 0)}, masters, tmp_path / "out", dtype=asked)
    config = read_config(tmp_path / "out")
    assert config["dtype"] == config["torch_dtype"] == written
    stored = load_file(tmp_path / "out" / "model.safetensors")
    reference = model.state_dict()
    for name, tensor in stored.items():
        assert tensor.dtype == getattr(torch, written)
        assert torch.equal(tensor, reference[name].to(tensor.dtype))
    assert all(tensor.dtype == torch.float32 for tensor in masters.values())


def test_heads_wider_than_the_hidden_size_keep_their_rows_and_their_norms(tmp_path: Path) -> None:
    """Hidden 32, four query and two key-value heads of 16: (4 + 2 * 2) * 16 fused rows, where hidden / heads would give 64."""
    model: Any = make_model("qwen3")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_norm.weight.fill_(2.0)
            layer.self_attn.k_norm.weight.fill_(3.0)
    spec = spec_from_hf(config := read_config(save(model, tmp_path / "in")))
    tensors = megatron_tensors(tmp_path / "in", spec, Grid(), 0)
    attention = "0.decoder.layers.1.self_attention."
    assert tensors[attention + "linear_qkv.weight"].shape == (128, 32)
    assert tensors[attention + "q_layernorm.weight"].tolist() == [2.0] * 16
    assert tensors[attention + "k_layernorm.weight"].tolist() == [3.0] * 16
    export_hf(spec, config, {0: megatron_layout(spec, Grid(), 0)}, tensors, tmp_path / "out")
    assert_same_model(tmp_path / "out", model)


def test_vllm_pieces_load_from_files_like_any_other(tmp_path: Path) -> None:
    model = make_model("qwen2")
    spec = spec_from_hf(read_config(save(model, tmp_path)))
    hf = {name: tensor.numpy() for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    for rank in range(4):
        tensors = {name: torch.zeros(shape) for name, shape in vllm_shapes(spec, 4, rank).items()}
        load_pieces(tmp_path, vllm_layout(spec, 4, rank), tensors)
        expected = scatter(vllm_layout(spec, 4, rank), vllm_shapes(spec, 4, rank), hf)
        assert all(torch.equal(tensors[name], torch.from_numpy(value)) for name, value in expected.items())


def test_a_critic_takes_the_body_of_a_language_model_and_reloads_its_own_head(tmp_path: Path) -> None:
    model = make_model("qwen3_tied")
    spec = spec_from_hf(config := read_config(save(model, tmp_path / "lm")))
    pieces = megatron_layout(spec, Grid(), 0, head="value")
    tensors = {name: torch.zeros(shape) for name, shape in megatron_shapes(spec, Grid(), 0, head="value").items()}
    assert load_pieces(tmp_path / "lm", pieces, tensors, head="value") == ["score.weight"]
    assert not tensors["0.output_layer.weight"].any()
    tensors["0.output_layer.weight"].normal_()
    export_hf(spec, config, {0: pieces}, tensors, tmp_path / "critic", head="value")
    again = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    assert load_pieces(tmp_path / "critic", pieces, again, head="value") == []
    assert all(torch.equal(again[name][: len(tensor)], tensor) for name, tensor in tensors.items())
    scorer, info = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "critic", output_loading_info=True)
    assert not any(info.values()), info
    assert torch.equal(scorer.score.weight, tensors["0.output_layer.weight"])


def load_all(folder: Path) -> None:
    spec = spec_from_hf(read_config(folder))
    load_pieces(folder, hf_layout(spec), {name: torch.zeros(shape) for name, shape in hf_shapes(spec).items()})


def rewrite(folder: Path, change: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_missing_unexpected_and_misshapen_tensors_are_listed_in_one_error(tmp_path: Path) -> None:
    save(make_model("qwen2"), tmp_path)

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.self_attn.q_proj.weight_old"] = tensors.pop("model.layers.0.self_attn.q_proj.weight")
        tensors["model.norm.weight"] = torch.ones(31)

    rewrite(tmp_path, spoil)
    with pytest.raises(ValueError) as error:
        load_all(tmp_path)
    message = str(error.value)
    assert "missing: model.layers.0.self_attn.q_proj.weight;" in message
    assert "unexpected: model.layers.0.self_attn.q_proj.weight_old;" in message
    assert "wrong shape: model.norm.weight (31,) instead of (32,)" in message


def test_a_tensor_without_a_place_is_named(tmp_path: Path) -> None:
    save(make_model("llama"), tmp_path)
    rewrite(tmp_path, lambda tensors: tensors.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(32)}))
    with pytest.raises(ValueError, match=r"unexpected: model\.layers\.0\.self_attn\.q_proj\.bias"):
        load_all(tmp_path)


def test_a_decoder_under_another_prefix_is_refused_by_name(tmp_path: Path) -> None:
    save(make_model("qwen3_tied"), tmp_path)
    rewrite(tmp_path, lambda t: [t.update({"language_model." + name: t.pop(name)}) for name in list(t)])
    with pytest.raises(ValueError, match=r"missing: model\.embed_tokens\.weight.*unexpected: language_model\.model\."):
        load_all(tmp_path)


def test_rotary_buffers_and_a_stored_tied_head_are_ignored(tmp_path: Path) -> None:
    model = make_model("llama_tied")
    save(model, tmp_path)

    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
        tensors["lm_head.weight"] = torch.zeros(97, 32)  # the config says tied, so this is not the head

    rewrite(tmp_path, add)
    spec = spec_from_hf(read_config(tmp_path))
    head = megatron_tensors(tmp_path, spec, Grid(pp=2), 1)["0.output_layer.weight"]
    assert torch.equal(head[:97], model.state_dict()["model.embed_tokens.weight"])


def test_an_untied_model_without_its_head_is_refused(tmp_path: Path) -> None:
    save(make_model("llama"), tmp_path)
    rewrite(tmp_path, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(ValueError, match=r"missing: lm_head\.weight"):
        load_all(tmp_path)


def test_folders_that_cannot_be_read_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no config\.json"):
        read_config(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="not valid JSON"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text('["llama"]')
    with pytest.raises(ValueError, match=r"holds \['llama'\] instead"):
        read_config(tmp_path)
    with pytest.raises(ValueError, match="no weights to read"):
        stored_tensors(tmp_path)
    torch.save({"w": torch.ones(1)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pickle.*save_pretrained"):
        stored_tensors(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"w": "model-00001-of-00001.safetensors"}}')
    with pytest.raises(ValueError, match=r"not there: model-00001-of-00001\.safetensors"):
        stored_tensors(tmp_path)
    for damaged in ("{}", "cut sho", "[]"):
        (tmp_path / "model.safetensors.index.json").write_text(damaged)
        with pytest.raises(ValueError, match=r"index\.json is damaged"):
            stored_tensors(tmp_path)


def test_a_tensor_that_the_index_leaves_out_is_named(tmp_path: Path) -> None:
    save(make_model("llama"), tmp_path, max_shard_size="20KB")
    index = tmp_path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    del content["weight_map"]["model.layers.1.mlp.down_proj.weight"]
    index.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"missing: model\.layers\.1\.mlp\.down_proj\.weight$"):
        load_all(tmp_path)


def test_a_file_cut_short_is_named(tmp_path: Path) -> None:
    path = save(make_model("llama"), tmp_path) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"model\.safetensors cannot be read"):
        load_all(tmp_path)


def fails_on_rank_0(folder: Path, out: Path, limit: int) -> str:
    import tridentrl.weights.hf_io as hf_io

    def full_disk(tensors: Mapping[str, torch.Tensor], path: Path, **options: Any) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device", str(path))

    hf_io.save_file = full_disk
    try:
        exported(folder, Grid(tp=2), out, limit)
    except OSError as error:
        return str(error)
    return "no error"


def test_a_failed_export_fails_on_every_rank_and_leaves_nothing(tmp_path: Path) -> None:
    save(make_model("llama"), tmp_path / "in")
    first, second = run_ranks(2, fails_on_rank_0, tmp_path / "in", tmp_path / "out", 20_000)
    assert first == second
    assert "No space left on device" in first
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_an_existing_folder_is_replaced_only_when_asked(tmp_path: Path) -> None:
    model = make_model("llama")
    spec = spec_from_hf(config := read_config(save(model, tmp_path / "in")))
    tensors, layout = megatron_tensors(tmp_path / "in", spec, Grid(), 0), {0: megatron_layout(spec, Grid(), 0)}
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis").touch()
    for overwrite, words in ((False, "exists already"), (True, "no model folder")):
        with pytest.raises(ValueError, match=words):
            export_hf(spec, config, layout, tensors, tmp_path / "out", overwrite=overwrite)
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ValueError, match="no model folder"):
        export_hf(spec, config, layout, tensors, tmp_path / "file", overwrite=True)
    assert (tmp_path / "file").read_text() == "mine"
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["thesis"]
    (tmp_path / "out" / "config.json").touch()  # a model folder
    (tmp_path / "link").symlink_to(tmp_path / "out")
    export_hf(spec, config, layout, tensors, tmp_path / "link", overwrite=True)
    assert_same_model(tmp_path / "out", model)
    assert (tmp_path / "link").is_symlink() and not (tmp_path / "out" / "thesis").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "in", "link", "out"]


def test_gains_stored_as_offsets_keep_every_bit_in_bf16(tmp_path: Path) -> None:
    """These offsets are not representable as bf16(1 + offset) - 1."""
    gains = torch.tensor([0.003006, -0.020020, 0.100098, 0.5], dtype=torch.bfloat16).repeat(8)
    assert (((1 + gains) - 1)[:3] != gains[:3]).all()
    model: Any = make_model("gemma", torch.bfloat16)
    with torch.no_grad():
        model.model.norm.weight.copy_(gains)
    spec = spec_from_hf(config := read_config(save(model, tmp_path / "in")))
    for dtype in (torch.bfloat16, torch.float32):
        tensors = megatron_tensors(tmp_path / "in", spec, Grid(), 0, dtype)
        export_hf(spec, config, {0: megatron_layout(spec, Grid(), 0)}, tensors, tmp_path / str(dtype))
        assert torch.equal(load_file(tmp_path / str(dtype) / "model.safetensors")["model.norm.weight"], gains)
