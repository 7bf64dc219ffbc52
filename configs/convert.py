"""From plain values, as YAML or a command line gives them, to a typed dataclass, strictly.

What is accepted beside the type itself: an integer for a float; a float without a fraction for an integer (8.0 is 8); a number in
quotes; yes/no, on/off and true/false for a bool; one value for a list of one; null for an empty list, mapping or section.
Everything else is an error that names the key, what it must be, and what came.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import math
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import annotated_types

T = TypeVar("T")

_BOOL_WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_BOUNDS = {
    annotated_types.Ge: (">=", lambda value, bound: value >= bound.ge),
    annotated_types.Gt: (">", lambda value, bound: value > bound.gt),
    annotated_types.Le: ("<=", lambda value, bound: value <= bound.le),
    annotated_types.Lt: ("<", lambda value, bound: value < bound.lt),
}


class ConfigError(ValueError):
    """The configuration cannot be used. The text lists every problem found, with the value, the rule and the fix."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = list(problems)
        assert self.problems
        count = len(self.problems)
        head = "the configuration has a problem" if count == 1 else f"the configuration has {count} problems"
        super().__init__("\n  - ".join([f"{head}:", *self.problems]))


def typed(
    kind: type[T],
    mapping: Mapping[str, Any],
    *,
    where: str = "algorithm",
    origins: Mapping[str, str] | None = None,
    other_keys: Iterable[str] = (),
) -> T:
    """Build dataclass `kind` from `mapping`, the content of section `where` ("" for the whole configuration).

    origins: where each dotted key (or its section) was written, for the messages.
    other_keys: dotted keys outside this section, to tell where a misplaced key belongs.
    Raises ConfigError with every unknown key, missing required key and wrong value; of a ValueError from
    `__post_init__`, each line is one more problem, and `field=value: ...` gets the full key.
    """
    reader = _Reader(origins or {}, [*key_paths(kind, where), *other_keys])
    built = reader.section(kind, mapping, where)
    if reader.problems:
        raise ConfigError(reader.problems)
    assert isinstance(built, kind)
    return built


def key_paths(kind: type, where: str = "") -> list[str]:
    """Dotted names of every key of a dataclass and the sections below it."""
    paths = []
    for name, hint in hints(kind).items():
        path = _join(where, name)
        paths += [path, *(key_paths(hint, path) if isinstance(hint, type) and dataclasses.is_dataclass(hint) else [])]
    return paths


def hints(kind: type) -> dict[str, Any]:
    """Type of each field, annotations such as ranges included."""
    everything = get_type_hints(kind, include_extras=True)
    return {field.name: everything[field.name] for field in dataclasses.fields(kind) if field.init}


class _Reader:
    """Converts one mapping and collects the problems."""

    def __init__(self, origins: Mapping[str, str], valid: list[str]) -> None:
        self.origins, self.valid, self.problems = origins, valid, list[str]()

    def section(self, kind: type, mapping: Any, where: str) -> Any:
        """The dataclass, or None when there was a problem."""
        if not isinstance(mapping, Mapping):
            first = next(iter(hints(kind)))
            self.problems.append(
                f"{where} is a section, not a value, got {_shown(mapping)}{self.origin(where)}; set its keys, such as {where}.{first}"
            )
            return None
        before, values = len(self.problems), {}
        fields = hints(kind)
        for name in mapping:
            if name not in fields:
                self.unknown(_join(where, str(name)), mapping[name], where, fields)
        required = {f.name for f in dataclasses.fields(kind) if f.default is f.default_factory is dataclasses.MISSING}
        for name, hint in fields.items():
            key = _join(where, name)
            if dataclasses.is_dataclass(hint):
                assert isinstance(hint, type)
                values[name] = self.section(hint, mapping[name] if mapping.get(name) is not None else {}, key)
            elif name in mapping and mapping[name] != "???":
                values[name] = self.value(hint, mapping[name], key)
            elif name in required:
                self.problems.append(f"{key} is required and not set; give it as {key}=... or in the configuration file")
        if len(self.problems) > before:
            return None
        try:
            return kind(**values)
        except ValueError as error:
            for line in str(error).splitlines():
                about_a_field = line.partition("=")[0] in fields
                self.problems.append(_join(where, line) if about_a_field else f"{where}: {line}" if where else line)
            return None

    def value(self, hint: Any, value: Any, key: str) -> Any:
        try:
            return _convert(hint, value)
        except _NotThat:
            quote = f"; put it in quotes to mean text: {key}='\"{value}\"'" if _wants_text(hint) and isinstance(value, int | float) else ""
            self.problems.append(f"{key} must be {describe(hint)}, got {_shown(value)}{self.origin(key)}{quote}")
            return None

    def unknown(self, key: str, value: Any, where: str, siblings: Iterable[str]) -> None:
        """Report an unknown key; of an unknown section, the keys inside it."""
        if isinstance(value, Mapping) and value:
            for name, inner in value.items():
                self.unknown(f"{key}.{name}", inner, where, siblings)
            return
        best = nearest(key, self.valid)
        if best is None:
            hint = f"the keys of {where or 'the configuration'} are {', '.join(siblings)}"
        elif best.rpartition(".")[2] == key.rpartition(".")[2]:
            hint = f"that key is {best}"
        else:
            hint = f"did you mean {best}?"
        self.problems.append(f"unknown key {key}{self.origin(key)}; {hint}")

    def origin(self, key: str) -> str:
        """Where the key, or the section it came in, was written."""
        while key and key not in self.origins:
            key = key.rpartition(".")[0]
        return f" ({self.origins[key]})" if key in self.origins else ""


