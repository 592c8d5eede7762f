"""The router's process: ``python -m slime_hpc.rollout.launch_router ARGS.json KEYS.json PARENT_PID``.

The key goes from its file straight into sglang-router, which neither logs nor shows it. Not through its own
launcher: that retitles the process, which wipes the environment that the sweep finds it by.
"""

from __future__ import annotations

import sys
from pathlib import Path

from slime_hpc.processes import die_with_parent
from slime_hpc.records import read_json
from slime_hpc.supervisor.signals import block_notices_for_good


def main(args_file: Path, keys_file: Path, parent_pid: int) -> None:
    """Route until killed. The arguments file holds RouterArgs fields by name."""
    die_with_parent(parent_pid)
    block_notices_for_good()
    from sglang_router.router import Router
    from sglang_router.router_args import RouterArgs

    api_key = read_json(keys_file)["api_key"]
    Router.from_args(RouterArgs(**read_json(args_file), api_key=api_key)).start()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
