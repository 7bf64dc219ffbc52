"""Algorithms: one file each, named after its paper, and the registry that knows them."""

from tridentrl.algos.algorithm import Algorithm
from tridentrl.algos.cispo import CISPO
from tridentrl.algos.dapo import DAPO
from tridentrl.algos.distill_rm import DistillRM
from tridentrl.algos.dpo import DPO
from tridentrl.algos.dr_grpo import DrGRPO
from tridentrl.algos.grpo import GRPO
from tridentrl.algos.gspo import GSPO
from tridentrl.algos.ppo import PPO
from tridentrl.algos.registry import get_algorithm_registry, register
from tridentrl.algos.reinforce_pp import ReinforcePP, ReinforcePPBaseline
from tridentrl.algos.remax import ReMax
from tridentrl.algos.reward_model import RewardModel
from tridentrl.algos.rloo import RLOO
from tridentrl.algos.safe_rlhf import SafeRLHF
from tridentrl.algos.sft import SFT

__all__ = [
    "CISPO",
    "DAPO",
    "DPO",
    "GRPO",
    "GSPO",
    "PPO",
    "RLOO",
    "SFT",
    "Algorithm",
    "DistillRM",
    "DrGRPO",
    "ReMax",
    "ReinforcePP",
    "ReinforcePPBaseline",
    "RewardModel",
    "SafeRLHF",
    "get_algorithm_registry",
    "register",
]
