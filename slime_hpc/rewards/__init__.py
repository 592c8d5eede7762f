"""Rewards: the user's function, run where it can be killed."""
