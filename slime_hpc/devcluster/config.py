"""From a shape and a network to the text of Slurm's configuration files. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from slime_hpc.devcluster import users
from slime_hpc.errors import UserError

CLUSTER_NAME = "devcluster"
ACCOUNT = "dev"
QOS = "high"
CONTROLLER_PORT = 6817
NODE_PORT = 6818
DATABASE_PORT = 6819

MEM_PER_NODE_MB = 256 * 1024
_MAX_NODES = 64
_MAX_GPUS_PER_NODE = 16
_MAX_UNIX_SOCKET_BYTES = 107


@dataclass(frozen=True)
class Shape:
    """What the user asked for. Nodes are n1, n2, …, those of ``train`` first."""

    train_nodes: int = 2
    rollout_nodes: int = 2
    gpus_per_node: int = 4
    cpus_per_node: int = 8
    accounting: bool = True
    netns: bool = True
    """A network namespace for each node; False also where they cannot be made."""

    def __post_init__(self) -> None:
        _require_between("train-nodes", self.train_nodes, 1, _MAX_NODES)
        _require_between("rollout-nodes", self.rollout_nodes, 1, _MAX_NODES)
        _require_between("gpus-per-node", self.gpus_per_node, 0, _MAX_GPUS_PER_NODE)
        _require_between("cpus-per-node", self.cpus_per_node, 1, 1024)

    @property
    def nodes(self) -> tuple[str, ...]:
        return tuple(f"n{i}" for i in range(1, self.train_nodes + self.rollout_nodes + 1))

    @property
    def partitions(self) -> dict[str, tuple[str, ...]]:
        """Nodes by partition; the first partition is the default one."""
        return {"train": self.nodes[: self.train_nodes], "rollout": self.nodes[self.train_nodes :]}


def _require_between(option: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise UserError(f"--{option} {value}: must be from {low} to {high}")


@dataclass(frozen=True)
class Host:
    """Where a daemon lives: the host name it sees, and the address and port others reach it by."""

    name: str
    address: str
    port: int


@dataclass(frozen=True)
class Hosts:
    """Every host of one devcluster; ``nodes`` by node name."""

    controller: Host
    database_port: int
    nodes: dict[str, Host]


@dataclass(frozen=True)
class Layout:
    """Every file of a devcluster, below one directory."""

    root: Path

    @property
    def state(self) -> Path:
        return self.root / "state.json"

    @property
    def etc(self) -> Path:
        return self.root / "etc"

    @property
    def slurm_conf(self) -> Path:
        return self.etc / "slurm.conf"

    @property
    def hosts(self) -> Path:
        """Bind-mounted over /etc/hosts on every node."""
        return self.etc / "hosts"

    @property
    def log(self) -> Path:
        return self.root / "log"

    @property
    def run(self) -> Path:
        return self.root / "run"

    @property
    def private(self) -> Path:
        """Mode 0700: munge's key and the accounting database."""
        return self.root / "private"

    @property
    def munge_key(self) -> Path:
        return self.private / "munge.key"

    @property
    def munge_socket(self) -> Path:
        return self.run / "munge.sock"

    @property
    def mariadb(self) -> Path:
        return self.private / "mariadb"

    @property
    def mariadb_socket(self) -> Path:
        return self.private / "mariadb.sock"

    @property
    def controller_state(self) -> Path:
        return self.root / "controller"

    @property
    def spool(self) -> Path:
        return self.root / "spool"

    @property
    def gpu_devices(self) -> Path:
        return self.root / "dev"

    @property
    def perishable(self) -> tuple[Path, ...]:
        """All that ``down`` removes: everything but the logs."""
        return (self.etc, self.run, self.private, self.controller_state, self.spool, self.gpu_devices, self.state)


def require_usable_path(root: Path) -> None:
    """UserError if Slurm could not live under ``root``."""
    if not re.fullmatch(r"[A-Za-z0-9_./+-]+", str(root)):
        raise UserError(
            f"the devcluster directory {str(root)!r} has characters that slurm.conf cannot quote; "
            "choose one of letters, digits and _ . / + - with --dir"
        )
    # slurmstepd's socket is the longest: the last node's name, the largest job id, step and component.
    longest = Layout(root).spool / "n128" / "n128_67108863.4294967291.128"
    excess = len(str(longest)) - _MAX_UNIX_SOCKET_BYTES
    if excess > 0:
        raise UserError(
            f"the devcluster directory {root} is {excess} bytes too long: Unix sockets below it may have "
            f"{_MAX_UNIX_SOCKET_BYTES} bytes of path; choose a shorter one with --dir"
        )


