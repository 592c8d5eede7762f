"""What slime-hpc costs, as ratios to doing the same without it: see README.md."""
