"""Writes docs/config.md from the configuration schema and the algorithms' own Config classes: `make docs`.

The text of a key is the string below its field, which Python itself throws away, so it is read from the source. Types, ranges and
defaults come from the classes.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import json
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tridentrl.algos import get_algorithm_registry
from tridentrl.configs.convert import describe, hints
from tridentrl.configs.schema import AlgorithmConfig, Config, ModelConfig
from tridentrl.weights.families import FAMILIES

TARGET = Path(__file__).resolve().parent.parent / "docs" / "config.md"
NOT_KEYS: dict[type, tuple[str, ...]] = {AlgorithmConfig: ("options", "origins")}
"""Fields that hold something else than a key of that name."""
INTRO = """\
# Every setting

This page is made from the code by `make docs`; a test fails when it is old. Do not edit it.

A setting is a dotted key. Give it on the command line as `key=value`, in a YAML file (`--config FILE`) with the sections nested, or by
the name of a preset (`--config-name NAME`, from `configs/presets/` or from `--config-dir DIR`). The order is: defaults, the named
configuration, the file, the command line. The later one wins.

- An unknown key or a wrong value is an error. The message says where it was written and which key is the nearest.
  All such errors come at once.
- `${key}` stands for the value of another key. `~key` on the command line forgets what a file says.
- On the command line, quote a list for the shell: `data.train_files='["a.arrow","b.arrow"]'`. One value alone is a list of one.
- Numbers may be written `1e-6`. No value is `null`.
- The resolved configuration of a run, without any `auto`, lies in `config.yaml` of the run's folder. `--config` reads it again.
"""


def field_texts(kind: type) -> dict[str, str]:
    """The string below each field of a dataclass; a field without one takes that of a parent class."""
    texts: dict[str, str] = {}
    for parent in reversed([parent for parent in kind.__mro__ if dataclasses.is_dataclass(parent)]):
        (node,) = ast.parse(textwrap.dedent(inspect.getsource(parent))).body
        assert isinstance(node, ast.ClassDef)
        for before, after in zip(node.body, node.body[1:], strict=False):
            if isinstance(before, ast.AnnAssign) and isinstance(before.target, ast.Name) and isinstance(after, ast.Expr):
                value = after.value
                if isinstance(value, ast.Constant) and isinstance(value.value, str):
                    texts[before.target.id] = " ".join(value.value.split())
    return texts


def page() -> str:
    """The whole file."""
    sections = {name: hint for name, hint in hints(Config).items() if isinstance(hint, type) and dataclasses.is_dataclass(hint)}
    lines = [INTRO, "## The run", "", *table(Config, "", leave_out=tuple(sections))]
    for name, kind in sections.items():
        lines += ["", f"## {name}", "", inspect.getdoc(kind) or "", ""]
        lines += [*families(), ""] if kind is ModelConfig else []
        lines += table(kind, name)
        for own, algorithm in get_algorithm_registry().items() if kind is AlgorithmConfig else ():
            lines += [
                "",
                f"### algorithm.name={own}",
                "",
                f"{first_line(algorithm.__module__)} See [algorithms.md](algorithms.md#{own}).",
                "",
            ]
            lines += table(algorithm.Config, name)
    return "\n".join(lines) + "\n"


def families() -> Iterator[str]:
    """What kinds of models can be trained."""
    yield "A model is taken by the `model_type` in its config.json ([how to add one](adding_a_family.md)):"
    yield ""
    for family in FAMILIES.values():
        names = ", ".join(f"`{name}`" for name in family.model_types)
        yield f"- {names}: {first_line(f'tridentrl.weights.families.{family.name}')}"


def first_line(module: str) -> str:
    """Of a module's docstring."""
    return (inspect.getdoc(importlib.import_module(module)) or "").splitlines()[0]


def table(kind: type, where: str, leave_out: tuple[str, ...] = ()) -> Iterator[str]:
    """One row for each key of a section, keys of sections below it included."""
    yield "| Key | Value | Default | Meaning |"
    yield "|---|---|---|---|"
    yield from rows(kind, where, leave_out)


def rows(kind: type, where: str, leave_out: tuple[str, ...] = ()) -> Iterator[str]:
    texts = field_texts(kind)
    for field in dataclasses.fields(kind):
        if field.name in leave_out + NOT_KEYS.get(kind, ()):
            continue
        key, hint = f"{where}.{field.name}".lstrip("."), hints(kind)[field.name]
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            yield from rows(hint, key)
        else:
            yield "| " + " | ".join(cell(part) for part in (f"`{key}`", describe(hint), default_of(field), texts[field.name])) + " |"


def default_of(field: dataclasses.Field[Any]) -> str:
    """The default as YAML spells it."""
    if field.default is not dataclasses.MISSING:
        return f"`{json.dumps(field.default, ensure_ascii=False)}`"
    if field.default_factory is not dataclasses.MISSING:
        return f"`{json.dumps(field.default_factory(), ensure_ascii=False)}`"
    return "required"


def cell(text: str) -> str:
    """Text of a table cell; Python's None is null in a file."""
    return re.sub(r"\bNone\b", "null", text).replace("|", "\\|")


if __name__ == "__main__":
    TARGET.parent.mkdir(exist_ok=True)
    TARGET.write_text(page(), encoding="utf-8")
    print(f"wrote {TARGET}")
