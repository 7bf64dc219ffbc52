"""Both rollout engines: what ends a response, seeds, temperature, caches. Not covered here: tensor-parallel engines (test_hybrid), CUDA."""

from __future__ import annotations

import json
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from tiny import tiny_spec
from toy_task import CHARACTERS, EOS, toy_folder, toy_tokenizer
from transformers import AutoTokenizer
from warm_vllm import vllm as _warm  # noqa: F401

from tridentrl.engine.hybrid import HybridEngine
from tridentrl.engine.megatron import MegatronEngine
from tridentrl.engine.packing import Sequences
from tridentrl.engine.placement import contiguous
from tridentrl.engine.rollout import Completion, Request, Sampling, sample_seed
from tridentrl.engine.rollout_hf import HfRollout
from tridentrl.engine.rollout_vllm import VllmRollout
from tridentrl.parallel.grid import Grid
from tridentrl.parallel.groups import init_groups
from tridentrl.parallel.optimizer import OptimizerSettings
from tridentrl.trainer.builders import end_of_sequence_ids

GREEDY = Sampling(max_response_length=6, temperature=0.0, stop_token_ids=())
SAMPLED = Sampling(max_response_length=6, temperature=1.0, stop_token_ids=())
PROMPT = toy_tokenizer()("12+34=").input_ids
LONG = [3 + i * 7 % 30 for i in range(300)]
"""Longer than two cache blocks of vLLM's CPU build."""


def one(prompt: list[int], seed: int = 1) -> list[Request]:
    return [Request(prompt_ids=prompt, seed=seed)]


def logprobs_by_trainer(actor: MegatronEngine, prompt: list[int], completions: list[Completion], temperature: float) -> torch.Tensor:
    sequences = Sequences(
        tokens_T=torch.tensor([token for c in completions for token in [*prompt, *c.response_ids]]),
        total_lengths=[len(prompt) + len(c.response_ids) for c in completions],
        response_lengths=[len(c.response_ids) for c in completions],
    )
    return actor.logprobs(sequences, temperature=temperature)[0]


def behaviour(folder: str, run_id: str) -> dict[str, dict[str, Any]]:
    """Everything the tests look at, from one vLLM engine and one transformers engine with the same weights."""
    init_groups(Grid(), seed=1)
    spec = tiny_spec(folder)
    engines = {
        "vllm": VllmRollout(
            folder, spec, placement=contiguous(1, 1), max_length=320, dtype=torch.float32, run_id=run_id, tokenizer_folder=folder
        ),
        "hf": HfRollout(folder, spec, dtype=torch.float32, device=torch.device("cpu"), tokenizer_folder=folder),
    }
    seen: dict[str, dict[str, Any]] = {name: {} for name in engines}
    for name, engine in engines.items():
        actor = MegatronEngine(spec, Grid(), max_tokens=512, optimizer=OptimizerSettings(lr=0.1, gradient_clip=0.0))
        actor.load(folder)
        hybrid = HybridEngine(actor, engine, checksum_syncs=2, bucket_bytes=1 << 20)
        hybrid.sync()
        report = seen[name]
        (free,) = engine.generate(one(PROMPT), GREEDY)
        ids = report["free"] = free.response_ids
        report["free truncated"] = free.truncated
        third = ids[2]
        assert third not in ids[:2]
        endings = {
            "stops at the third": replace(GREEDY, stop_token_ids=(third,)),
            "stops at the third of two ids": replace(GREEDY, stop_token_ids=(EOS, third)),
            "third is the last allowed": replace(GREEDY, stop_token_ids=(third,), max_response_length=3),
            "cut before the third": replace(GREEDY, stop_token_ids=(third,), max_response_length=2),
            "first ends": replace(GREEDY, stop_token_ids=(ids[0],)),
            "stop string": replace(GREEDY, stop=(CHARACTERS[ids[1]] + CHARACTERS[third],)),
        }
        for case, sampling in endings.items():
            (completion,) = engine.generate(one(PROMPT), sampling)
            assert len(completion.logprobs) == len(completion.response_ids)
            report[case] = completion.response_ids, completion.truncated
        # The stop id may stand in the prompt.
        (completion,) = engine.generate(one([*PROMPT, third, PROMPT[0]]), replace(GREEDY, stop_token_ids=(third,), max_response_length=1))
        report["stop id in the prompt"] = len(completion.response_ids)
        seeds = [sample_seed(7, 3, i) for i in range(64)]
        many = engine.generate([Request(prompt_ids=PROMPT, seed=seed) for seed in seeds], SAMPLED)
        few = engine.generate([Request(prompt_ids=PROMPT, seed=seed) for seed in reversed(seeds[:5])], SAMPLED)
        report["same seed, same sample"] = [c.response_ids for c in many[:5]] == [c.response_ids for c in reversed(few)]
        report["distinct samples"] = len({tuple(c.response_ids) for c in many})
        report["gaps"] = {}
        for temperature in (0.5, 1.0, 1.5):
            completions = engine.generate(
                [Request(prompt_ids=PROMPT, seed=s) for s in seeds[:8]], replace(SAMPLED, temperature=temperature)
            )
            engine_logprobs = torch.tensor([logprob for c in completions for logprob in c.logprobs])
            trainer = logprobs_by_trainer(actor, PROMPT, completions, temperature)
            report["gaps"][temperature] = (engine_logprobs - trainer).abs().max().item()
            report["gaps"][temperature, "mixed"] = (
                (engine_logprobs - logprobs_by_trainer(actor, PROMPT, completions, 2.0)).abs().max().item()
            )
        engine.generate(one(LONG), GREEDY)
        (before,) = engine.generate(one(LONG), GREEDY)
        assert actor.update(
            Sequences(tokens_T=torch.tensor(LONG), total_lengths=[300], response_lengths=[299]),
            lambda outputs, batch: (outputs[0].sum(), {}),
        )
        hybrid.sync()
        (after,) = engine.generate(one(LONG), SAMPLED)
        expected = logprobs_by_trainer(actor, LONG, [after], 1.0)
        report["stale prefix"] = (torch.tensor(after.logprobs) - expected).abs().max().item()
        report["moved"] = (torch.tensor(before.logprobs) - logprobs_by_trainer(actor, LONG, [before], 1.0)).abs().max().item()
    return seen


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = Path(toy_folder(tmp_path_factory.mktemp("rollout") / "model", max_position_embeddings=512))
    poison = {"do_sample": True, "top_p": 0.1, "top_k": 1, "repetition_penalty": 1.5, "temperature": 0.3, "eos_token_id": [EOS, 5]}
    (folder / "generation_config.json").write_text(json.dumps(poison))
    (result,) = run_ranks(1, behaviour, str(folder), uuid.uuid4().hex, timeout_s=120)
    return result


