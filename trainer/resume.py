"""What a checkpoint holds of a run beside its models, and how a run goes on from one."""

from __future__ import annotations

import functools
import hashlib
import logging
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

from tridentrl.checkpoint.manifest import Manifest
from tridentrl.checkpoint.model import load_model
from tridentrl.checkpoint.store import CheckpointStore, Contents, verified
from tridentrl.configs.load import save_config, to_dict
from tridentrl.configs.schema import TaskAlgorithm
from tridentrl.data.sampler import PromptSampler
from tridentrl.parallel.grid import Grid
from tridentrl.trainer.builders import FROZEN
from tridentrl.trainer.context import TrainContext
from tridentrl.trainer.phases import Phase, make_phase, phase_of
from tridentrl.trainer.prepare import Prepared
from tridentrl.weights.hf_io import stored_tensors
from tridentrl.weights.torch_dist import checkpoint_in

log = logging.getLogger(__name__)

SAMPLED_BYTES = 65536
"""Of each part of a weights file that enters a fingerprint."""
SAMPLED_PARTS = 64


@dataclass(frozen=True)
class Found:
    """A complete and undamaged checkpoint of the run's own kind."""

    folder: Path
    manifest: Manifest
    state: Mapping[str, Any]
    """As `run_contents` made it."""


def find_checkpoint(prepared: Prepared, checkpoints: CheckpointStore, sampler: PromptSampler) -> Found | None:
    """The checkpoint that `trainer.resume` asks for, the sampler brought to its place in the data; None to start anew.

    Changes nothing on the disk. Raises ValueError when a folder given by name is not a good checkpoint, or the checkpoint is of another
    kind of run. Collective over the world.
    """
    resume = prepared.config.trainer.resume
    if resume == "never":
        return None
    if resume == "auto":
        newest = checkpoints.newest()
        if newest is None:
            return None
        folder, manifest = newest
    elif later := _later(checkpoints, Path(resume)):
        folder, manifest = later
    else:
        folder = Path(resume)
        try:
            manifest = verified(folder)
        except ValueError as error:
            raise ValueError(f"trainer.resume={resume}: {error}; give auto, never, or the folder of a complete checkpoint") from None
    state = torch.load(folder / "trainer.pt", weights_only=True)
    try:
        _check_same_kind_of_run(state, prepared, manifest)
        sampler.load_state_dict(state["sampler"])
    except ValueError as error:
        raise ValueError(f"cannot resume from {folder}: {error}. For a new run set trainer.resume=never or another exp_name") from None
    return Found(folder, manifest, state)


def _later(checkpoints: CheckpointStore, start: Path) -> tuple[Path, Manifest] | None:
    """The run's own newest checkpoint, if the run had set out from `start`: the same command, started once more, goes on from there."""
    newest = checkpoints.newest()
    if newest is None:
        return None
    resume = torch.load(newest[0] / "trainer.pt", weights_only=True)["config"]["trainer"]["resume"]
    return newest if Path(resume).resolve() == start.resolve() else None


def run_contents(prepared: Prepared, context: TrainContext, sampler: PromptSampler, phase: Phase, switches: Sequence[Phase]) -> Contents:
    """What the checkpoint of this moment holds. `phase`: the algorithm that runs; `switches`: those that no setting planned."""
    shared_state = {
        "algorithm": phase.name,
        "algorithm_since": phase.at,
        "algorithm_state": phase.algorithm.state_dict(),
        "tasks": {task: chosen.name for task, chosen in phase.tasks.items()},
        "switches": [
            {"at": switch.at, "name": switch.name, "config": dict(switch.config), "tasks": {t: vars(a) for t, a in switch.tasks.items()}}
            for switch in switches
        ],
        "sampler": sampler.state_dict(),
        "context": context.state_dict(),
        "reference": _reference(prepared),
        "config": to_dict(prepared.config),
    }
    return Contents(
        models=context.trained(),
        shared_state=shared_state,
        rank_state=random_states(),
        write_config=functools.partial(save_config, prepared.config),
    )


def switches_of(found: Found) -> tuple[Phase, ...]:
    """The switches that the saved run had made beside its settings."""
    return tuple(
        make_phase(**{**switch, "tasks": {task: TaskAlgorithm(**chosen) for task, chosen in switch["tasks"].items()}})
        for switch in found.state["switches"]
    )


