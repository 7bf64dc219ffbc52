"""Configuration files: YAML in, with the line of every key, and YAML out, whole or not at all.

What a plain word means must not depend on where it is written, so files read scalars as Hydra's command-line grammar does: only
true and false are bools (YAML 1.1 has yes, no, on and off as well), `off` is a word, and 1e-6 is a number.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from tridentrl.configs.convert import ConfigError

_INT = "(?:0|[1-9](?:_?[0-9])*)"
_DIGITS = "[0-9](?:_?[0-9])*"
_EXPONENT = f"[eE][-+]?{_DIGITS}"
_SCALARS = {
    "bool": "(?i:true|false)",
    "null": "(?i:null)|~|",
    "int": f"[-+]?{_INT}",
    "float": rf"[-+]?(?:(?:{_INT}?\.{_DIGITS}|{_INT}\.)(?:{_EXPONENT})?|{_INT}{_EXPONENT}|(?i:\.?inf))|(?i:\.?nan)",
    "merge": "<<",
}


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[Any, Any] = {}  # noqa: RUF012 - that is how PyYAML is extended


class _Dumper(yaml.SafeDumper):
    """Quotes a text that YAML 1.1 or the rules above would read as something else."""


for _name, _pattern in _SCALARS.items():
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", re.compile(rf"(?:{_pattern})\Z"), None)


def read_yaml(path: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Content of a file, and for each dotted key "file, line N". ConfigError for a missing or broken file and for a key given twice."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([f"cannot read the configuration file {path}: {getattr(error, 'strerror', None) or error}"]) from error
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return {}, {}
        if not isinstance(node, yaml.MappingNode):
            raise ConfigError([f"the configuration file {path} must hold keys with values, it holds {type(node).__name__}"])
        lines: dict[str, int] = {}
        problems = list(_note_lines(node, "", lines))
        if problems:
            raise ConfigError([f"{path}: {problem}" for problem in problems])
        content = loader.construct_document(node)
    except yaml.YAMLError as error:
        raise ConfigError([f"the configuration file {path} is not valid YAML: {' '.join(str(error).split())}"]) from error
    finally:
        loader.dispose()
    return content, {key: f"{path}, line {line}" for key, line in lines.items()}


def _note_lines(node: yaml.MappingNode, where: str, lines: dict[str, int]) -> Iterator[str]:
    """Fill in the line of each key below `node`; yield what is wrong with keys."""
    seen: dict[str, int] = {}
    for name, value in node.value:
        line = name.start_mark.line + 1
        if not isinstance(name, yaml.ScalarNode):
            yield f"line {line}: a key must be a word"
            continue
        key = f"{where}.{name.value}" if where else name.value
        if not where and "." in name.value:
            section, _, rest = name.value.partition(".")
            yield f"line {line}: write {name.value} nested in a file, as {section}: {{{rest}: ...}}"
        if name.value in seen:
            yield f"line {line}: {key} is given a second time, first in line {seen[name.value]}; keep one"
        seen[name.value] = lines[key] = line
        if isinstance(value, yaml.MappingNode):
            yield from _note_lines(value, key, lines)


def write_yaml(content: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Write and flush to disk under another name, then rename: a reader sees the old file or the new one, never a part."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            yaml.dump(content, file, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
