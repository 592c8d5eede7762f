"""The engine's process: ``python -m slime_hpc.rollout.launch_sglang ARGS.json KEYS.json PARENT_PID``.

SGLang logs its server arguments and shows them on /server_info, keys included. So the keys never
become arguments: they go from their file straight into SGLang's own authentication.

The schedulers are multiprocessing children, which import this module first (as ``__mp_main__``).
SGLang ties them to their parent only after some ten seconds of imports; if the engine was killed
before that, its detokenizer stayed for good. So it is done here, at once.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

from slime_hpc.processes import die_with_parent
from slime_hpc.records import read_json
from slime_hpc.supervisor.signals import block_notices_for_good

PARENT_VARIABLE = "SLIME_HPC_ENGINE_PARENT"
"""Environment variable: the pid that a child of this process must find as its parent."""


def main(args_file: Path, keys_file: Path, parent_pid: int) -> None:
    """Serve until killed. The arguments file holds ServerArgs fields by name."""
    _bind_to(parent_pid)
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


def _bind_to(parent_pid: int) -> None:
    """Die with the process that started this one, and have this one's children do the same."""
    die_with_parent(parent_pid)
    os.environ[PARENT_VARIABLE] = str(os.getpid())


def _not_the_refused_freeze(record: logging.LogRecord) -> bool:
    """After its start SGLang calls its own /freeze_gc, without our key, and logs the refusal with a traceback."""
    return "freeze_gc failed" not in record.getMessage()


if __name__ == "__mp_main__":
    _bind_to(int(os.environ[PARENT_VARIABLE]))
if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
