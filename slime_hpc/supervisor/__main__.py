"""``python -m slime_hpc.supervisor RUN_DIR``: what a script submitted by hand becomes."""

from __future__ import annotations

import sys
from pathlib import Path

from slime_hpc.errors import SlimeHpcError, UserError
from slime_hpc.run_dir import RunDir
from slime_hpc.supervisor.main import supervise


def main(argv: list[str]) -> int:
    try:
        if len(argv) != 1:
            raise UserError("usage: python -m slime_hpc.supervisor RUN_DIR")
        attempts = RunDir(Path(argv[0])).all_attempts()
        if not attempts:
            raise UserError(f"{argv[0]} holds no attempt; make one with `slime-hpc submit profile.yaml`")
        supervise(argv[0], attempts[-1].number)
    except SlimeHpcError as error:
        print(f"slime-hpc: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
