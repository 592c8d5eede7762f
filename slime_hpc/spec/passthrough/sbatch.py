"""sbatch options that a profile may not set, since another key or slime-hpc itself owns them."""

from __future__ import annotations

_OUTPUT = "Slurm's output goes to run_dir, where `slime-hpc logs` finds it"
_REQUEUE = "Slurm may always start the job of a run again: it goes on from its newest checkpoint"
_SHAPE = "one task a node starts everything there; set nodes, gpus_per_node and cpus_per_task"

SBATCH_OWNED = {
    "partition": "set the component's partition",
    "account": "set the component's account, or the profile's",
    "qos": "set the component's qos, or the profile's",
    "constraint": "set the component's constraint",
    "gres": "set the component's gres or gpus_per_node",
    "gpus": _SHAPE,
    "gpus-per-node": _SHAPE,
    "gpus-per-task": _SHAPE,
    "gpus-per-socket": _SHAPE,
    "nodes": "set the component's nodes",
    "ntasks": _SHAPE,
    "ntasks-per-node": _SHAPE,
    "cpus-per-task": "set the component's cpus_per_task",
    "mem": "set the component's mem",
    "mem-per-cpu": "set the component's mem",
    "time": "set the component's time_limit, or the profile's",
    "job-name": "set name",
    "output": _OUTPUT,
    "error": _OUTPUT,
    "open-mode": _OUTPUT,
    "requeue": _REQUEUE,
    "no-requeue": _REQUEUE,
    "comment": "it carries the token by which `slime-hpc status` finds the job",
    "signal": "the supervisor needs it",
    "array": "a run is one job",
    "wrap": "slime-hpc writes the script",
    "parsable": "it changes what sbatch prints, which slime-hpc reads",
    "wait": "`slime-hpc status` shows how the run stands",
}
"""sbatch options that another key owns, and what to do instead."""
