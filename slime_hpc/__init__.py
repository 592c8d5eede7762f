"""Reinforcement-learning post-training of language models on Slurm supercomputers."""

__version__ = "0.1.0"
