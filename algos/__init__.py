"""Algorithms: one file each, named after its paper, and the registry that knows them."""

from tridentrl.algos.algorithm import Algorithm
from tridentrl.algos.grpo import GRPO
from tridentrl.algos.ppo import PPO
from tridentrl.algos.registry import get_algorithm_registry, register
from tridentrl.algos.sft import SFT

__all__ = ["GRPO", "PPO", "SFT", "Algorithm", "get_algorithm_registry", "register"]
