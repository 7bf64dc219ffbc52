"""Checkpoints of models: nothing lost on any layout, nothing broken loaded. Whole runs are resumed in test_resume. Not covered: CUDA."""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import shutil
import signal
import threading
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from ranks import run_ranks
from test_megatron_engine import packed, share_of
from tiny import tiny_folder, tiny_spec

import tridentrl.checkpoint.store as store_module
from tridentrl.checkpoint.collective import on_every_rank
from tridentrl.checkpoint.manifest import MANIFEST, read_manifest, steps_in
from tridentrl.checkpoint.model import SCHEDULE, load_model
from tridentrl.checkpoint.store import CheckpointStore, Contents, verified
from tridentrl.engine.megatron import MegatronEngine
from tridentrl.engine.packing import PackedMicroBatch
from tridentrl.parallel.grid import Grid
from tridentrl.parallel.groups import init_groups
from tridentrl.parallel.optimizer import OptimizerSettings
from tridentrl.weights.pieces import slices

SETTINGS = OptimizerSettings(lr=1e-3, weight_decay=0.1, warmup_steps=3, schedule="cosine", total_steps=8, gradient_clip=1.0, eps=1e-5)
LAYOUTS = {"tp2": Grid(tp=2), "pp2 vpp2": Grid(pp=2, vpp=2), "dp2": Grid(dp=2), "one": Grid(), "pp2 dp2": Grid(pp=2, dp=2)}


def odd_folder(kind: str) -> str:
    """Sizes that fill no buffer of Megatron's to its end."""
    return tiny_folder(kind, hidden_size=40, head_dim=10)


def engine_on(grid: Grid, kind: str, head: Any = "lm", *, bf16: bool = False, load: bool = True) -> MegatronEngine:
    folder = odd_folder(kind)
    engine = MegatronEngine(tiny_spec(folder), grid, head=head, bf16=bf16, max_tokens=64, sequence_parallel=True, optimizer=SETTINGS)
    if load and head == "value":
        engine.load_value_model(folder, seed=3)
    elif load:
        engine.load(folder)
    return engine


