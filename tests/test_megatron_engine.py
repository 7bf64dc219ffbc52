"""The Megatron engine against transformers on every layout. Not covered here: CUDA, context parallel."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region
from megatron.core.utils import unwrap_model
from ranks import run_ranks
from tiny import KINDS, tiny_folder, tiny_model, tiny_spec

from tridentrl.algos import GSPO
from tridentrl.algos.context import Denominators, MicroBatch
from tridentrl.algos.grpo import GRPO, GRPOConfig
from tridentrl.algos.ppo import PPO, PPOConfig
from tridentrl.data.balance import micro_batches
from tridentrl.engine.megatron import MegatronEngine
from tridentrl.engine.packing import Sequences
from tridentrl.parallel.cpu import megatron_facade
from tridentrl.parallel.grid import Grid
from tridentrl.parallel.groups import init_groups
from tridentrl.parallel.optimizer import OptimizerSettings
from tridentrl.weights.pieces import slices

GRIDS = {
    "tp1": Grid(),
    "tp2": Grid(tp=2),
    "pp2": Grid(pp=2),
    "pp2 vpp2": Grid(pp=2, vpp=2),
    "dp2": Grid(dp=2),
    "tp2 pp2": Grid(tp=2, pp=2),
    "tp4": Grid(tp=4),
}
PROMPTS, RESPONSES = [3, 7, 1, 12, 5, 9], [4, 1, 9, 6, 11, 2]
TOTALS = [p + r for p, r in zip(PROMPTS, RESPONSES, strict=True)]
"""Lengths of the six sequences that the tests run."""
FREE = OptimizerSettings(lr=1e-3, gradient_clip=0.0)


def some_sequences() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, 97, (p + r,), generator=generator) for p, r in zip(PROMPTS, RESPONSES, strict=True)]


def share_of(dp_rank: int, dp: int) -> list[int]:
    return list(range(dp_rank, len(PROMPTS), dp))


def packed(members: list[int]) -> Sequences:
    sequences = some_sequences()
    return Sequences(
        tokens_T=torch.cat([sequences[i] for i in members]),
        total_lengths=[PROMPTS[i] + RESPONSES[i] for i in members],
        response_lengths=[RESPONSES[i] for i in members],
    )


def packed_fields(members: list[int]) -> dict[str, torch.Tensor]:
    """What the losses read besides the model, drawn for each sequence by itself so that no split changes it."""
    fields = []
    for i in members:
        generator = torch.Generator().manual_seed(100 + i)
        draws = torch.randn(5, RESPONSES[i], generator=generator)
        fields.append(torch.cat([draws, (torch.rand(1, RESPONSES[i], generator=generator) < 0.8).float()]))
    draws = torch.cat(fields, 1)
    names = ("old_logprobs", "ref_logprobs", "advantages", "old_values", "returns", "mask")
    values = dict(zip(names, draws, strict=True))
    # Near the tiny model's own log-probs, so that some ratios are clipped and others are not.
    return values | {name: values[name] * 0.3 - 4.6 for name in ("old_logprobs", "ref_logprobs")}


def logits_of_all_families(grid: Grid, folders: dict[str, str]) -> dict[str, torch.Tensor]:
    """Logits [tokens, 97] of the packed sequences, known on the ranks of the last stage."""
    init_groups(grid, seed=1)
    result = {}
    for kind, folder in folders.items():
        engine = MegatronEngine(tiny_spec(folder), grid, max_tokens=32, sequence_parallel=True)
        engine.load(folder)
        batches = engine._pack(packed(list(range(len(PROMPTS)))))
        with torch.no_grad():
            outputs = engine._run(batches, lambda output, batch: output, forward_only=True)
        if outputs:
            of_sequence = {}
            for output, members in zip(outputs, micro_batches(TOTALS, 32), strict=False):
                with megatron_facade():
                    logits = gather_from_tensor_model_parallel_region(output)[0, :, :97]
                of_sequence.update(
                    zip(members, logits.split([*(TOTALS[i] for i in members), len(logits) - sum(TOTALS[i] for i in members)]), strict=False)
                )
            result[kind] = torch.cat([of_sequence[i] for i in range(len(TOTALS))])
    return result


@pytest.mark.parametrize("layout", ["tp1", "tp2", "pp2", "pp2 vpp2", "tp2 pp2", "tp4"])
def test_logits_equal_those_of_transformers(layout: str) -> None:
    grid = GRIDS[layout]
    folders = {kind: tiny_folder(kind) for kind in KINDS}
    by_rank = run_ranks(grid.world, logits_of_all_families, grid, folders)
    for kind, folder in folders.items():
        model = tiny_model(folder)
        with torch.no_grad():
            expected = torch.cat([model(tokens[None]).logits[0] for tokens in some_sequences()])
        logits = by_rank[-1][kind]
        assert (logits - expected).abs().max() < 1e-5, kind


def update_gradients(grid: Grid, folder: str, algorithm: str, head: str, max_tokens: int, recompute: Any = "none") -> Any:
    """One update under the loss of `algorithm`; gradients of this rank by local name, its pieces and the metrics."""
    init_groups(grid, seed=1)
    engine = MegatronEngine(
        tiny_spec(folder), grid, head=head, max_tokens=max_tokens, sequence_parallel=True, optimizer=FREE, recompute=recompute
    )
    if head == "value":
        assert engine.load_value_model(folder, seed=5)
    else:
        engine.load(folder)
    members = share_of(grid.coord(dist.get_rank()).dp_rank, grid.dp)
    mask = packed_fields(list(range(len(PROMPTS))))["mask"]
    denominators = Denominators(tokens=mask.sum().item(), sequences=float(len(PROMPTS)), longest=8)
    fields = packed_fields(members)
    loss = loss_of(algorithm, head)

    def micro_loss(outputs: tuple[torch.Tensor, ...], batch: Any) -> Any:
        micro = MicroBatch(
            response_mask=fields["mask"][batch.rows_r],
            lengths=torch.tensor(batch.lengths),
            fields={name: tensor[batch.rows_r] for name, tensor in fields.items()},
            denominators=denominators,
        )
        return loss(*outputs, micro)

    metrics = engine.update(packed(members), micro_loss)
    assert engine.training
    for chunk in engine.training.chunks:
        gather_gradients(chunk.buffers, parallel_state.get_data_parallel_group())
        gather_gradients(chunk.expert_parallel_buffers, parallel_state.get_expert_data_parallel_group())
    gradients = {
        f"{number}.{name}": parameter.main_grad.clone()
        for number, chunk in enumerate(unwrap_model(engine.training.chunks))
        for name, parameter in chunk.named_parameters()
    }
    return engine.layouts()[dist.get_rank()], gradients, metrics


def gather_gradients(buffers: list[Any], group: dist.ProcessGroup) -> None:
    """With the distributed optimizer each rank of `group` has the summed gradient of its own share only."""
    for bucket in (bucket for buffer in buffers for bucket in buffer.buckets):
        shard = bucket.grad_data.chunk(group.size())[group.rank()].clone()
        dist.all_gather_into_tensor(bucket.grad_data, shard, group=group)


def loss_of(algorithm: str, head: str) -> Any:
    if algorithm == "ppo":
        ppo = PPO(PPOConfig(entropy_coef=0.01))
        return ppo.critic_loss if head == "value" else ppo.loss
    if algorithm == "gspo":
        return GSPO(GSPO.Config(group_size=2, clip_coef=0.05, clip_coef_high=0.05)).loss
    return GRPO(GRPOConfig(beta=0.05, group_size=2)).loss


def in_hf_names(by_rank: list[Any], shapes: dict[str, torch.Size]) -> dict[str, torch.Tensor]:
    whole = {name: torch.full(shape, torch.nan) for name, shape in shapes.items()}
    for pieces, tensors, _ in by_rank:
        for piece in pieces:
            whole[piece.hf_name][slices(piece.hf_box)] = tensors[piece.local_name][slices(piece.local_box)]
    return whole


def reference_gradients(folder: str, algorithm: str, head: str) -> dict[str, torch.Tensor]:
    """The same loss in float64 through transformers, one sequence at a time."""
    model = tiny_model(folder, torch.float64)
    score = None
    if head == "value":
        generator = torch.Generator().manual_seed(5)
        score = (torch.randn(1, 64, generator=generator) / 8).double().requires_grad_()
    everyone = list(range(len(PROMPTS)))
    fields = {name: tensor.double() for name, tensor in packed_fields(everyone).items()}
    outputs = []
    for tokens, prompt in zip(some_sequences(), PROMPTS, strict=True):
        if score is not None:
            hidden = model.model(tokens[None]).last_hidden_state[0, prompt - 1 : -1]
            outputs.append(((hidden @ score.T)[:, 0],))
        else:
            logp = model(tokens[None]).logits[0, prompt - 1 : -1].log_softmax(-1)
            outputs.append((logp.gather(1, tokens[prompt:, None])[:, 0], -(logp.exp() * logp).sum(-1)))
    micro = MicroBatch(
        response_mask=fields["mask"],
        lengths=torch.tensor(RESPONSES),
        fields=fields,
        denominators=Denominators(tokens=fields["mask"].sum().item(), sequences=float(len(PROMPTS)), longest=8),
    )
    loss, _ = loss_of(algorithm, head)(*(torch.cat(parts) for parts in zip(*outputs, strict=True)), micro)
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return gradients | ({"score.weight": score.grad} if score is not None else {})


LOSSES = [("grpo", "lm"), ("gspo", "lm"), ("ppo", "lm"), ("ppo", "value")]


def gradients_of_all_losses(grid: Grid, folder: str) -> list[Any]:
    """With one sequence per micro-batch, and with several."""
    return [update_gradients(grid, folder, *loss, max_tokens) for loss in LOSSES for max_tokens in (1, 40)]


@functools.cache
def expected_gradients(folder: str) -> list[dict[str, torch.Tensor]]:
    return [reference_gradients(folder, *loss) for loss in LOSSES for _ in (1, 40)]


@pytest.mark.parametrize("layout", GRIDS)
def test_gradients_equal_float64_transformers_on_every_layout_and_split(layout: str) -> None:
    folder = tiny_folder("qwen2")
    by_rank = run_ranks(GRIDS[layout].world, gradients_of_all_losses, GRIDS[layout], folder)
    for case, expected in enumerate(expected_gradients(folder)):
        results = [rank[case] for rank in by_rank]
        gradients = in_hf_names(results, {name: gradient.shape for name, gradient in expected.items()})
        scale = max(gradient.abs().max() for gradient in expected.values())
        for name, gradient in expected.items():
            assert (gradients[name] - gradient).abs().max() < 1e-5 * scale, (case, name)
        norm = torch.stack([gradient.norm() for gradient in expected.values()]).norm().item()
        assert results[0][2]["grad_norm"] == pytest.approx(norm, rel=1e-5)


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputing_activations_changes_no_gradient(recompute: str) -> None:
    grid, folder = GRIDS["tp2"], tiny_folder("qwen2")
    plain, again = (run_ranks(2, update_gradients, grid, folder, "grpo", "lm", 40, how) for how in ("none", recompute))
    for (_, a, _), (_, b, _) in zip(plain, again, strict=True):
        for name in a:
            assert torch.equal(a[name], b[name]), name


def score_then_update_with_nan(grid: Grid, folder: str) -> Any:
    init_groups(grid, seed=1)
    engine = MegatronEngine(tiny_spec(folder), grid, max_tokens=40, optimizer=FREE)
    engine.load(folder)
    before = {name: tensor.clone() for name, tensor in engine.tensors().items()}
    members = share_of(grid.coord(dist.get_rank()).dp_rank, grid.dp)

    def loss(outputs: tuple[torch.Tensor, ...], batch: Any) -> Any:
        # Only the last rank's share is spoilt.
        bad = torch.nan if dist.get_rank() == grid.world - 1 else 1.0
        return outputs[0].sum() * bad, {}

    metrics = engine.update(packed(members), loss)
    return metrics["skipped_steps"], all(torch.equal(before[name], tensor) for name, tensor in engine.tensors().items())


def test_a_gradient_that_is_not_finite_on_one_rank_changes_no_weight_anywhere() -> None:
    assert run_ranks(2, score_then_update_with_nan, GRIDS["dp2"], tiny_folder("qwen2")) == [(1.0, True), (1.0, True)]


def bf16_scores(grid: Grid, folder: str) -> Any:
    init_groups(grid, seed=1)
    everyone = packed(list(range(len(PROMPTS))))
    full = MegatronEngine(tiny_spec(folder), grid, max_tokens=40)
    full.load(folder)
    half = MegatronEngine(tiny_spec(folder), grid, max_tokens=40, bf16=True, optimizer=OptimizerSettings(lr=1e-30, gradient_clip=0.0))
    half.load(folder)
    loaded = {name: tensor.clone() for name, tensor in half.tensors().items()}
    gap = (full.logprobs(everyone, temperature=1.0)[0] - half.logprobs(everyone, temperature=1.0)[0]).abs().max().item()
    metrics = half.update(everyone, lambda outputs, batch: (outputs[0].sum() / 10, {}))
    kept = all(torch.equal(loaded[name], tensor) for name, tensor in half.tensors().items())
    return gap, kept, metrics["grad_norm"], {tensor.dtype for tensor in half.tensors().values()}


@pytest.mark.parametrize("layout", ["tp1", "tp2 pp2", "dp2"])
def test_bf16_is_near_fp32_and_its_master_weights_are_the_loaded_ones(layout: str) -> None:
    """With a learning rate of nearly 0 an update writes the fp32 master weights back: stale ones would undo the load."""
    for gap, kept, grad_norm, dtypes in run_ranks(GRIDS[layout].world, bf16_scores, GRIDS[layout], tiny_folder("qwen2")):
        assert 1e-4 < gap < 0.1
        assert kept
        assert grad_norm > 0
        assert dtypes == {torch.bfloat16}


def learning_rates(settings: OptimizerSettings, updates: int) -> list[float]:
    init_groups(Grid(), seed=1)
    folder = tiny_folder("llama")
    engine = MegatronEngine(tiny_spec(folder), Grid(), max_tokens=64, optimizer=settings)
    return [engine.update(packed([0]), lambda outputs, batch: (outputs[0].sum() * 0.0, {}))["lr"] for _ in range(updates)]


def test_learning_rate_warms_up_then_decays_to_its_share() -> None:
    settings = OptimizerSettings(lr=1.0, warmup_steps=2, schedule="linear", total_steps=6, min_lr_ratio=0.2)
    (rates,) = run_ranks(1, learning_rates, settings, 6)
    assert rates == pytest.approx([0.5, 1.0, 0.8, 0.6, 0.4, 0.2])


def test_the_facade_leaves_torch_as_it_was() -> None:
    names = ("current_device", "Stream", "Event", "synchronize")
    before = {name: getattr(torch.cuda, name) for name in names} | {"empty": torch.empty, "type": torch.Tensor.type}
    with megatron_facade(), megatron_facade():
        assert torch.cuda.current_device() == torch.device("cpu")
        assert torch.zeros(1, device="cuda").device.type == "cpu"
    assert before == {name: getattr(torch.cuda, name) for name in names} | {"empty": torch.empty, "type": torch.Tensor.type}
