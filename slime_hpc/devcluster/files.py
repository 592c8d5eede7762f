"""Write and remove the files of a devcluster."""

from __future__ import annotations

import os
import secrets
import shutil
import stat
from pathlib import Path

from slime_hpc.devcluster import config
from slime_hpc.devcluster.config import Hosts, Layout, Shape
from slime_hpc.errors import ClusterError, UserError


def require_own_directory(layout: Layout) -> None:
    """UserError if the directory holds something that is not a devcluster's."""
    if not layout.root.exists() or layout.state.exists():
        return
    foreign = sorted({path.name for path in layout.root.iterdir()} - {layout.log.name})
    if foreign:
        raise UserError(
            f"{layout.root} is not empty (it has {foreign[0]}) and holds no devcluster; "
            "choose an empty directory with --dir"
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
    """Numbered character devices that pose as GPUs: the consoles, or in a container, which has none, our own."""
    if all(Path(f"/dev/tty{i}").is_char_device() for i in range(count)):
        return f"/dev/tty[0-{count - 1}]"
    layout.gpu_devices.mkdir(exist_ok=True)
    for i in range(count):
        _make_null_device(layout.gpu_devices / f"gpu{i}")
    return f"{layout.gpu_devices}/gpu[0-{count - 1}]"


def _make_null_device(path: Path) -> None:
    try:
        os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 3))
    except PermissionError as error:
        raise ClusterError(
            f"there is no /dev/tty0 to pose as a GPU, and {path} could not be made ({error}); "
            "be root, or use --gpus-per-node 0"
        ) from error
