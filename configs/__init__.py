"""Typed configuration: schema, loading and the rules between settings. Imports nothing else of this package."""

from tridentrl.configs.convert import ConfigError, typed
from tridentrl.configs.load import load_config, save_config, to_dict, typed_options
from tridentrl.configs.schema import AlgorithmConfig, Config, DataConfig

__all__ = ["AlgorithmConfig", "Config", "ConfigError", "DataConfig", "load_config", "save_config", "to_dict", "typed", "typed_options"]