def slurm_conf(layout: Layout, shape: Shape, hosts: Hosts) -> str:
    """Settings for short runs: seconds, where a site waits for minutes."""
    user = users.me().pw_name
    ports = {host.port for host in hosts.nodes.values()}
    sections = [
        f"""\
ClusterName={CLUSTER_NAME}
SlurmctldHost={hosts.controller.name}({hosts.controller.address})
SlurmctldPort={hosts.controller.port}
SlurmdPort={min(ports)}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={layout.munge_socket},cred_expire=10
StateSaveLocation={layout.controller_state}
SlurmdSpoolDir={layout.spool}/%n
SlurmctldPidFile={layout.run}/slurmctld.pid
SlurmdPidFile={layout.run}/slurmd.%n.pid
SlurmctldLogFile={layout.log}/slurmctld.log
SlurmdLogFile={layout.log}/slurmd.%n.log
MailProg=/bin/true
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/linux
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=2,bf_hetjob_immediate,sched_interval=2,batch_sched_delay=0
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
EnforcePartLimits=ALL
ReturnToService=2
KillWait=10
SlurmdTimeout=60
BatchStartTimeout=60
UnkillableStepTimeout=60""",
        *_accounting_section(layout, shape, hosts),
        *(["GresTypes=gpu"] if shape.gpus_per_node else []),
        *(_node_line(name, host, shape) for name, host in hosts.nodes.items()),
        *_partition_lines(shape),
    ]
    return "\n".join(sections) + "\n"


def _accounting_section(layout: Layout, shape: Shape, hosts: Hosts) -> Iterator[str]:
    if not shape.accounting:
        yield "AccountingStorageType=accounting_storage/none"
        return
    # Clients of slurmdbd take the munge socket from AccountingStoragePass, not from AuthInfo.
    yield f"""\
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost={hosts.controller.address}
AccountingStoragePort={hosts.database_port}
AccountingStoragePass={layout.munge_socket}
AccountingStorageEnforce=associations,limits,qos"""
    if shape.gpus_per_node:
        yield "AccountingStorageTRES=gres/gpu"


def _node_line(name: str, host: Host, shape: Shape) -> str:
    gres = f" Gres=gpu:{shape.gpus_per_node}" if shape.gpus_per_node else ""
    return (
        f"NodeName={name} NodeHostname={host.name} NodeAddr={host.address} Port={host.port} "
        f"CPUs={shape.cpus_per_node} RealMemory={MEM_PER_NODE_MB}{gres} State=UNKNOWN"
    )


def _partition_lines(shape: Shape) -> Iterator[str]:
    for index, (partition, nodes) in enumerate(shape.partitions.items()):
        default = "YES" if index == 0 else "NO"
        yield (
            f"PartitionName={partition} Nodes={','.join(nodes)} Default={default} State=UP "
            "DefaultTime=1:00:00 MaxTime=1-00:00:00"
        )


def gres_conf(shape: Shape, devices: str) -> str:
    """``devices``: numbered character devices, e.g. ``/dev/tty[0-3]``; slurmd only looks that they exist."""
    if not shape.gpus_per_node:
        return ""
    return f"AutoDetect=off\nNodeName={','.join(shape.nodes)} Name=gpu File={devices}\n"


def slurmdbd_conf(layout: Layout, hosts: Hosts) -> str:
    """The database is reached by its Unix socket and the user's own identity: no port, no password."""
    user = users.me().pw_name
    return f"""\
DbdHost={hosts.controller.name}
DbdAddr={hosts.controller.address}
DbdPort={hosts.database_port}
SlurmUser={user}
AuthType=auth/munge
AuthInfo=socket={layout.munge_socket}
PidFile={layout.run}/slurmdbd.pid
LogFile={layout.log}/slurmdbd.log
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser={user}
StorageLoc=slurm
"""


def accounting_commands() -> str:
    """What sacctmgr is told, in one session, before anyone can be admitted."""
    return f"""\
add cluster {CLUSTER_NAME}
add qos {QOS} priority=1000
add account {ACCOUNT} description={CLUSTER_NAME} organization={CLUSTER_NAME} qos=normal,{QOS}
"""


def admission_commands(names: Iterable[str]) -> str:
    """What sacctmgr is told so that these users may submit, with ``dev`` as default account."""
    # A user to the line: sacctmgr reads lines of 4 KB.
    return "".join(
        f"add user {name} account={ACCOUNT} defaultaccount={ACCOUNT}\nmodify user {name} set defaultaccount={ACCOUNT}\n"
        for name in names
    )


def hosts_file(hosts: Hosts) -> str:
    """/etc/hosts of every node, so that controller and nodes resolve each other and themselves."""
    lines = ["127.0.0.1 localhost", "::1 localhost"]
    lines += [f"{host.address} {host.name}" for host in (hosts.controller, *hosts.nodes.values())]
    return "\n".join(lines) + "\n"
