"""Defaults <- files <- command line: merged, interpolated and converted to one typed `Config`; and back to a file."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from tridentrl.configs.convert import ConfigError, T, hints, key_paths, typed
from tridentrl.configs.schema import AlgorithmConfig, Config
from tridentrl.configs.yaml_files import read_yaml, write_yaml

PRESETS = Path(__file__).parent / "presets"
"""Where a configuration is looked for by name when no folder is given."""
_NOT_KEYS = ("options", "origins")
"""Fields of AlgorithmConfig that are not written as keys."""
_KEYS = tuple(name for name in hints(AlgorithmConfig) if name not in _NOT_KEYS)


def load_config(
    argv_overrides: Sequence[str],
    config_file: str | os.PathLike[str] | None = None,
    config_name: str | None = None,
    config_dir: str | os.PathLike[str] | None = None,
) -> Config:
    """The configuration of a run: defaults, over them `{config_dir}/{config_name}.yaml`, then `config_file`, then the overrides.

    Overrides follow Hydra's grammar: dotted keys, quotes, lists, `+key=` and `++key=` (both the same as `key=`), `~key` (forget what
    a file says). `${key}` in any value stands for another key's value. A section given as null is that section's defaults.
    Raises ConfigError; unknown keys, missing keys and wrong values are reported together.
    """
    tree: dict[str, Any] = {}
    origins: dict[str, str] = {}
    if config_dir is not None and config_name is None:
        raise ConfigError([f"--config-dir={config_dir} says where a configuration lies but not which one; add --config-name=NAME"])
    files = [] if config_name is None else [_named_file(config_name, config_dir)]
    for file in [*files, *([] if config_file is None else [config_file])]:
        content, lines = read_yaml(file)
        _merge(tree, content)
        origins |= lines
    for override in _parsed(argv_overrides):
        _apply(override, tree)
        origins[override.key_or_group] = f"command line: {override.input_line}"
    tree = _interpolated(tree)
    if isinstance(tree.get("algorithm"), dict):
        written = tree["algorithm"]
        options = {name: value for name, value in written.items() if name not in _KEYS}
        own = {key: origin for key, origin in origins.items() if key.startswith("algorithm.")}
        kept = {name: value for name, value in written.items() if name not in options}
        tree["algorithm"] = {**kept, "options": options, "origins": own}
    return typed(Config, tree, where="", origins=origins)


def typed_options(kind: type[T], config: AlgorithmConfig) -> T:
    """The algorithm's own settings as its dataclass `kind`, converted as strictly as all others. Raises ConfigError."""
    return typed(kind, config.options, where="algorithm", origins=config.origins, other_keys=schema_keys())


def schema_keys() -> list[str]:
    """Dotted names of all sections and keys; an algorithm's own settings are not among them."""
    return [path for path in key_paths(Config) if path not in {f"algorithm.{name}" for name in _NOT_KEYS}]


def save_config(config: Config, path: str | os.PathLike[str]) -> None:
    """Write YAML that `load_config` reads back to an equal configuration. The file appears whole or not at all."""
    write_yaml(_escaped(to_dict(config)), path)


def to_dict(config: Config) -> dict[str, Any]:
    """The configuration as nested plain dicts, lists and scalars, with the keys that a file has."""
    content: dict[str, Any] = _plain(config)
    algorithm = content["algorithm"]
    content["algorithm"] = {name: value for name, value in algorithm.items() if name not in _NOT_KEYS} | algorithm["options"]
    return content


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _escaped(value: Any) -> Any:
    """`value` so that `${` in a text is no interpolation when it is read again."""
    if isinstance(value, dict):
        return {name: _escaped(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_escaped(item) for item in value]
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value


def _merge(tree: dict[str, Any], layer: Mapping[str, Any]) -> None:
    """Lay `layer` over `tree`: mappings key by key, everything else replaces."""
    for name, value in layer.items():
        if isinstance(value, Mapping) and isinstance(tree.get(name), dict):
            _merge(tree[name], value)
        else:
            tree[name] = value


def _parsed(overrides: Sequence[str]) -> list[Override]:
    parser, parsed, problems = OverridesParser.create(), [], []
    for text in overrides:
        try:
            (override,) = parser.parse_overrides([text])
        except HydraException as error:
            reason = " ".join(str(error).partition("See https")[0].split())
            problems.append(f"cannot read the override {text}: {reason}; write key=value, unusual characters in quotes: key='\"a=b\"'")
            continue
        if override.is_sweep_override():
            problems.append(f"the override {text} is a sweep, and this is one run; write a list in brackets: key='[a,b]'")
        elif override.package is not None:
            problems.append(f"the override {text} has an @ in its key; keys are dotted names")
        parsed.append(override)
    if problems:
        raise ConfigError(problems)
    return parsed


def _apply(override: Override, tree: dict[str, Any]) -> None:
    """Set or remove one key in `tree`."""
    *sections, last = override.key_or_group.split(".")
    for section in sections:
        if tree.get(section) is None:
            tree[section] = {}
        tree = tree[section]
        if not isinstance(tree, dict):
            raise ConfigError([f"the override {override.input_line} goes into {section}, which is set to {tree!r}; remove that value"])
    value = override.value()
    if override.is_delete():
        if last not in tree or (value is not None and tree[last] != value):
            raise ConfigError([f"the override {override.input_line} has nothing to remove: no file and no earlier override sets that"])
        del tree[last]
    else:
        _merge(tree, {last: value})


def _interpolated(tree: dict[str, Any]) -> dict[str, Any]:
    """`tree` with every `${key}` replaced; a key that is not set stands for its default."""
    sections = {name for name, hint in hints(Config).items() if dataclasses.is_dataclass(hint)}
    written = {name: value for name, value in tree.items() if not (value is None and name in sections)}
    try:
        whole = OmegaConf.to_container(OmegaConf.merge(_defaults(Config), written), resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError([f"cannot work out {error.full_key or 'the configuration'}: {str(error).splitlines()[0]}"]) from error
    assert isinstance(whole, dict)
    return {name: value for name, value in whole.items() if name in written}


def _defaults(kind: type) -> dict[str, Any]:
    """Every default that is a plain value, sections nested."""
    values: dict[str, Any] = {}
    for field in dataclasses.fields(kind):
        hint = hints(kind)[field.name]
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            values[field.name] = _defaults(hint)
        elif field.default is not dataclasses.MISSING:
            values[field.name] = _plain(field.default)
    return values


def _named_file(name: str, folder: str | os.PathLike[str] | None) -> Path:
    folder = PRESETS if folder is None else Path(folder)
    path = folder / f"{name.removesuffix('.yaml')}.yaml"
    if not path.is_file():
        known = ", ".join(sorted(file.stem for file in folder.glob("*.yaml"))) or "none"
        raise ConfigError([f"no configuration {path.name} in the folder {folder} (--config-name, --config-dir); there: {known}"])
    return path
