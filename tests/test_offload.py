"""Training state that leaves the device between its uses. On CPU the device is host memory too; CUDA and vLLM's own sleep did not run."""

from __future__ import annotations

import ctypes
import json
import os
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from safetensors.torch import load_file
from tiny import tiny_folder, tiny_spec
from toy_task import toy_folder, toy_overrides

from tridentrl.configs.load import load_config
from tridentrl.engine.megatron import MegatronEngine
from tridentrl.engine.packing import PackedMicroBatch, Sequences
from tridentrl.engine.rollout_hf import HfRollout
from tridentrl.engine.rollout_vllm import VllmRollout
from tridentrl.parallel.grid import Grid
from tridentrl.parallel.groups import init_groups
from tridentrl.parallel.optimizer import OptimizerSettings
from tridentrl.trainer.rl_trainer import RLTrainer
from tridentrl.trainer.world import world_from_torchrun

HERE = Path(__file__).parent


def some_tokens(step: int) -> Sequences:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank() // 2)
    return Sequences(tokens_T=torch.randint(0, 97, (20,), generator=generator), total_lengths=[20], response_lengths=[11])


def likelihood(outputs: tuple[torch.Tensor, ...], batch: PackedMicroBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return -outputs[0].mean(), {}


def four_updates(grid: Grid, folder: str, bf16: bool) -> dict[str, Any]:
    """Four updates with and without offload in between; what was away after the first."""
    init_groups(grid, seed=1)
    spec, settings, result = tiny_spec(folder), OptimizerSettings(lr=1e-2, gradient_clip=1.0), {}
    for offload in ("none", "optimizer", "all"):
        engine = MegatronEngine(spec, grid, bf16=bf16, max_tokens=64, sequence_parallel=grid.tp > 1, optimizer=settings, offload=offload)
        engine.load(folder)
        losses = []
        for step in range(4):
            with engine.at_work(training=True):
                losses.append(engine.update(some_tokens(step), likelihood)["loss"])
            if step == 0:
                result[f"{offload} away"] = engine.offload.away, engine.offload.host_bytes
            with engine.at_work():
                logprobs, _ = engine.logprobs(some_tokens(step), temperature=1.0)
        with engine.at_work():
            weights = {name: tensor.clone() for name, tensor in engine.tensors().items()}
        result[offload] = losses, logprobs, weights
    return result


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("layout", "kind"),
    [(Grid(tp=2), "qwen2"), (Grid(pp=2, vpp=2), "qwen2"), (Grid(dp=2), "qwen2"), (Grid(dp=2, ep=2), "qwen3_moe")],
    ids=str,
)
def test_training_is_bit_equal_with_everything_taken_away_between_the_stages(layout: Grid, kind: str, bf16: bool) -> None:
    for result in run_ranks(2, four_updates, layout, tiny_folder(kind), bf16):
        losses, logprobs, weights = result["none"]
        assert len(set(losses)) == 4
        for offload in ("optimizer", "all"):
            assert result[offload][0] == losses
            assert torch.equal(result[offload][1], logprobs)
            assert all(torch.equal(result[offload][2][name], tensor) for name, tensor in weights.items())

        # Adam's moments, and in bf16 the masters, are 4 bytes each for this rank's share of the elements; gradients have no copy.
        elements = sum(tensor.numel() * (layout.ep if ".experts." in name else 1) for name, tensor in weights.items())
        bytes_of_weights = sum(tensor.nbytes for tensor in weights.values())
        share = elements / layout.dp * 4 * (3 if bf16 else 2)
        assert result["none away"] == (frozenset(), 0)
        away, host_bytes = result["optimizer away"]
        assert away == {"gradients", "optimizer"}
        assert host_bytes == pytest.approx(share, rel=0.03)  # a share ends inside a tensor; buffers are padded
        away, host_bytes = result["all away"]
        assert away == {"gradients", "optimizer", "weights"}
        assert host_bytes == pytest.approx(share + bytes_of_weights, rel=0.03)


def what_is_left(folder: str) -> dict[str, Any]:
    init_groups(Grid(), seed=1)
    engine = MegatronEngine(tiny_spec(folder), Grid(), max_tokens=64, optimizer=OptimizerSettings(lr=1e-2), offload="all")
    engine.load(folder)
    before = engine.tensors()
    assert engine.training
    gradients = [buffer.grad_data for chunk in engine.training.chunks for buffer in chunk.buffers]
    engine.offload.park()
    left = sum(tensor.untyped_storage().nbytes() for tensor in [*before.values(), *gradients])
    refusals = []
    for use in (engine.tensors, lambda: engine.logprobs(some_tokens(0), temperature=1.0)):
        with pytest.raises(AssertionError, match="offloaded: use at_work"):
            use()
        refusals.append(True)
    return {"left": left, "refusals": len(refusals)}


def test_nothing_is_left_on_the_device_and_nothing_reads_what_is_away() -> None:
    assert run_ranks(1, what_is_left, tiny_folder("llama"))[0] == {"left": 0, "refusals": 2}


# Whole runs


class Sleeper(HfRollout):
    """Loses its weights whenever it sleeps, as vLLM at level 2, and writes down the order of things."""

    happened: list[str]

    def sleep(self) -> bool:
        self.happened = [*getattr(self, "happened", []), "sleep"]
        for tensor in self.tensors().values():
            tensor.fill_(torch.nan)
        return True

    def wake(self, part: Literal["weights", "kv_cache"]) -> None:
        self.happened.append(f"wake {part}")

    def weights_changed(self) -> None:
        self.happened.append("weights")

    def generate(self, *args: Any) -> Any:
        self.happened.append("generate")
        return super().generate(*args)


