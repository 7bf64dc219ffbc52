"""Algorithms by name."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TypeVar

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
        close = difflib.get_close_matches(name, list(_algorithms), n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise ValueError(f"algorithm.name={name} is unknown; {hint}Known are {', '.join(sorted(_algorithms))}")
    return _algorithms[name]
