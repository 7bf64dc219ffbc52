"""Layouts against hand-written shards and against the plain formulas (reshape, concatenate, chunk) on element numbers.

Not covered here: that Megatron-Core and vLLM really have these names and shapes; the engine tests compare with the live modules.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from weight_worlds import element_ids, scatter, tiny_spec

from tridentrl.configs.model_spec import ModelSpec
from tridentrl.parallel.grid import Coord, Grid
from tridentrl.weights.families import FAMILIES
from tridentrl.weights.layouts import hf_layout, hf_shapes, megatron_layout, megatron_shapes, vllm_layout, vllm_shapes
from tridentrl.weights.pieces import slices

QKV = "0.decoder.layers.0.self_attention.linear_qkv.weight"
HF_QKV = tuple(f"model.layers.0.self_attn.{slot}_proj.weight" for slot in "qkv")


def heads_held(spec: ModelSpec, tensor: np.ndarray, ids: dict[str, np.ndarray]) -> list[str]:
    """Name of the head that every `head_dim` rows of a fused attention tensor come from."""
    owner = {}
    for name, slot in zip(HF_QKV, "qkv", strict=True):
        for head, rows in enumerate(ids[name].reshape(-1, spec.head_dim, spec.hidden_size)):
            owner[int(rows[0, 0])] = f"{slot}{head}"
    return [owner[int(rows[0, 0])] for rows in tensor.reshape(-1, spec.head_dim, spec.hidden_size)]


def test_fewer_kv_heads_than_ranks_split_a_group_over_ranks() -> None:
    spec, grid = tiny_spec(), Grid(tp=4)
    ids = element_ids(hf_shapes(spec))
    held = []
    for rank in range(4):
        shapes = megatron_shapes(spec, grid, rank)
        assert shapes[QKV] == (12, 32)
        held.append(heads_held(spec, scatter(megatron_layout(spec, grid, rank), shapes, ids)[QKV], ids))
    assert held == [["q0", "q1", "q2"], ["q3", "k0", "v0"], ["q4", "q5", "q6"], ["q7", "k1", "v1"]]


def test_vllm_repeats_kv_heads_when_ranks_outnumber_them() -> None:
    spec = tiny_spec()
    ids = element_ids(hf_shapes(spec))
    name = "model.layers.0.self_attn.qkv_proj.weight"
    held = [heads_held(spec, scatter(vllm_layout(spec, 4, r), vllm_shapes(spec, 4, r), ids)[name], ids) for r in range(4)]
    assert held == [["q0", "q1", "k0", "v0"], ["q2", "q3", "k0", "v0"], ["q4", "q5", "k1", "v1"], ["q6", "q7", "k1", "v1"]]


def expected_megatron(spec: ModelSpec, ids: dict[str, np.ndarray], tp: int, tp_rank: int, layer: int) -> dict[str, np.ndarray]:
    """One layer's parameters by reshaping whole tensors, without boxes."""
    d, groups = spec.head_dim, spec.num_kv_heads
    hf = {name.removeprefix(f"model.layers.{layer}."): ids[name] for name in ids if name.startswith(f"model.layers.{layer}.")}

    if "self_attn.qkv_proj.weight" in hf:
        q, kv = spec.num_heads * d, groups * d
        hf |= zip((f"self_attn.{slot}_proj.weight" for slot in "qkv"), np.split(hf["self_attn.qkv_proj.weight"], [q, q + kv]), strict=True)
        hf |= zip((f"mlp.{half}_proj.weight" for half in ("gate", "up")), np.split(hf["mlp.gate_up_proj.weight"], 2), strict=True)

    def fused(kind: str) -> np.ndarray:
        q, k, v = (hf[f"self_attn.{slot}_proj.{kind}"] for slot in "qkv")
        rest = q.shape[1:]
        q, k, v = q.reshape(groups, -1, *rest), k.reshape(groups, d, *rest), v.reshape(groups, d, *rest)
        return np.split(np.concatenate([q, k, v], axis=1).reshape(-1, *rest), tp)[tp_rank]

    expected = {
        "input_layernorm.weight": hf["input_layernorm.weight"],
        "pre_mlp_layernorm.weight": hf["post_attention_layernorm.weight"],
        "self_attention.linear_qkv.weight": fused("weight"),
        "self_attention.linear_proj.weight": np.split(hf["self_attn.o_proj.weight"], tp, axis=1)[tp_rank],
        "mlp.linear_fc1.weight": np.concatenate([np.split(hf[f"mlp.{half}_proj.weight"], tp)[tp_rank] for half in ("gate", "up")]),
        "mlp.linear_fc2.weight": np.split(hf["mlp.down_proj.weight"], tp, axis=1)[tp_rank],
    }
    if spec.qkv_bias:
        expected["self_attention.linear_qkv.bias"] = fused("bias")
    if spec.qk_norm:
        expected |= {f"self_attention.{s}_layernorm.weight": hf[f"self_attn.{s}_norm.weight"] for s in "qk"}
    return expected


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "qwen3_moe"])
@pytest.mark.parametrize(("kv_heads", "tp"), itertools.product([1, 2, 4, 8], [1, 2, 4, 8]))
def test_megatron_layers_equal_the_reshaped_tensors(family: str, kv_heads: int, tp: int) -> None:
    spec = tiny_spec(family=family, num_kv_heads=kv_heads, head_dim=8, qkv_bias=FAMILIES[family].qkv_bias, qk_norm=FAMILIES[family].qk_norm)
    ids, grid = element_ids(hf_shapes(spec)), Grid(tp=tp, pp=2)
    for rank in range(grid.world):
        coord = grid.coord(rank)
        local = scatter(megatron_layout(spec, grid, rank), megatron_shapes(spec, grid, rank), ids)
        layers = {name.removeprefix("0.decoder.layers.0."): value for name, value in local.items() if "decoder.layers" in name}
        expected = expected_megatron(spec, ids, tp, coord.tp_rank, layer=coord.pp_rank)
        assert layers.keys() == expected.keys()
        for name, value in expected.items():
            assert np.array_equal(layers[name], value), name