@pytest.mark.parametrize("backend", ["vllm", "hf"])
def test_a_response_ends_with_the_first_stop_id_and_knows_why(seen: dict[str, dict[str, Any]], backend: str) -> None:
    report = seen[backend]
    ids = report["free"]
    assert len(ids) == 6 and report["free truncated"]
    assert report["stops at the third"] == (ids[:3], False)
    assert report["stops at the third of two ids"] == (ids[:3], False)
    assert report["third is the last allowed"] == (ids[:3], False)
    assert report["cut before the third"] == (ids[:2], True)
    assert report["first ends"] == (ids[:1], False)
    assert report["stop string"] == (ids[:3], False)
    assert report["stop id in the prompt"] == 1


@pytest.mark.parametrize("backend", ["vllm", "hf"])
def test_a_seed_decides_the_sample_and_nothing_comes_from_generation_config(seen: dict[str, dict[str, Any]], backend: str) -> None:
    assert seen[backend]["same seed, same sample"]
    # With the folder's top_k of 1 all 64 would be the same.
    assert seen[backend]["distinct samples"] > 32


@pytest.mark.parametrize("backend", ["vllm", "hf"])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.5])
def test_engine_and_trainer_agree_at_the_sampling_temperature(seen: dict[str, dict[str, Any]], backend: str, temperature: float) -> None:
    assert seen[backend]["gaps"][temperature] < 1e-4
    assert seen[backend]["gaps"][temperature, "mixed"] > 0.05


@pytest.mark.parametrize("backend", ["vllm", "hf"])
def test_cached_prefixes_are_forgotten_when_weights_change(seen: dict[str, dict[str, Any]], backend: str) -> None:
    assert seen[backend]["stale prefix"] < 2e-4
    assert seen[backend]["moved"] > 1e-2


def test_backends_are_greedy_alike(seen: dict[str, dict[str, Any]]) -> None:
    assert seen["vllm"]["free"] == seen["hf"]["free"]


def test_every_end_of_sequence_id_of_the_folder_counts(tmp_path: Path) -> None:
    folder = toy_folder(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 5]}))
    assert end_of_sequence_ids(folder, AutoTokenizer.from_pretrained(folder)) == (EOS, 5, 7)


def test_seeds_depend_on_run_step_and_sample_alone() -> None:
    seeds = {sample_seed(run, step, sample) for run in range(3) for step in range(-1, 20) for sample in range(50)}
    assert len(seeds) == 3 * 21 * 50
    assert sample_seed(1, 2, 3) == sample_seed(1, 2, 3) != sample_seed(1, 3, 2)
