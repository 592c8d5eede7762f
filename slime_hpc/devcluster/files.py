"""Write and remove the files of a devcluster."""

from __future__ import annotations

import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from slime_hpc.devcluster import config, users
from slime_hpc.devcluster.config import Hosts, Layout, Shape
from slime_hpc.errors import UserError


@contextmanager
def naming(root: Path) -> Iterator[None]:
    """A UserError for what the system says about the directory: missing rights, a file, a read-only disk."""
    try:
        yield
    except OSError as error:
        where = "" if error.filename in (None, str(root)) else f" ({error.filename})"
        raise UserError(
            f"{root} cannot hold a devcluster: {error.strerror}{where}; choose another directory with --dir"
        ) from error


def require_owner(root: Path) -> None:
    """UserError if the directory is another user's."""
    owner = root.stat().st_uid
    if owner != os.geteuid():
        raise UserError(
            f"{root} belongs to {users.name_of(owner)}, and only its owner can start or stop a devcluster there; "
            "choose another directory with --dir"
        )


def claim_directory(layout: Layout) -> None:
    """Make the directory, or see that it is ours, closed, and holds nothing but a devcluster; else UserError."""
    root = layout.root
    with naming(root):
        if not root.exists():
            root.mkdir(parents=True)
        require_owner(root)
        foreign = sorted({path.name for path in root.iterdir()} - {layout.log.name})
        _require_closed(root)
    if foreign and not layout.state.exists():
        raise UserError(
            f"{root} is not empty (it has {foreign[0]}) and holds no devcluster; choose an empty directory with --dir"
        )


def _require_closed(root: Path) -> None:
    """Whoever can write here decides what our daemons run: munged's own rule, which --force puts out of force."""
    mode = stat.S_IMODE(root.stat().st_mode)
    if not os.access(root, os.W_OK | os.X_OK):
        raise UserError(f"{root} is read-only (mode {mode:o}); choose another directory with --dir")
    if mode & 0o022:
        raise UserError(
            f"others may write to {root} (mode {mode:o}), and so into the Slurm there; "
            f"forbid it (chmod go-w {root}), or choose another directory with --dir"
        )


def write_files(layout: Layout, shape: Shape, hosts: Hosts) -> None:
    """Directories, keys and configuration of a devcluster about to start."""
    for path in (layout.etc, layout.run, layout.log, layout.controller_state, layout.spool):
        path.mkdir(exist_ok=True)
    layout.private.mkdir(mode=0o700, exist_ok=True)
    layout.slurm_conf.write_text(config.slurm_conf(layout, shape, hosts))
    layout.hosts.write_text(config.hosts_file(hosts))
    _write_private(layout.munge_key, secrets.token_bytes(128))
    if shape.gpus_per_node:
        (layout.etc / "gres.conf").write_text(config.gres_conf(shape, _gpu_devices(layout, shape.gpus_per_node)))
    if shape.accounting:
        _write_private(layout.etc / "slurmdbd.conf", config.slurmdbd_conf(layout, hosts).encode())


def remove_files(layout: Layout) -> None:
    """All but the logs; the record of what was started goes last, so that an interrupted removal can go on."""
    for path in layout.perishable:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _write_private(path: Path, content: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(content)


def _gpu_devices(layout: Layout, count: int) -> str:
    """Numbered names that pose as GPUs. Slurm numbers character devices only, and anyone can make a link to one."""
    layout.gpu_devices.mkdir(exist_ok=True)
    for i in range(count):
        (layout.gpu_devices / f"gpu{i}").symlink_to("/dev/null")
    return f"{layout.gpu_devices}/gpu[0-{count - 1}]"