def test_virtual_chunks_number_their_layers_from_zero() -> None:
    spec, grid = tiny_spec(num_layers=8), Grid(pp=2, vpp=2)
    origin = {
        rank: {p.local_name: p.hf_name for p in megatron_layout(spec, grid, rank) if "input_layernorm" in p.local_name} for rank in (0, 1)
    }
    # Megatron's interleaved schedule: stage 0 has layers 0,1 and 4,5; stage 1 has 2,3 and 6,7.
    for rank, layers in {0: (0, 1, 4, 5), 1: (2, 3, 6, 7)}.items():
        names = [f"{chunk}.decoder.layers.{local}.input_layernorm.weight" for chunk in (0, 1) for local in (0, 1)]
        assert origin[rank] == {name: f"model.layers.{layer}.input_layernorm.weight" for name, layer in zip(names, layers, strict=True)}
    outside = [{name for name in megatron_shapes(spec, grid, rank) if "decoder.layers" not in name} for rank in (0, 1)]
    assert outside == [{"0.embedding.word_embeddings.weight"}, {"1.decoder.final_layernorm.weight", "1.output_layer.weight"}]


def test_vocabulary_padding_lies_outside_every_piece() -> None:
    spec, grid = tiny_spec(), Grid(tp=2)
    ids = element_ids(hf_shapes(spec))
    embedding = ids["model.embed_tokens.weight"]
    for rank, expected in enumerate([embedding[:64], np.concatenate([embedding[64:], np.full((31, 32), -1)])]):
        local = scatter(megatron_layout(spec, grid, rank), megatron_shapes(spec, grid, rank), ids, fill=-1)
        assert np.array_equal(local["0.embedding.word_embeddings.weight"], expected)
    # vLLM pads 97 to 128, so with four ranks the last one holds the 97th row and 31 rows of padding.
    parts = [scatter(vllm_layout(spec, 4, r), vllm_shapes(spec, 4, r), ids, fill=-1)["lm_head.weight"] for r in range(4)]
    assert [part.shape for part in parts] == [(32, 32)] * 4
    assert np.array_equal(np.concatenate(parts)[:97], ids["lm_head.weight"])
    assert np.all(np.concatenate(parts)[97:] == -1)


def test_a_rank_with_nothing_but_padding_has_the_tensor_and_no_piece_of_it() -> None:
    spec = tiny_spec(vocab_size=60)
    assert megatron_shapes(spec, Grid(tp=8), 7)["0.embedding.word_embeddings.weight"] == (16, 32)
    assert not [p for p in megatron_layout(spec, Grid(tp=8), 7) if p.hf_name == "model.embed_tokens.weight"]


@pytest.mark.parametrize(("pp", "copies"), [(1, 1), (2, 2), (4, 2)])
def test_a_tied_head_is_a_second_copy_only_where_a_pipeline_ends(pp: int, copies: int) -> None:
    spec, grid = tiny_spec(tied=True, num_layers=4), Grid(pp=pp)
    places = [(r, p.local_name) for r in range(pp) for p in megatron_layout(spec, grid, r) if p.hf_name == "model.embed_tokens.weight"]
    assert places == [(0, "0.embedding.word_embeddings.weight"), (pp - 1, "0.output_layer.weight")][:copies]
    assert "lm_head.weight" not in hf_shapes(spec)
    assert "lm_head.weight" not in vllm_shapes(spec, 1, 0)


@pytest.mark.parametrize("tied", [False, True])
def test_a_value_head_replaces_the_language_head_on_every_tensor_rank(tied: bool) -> None:
    spec, grid = tiny_spec(tied=tied), Grid(tp=2, pp=2)
    for rank in range(4):
        shapes = megatron_shapes(spec, grid, rank, head="value")
        heads = [p for p in megatron_layout(spec, grid, rank, head="value") if p.local_name == "0.output_layer.weight"]
        last = grid.coord(rank).pp_rank == 1
        assert shapes.get("0.output_layer.weight") == ((1, 32) if last else None)
        assert [(p.hf_name, p.hf_box) for p in heads] == ([("score.weight", ((0, 1), (0, 32)))] if last else [])
    names = hf_shapes(spec, head="value")
    assert names["score.weight"] == (1, 32)
    assert "lm_head.weight" not in names