def nearest(key: str, valid: Iterable[str]) -> str | None:
    """The valid key that `key` most likely means: its last word counts first, then the whole path; None when nothing is near."""

    def likeness(candidate: str) -> tuple[float, float]:
        last, whole = (key.rpartition(".")[2], candidate.rpartition(".")[2]), (key, candidate)
        return difflib.SequenceMatcher(None, *last).ratio(), difflib.SequenceMatcher(None, *whole).ratio()

    best = max(valid, key=likeness, default=None)
    return best if best is not None and likeness(best)[0] >= 0.75 else None


class _NotThat(Exception):
    """The value is not of the wanted type."""


def _convert(hint: Any, value: Any) -> Any:
    origin, args = get_origin(hint), get_args(hint)
    if hint is Any:
        return value
    if origin is Annotated:
        return _within(_convert(args[0], value), args[1:])
    if origin in (Union, types.UnionType):
        return _first_that_fits(args, value)
    if origin is Literal:
        if any(type(value) is type(word) and value == word for word in args):
            return value
        raise _NotThat
    if origin in (tuple, list):
        return origin(_items(args, value))
    if origin in (dict, Mapping):
        if isinstance(value, Mapping | None):
            return {_convert(args[0], name): _convert(args[1], item) for name, item in (value or {}).items()}
        raise _NotThat
    return _scalar(hint, value)


def _scalar(hint: Any, value: Any) -> Any:
    if hint is type(None) and value is None:
        return None
    if hint is str and isinstance(value, str):
        return value
    if hint is bool:
        if isinstance(value, bool):
            return value
        if isinstance(value, str) and value.lower() in _BOOL_WORDS:
            return _BOOL_WORDS[value.lower()]
    if hint in (int, float) and isinstance(value, int | float | str) and not isinstance(value, bool):
        with contextlib.suppress(ValueError, OverflowError):
            number = value if isinstance(value, int) else float(value)
            if math.isfinite(number) and (hint is float or number == int(number)):
                return hint(number)
    raise _NotThat


def _items(args: tuple[Any, ...], value: Any) -> Iterator[Any]:
    """Items of a list or tuple. Where any length is allowed, null is an empty list and one value that is no list a list of one."""
    any_length = len(args) == 1 or args[1] is Ellipsis
    if any_length and not isinstance(value, list | tuple | Mapping):
        value = [] if value is None else [value]
    if not isinstance(value, list | tuple) or not (any_length or len(value) == len(args)):
        raise _NotThat
    for hint, item in zip([args[0]] * len(value) if any_length else args, value, strict=True):
        yield _convert(hint, item)


def _first_that_fits(hints_: tuple[Any, ...], value: Any) -> Any:
    for hint in hints_:
        with contextlib.suppress(_NotThat):
            return _convert(hint, value)
    raise _NotThat


def _within(value: Any, bounds: tuple[Any, ...]) -> Any:
    for bound in bounds:
        if isinstance(bound, annotated_types.MinLen):
            fits = len(value) >= bound.min_length
        else:
            fits = _BOUNDS[type(bound)][1](value, bound)
        if not fits:
            raise _NotThat
    return value


def describe(hint: Any) -> str:
    """A type in words, for messages and the docs: `an integer >= 1 or one of auto`."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        bounds = [_bound_in_words(bound, args[0]) for bound in args[1:]]
        return describe(args[0]) + " and".join(bounds)
    if origin in (Union, types.UnionType):
        return " or ".join(describe(arg) for arg in args)
    if origin is Literal:
        words = [str(word) for word in args]
        return words[0] if len(words) == 1 else f"one of {', '.join(words)}"
    if origin in (tuple, list):
        any_length = len(args) == 1 or args[1] is Ellipsis
        return f"a list, each item {describe(args[0])}" if any_length else f"a list of {len(args)}, each item {describe(args[0])}"
    if origin is not None:
        return f"a mapping from {describe(args[0])} to {describe(args[1])}"
    return {int: "an integer", float: "a finite number", bool: "true or false", str: "text", type(None): "null"}.get(hint, "any value")


def _bound_in_words(bound: Any, base: Any) -> str:
    if isinstance(bound, annotated_types.MinLen):
        return " that is not empty" if base is str else ", with at least one item"
    symbol, _ = _BOUNDS[type(bound)]
    return f" {symbol} {getattr(bound, type(bound).__name__.lower())}"


def _wants_text(hint: Any) -> bool:
    return hint is str or any(_wants_text(arg) for arg in get_args(hint))


def _shown(value: Any) -> str:
    """A value as YAML spells it, and its type."""
    if value is None:
        return "null"
    return f"{str(value).lower() if isinstance(value, bool) else repr(value)} ({type(value).__name__})"


def _join(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name
