"""Whose a devcluster is, and who else may use it."""

from __future__ import annotations

import os
import pwd
import re
from collections.abc import Iterator
from contextlib import contextmanager

from slime_hpc.errors import UserError

_FIRST_PERSON = 1000
"""Uids below belong to services (UID_MIN of /etc/login.defs)."""


def is_root() -> bool:
    return os.geteuid() == 0


def me() -> pwd.struct_passwd:
    """The effective user, whatever $USER says: it outlives ``setpriv`` and ``su``. UserError if it has no name."""
    uid = os.geteuid()
    try:
        return pwd.getpwuid(uid)
    except KeyError:
        raise UserError(
            f"uid {uid} has no name on this machine, and Slurm knows users by name; "
            f"give it one (as root: useradd --uid {uid} NAME), or be another user"
        ) from None


def name_of(uid: int) -> str:
    """For messages: ``alice``, or ``uid 1234`` where there is no name."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"


def submitters() -> list[str]:
    """Whose jobs a devcluster of ours runs: root's slurmd becomes any user, another's stays what it is."""
    mine = me().pw_name
    others = {entry.pw_name for entry in pwd.getpwall() if entry.pw_uid >= _FIRST_PERSON} if is_root() else set()
    return [mine, *sorted(name for name in others - {mine} if re.fullmatch(r"[a-z0-9_.-]+", name))]


@contextmanager
def umask() -> Iterator[None]:
    """Root's files are for all to read. A user's are closed: its slurmd runs anybody's srun as that user."""
    before = os.umask(0o022 if is_root() else 0o077)
    try:
        yield
    finally:
        os.umask(before)