def update(engine: MegatronEngine) -> dict[str, float]:
    """One step down the mean log-prob (or squared value) of fixed sequences; metrics."""
    sequences = packed(share_of(engine.grid.coord(dist.get_rank()).dp_rank, engine.grid.dp))

    def loss(outputs: tuple[torch.Tensor, ...], micro: PackedMicroBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return ((outputs[0] if engine.head == "lm" else outputs[0] ** 2) / 33).sum(), {}

    return engine.update(sequences, loss)


def gathered_state(engine: MegatronEngine) -> dict[str, torch.Tensor]:
    """Weights, fp32 masters and both moments of the whole model, `name/kind` by Hugging Face names, put together without Megatron."""
    assert engine.training
    by_parameter = {}
    for inner in engine.training.optimizer.chained_optimizers:  # one for dense weights, one for experts
        for ranges in (ranges for buffer in inner.gbuf_ranges for buckets in buffer.values() for ranges in buckets):
            for parameter, parts in ranges["param_map"].items():
                group, order = inner.model_param_group_index_map[parameter]
                main = inner.optimizer.param_groups[group]["params"][order]
                state = inner.optimizer.state[main]
                assert float(state["step"]) == engine.training.scheduler.num_steps
                by_parameter[parameter] = (parts["param"], {"main": main, "exp_avg": state["exp_avg"], "exp_avg_sq": state["exp_avg_sq"]})
    local = dict(engine.tensors())
    for name, parameter in [
        (f"{number}.{name}", p)
        for number, chunk in enumerate(engine.training.chunks)
        for name, p in (chunk.module.module if hasattr(chunk.module, "module") else chunk.module).named_parameters()
    ]:
        for kind in ("main", "exp_avg", "exp_avg_sq"):
            flat = torch.zeros(parameter.numel())
            if parameter in by_parameter:
                part, tensors = by_parameter[parameter]
                flat[part.start : part.end] = tensors[kind].detach()
            expert = ".experts." in name
            dist.all_reduce(flat, group=getattr(parallel_state, f"get_{'expert_' if expert else ''}data_parallel_group")())
            local[f"{name}/{kind}"] = flat.view(parameter.shape)
    mine = []
    for piece in engine.layouts()[dist.get_rank()]:
        for kind in ("", "/main", "/exp_avg", "/exp_avg_sq"):
            part = local[piece.local_name + kind][slices(piece.local_box)].clone()
            mine.append((piece.hf_name + kind, piece.hf_box, part))
    whole: dict[str, torch.Tensor] = {}
    parts = [part for rank in on_every_rank(lambda: mine) for part in rank]
    for name, box, _ in parts:
        shape = [max(high, size) for (_, high), size in zip(box, whole[name].shape if name in whole else [0] * len(box), strict=True)]
        whole[name] = torch.full(shape, torch.nan)
    for name, box, part in parts:
        # Replicas (the ranks of a data-parallel group, norms over tensor parallel, tied embeddings) hold the same bits.
        assert whole[name][slices(box)].isnan().all() or torch.equal(whole[name][slices(box)], part.float()), name
        whole[name][slices(box)] = part.float()
    return whole


def contents(engines: dict[str, MegatronEngine]) -> Contents:
    return Contents(
        models=engines,
        shared_state={"number": 7},
        rank_state={"rank": dist.get_rank()},
        write_config=lambda path: path.write_text("a: 1\n") and None,
    )


MODELS = {"actor": ("qwen2", "lm", False), "critic": ("qwen2", "value", False), "half": ("qwen3", "lm", True)}
"""Tied head with biases, a value head, and an untied bf16 model whose masters are not its weights."""


def save_after_two_updates(grid: Grid, root: Path) -> tuple[Any, Any]:
    init_groups(grid, seed=1)
    engines = {role: engine_on(grid, kind, head, bf16=bf16) for role, (kind, head, bf16) in MODELS.items()}
    for engine in engines.values():
        update(engine), update(engine)
    states = {role: gathered_state(engine) for role, engine in engines.items()}
    CheckpointStore(root).save(2, contents(engines))
    return states, {role: update(engine) for role, engine in engines.items()}


def load_and_update(grid: Grid, root: Path) -> tuple[Any, Any]:
    init_groups(grid, seed=1)
    found = CheckpointStore(root).newest()
    assert found and found[1].step == 2 and set(found[1].roles) == set(MODELS)
    states, metrics = {}, {}
    for role, (kind, head, bf16) in MODELS.items():
        engine = engine_on(grid, kind, head, bf16=bf16, load=False)
        load_model(engine, found[0] / role)
        states[role], metrics[role] = gathered_state(engine), update(engine)
    return states, metrics


@pytest.mark.parametrize(("saved", "layouts"), [("dp2", ["dp2", "tp2", "one"]), ("pp2 vpp2", ["pp2 vpp2", "pp2 dp2", "tp2"])])
def test_every_layout_loads_weights_masters_and_moments_bit_for_bit(saved: str, layouts: list[str], tmp_path: Path) -> None:
    for kind in ("qwen2", "qwen3"):
        odd_folder(kind)
    states, metrics = run_ranks(2, save_after_two_updates, LAYOUTS[saved], tmp_path)[0]
    for name in ("exp_avg", "exp_avg_sq"):
        assert all(tensor.abs().sum() > 0 for key, tensor in states["actor"].items() if key.endswith(name) and "k_proj.bias" not in key)
    for layout in layouts:
        loaded, went_on = run_ranks(LAYOUTS[layout].world, load_and_update, LAYOUTS[layout], tmp_path)[0]
        for role, state in states.items():
            assert loaded[role].keys() == state.keys()
            for name, tensor in state.items():
                assert torch.equal(loaded[role][name], tensor), (layout, role, name)
            # warm-up 3: steps 1 and 2 had a third and two thirds of the peak
            assert went_on[role]["lr"] == metrics[role]["lr"] == pytest.approx(1e-3)
            tolerance = 0.0 if layout == saved else 1e-2 if role == "half" else 1e-5
            for metric in ("loss", "grad_norm"):
                assert went_on[role][metric] == pytest.approx(metrics[role][metric], rel=tolerance, abs=0), (layout, role, metric)


def store_with_two(root: Path, **settings: Any) -> tuple[CheckpointStore, dict[str, MegatronEngine]]:
    init_groups(Grid(dp=dist.get_world_size()), seed=1)
    store, engines = CheckpointStore(root, **settings), {"actor": engine_on(Grid(dp=dist.get_world_size()), "qwen2")}
    store.save(1, contents(engines))
    update(engines["actor"])
    store.save(2, contents(engines))
    return store, engines


class Lines(logging.Handler):
    """Collects what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        store_module.log.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def damage_every_file(root: Path) -> None:
    store, _ = store_with_two(root)
    folder = root / "step_2"
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    names = {str(path.relative_to(folder)) for path in files}
    assert names == {"trainer.pt", "config.yaml", MANIFEST, "ranks/0.pt", *(f"actor/{n}" for n in ("common.pt", ".metadata"))} | {
        "actor/metadata.json",
        "actor/__0_0.distcp",
    }
    shutil.copytree(folder, root / "good")
    damages: list[Callable[[Path], None]] = [truncate, Path.unlink, flip_a_bit, lambda path: path.write_bytes(b"")]
    for path in files:
        for damage in damages:
            damage(path)
            log = Lines()
            found = store.newest()
            assert found and found[1].step == 1, path
            assert len(log.lines) == 1 and "skipped" in log.lines[0] and path.name in log.lines[0], (path, log.lines)
            with pytest.raises(ValueError, match=path.name.replace(".", r"\.")):
                verified(folder)
            shutil.copy2(root / "good" / path.relative_to(folder), path)
    found = store.newest()
    assert found and found[1].step == 2
    (folder / MANIFEST).unlink()
    store.set_aside_after(1)
    assert steps_in(root) == [1] and len(list(root.glob("skipped-step_2-*"))) == 1


def test_a_file_that_is_truncated_removed_or_changed_is_named_and_the_checkpoint_skipped(tmp_path: Path) -> None:
    odd_folder("qwen2")
    run_ranks(1, damage_every_file, tmp_path)


def test_what_is_no_checkpoint_is_said_to_be_none(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path, tmp_path / "file", tmp_path / "nowhere"):
        with pytest.raises(ValueError, match=f"{path} is not a complete checkpoint"):
            read_manifest(path)


@contextlib.contextmanager
def file_size_limit(limit: int) -> Any:
    """A write beyond `limit` bytes fails as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def fail_in_every_way(root: Path, background: bool) -> None:
    store, engines = store_with_two(root, keep_last=1, background=background)
    store.finish()
    assert steps_in(root) == [2]
    usage = namedtuple("usage", "total used free")
    attempts: dict[str, Any] = {
        "file too large": lambda rank: file_size_limit(5000) if rank == 0 else contextlib.nullcontext(),
        "ranks does not exist": lambda rank: moved_ranks(root) if rank == 0 else contextlib.nullcontext(),
        "it needs [0-9,]+ bytes and 99 are free": lambda rank: patched(shutil, "disk_usage", lambda path: usage(100, 1, 99)),
        "Read-only": lambda rank: patched(Path, "mkdir", read_only) if rank == 0 else contextlib.nullcontext(),
    }
    for message, trouble in attempts.items():
        # Both ranks get the error of the one that has it.
        with trouble(dist.get_rank()), pytest.raises(OSError, match=rf"(?is){root}.*step_3.*") as caught:
            store.save(3, contents(engines))
            store.finish()
        assert caught.match(f"(?i){message}") and ("bytes free" in str(caught.value) or "are free" in str(caught.value))
        found = store.newest()
        assert found and found[1].step == 2
    store.save(3, contents(engines))
    store.finish()
    assert steps_in(root) == [3] and verified(root / "step_3").step == 3


@contextlib.contextmanager
def patched(owner: Any, name: str, value: Any) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, value)
        yield