def restore(found: Found, prepared: Prepared, context: TrainContext, phase: Phase) -> None:
    """Bring models, context, the algorithm of `phase` and random states to where `found` was saved. Collective over the world.

    An algorithm that takes over at this very step starts afresh, and so do the models that only it needs.

    On another layout the random states stay as the seed made them: rollouts and the data order do not depend on them.
    """
    with context.all_at_work():
        for role, engine in context.trained().items():
            if role in found.manifest.roles:
                load_model(engine, found.folder / role)
    context.load_state_dict(found.state["context"])
    tasks = {task: chosen.name for task, chosen in phase.tasks.items()}
    goes_on = (phase.name, phase.at, tasks) == tuple(found.state[key] for key in ("algorithm", "algorithm_since", "tasks"))
    if goes_on:
        phase.algorithm.load_state_dict(found.state["algorithm_state"])
    same_layout = found.manifest.layout == asdict(prepared.grid)
    if same_layout:
        set_random_states(torch.load(found.folder / "ranks" / f"{dist.get_rank()}.pt", weights_only=True))
    if dist.get_rank() == 0:
        log.info("resumed after step %d from %s", found.manifest.step, found.folder)
        if phase.name != found.state["algorithm"]:
            log.info("%s takes over from %s", phase.name, found.state["algorithm"])
        elif not goes_on:
            log.info("%s starts afresh: it takes its turn here, or the algorithms of the tasks are others", phase.name)
        if unused := sorted(set(found.manifest.roles) - set(context.engines.models)):
            log.info("no algorithm of this run uses the %s of the checkpoint, which is left there", " and the ".join(unused))
        if not same_layout:
            saved = Grid(**found.manifest.layout)
            log.info("the layout was %s and is %s: the random states of the ranks start from the seed", saved, prepared.grid)
        for line in _changes(found.state["config"], to_dict(prepared.config)):
            log.info("changed since: %s", line)


def _check_same_kind_of_run(state: Mapping[str, Any], prepared: Prepared, manifest: Manifest) -> None:
    known = {phase.name for phase in prepared.phases} | {switch["name"] for switch in state["switches"]}
    if state["algorithm"] not in known and prepared.config.trainer.resume == "auto":
        raise ValueError(
            f"its algorithm.name is {state['algorithm']}, this run has {', '.join(sorted(known))}. To let another one take over, name the"
            " checkpoint in trainer.resume, or plan the change in algorithm.schedule"
        )
    phase = phase_of(prepared.phases, manifest.step + 1)
    trained = set(phase.algorithm.roles(kl_coef=prepared.config.trainer.kl_coef)) - set(FROZEN)
    if phase.name == state["algorithm"] and not trained <= set(manifest.roles):
        raise ValueError(f"it has the models {', '.join(manifest.roles)}, this run trains {', '.join(sorted(trained))}")
    reference = _reference(prepared)
    if state["reference"] and reference and state["reference"]["fingerprint"] != reference["fingerprint"]:
        raise ValueError(
            f"its KL is measured to the model in {state['reference']['folder']}, and {reference['folder']} holds another one; "
            "set model.reference_pretrained_model_name_or_path to the former"
        )


def _reference(prepared: Prepared) -> dict[str, str] | None:
    """Which frozen model KL is measured to. It is not saved, but must be the same one after a resume, wherever it lies then."""
    folder = prepared.folders.get("reference")
    return {"folder": str(Path(folder).resolve()), "fingerprint": model_fingerprint(folder)} if folder else None


@functools.cache
def model_fingerprint(folder: str) -> str:
    """SHA-256 over names, sizes and evenly spread samples of the weight files: other weights give another, and it costs no full read.

    The same model as a Hugging Face and as a converted folder has two.
    """
    digest = hashlib.sha256()
    converted = checkpoint_in(folder)
    files = converted.glob("*.distcp") if converted else set(stored_tensors(folder).values())
    for path in sorted(files):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            for part in range(SAMPLED_PARTS):
                file.seek(size * part // SAMPLED_PARTS)
                digest.update(file.read(SAMPLED_BYTES))
    return digest.hexdigest()


def random_states() -> dict[str, Any]:
    """Of every generator that is not seeded anew where it is used."""
    name, keys, *rest = np.random.get_state()
    states = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(np.asarray(keys, dtype=np.int64)), *rest),
        "megatron": dict(get_cuda_rng_tracker().get_states()),
    }
    return states | ({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {})


def set_random_states(states: Mapping[str, Any]) -> None:
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    get_cuda_rng_tracker().set_states(states["megatron"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def _changes(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[str]:
    """`key: old -> new` of every setting that differs."""
    lines = []
    for name in sorted(old.keys() | new.keys()):
        before, after = old.get(name), new.get(name)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            lines += _changes(before, after, f"{prefix}{name}.")
        elif before != after:
            lines.append(f"{prefix}{name}: {before} -> {after}")
    return lines
