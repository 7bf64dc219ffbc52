"""From a name or a file to a reward function, with every mistake found before the first rollout."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from tridentrl.rewards.functions import BUILTIN

ARGUMENTS = ("prompt", "response", "ground_truth", "data_source", "extra_info", "ability")
"""What a reward function may ask for, by keyword."""

RewardFunction = Callable[..., Any]


@dataclass(frozen=True)
class FunctionSpec:
    """Where a reward function is; small enough to send to a worker, which loads it there."""

    name: str
    path: str | None = None
    """Absolute path of the user's file; None for a built-in."""

    def __str__(self) -> str:
        return f"{self.path}:{self.name}" if self.path else self.name

    def load(self) -> tuple[RewardFunction, tuple[str, ...]]:
        """The function and the arguments it takes. Raises ValueError with what is wrong and how to mend it."""
        function = self._from_file(self.path) if self.path else getattr(importlib.import_module(BUILTIN[self.name]), self.name)
        return function, wanted_arguments(function, str(self))

    def _from_file(self, path: str) -> RewardFunction:
        module = _run_file(path)
        function = getattr(module, self.name, None)
        if function is None:
            defined = [name for name, value in vars(module).items() if inspect.isroutine(value) and value.__module__ == module.__name__]
            raise ValueError(
                f"reward.custom_fn.name: {path} has no function {self.name!r}; it defines {', '.join(sorted(defined)) or 'no functions'}"
            )
        if not callable(function):
            raise ValueError(f"reward.custom_fn.name: {self.name!r} in {path} is a {type(function).__name__}, not a function")
        loaded: RewardFunction = function
        return loaded


def custom_function(path: str, name: str) -> FunctionSpec:
    """The user's function as a spec, after loading it once here to see that it is there and takes what we can give."""
    spec = FunctionSpec(name, os.path.abspath(os.path.expanduser(path)))
    spec.load()
    return spec


def _run_file(path: str) -> ModuleType:
    """Execute the user's file as a module. Raises ValueError that ends with the user's own traceback."""
    if os.path.isdir(path):
        raise ValueError(f"reward.custom_fn.path: {path} is a folder; give the Python file that holds the function")
    if not os.path.isfile(path):
        raise ValueError(f"reward.custom_fn.path: there is no file {path}")
    name = "tridentrl_reward_" + os.path.splitext(os.path.basename(path))[0]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"reward.custom_fn.path: {path} is not a Python file (its name must end in .py)")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look a class's module up by name
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise ValueError(f"reward.custom_fn.path: {path} fails when it is imported:\n{user_traceback(error)}") from None
    return module


def user_traceback(error: BaseException) -> str:
    """The traceback without the frames of this package and of the import system in front of the user's code."""
    ours = os.path.dirname(os.path.abspath(__file__))
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename.startswith((ours, "<frozen importlib")):
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames)).rstrip()


def wanted_arguments(function: RewardFunction, label: str) -> tuple[str, ...]:
    """Which of `ARGUMENTS` to pass to `function` by keyword. Raises ValueError where it asks for anything else."""
    if inspect.iscoroutinefunction(function):
        raise ValueError(f"reward function {label} is async; write a plain function, it runs in its own process")
    try:
        signature = inspect.signature(function)
    except ValueError as error:
        raise ValueError(f"reward function {label} has no readable signature ({error}); wrap it in a def") from None
    kinds = inspect.Parameter
    named = [p for p in signature.parameters.values() if p.kind in (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)]
    takes_all = any(p.kind is kinds.VAR_KEYWORD for p in signature.parameters.values())
    wrong = [p.name for p in named if p.name not in ARGUMENTS and p.default is kinds.empty]
    wrong += [p.name for p in signature.parameters.values() if p.kind is kinds.POSITIONAL_ONLY]
    wanted = ARGUMENTS if takes_all else tuple(p.name for p in named if p.name in ARGUMENTS)
    if wrong or not wanted:
        problem = f"asks for {', '.join(wrong)}" if wrong else "takes none of the arguments"
        raise ValueError(
            f"reward function {label}{signature} {problem}; it is called by keyword with those it names out of {', '.join(ARGUMENTS)}"
            " (others need a default value)"
        )
    return wanted
