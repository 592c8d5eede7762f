"""Which daemons make up a devcluster, and how each is called. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from slime_hpc.devcluster import users
from slime_hpc.devcluster.config import Host, Hosts, Layout, Shape


@dataclass(frozen=True)
class Daemon:
    """One daemon: the host it runs on (None: the machine itself) and where it listens once it is ready."""

    name: str
    argv: Sequence[str]
    endpoint: Path | tuple[str, int]
    host: Host | None = None
    env: Mapping[str, str] = field(default_factory=dict)


def stages(layout: Layout, shape: Shape, hosts: Hosts) -> list[list[Daemon]]:
    """Daemons in starting order; those of one stage may start together. The database comes before its users."""
    database = [[_mariadbd(layout)], [_slurmdbd(layout, hosts)]] if shape.accounting else []
    return [[_munged(layout)], *database, [_slurmctld(hosts), *_slurmds(hosts)]]


def _munged(layout: Layout) -> Daemon:
    # Without --force it wants a socket that everybody reaches: a user's own devcluster must not have one.
    argv = [
        "munged", "--foreground", "--force", "--num-threads=2",
        f"--socket={layout.munge_socket}",
        f"--key-file={layout.munge_key}",
        f"--seed-file={layout.private}/munge.seed",
        f"--pid-file={layout.run}/munged.pid",
        f"--log-file={layout.log}/munged.log",
    ]  # fmt: skip
    return Daemon("munged", argv, layout.munge_socket)


def _mariadbd(layout: Layout) -> Daemon:
    argv = [
        "mariadbd", *_database_options(layout), "--skip-networking", "--skip-log-bin", "--performance-schema=OFF",
        f"--socket={layout.mariadb_socket}",
        f"--pid-file={layout.run}/mariadbd.pid",
        "--innodb-lock-wait-timeout=900",
        "--max-allowed-packet=16M",
    ]  # fmt: skip
    return Daemon("mariadbd", argv, layout.mariadb_socket)


def create_database(layout: Layout) -> list[str]:
    """The command that makes an empty database, open to its owner through the Unix socket alone."""
    return [
        "mariadb-install-db", *_database_options(layout), "--skip-test-db", "--auth-root-authentication-method=socket",
    ]  # fmt: skip


def _database_options(layout: Layout) -> list[str]:
    """What creating the database and running it have in common."""
    return [
        "--no-defaults", f"--datadir={layout.mariadb}", f"--user={users.me().pw_name}", "--skip-name-resolve",
        "--innodb-log-file-size=8M", "--innodb-buffer-pool-size=64M", "--innodb-flush-log-at-trx-commit=0",
    ]  # fmt: skip


def _slurmdbd(layout: Layout, hosts: Hosts) -> Daemon:
    endpoint = (hosts.controller.address, hosts.database_port)
    # StorageHost=localhost means MariaDB's Unix socket, and only this variable says where that is.
    env = {"MARIADB_UNIX_PORT": str(layout.mariadb_socket), "MYSQL_UNIX_PORT": str(layout.mariadb_socket)}
    return Daemon("slurmdbd", ["slurmdbd", "-D"], endpoint, hosts.controller, env)


def _slurmctld(hosts: Hosts) -> Daemon:
    endpoint = (hosts.controller.address, hosts.controller.port)
    return Daemon("slurmctld", ["slurmctld", "-D"], endpoint, hosts.controller)


def _slurmds(hosts: Hosts) -> list[Daemon]:
    return [
        Daemon(f"slurmd-{name}", ["slurmd", "-D", "-N", name], (host.address, host.port), host)
        for name, host in hosts.nodes.items()
    ]
