"""From training layouts into live vLLM engines: against vLLM's own loader, transformers' greedy text and the trainer's log-probs.

Not covered here: CUDA, more than four processes.
"""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from safetensors.torch import load_file
from tiny import KINDS, tiny_folder, tiny_model, tiny_spec
from warm_vllm import vllm as _warm  # noqa: F401

from tridentrl.engine.hybrid import HybridEngine, _check_every_parameter_is_covered
from tridentrl.engine.megatron import MegatronEngine
from tridentrl.engine.packing import Sequences
from tridentrl.engine.placement import Placement, contiguous
from tridentrl.engine.rollout import Completion, Request, Sampling, sample_seed
from tridentrl.engine.rollout_vllm import VllmRollout
from tridentrl.parallel.grid import Grid
from tridentrl.parallel.groups import init_groups
from tridentrl.parallel.optimizer import OptimizerSettings
from tridentrl.weights.hf_io import export_hf, read_config
from tridentrl.weights.layouts import vllm_layout, vllm_shapes

GENERATOR = torch.Generator().manual_seed(11)
PROMPTS = [torch.randint(2, 97, (length,), generator=GENERATOR).tolist() for length in (3, 40, 7, 40, 12)]
SAMPLED = Sampling(max_response_length=6, temperature=1.0, stop_token_ids=(1,))
GREEDY = Sampling(max_response_length=6, temperature=0.0, stop_token_ids=(1,))
LAYOUTS = {
    1: [Grid()],
    2: [Grid(tp=2), Grid(pp=2), Grid(dp=2), Grid(pp=2, vpp=2)],
    4: [Grid(tp=2, pp=2), Grid(tp=2, dp=2), Grid(pp=2, dp=2), Grid(tp=4)],
}


def requests(step: int = 0) -> list[Request]:
    return [Request(prompt_ids=prompt, seed=sample_seed(1, step, i)) for i, prompt in enumerate(PROMPTS)]


def vllm_engine(folder: str, placement: Placement, run_id: str) -> VllmRollout:
    return VllmRollout(folder, tiny_spec(folder), placement=placement, max_length=64, dtype=torch.float32, run_id=run_id)


def trainer_logprobs(actor: MegatronEngine, completions: list[Completion], temperature: float = 1.0) -> torch.Tensor:
    tokens = [token for prompt, c in zip(PROMPTS, completions, strict=True) for token in [*prompt, *c.response_ids]]
    sequences = Sequences(
        tokens_T=torch.tensor(tokens),
        total_lengths=[len(prompt) + len(c.response_ids) for prompt, c in zip(PROMPTS, completions, strict=True)],
        response_lengths=[len(c.response_ids) for c in completions],
    )
    return actor.logprobs(sequences, temperature=temperature)[0]


def engine_logprobs(completions: list[Completion]) -> torch.Tensor:
    return torch.tensor([logprob for c in completions for logprob in c.logprobs])


def one_step(actor: MegatronEngine, completions: list[Completion]) -> None:
    sequences = Sequences(
        tokens_T=torch.tensor(PROMPTS[1] + completions[1].response_ids),
        total_lengths=[len(PROMPTS[1]) + len(completions[1].response_ids)],
        response_lengths=[len(completions[1].response_ids)],
    )
    metrics = actor.update(sequences, lambda outputs, batch: (outputs[0].sum(), {}))
    assert metrics["skipped_steps"] == 0


def loaded_by_vllm(rollout: VllmRollout, exported: Path) -> dict[str, torch.Tensor]:
    """What vLLM's own loader makes of the exported folder, in an engine that was filled with NaN before."""
    state = {name: tensor for file in exported.glob("*.safetensors") for name, tensor in load_file(file).items()}
    for tensor in rollout.tensors().values():
        tensor.fill_(torch.nan)
    rollout.llm.apply_model(lambda model: model.load_weights(iter(state.items())))
    return {name: tensor.clone() for name, tensor in rollout.tensors().items()}


def same_but_for_padding(a: torch.Tensor, b: torch.Tensor, rows: int) -> bool:
    return torch.equal(a[:rows], b[:rows])


def reshard_from(grids: list[Grid], placement: Placement, folder: str, run_id: str, exported: str) -> dict[str, Any]:
    """Every training layout of this world into the same engines; what to compare, by layout."""
    rollout = vllm_engine(folder, placement, run_id)
    assert not list(Path("/dev/shm").glob(f"*{run_id}*"))  # nothing that a killed run could leave behind
    report: dict[str, Any] = {}
    for grid in grids:
        init_groups(grid, seed=1)
        settings = OptimizerSettings(lr=3e-3, gradient_clip=0.0)
        actor = MegatronEngine(tiny_spec(folder), grid, max_tokens=64, sequence_parallel=True, optimizer=settings)
        actor.load(folder)
        hybrid = HybridEngine(actor, rollout, checksum_syncs=2, bucket_bytes=20_000)
        receipts = [hybrid.sync()]
        first = rollout.generate(requests(), SAMPLED)
        gap_first = (engine_logprobs(first) - trainer_logprobs(actor, first)).abs().max().item()
        one_step(actor, first)
        stale = (engine_logprobs(first) - trainer_logprobs(actor, first)).abs().max().item()
        receipts.append(hybrid.sync())
        second = rollout.generate(requests(step=1), SAMPLED)
        gap_second = (engine_logprobs(second) - trainer_logprobs(actor, second)).abs().max().item()
        greedy = rollout.generate(requests(), GREEDY)
        target = Path(exported) / str(grid).replace(" ", "-")
        export_hf(actor.spec, read_config(folder), actor.layouts(), actor.tensors(), target, group=dist.group.WORLD)
        synced = {name: tensor.clone() for name, tensor in rollout.tensors().items()}
        loaded = loaded_by_vllm(rollout, target)
        rows = 97 - len(synced["model.embed_tokens.weight"]) * placement.seat(dist.get_rank())[1]
        different = [
            name
            for name in synced
            if not same_but_for_padding(
                synced[name], loaded[name], rows if name.endswith(("embed_tokens.weight", "lm_head.weight")) else 10**9
            )
        ]
        report[str(grid)] = {
            "gaps": (gap_first, gap_second),
            "stale": stale,
            "different": different,
            "ratios": [receipt.ratio for receipt in receipts],
            "versions": [receipt.version for receipt in receipts],
            "greedy": [c.response_ids for c in greedy],
            "sampled": [c.response_ids for c in first],
            "buckets": max(receipt.bucket_bytes for receipt in receipts),
        }
    return report


