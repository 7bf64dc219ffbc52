"""Typed configuration: schema, loading and the rules between settings. Imports nothing else of this package."""

from tridentrl.configs.convert import ConfigError, typed
from tridentrl.configs.layout import describe_batches, resolve_layout
from tridentrl.configs.load import load_config, save_config, to_dict, typed_options
from tridentrl.configs.model_spec import ModelSpec
from tridentrl.configs.rules import Batches, check, violations
from tridentrl.configs.schema import AlgorithmConfig, Config, DataConfig

__all__ = [
    "AlgorithmConfig",
    "Batches",
    "Config",
    "ConfigError",
    "DataConfig",
    "ModelSpec",
    "check",
    "describe_batches",
    "load_config",
    "resolve_layout",
    "save_config",
    "to_dict",
    "typed",
    "typed_options",
    "violations",
]