def moved_ranks(root: Path) -> Any:
    """Takes the folder `ranks` away when it has just been made."""
    make = Path.mkdir
    return patched(Path, "mkdir", lambda self, *args, **kwargs: None if self.name == "ranks" else make(self, *args, **kwargs))


def read_only(path: Path, *args: Any, **kwargs: Any) -> None:
    raise OSError(30, "Read-only file system", str(path))


@pytest.mark.parametrize("background", [False, True])
def test_a_save_that_fails_on_one_rank_fails_on_all_and_leaves_the_earlier_one(tmp_path: Path, background: bool) -> None:
    odd_folder("qwen2")
    run_ranks(2, fail_in_every_way, tmp_path, background)


def kill_while_saving(root: Path, moment: int) -> None:
    store, engines = store_with_two(root)
    if dist.get_rank() == 0:
        calls, record = [0], store_module.file_record

        def record_or_die(path: Path) -> Any:
            calls[0] += 1
            if calls[0] > moment:
                os.kill(os.getpid(), signal.SIGKILL)
            return record(path)

        store_module.file_record = record_or_die
        if moment == 7:  # all files are written, the manifest and the name are not
            store_module.write_manifest = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
        if moment == 8:
            store_module.sync = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
    store.save(3, contents(engines))


def save_again(root: Path) -> None:
    store = CheckpointStore(root)
    found = store.newest()
    assert found and found[1].step == 2 and any(root.glob(".step_3.*"))
    init_groups(Grid(), seed=1)
    store.save(3, contents({"actor": engine_on(Grid(), "qwen2")}))
    found = store.newest()
    assert found and found[1].step == 3 and not any(root.glob(".*"))


