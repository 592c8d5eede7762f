"""Everything that knows how Slurm speaks."""
