"""The RL arithmetic: pure torch functions, one formula each."""

from slime_hpc.algorithm.advantages import grpo_advantages
from slime_hpc.algorithm.losses import policy_loss
from slime_hpc.algorithm.reduce import sum_of_sample_means

__all__ = ["grpo_advantages", "policy_loss", "sum_of_sample_means"]
