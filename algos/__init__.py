"""Algorithms: one file each, named after its paper, and the registry that knows them."""

from tridentrl.algos.algorithm import Algorithm
from tridentrl.algos.dpo import DPO
from tridentrl.algos.grpo import GRPO
from tridentrl.algos.ppo import PPO
from tridentrl.algos.registry import get_algorithm_registry, register
from tridentrl.algos.reward_model import RewardModel
from tridentrl.algos.sft import SFT

__all__ = ["DPO", "GRPO", "PPO", "SFT", "Algorithm", "RewardModel", "get_algorithm_registry", "register"]
