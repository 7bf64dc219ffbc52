"""Which algorithm runs when and for which rows: `algorithm.name`, `schedule` and `tasks`, and what a program calls for while it runs."""

from __future__ import annotations

import logging
import os
import runpy
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tridentrl.algos import Algorithm
from tridentrl.algos.per_task import PerTask
from tridentrl.algos.registry import algorithm_class
from tridentrl.configs.convert import ConfigError, typed
from tridentrl.configs.load import schema_keys
from tridentrl.configs.rules import Batches
from tridentrl.configs.schema import AlgorithmConfig, SchedulePoint, TaskAlgorithm

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Phase:
    """From the step after `at` on, `algorithm` runs."""

    at: int
    name: str
    config: Mapping[str, Any]
    """Its own settings, as they were written."""
    tasks: Mapping[str, TaskAlgorithm]
    """What runs in its place for the rows of single data sources."""
    algorithm: Algorithm = field(compare=False)
    """All of it."""

    def _parts(self) -> dict[str, tuple[str, Mapping[str, Any], Algorithm]]:
        """Name, settings and object of each of its algorithms."""
        if not isinstance(self.algorithm, PerTask):
            return {"default": (self.name, self.config, self.algorithm)}
        tasks = {task: (chosen.name, chosen.config, self.algorithm.tasks[task]) for task, chosen in self.tasks.items()}
        return {"default": (self.name, self.config, self.algorithm.default), **tasks}

    def keep_state_of(self, before: Phase) -> None:
        """Those of its algorithms that ran before, with the same settings for the same rows, go on as they were."""
        others = before._parts()
        for part, (name, config, algorithm) in self._parts().items():
            if part in others and others[part][:2] == (name, config):
                algorithm.load_state_dict(others[part][2].state_dict())

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
    tasks: dict[str, TaskAlgorithm] = {}
    for task, written in config.tasks.items():
        try:
            tasks[task] = typed(TaskAlgorithm, written, where=f"algorithm.tasks.{task}", origins=origins)
        except ConfigError as error:
            problems += error.problems
    if 0 not in steps:
        points.insert(0, ("algorithm", SchedulePoint(at=0, name=config.name, config=config.options)))
    phases: list[Phase] = []
    for where, point in points:
        try:
            inside = where if where == "algorithm" else f"{where}.config"
            phases.append(make_phase(point.at, point.name, point.config, tasks, where=inside, origins=origins))
        except ValueError as error:
            here = "" if where == "algorithm" else f"{where}: "
            problems += getattr(error, "problems", [f"{here}{error}"])
    if problems:
        raise ConfigError(problems)
    return tuple(phases)


def make_phase(
    at: int,
    name: str,
    config: Mapping[str, Any],
    tasks: Mapping[str, TaskAlgorithm] | None = None,
    *,
    where: str = "algorithm",
    origins: Mapping[str, str] | None = None,
) -> Phase:
    """A phase of the algorithm `name`. Raises ValueError for an unknown name, ConfigError for settings that are not its own."""

    def make(name: str, config: Mapping[str, Any], where: str) -> Algorithm:
        kind = algorithm_class(name)
        return kind(typed(kind.Config, config, where=where, origins=origins, other_keys=schema_keys()))

    algorithm = make(name, config, where)
    if tasks:
        algorithm = PerTask(
            algorithm, {task: make(chosen.name, chosen.config, f"algorithm.tasks.{task}.config") for task, chosen in tasks.items()}
        )
    return Phase(at, name, config, tasks or {}, algorithm)


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