@pytest.mark.parametrize("moment", [0, 3, 7, 8])
def test_a_save_killed_at_any_file_leaves_the_earlier_one_and_can_be_done_again(moment: int, tmp_path: Path) -> None:
    odd_folder("qwen2")
    with pytest.raises(RuntimeError, match="ended without a result"):
        run_ranks(1, kill_while_saving, tmp_path, moment)
    run_ranks(1, save_again, tmp_path)


def delete_and_schedule(root: Path) -> None:
    store, engines = store_with_two(root, keep_last=1)
    assert steps_in(root) == [2]
    log = Lines()
    with patched(shutil, "rmtree", lambda path, **kwargs: read_only(path)):
        store.save(3, contents(engines))
    assert [line for line in log.lines if "cannot delete the old checkpoint" in line and "step_2" in line]
    assert store.newest()[1].step == 3  # type: ignore[index]

    common = root / "step_3" / "actor" / "common.pt"
    content = torch.load(common)
    assert content.pop(SCHEDULE)["num_steps"] == 1
    torch.save(content, common)
    with pytest.raises(ValueError, match=f"no learning-rate schedule .{SCHEDULE}"):
        load_model(engines["actor"], root / "step_3" / "actor")
    with pytest.raises(ValueError, match="does not fit the one to train"):
        load_model(engine_on(Grid(), "qwen2", "value"), root / "step_3" / "actor")


def test_a_delete_that_fails_is_a_warning_and_a_schedule_that_is_missing_an_error(tmp_path: Path) -> None:
    odd_folder("qwen2")
    run_ranks(1, delete_and_schedule, tmp_path)


def save_beside_training(root: Path) -> None:
    init_groups(Grid(dp=2), seed=1)
    store, engine = CheckpointStore(root, background=True), engine_on(Grid(dp=2), "qwen2")
    update(engine)
    state = gathered_state(engine)
    may_write, write = threading.Event(), store_module.ModelSave.write
    store_module.ModelSave.write = lambda self: may_write.wait(30) and write(self)  # type: ignore[method-assign]
    store.save(1, contents({"actor": engine}))
    update(engine)
    store.poll()
    assert steps_in(root) == []
    may_write.set()
    store.finish()
    other = engine_on(Grid(dp=2), "qwen2", load=False)
    load_model(other, root / "step_1" / "actor")
    loaded = gathered_state(other)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in state.items())
    assert not all(torch.equal(now, state[name]) for name, now in gathered_state(engine).items())
    store.save(2, contents({"actor": engine}))
    for thread in threading.enumerate():
        if thread.name == "checkpoint":
            thread.join()
    dist.barrier()
    assert steps_in(root) == [1]
    store.poll()
    assert steps_in(root) == [2, 1]


def test_a_save_beside_training_holds_the_moment_it_was_asked_for_and_appears_when_it_is_on_the_disk(tmp_path: Path) -> None:
    odd_folder("qwen2")
    run_ranks(2, save_beside_training, tmp_path)


def save_or_load_padded(root: Path, grid: Grid, load: bool) -> Any:
    init_groups(grid, seed=1)
    folder = tiny_folder("qwen2", hidden_size=48, num_attention_heads=6, num_key_value_heads=3)
    engine = MegatronEngine(tiny_spec(folder), grid, max_tokens=64, optimizer=SETTINGS)
    if load:
        load_model(engine, root / "step_1" / "actor")
    else:
        engine.load(folder)
        update(engine)
        CheckpointStore(root).save(1, contents({"actor": engine}))
    rows = [tensor for name, tensor in engine.tensors().items() if name.endswith("word_embeddings.weight")]
    first = len(rows[0]) * grid.coord(dist.get_rank()).tp_rank
    assert not rows[0][max(97 - first, 0) :].any(), "padding that is not zero"
    return gathered_state(engine), update(engine)


def test_a_vocabulary_padded_to_another_size_loads(tmp_path: Path) -> None:
    """128 rows on one rank, 384 on three."""
    tiny_folder("qwen2", hidden_size=48, num_attention_heads=6, num_key_value_heads=3)
    state, metrics = run_ranks(1, save_or_load_padded, tmp_path, Grid(), False)[0]
    loaded, went_on = run_ranks(3, save_or_load_padded, tmp_path, Grid(tp=3), True)[0]
    for name, tensor in state.items():
        assert torch.equal(loaded[name], tensor), name
    for metric in ("loss", "grad_norm"):
        assert went_on[metric] == pytest.approx(metrics[metric], rel=1e-5)
