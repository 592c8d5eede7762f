"""The engine's process: ``python -m slime_hpc.rollout.launch_sglang ARGS.json KEYS.json PARENT_PID``.

SGLang logs its server arguments and shows them on /server_info, keys included. So the keys never
become arguments: they go from their file straight into SGLang's own authentication.

The schedulers are multiprocessing children, which import this module first (as ``__mp_main__``).
SGLang ties them to their parent only after some ten seconds of imports; if the engine was killed
before that, its detokenizer stayed for good. So it is done here, at once.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
from pathlib import Path

from slime_hpc.records import read_json
from slime_hpc.supervisor.signals import block_notices_for_good

PR_SET_PDEATHSIG = 1  # linux/prctl.h
PARENT_VARIABLE = "SLIME_HPC_ENGINE_PARENT"
"""Environment variable: the pid that a child of this process must find as its parent."""


def main(args_file: Path, keys_file: Path, parent_pid: int) -> None:
    """Serve until killed. The arguments file holds ServerArgs fields by name."""
    die_with_parent(parent_pid)
    block_notices_for_good()
    from sglang.srt.entrypoints.http_server import app, launch_server
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.utils import kill_process_tree
    from sglang.srt.utils.auth import add_api_key_middleware

    add_api_key_middleware(app, **read_json(keys_file))
    logging.getLogger("sglang.srt.entrypoints.http_server").addFilter(_not_the_refused_freeze)
    try:
        launch_server(ServerArgs(**read_json(args_file)))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when the thread that started it ends.

    Set here and not between fork and exec: Python code there can deadlock in a threaded parent.
    """
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent_pid:
        sys.exit(f"the process that started this one (pid {parent_pid}) is gone")
    os.environ[PARENT_VARIABLE] = str(os.getpid())


def _not_the_refused_freeze(record: logging.LogRecord) -> bool:
    """After its start SGLang calls its own /freeze_gc, without our key, and logs the refusal with a traceback."""
    return "freeze_gc failed" not in record.getMessage()


if __name__ == "__mp_main__":
    die_with_parent(int(os.environ[PARENT_VARIABLE]))
if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