def test_transformer_engine_layers_own_the_norm_before_them() -> None:
    spec, grid = tiny_spec(), Grid()
    plain, fused = (megatron_layout(spec, grid, 0, fused_norms=on) for on in (False, True))
    renamed = {a.local_name: b.local_name for a, b in zip(plain, fused, strict=True) if a.local_name != b.local_name}
    layer = "0.decoder.layers.{}."
    assert renamed == {
        layer.format(i) + a: layer.format(i) + b
        for i in (0, 1)
        for a, b in [
            ("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"),
            ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"),
        ]
    }


def test_data_and_context_parallel_ranks_are_replicas() -> None:
    spec, grid = tiny_spec(), Grid(tp=2, cp=2, dp=2, pp=2)
    first = {(t, p): grid.rank(Coord(t, 0, 0, p)) for t in (0, 1) for p in (0, 1)}
    for rank in range(grid.world):
        coord = grid.coord(rank)
        assert megatron_layout(spec, grid, rank) == megatron_layout(spec, grid, first[coord.tp_rank, coord.pp_rank])


@pytest.mark.parametrize(
    ("changes", "tp", "words"),
    [
        ({"num_heads": 6, "num_kv_heads": 3, "head_dim": 4}, 2, ["3 key-value heads", "size 2"]),
        ({"num_heads": 9, "num_kv_heads": 3}, 2, ["9 attention heads", "size 2"]),
        ({"ffn_size": 18}, 4, ["18", "size 4"]),
    ],
)
def test_sizes_that_do_not_divide_are_named(changes: dict[str, int], tp: int, words: list[str]) -> None:
    for layout in (lambda s: megatron_layout(s, Grid(tp=tp), 0), lambda s: vllm_layout(s, tp, 0)):
        with pytest.raises(ValueError) as error:
            layout(tiny_spec(**changes))
        assert all(word in str(error.value) for word in words), str(error.value)


def test_three_ranks_share_nine_heads_and_a_padded_vocabulary() -> None:
    spec = tiny_spec(num_heads=9, num_kv_heads=3, ffn_size=18, hidden_size=36, vocab_size=49152)
    ids = element_ids(hf_shapes(spec))
    rows = [scatter(vllm_layout(spec, 3, r), vllm_shapes(spec, 3, r), ids)["model.embed_tokens.weight"] for r in range(3)]
    assert np.array_equal(np.concatenate(rows), ids["model.embed_tokens.weight"])


@pytest.mark.parametrize("tp", [1, 2])
def test_fused_gate_and_up_are_halved_each_and_fused_again(tp: int) -> None:
    spec = tiny_spec(family="phi3")
    hf = {name: np.zeros(shape) for name, shape in hf_shapes(spec).items()}
    assert hf["model.layers.1.self_attn.qkv_proj.weight"].shape == (8 * 4 + 2 * 2 * 4, 32)
    gate_up = hf["model.layers.1.mlp.gate_up_proj.weight"]
    gate_up[:16], gate_up[16:] = 1.0, 2.0
    assert {piece.hf_name for piece in hf_layout(spec)} == hf.keys()
    engines = {
        "0.decoder.layers.1.mlp.linear_fc1.weight": (
            lambda r: megatron_layout(spec, Grid(tp=tp), r),
            lambda r: megatron_shapes(spec, Grid(tp=tp), r),
        ),
        "model.layers.1.mlp.gate_up_proj.weight": (lambda r: vllm_layout(spec, tp, r), lambda r: vllm_shapes(spec, tp, r)),
    }
    for name, (layout, shapes) in engines.items():
        for rank in range(tp):
            local = scatter(layout(rank), shapes(rank), hf)[name]
            assert local.shape == (32 // tp, 32)
            assert np.all(local[: 16 // tp] == 1.0) and np.all(local[16 // tp :] == 2.0)


def test_boxes_of_a_piece_have_one_shape_and_lie_inside_their_tensors() -> None:
    spec = tiny_spec(num_layers=4)
    hf = element_ids(hf_shapes(spec))
    for tp, pp in itertools.product([1, 2, 8], [1, 2]):
        for rank in range(tp * pp):
            local = {name: np.zeros(shape) for name, shape in megatron_shapes(spec, Grid(tp=tp, pp=pp), rank).items()}
            for piece in megatron_layout(spec, Grid(tp=tp, pp=pp), rank):
                sizes = tuple(high - low for low, high in piece.hf_box)
                assert hf[piece.hf_name][slices(piece.hf_box)].shape == sizes == local[piece.local_name][slices(piece.local_box)].shape
