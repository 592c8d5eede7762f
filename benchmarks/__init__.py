"""What slime-hpc costs, as ratios to doing the same without it: see README.md."""

import os

from slime_hpc.supervisor.raylet import WAITING

os.environ.update(WAITING)  # as in a run; read when torch is imported