def train(overrides: list[str], *, sleeper: bool = False) -> list[str]:
    if sleeper:
        import tridentrl.trainer.builders as builders

        builders.HfRollout = Sleeper  # type: ignore[misc]  # this process ends with the test
    trainer = RLTrainer(load_config(overrides), world_from_torchrun(os.environ))
    trainer.run()
    hybrid = trainer.engines.hybrid
    assert hybrid
    return getattr(hybrid.rollout, "happened", [])


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def without_clock(folder: Path) -> list[dict[str, Any]]:
    noise = ("timing_s/", "perf/", "reshard/", "memory/", "rollout/weight_version")
    return [{name: value for name, value in record.items() if not name.startswith(noise)} for record in records(folder)]


@pytest.fixture
def common(tmp_path: Path) -> list[str]:
    return [
        *toy_overrides(tmp_path, val_rows=3),
        f"reward.custom_fn.path={HERE / 'closeness_reward.py'}",
        "rollout.backend=hf",
        "algorithm.name=ppo",
        "trainer.kl_coef=0.05",
        "data.val_batch_size=2",
    ]


def test_a_run_with_everything_offloaded_and_a_sleeping_engine_is_the_same_run(common: list[str], tmp_path: Path) -> None:
    settings = [*common, "trainer.total_steps=3", "trainer.eval_interval=2", "trainer.save_interval=2"]
    plain, moved = tmp_path / "outputs" / "plain", tmp_path / "outputs" / "moved"
    run_ranks(2, train, [*settings, "exp_name=plain"])
    happened = run_ranks(2, lambda: train([*settings, "parallel.offload=all", "exp_name=moved"], sleeper=True))[0]
    assert without_clock(moved) == without_clock(plain)
    for role in ("", "-critic"):
        a, b = (load_file(folder / "hf" / f"step_3{role}" / "model.safetensors") for folder in (plain, moved))
        assert all(torch.equal(b[name], tensor) for name, tensor in a.items())
    # Built asleep; each generation wakes the weights, gets new ones, then the cache; whatever trains or saves sends it to sleep.
    cycle = ["wake weights", "weights", "wake kv_cache", "generate"]
    assert happened[:5] == ["sleep", *cycle]
    for number, event in enumerate(happened):
        if event == "generate":
            assert happened[number - 3 : number + 1] == cycle

    run_ranks(2, lambda: train([*settings, "parallel.offload=all", "exp_name=moved", "trainer.total_steps=4"], sleeper=True))
    run_ranks(2, train, [*settings, "exp_name=plain", "trainer.total_steps=4"])
    assert without_clock(moved) == without_clock(plain)


def train_trimmed(overrides: list[str]) -> None:
    """glibc keeps freed pages for later, here up to 8 % of the process, by chance; they are handed back before each look."""
    import tridentrl.trainer.context as context

    look = context.memory_in_use
    context.memory_in_use = lambda device: (ctypes.CDLL("libc.so.6").malloc_trim(0), look(device))[1]
    train(overrides)


@pytest.mark.parametrize("offload", ["none", "all"])
def test_memory_does_not_creep_over_five_cycles_of_training_and_generation(common: list[str], offload: str, tmp_path: Path) -> None:
    settings = [*common, "trainer.total_steps=7", "trainer.eval_interval=null", "trainer.eval_at_start=false", "trainer.save_interval=null"]
    # 14 MB of weights, so that 5 % of the process is less than one copy leaked in each cycle: four would make 15 % or more.
    bigger = toy_folder(tmp_path / "bigger", hidden_size=256, intermediate_size=512, num_hidden_layers=6)
    settings.append(f"model.actor_pretrained_model_name_or_path={bigger}")
    run_ranks(2, train_trimmed, [*settings, f"parallel.offload={offload}"])
    cycles = records(tmp_path / "outputs" / "default")[2:7]  # the first two fill caches
    stages = ["generate", "reward", "old_logprob", "ref", "values", "advantage", "update_critic", "update_actor", "reshard", "offload"]
    ledger = {name for name in cycles[0] if name.startswith("memory/")}
    assert ledger == {f"memory/{stage}/host_gb" for stage in stages}
    for name in ledger:
        held = [record[name] for record in cycles]
        assert min(held) > 0.1 and max(held) / min(held) < 1.05, (name, held)


# vLLM's sleep, whose calls alone can be seen without a GPU


class FakeLLM:
    def __init__(self) -> None:
        self.calls: list[str] = []

    def sleep(self, *, level: int) -> None:
        self.calls.append(f"sleep {level}")

    def wake_up(self, *, tags: list[str]) -> None:
        self.calls.append(f"wake {tags}")


@pytest.mark.parametrize(
    ("level", "lost", "calls"),
    [
        (0, False, []),
        (1, False, ["sleep 1", "wake ['weights']", "wake ['kv_cache']"]),
        (2, True, ["sleep 2", "wake ['weights']", "wake ['kv_cache']"]),
    ],
)
def test_vllm_is_sent_to_sleep_once_and_woken_part_by_part(
    level: int, lost: bool, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    rollout = VllmRollout.__new__(VllmRollout)
    rollout.llm, rollout.sleep_level, rollout._asleep = FakeLLM(), level, set()
    assert [rollout.sleep(), rollout.sleep()] == [lost, lost]
    for part in ("weights", "weights", "kv_cache"):
        rollout.wake(part)
    assert rollout.llm.calls == calls
