"""Everything that can be known, and refused, before a process group or a model exists: cheap enough to run before ranks are started."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from tridentrl import require_vllm
from tridentrl.configs.convert import ConfigError
from tridentrl.configs.layout import resolve_layout
from tridentrl.configs.model_spec import ModelSpec
from tridentrl.configs.rules import Batches, check
from tridentrl.configs.schema import Config
from tridentrl.parallel.grid import Grid
from tridentrl.trainer.phases import Phase, planned_phases
from tridentrl.weights.families import spec_from_hf
from tridentrl.weights.hf_io import read_config

T = TypeVar("T")
log = logging.getLogger(__name__)

MODEL_FILES = ("*.json", "*.safetensors", "tokenizer*", "*.model", "*.txt", "*.jinja")
"""What is fetched of a hub model. Never pickles."""


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A configuration without any `auto`, and what follows from it."""

    config: Config
    phases: tuple[Phase, ...]
    """Which algorithm runs when."""
    folders: dict[str, str]
    """Local folder of each role's pretrained model; the first role is the one that a run is about."""
    tokenizer_folder: str
    specs: dict[str, ModelSpec]
    """Shape of each role's model, of all phases."""
    scoring: dict[str, tuple[str, ModelSpec]]
    """Local folder and shape of each model of `reward.models` and `cost.models`, by the name there."""
    world: int

    @property
    def grid(self) -> Grid:
        """The training layout."""
        parallel = self.config.parallel
        assert isinstance(parallel.tensor, int) and isinstance(parallel.pipeline, int)
        dp = self.world // (parallel.tensor * parallel.pipeline * parallel.context)
        return Grid(
            tp=parallel.tensor,
            pp=parallel.pipeline,
            vpp=parallel.virtual_pipeline,
            cp=parallel.context,
            dp=dp,
            ep=parallel.expert,
            etp=parallel.expert_tensor,
        )


def prepare(config: Config, *, world: int, later: tuple[Phase, ...] = ()) -> Prepared:
    """Resolve `config` for `world` processes. `later`: phases in place of those that it plans.

    Raises ConfigError that lists everything wrong with the settings and the models' shapes.
    """
    problems: list[str] = []
    phases = later or _collect(problems, lambda: planned_phases(config.algorithm)) or ()
    roles = all_roles(phases, config) or ("actor",)
    folders, specs = {}, {}
    for role in roles:
        chosen = _collect(problems, partial(_pretrained, config, role))
        if not chosen:
            continue
        key, name = chosen
        folder = _collect(problems, partial(model_folder, name, key=key))
        spec = _collect(problems, partial(_spec, folder), prefix=f"{key}={name}: ") if folder else None
        if folder and spec:
            folders[role], specs[role] = folder, spec
    scoring: dict[str, tuple[str, ModelSpec]] = {}
    for key, name in _scoring_models(phases, config):
        folder = _collect(problems, partial(model_folder, name, key=key))
        spec = _collect(problems, partial(_spec, folder), prefix=f"{key}={name}: ") if folder else None
        if folder and spec:
            scoring[name] = folder, spec
    tokenizer = config.model.tokenizer_name_or_path
    tokenizer_folder = next(iter(folders.values()), None)
    if tokenizer:
        tokenizer_folder = _collect(problems, lambda: model_folder(tokenizer, key="model.tokenizer_name_or_path"))
    for phase in phases:
        problems += _missing_columns(config, phase)
    _collect(problems, lambda: _check_machine(config, needs_vllm=any(phase.algorithm.online for phase in phases)))
    on_gpu = config.trainer.device != "cpu" and torch.cuda.is_available()
    models = specs | {f"model {name} of reward or cost": spec for name, (_, spec) in scoring.items()}
    resolved = _collect(problems, lambda: resolve_layout(config, models, world=world, device="cuda" if on_gpu else "cpu"))
    if resolved:
        for batches in [phase.batches for phase in phases] or [Batches()]:
            _collect(problems, partial(check, resolved, models, world=world, batches=batches))
    if problems:
        raise ConfigError(problems)
    assert resolved and tokenizer_folder
    return Prepared(
        config=resolved,
        phases=phases,
        folders=folders,
        tokenizer_folder=tokenizer_folder,
        specs=specs,
        scoring=scoring,
        world=world,
    )


def _collect(problems: list[str], make: Callable[[], T], *, prefix: str = "") -> T | None:
    """What `make` returns; when it refuses, its reasons join `problems`, each once."""
    try:
        return make()
    except ValueError as error:
        for problem in getattr(error, "problems", [str(error)]):
            if prefix + problem not in problems:
                problems.append(prefix + problem)
    return None


def all_roles(phases: Sequence[Phase], config: Config) -> tuple[str, ...]:
    """Every model that some phase needs, each once, in the order of need."""
    return tuple(dict.fromkeys(role for phase in phases for role in phase.algorithm.roles(kl_coef=config.trainer.kl_coef)))


def sections(phases: Sequence[Phase]) -> tuple[str, ...]:
    """Those of `reward` and `cost` that some phase asks."""
    return tuple(dict.fromkeys(section for phase in phases if phase.algorithm.online for section in phase.algorithm.sections))


def _scoring_models(phases: Sequence[Phase], config: Config) -> list[tuple[str, str]]:
    """Key and name of every model that scores, each name once."""
    named = {name: f"{section}.models.{source}" for section in sections(phases) for source, name in getattr(config, section).models.items()}
    return [(key, name) for name, key in named.items()]


def _missing_columns(config: Config, phase: Phase) -> list[str]:
    missing = [f"data.{key}" for key in phase.algorithm.data_keys if getattr(config.data, key) is None]
    return [f"algorithm.name={phase.name} learns from {' and '.join(missing)}; set it to the column of your files"] if missing else []


def _spec(folder: str) -> ModelSpec:
    return spec_from_hf(read_config(folder))


def _pretrained(config: Config, role: str) -> tuple[str, str]:
    """The setting that says where a role's model comes from, and its value. ValueError where a teacher is wanting."""
    if role == "teacher" and not config.model.teacher_pretrained_model_name_or_path:
        raise ValueError("model.teacher_pretrained_model_name_or_path=null: there is no reward model to learn from; set it to one")
    for key in (f"{role}_pretrained_model_name_or_path", "actor_pretrained_model_name_or_path"):
        if name := getattr(config.model, key):
            return f"model.{key}", name
    raise AssertionError("the actor's name is required")


def _check_machine(config: Config, *, needs_vllm: bool) -> None:
    """What must be installed, there and writable."""
    problems = []
    if config.trainer.device == "cuda" and not torch.cuda.is_available():
        problems.append("trainer.device=cuda, but torch sees no CUDA device; set trainer.device=auto or install a CUDA build of torch")
    if needs_vllm and config.rollout.backend == "vllm":
        require_vllm()
    folder = Path(config.output_dir, config.exp_name).absolute()
    there = next(parent for parent in [folder, *folder.parents] if parent.exists())
    if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
        problems.append(f"output_dir={config.output_dir}: {there} is no folder that can be written to; choose another output_dir")
    if problems:
        raise ConfigError(problems)


def model_folder(name: str, *, key: str) -> str:
    """`name` itself where it is a folder, else the local copy of that hub model, downloaded if need be. ValueError names `key`."""
    if os.path.isdir(name):
        return name
    try:
        return snapshot_download(name, allow_patterns=list(MODEL_FILES))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"{key}={name}: no such folder, and the hub has no such model for us ({type(error).__name__}: {reason})") from None
