"""Which algorithm runs when: `algorithm.name`, `algorithm.schedule`, and what `RLTrainer.switch_algorithm` adds to them."""

from __future__ import annotations

import logging
import os
import runpy
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tridentrl.algos import Algorithm
from tridentrl.algos.registry import algorithm_class
from tridentrl.configs.convert import ConfigError, typed
from tridentrl.configs.load import schema_keys, typed_options
from tridentrl.configs.rules import Batches
from tridentrl.configs.schema import AlgorithmConfig, SchedulePoint

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Phase:
    """From the step after `at` on, `algorithm` runs."""

    at: int
    name: str
    config: Mapping[str, Any]
    """Its own settings, as they were written."""
    algorithm: Algorithm = field(compare=False)

    @property
    def batches(self) -> Batches:
        """How it cuts a step's batch."""
        config = self.algorithm.config
        return Batches(
            samples_per_prompt=self.algorithm.samples_per_prompt,
            trained_per_prompt=getattr(config, "top_k", None),
            mini_batch_size=config.mini_batch_size,
            update_epochs=config.epochs,
            longest_prompt=self.algorithm.longest_prompt,
        )


def planned_phases(config: AlgorithmConfig) -> tuple[Phase, ...]:
    """The phases of a run, the first at 0. Runs `algorithm.path`. Raises ConfigError for all settings that do not fit."""
    if config.path:
        run_algorithm_file(config.path)
    problems: list[str] = []
    points: list[tuple[str, SchedulePoint]] = []
    origins = dict(config.origins)
    for number, written in enumerate(config.schedule):
        where = f"algorithm.schedule[{number}]"
        if "algorithm.schedule" in origins:
            origins[where] = origins["algorithm.schedule"]
        try:
            points.append((where, typed(SchedulePoint, written, where=where, origins=origins)))
        except ConfigError as error:
            problems += error.problems
    steps = [point.at for _, point in points]
    if steps != sorted(set(steps)):
        problems.append(f"algorithm.schedule: its entries begin at steps {steps}, which must ascend; sort them, one for each step")
    if 0 in steps and config.options:
        keys = ", ".join(f"algorithm.{name}" for name in config.options)
        problems.append(f"{keys}: the entry of algorithm.schedule at step 0 brings its own settings; write them into its config")
    phases: list[Phase] = []
    if 0 not in steps:
        try:
            kind = algorithm_class(config.name)
            phases.append(Phase(0, config.name, config.options, kind(typed_options(kind.Config, config))))
        except ValueError as error:
            problems += getattr(error, "problems", [str(error)])
    for where, point in points:
        try:
            phases.append(make_phase(point.at, point.name, point.config, where=f"{where}.config", origins=origins))
        except ValueError as error:
            problems += getattr(error, "problems", [f"{where}: {error}"])
    if problems:
        raise ConfigError(problems)
    return tuple(phases)


def make_phase(
    at: int, name: str, config: Mapping[str, Any], *, where: str = "algorithm", origins: Mapping[str, str] | None = None
) -> Phase:
    """A phase of the algorithm `name`. Raises ValueError for an unknown name, ConfigError for settings that are not its own."""
    kind = algorithm_class(name)
    return Phase(at, name, config, kind(typed(kind.Config, config, where=where, origins=origins, other_keys=schema_keys())))


def phase_of(phases: Sequence[Phase], step: int) -> Phase:
    """Whose turn step number `step` (from 1) is."""
    return next(phase for phase in reversed(phases) if phase.at < max(step, 1))


def optimizer_steps(phases: Sequence[Phase], total_steps: int, prompts: int) -> int:
    """Of the actor, in a run of `total_steps` steps of `prompts` prompts each."""
    count = 0
    for phase, end in zip(phases, [*(phase.at for phase in phases[1:]), total_steps], strict=True):
        responses = prompts * phase.batches.kept_per_prompt
        each = phase.batches.update_epochs * -(-responses // (phase.batches.mini_batch_size or responses))
        count += each * max(0, min(end, total_steps) - phase.at)
    return count


def run_algorithm_file(path: str) -> None:
    """Run the user's file, which registers algorithms. ValueError names `algorithm.path` and shows the file's own traceback."""
    if not os.path.isfile(path):
        raise ValueError(f"algorithm.path={path}: there is no such file; give a Python file that calls tridentrl.algos.register")
    log.info("running algorithm.path=%s", path)
    try:
        runpy.run_path(path, run_name=f"algorithm_{os.path.basename(path).removesuffix('.py')}")
    except Exception:
        raise ValueError(f"algorithm.path={path} cannot be run:\n{traceback.format_exc()}") from None
