"""Algorithms by name."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

from tridentrl.algos.algorithm import Algorithm

_AlgorithmClass = TypeVar("_AlgorithmClass", bound=type[Algorithm])
_algorithms: dict[str, type[Algorithm]] = {}


def register(name: str) -> Callable[[_AlgorithmClass], _AlgorithmClass]:
    """Class decorator that makes an algorithm known under `name`, the value of `algorithm.name`. ValueError when it is taken."""

    def add(algorithm: _AlgorithmClass) -> _AlgorithmClass:
        taken = _algorithms.get(name)
        if taken is not None and (taken.__module__, taken.__qualname__) != (algorithm.__module__, algorithm.__qualname__):
            raise ValueError(f"the algorithm name {name!r} belongs to {taken.__module__}.{taken.__qualname__}; register under another name")
        _algorithms[name] = algorithm
        return algorithm

    return add


def get_algorithm_registry() -> Mapping[str, type[Algorithm]]:
    """Read-only view of all known algorithms, name to class, in alphabetical order."""
    return MappingProxyType(dict(sorted(_algorithms.items())))


def algorithm_class(name: str) -> type[Algorithm]:
    """The algorithm registered under `name`; ValueError with all names and the nearest."""
    if name not in _algorithms:
        raise ValueError(f"algorithm.name={name} is unknown{_nearest(name, _algorithms)}; known are {', '.join(sorted(_algorithms))}")
    return _algorithms[name]


def build(name: str, settings: Mapping[str, Any] | None = None) -> Algorithm:
    """The algorithm `name` with these values of its config; ValueError for an unknown name, an unknown key or a broken rule."""
    algorithm, settings = algorithm_class(name), dict(settings or {})
    keys = [field.name for field in dataclasses.fields(algorithm.Config)]
    for key in settings:
        if key not in keys:
            raise ValueError(f"algorithm.{key} is not a key of {name}{_nearest(key, keys)}; its keys are {', '.join(keys)}")
    return algorithm(algorithm.Config(**settings))


def _nearest(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {close[0]}?)" if close else ""
