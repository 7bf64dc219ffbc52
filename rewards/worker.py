"""What runs inside a reward worker process. Imports nothing heavy: a worker that was killed is replaced while the step waits."""

from __future__ import annotations

import ctypes
import math
import numbers
import os
import signal
import sys
from dataclasses import dataclass
from typing import Any

from tridentrl.rewards.loading import FunctionSpec, RewardFunction, user_traceback

PR_SET_PDEATHSIG = 1  # linux/prctl.h


@dataclass(frozen=True)
class Outcome:
    """Result of one call: a finite score, or None for a function that abstained, or the text of an error."""

    score: float | None = None
    error: str | None = None


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the thread of process `parent` that started it ends, even by SIGKILL (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


_functions: dict[FunctionSpec, tuple[RewardFunction, tuple[str, ...]] | Outcome] = {}


def start(specs: tuple[FunctionSpec, ...], parent: int) -> None:
    """Load the functions before the first sample's clock starts. A load that fails is reported with every sample that needs it."""
    die_with_parent(parent)  # in the middle of a user's endless loop it would outlive a trainer that was killed
    for spec in specs:
        try:
            _functions[spec] = spec.load()
        except BaseException as error:
            _functions[spec] = Outcome(error=user_traceback(error))


def score(spec: FunctionSpec, arguments: dict[str, Any]) -> Outcome:
    """Call the function in this process's main thread with what it asks for. Never raises, whatever the user's code does."""
    loaded = _functions[spec]
    if isinstance(loaded, Outcome):
        return loaded
    function, wanted = loaded
    try:
        return Outcome(score=as_score(function(**{name: arguments[name] for name in wanted})))
    except BaseException as error:
        return Outcome(error=user_traceback(error))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)  # an alarm the user's code left behind would hit the next sample


def as_score(value: object) -> float | None:
    """A number, bool, numpy scalar or 0-d array or tensor as a float; None stays None. Raises TypeError or ValueError otherwise."""
    if value is None:
        return None
    if getattr(value, "shape", None) == () and callable(item := getattr(value, "item", None)):
        value = item()
    if not isinstance(value, numbers.Real):
        raise TypeError(
            f"a reward must be one number (or None to abstain), the function returned {value!r:.200} of type {type(value).__name__}"
        )
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"a reward must be finite, the function returned {number}; return None to leave a sample out")
    return number