@pytest.mark.parametrize(
    ("world", "replicas"), [(1, ((0,),)), (2, ((0,), (1,))), (2, ((0, 1),)), (4, ((0,), (1,), (2,), (3,))), (4, ((0, 2), (1, 3)))]
)
def test_every_training_layout_lands_bit_for_bit_in_live_vllm(world: int, replicas: tuple[tuple[int, ...], ...], tmp_path: Path) -> None:
    folder = tiny_folder("qwen2", hidden_size=128)
    reports = run_ranks(world, reshard_from, LAYOUTS[world], Placement(replicas), folder, uuid.uuid4().hex, str(tmp_path), timeout_s=240)
    for grid in LAYOUTS[world]:
        model = tiny_model(str(tmp_path / str(grid).replace(" ", "-")))
        expected = [greedy_by_transformers(model, prompt) for prompt in PROMPTS]
        for report in (rank[str(grid)] for rank in reports):
            assert report["different"] == []
            assert max(report["gaps"]) < 1e-4
            assert report["stale"] > 1e-2
            assert report["ratios"] == [1.0, 1.0]
            assert report["versions"] == [1, 2]
            assert report["greedy"] == expected
            assert report["buckets"] <= 2 * 20_000
            assert report["sampled"] == reports[0][str(LAYOUTS[world][0])]["sampled"]


def greedy_by_transformers(model: Any, prompt: list[int]) -> list[int]:
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=6,
        do_sample=False,
        eos_token_id=1,
    )
    return output[0, len(prompt) :].tolist()


def families_into_vllm(grid: Grid, folders: dict[str, str], run_id: str) -> dict[str, Any]:
    init_groups(grid, seed=1)
    result = {}
    for kind, folder in folders.items():
        rollout = vllm_engine(folder, contiguous(2, 2), run_id)
        actor = MegatronEngine(tiny_spec(folder), grid, max_tokens=64, sequence_parallel=True)
        actor.load(folder)
        HybridEngine(actor, rollout, checksum_syncs=1, bucket_bytes=1 << 20).sync()
        completions = rollout.generate(requests(), SAMPLED)
        gap = (engine_logprobs(completions) - trainer_logprobs(actor, completions)).abs().max().item()
        result[kind] = gap, [c.response_ids for c in rollout.generate(requests(), GREEDY)]
    return result


@pytest.mark.parametrize(
    ("grid", "kinds"),
    [
        (Grid(tp=2), [kind for kind in KINDS if kind not in ("qwen2", "qwen3_moe")]),
        # In processes of its own: vLLM makes a group for experts only if the first model has some.
        (Grid(tp=2), ["qwen3_moe"]),
        (Grid(dp=2, ep=2), ["qwen3_moe"]),
    ],
    ids=["dense", "experts on tp2", "experts on ep2"],
)
def test_every_family_generates_in_vllm_what_transformers_does(grid: Grid, kinds: list[str]) -> None:
    folders = {kind: tiny_folder(kind, hidden_size=128) for kind in kinds}
    reports = run_ranks(2, families_into_vllm, grid, folders, uuid.uuid4().hex, timeout_s=240)
    for kind, folder in folders.items():
        expected = [greedy_by_transformers(tiny_model(folder), prompt) for prompt in PROMPTS]
        for gap, greedy in (rank[kind] for rank in reports):
            assert gap < 1e-4, kind
            assert greedy == expected, kind


def test_a_parameter_that_the_trainer_does_not_fill_is_named() -> None:
    spec = tiny_spec(tiny_folder("qwen2"))
    shapes = vllm_shapes(spec, 1, 0)
    pieces = vllm_layout(spec, 1, 0)
    tensors = {name: torch.empty(shape) for name, shape in shapes.items()}
    _check_every_parameter_is_covered(spec, pieces, tensors)
    renamed = {name.replace("layers.2.mlp.down_proj", "layers.2.mlp.renamed"): tensor for name, tensor in tensors.items()}
    with pytest.raises(
        RuntimeError, match=r"(?s)no such parameter.*layers.2.mlp.down_proj.weight.*not covered.*layers.2.mlp.renamed.weight"
    ):
        _check_every_parameter_is_covered(spec, pieces, renamed)


def test_a_cache_that_is_not_reset_is_an_error() -> None:
    class Engine:
        def reset_prefix_cache(self) -> bool:
            return False

    rollout = object.__new__(VllmRollout)
    rollout.llm = Engine()  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match="prefix cache"):
        rollout.weights_changed()
