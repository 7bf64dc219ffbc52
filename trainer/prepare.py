"""Everything that can be known, and refused, before a process group or a model exists: cheap enough to run before ranks are started."""

from __future__ import annotations

import logging
import os
import runpy
import traceback
from dataclasses import dataclass
from typing import Literal

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from tridentrl import require_vllm
from tridentrl.algos import Algorithm
from tridentrl.algos.registry import algorithm_class
from tridentrl.configs.convert import ConfigError
from tridentrl.configs.layout import resolve_layout
from tridentrl.configs.load import typed_options
from tridentrl.configs.model_spec import ModelSpec
from tridentrl.configs.rules import Batches, check
from tridentrl.configs.schema import Config
from tridentrl.parallel.grid import Grid
from tridentrl.weights.families import spec_from_hf
from tridentrl.weights.hf_io import read_config

log = logging.getLogger(__name__)

MODEL_FILES = ("*.json", "*.safetensors", "tokenizer*", "*.model", "*.txt", "*.jinja")
"""What is fetched of a hub model. Never pickles."""


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A configuration without any `auto`, and what follows from it."""

    config: Config
    algorithm: Algorithm
    folders: dict[str, str]
    """Local folder of each role's pretrained model."""
    specs: dict[str, ModelSpec]
    batches: Batches
    world: int

    @property
    def grid(self) -> Grid:
        """The training layout."""
        parallel = self.config.parallel
        assert isinstance(parallel.tensor, int) and isinstance(parallel.pipeline, int)
        dp = self.world // (parallel.tensor * parallel.pipeline * parallel.context)
        return Grid(tp=parallel.tensor, pp=parallel.pipeline, vpp=parallel.virtual_pipeline, cp=parallel.context, dp=dp)


def prepare(config: Config, *, world: int) -> Prepared:
    """Resolve `config` for `world` processes. Raises ConfigError that lists everything wrong with the settings and the models' shapes."""
    if config.algorithm.path:
        run_algorithm_file(config.algorithm.path)
    kind = algorithm_class(config.algorithm.name)
    algorithm = kind(typed_options(kind.Config, config.algorithm))
    roles = algorithm.roles(kl_coef=config.trainer.kl_coef)
    model = config.model
    names = {
        "actor": ("model.actor_pretrained_model_name_or_path", model.actor_pretrained_model_name_or_path),
        "critic": ("model.critic_pretrained_model_name_or_path", model.critic_pretrained_model_name_or_path),
        "reference": ("model.reference_pretrained_model_name_or_path", model.reference_pretrained_model_name_or_path),
    }
    folders, specs, problems = {}, {}, []
    for role in roles:
        key, name = names[role] if names[role][1] else names["actor"]
        assert name
        try:
            folders[role] = model_folder(name, key=key)
            specs[role] = spec_from_hf(read_config(folders[role]))
        except ValueError as error:
            if str(error) not in problems:
                problems.append(str(error))
    if problems:
        raise ConfigError(problems)
    if algorithm.online and config.rollout.backend == "vllm":
        require_vllm()
    device = config.trainer.device
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(["trainer.device=cuda, but torch sees no CUDA device; set trainer.device=auto or install a CUDA build of torch"])
    found: Literal["cpu", "cuda"] = "cuda" if device != "cpu" and torch.cuda.is_available() else "cpu"
    batches = Batches(
        samples_per_prompt=algorithm.samples_per_prompt,
        trained_per_prompt=getattr(algorithm.config, "top_k", None),
        mini_batch_size=algorithm.config.mini_batch_size,
        update_epochs=algorithm.config.epochs,
    )
    resolved = resolve_layout(config, specs, world=world, device=found)
    check(resolved, specs, world=world, batches=batches)
    return Prepared(config=resolved, algorithm=algorithm, folders=folders, specs=specs, batches=batches, world=world)


def model_folder(name: str, *, key: str) -> str:
    """`name` itself where it is a folder, else the local copy of that hub model, downloaded if need be. ValueError names `key`."""
    if os.path.isdir(name):
        return name
    try:
        return snapshot_download(name, allow_patterns=list(MODEL_FILES))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"{key}={name}: no such folder, and the hub has no such model for us ({type(error).__name__}: {reason})") from None


def run_algorithm_file(path: str) -> None:
    """Run the user's file, which registers algorithms. ValueError names `algorithm.path` and shows the file's own traceback."""
    if not os.path.isfile(path):
        raise ValueError(f"algorithm.path={path}: there is no such file; give a Python file that calls tridentrl.algos.register")
    log.info("running algorithm.path=%s", path)
    try:
        runpy.run_path(path, run_name=f"algorithm_{os.path.basename(path).removesuffix('.py')}")
    except Exception:
        raise ValueError(f"algorithm.path={path} cannot be run:\n{traceback.format_exc()}") from None
