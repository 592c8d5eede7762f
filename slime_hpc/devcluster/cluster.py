"""DevCluster: bring a real Slurm up in a directory, say how it is, and take it down without a trace."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Literal

from slime_hpc.devcluster import config, daemons, files, roster, users
from slime_hpc.devcluster.config import Layout, Shape
from slime_hpc.devcluster.daemons import MARKER, ProcessRecord
from slime_hpc.devcluster.network import Network, obstacle_to_namespaces, plan_network, unrecorded_network
from slime_hpc.devcluster.roster import Daemon
from slime_hpc.devcluster.state import DaemonStatus, NodeStatus, Record, Status
from slime_hpc.errors import ClusterError, UserError
from slime_hpc.processes import read_environ

_BINARIES = ("munged", "slurmctld", "slurmd", "sinfo", "squeue", "scancel")
_NETWORK_BINARIES = ("ip", "nsenter", "unshare")
_ACCOUNTING_BINARIES = ("slurmdbd", "mariadbd", "mariadb-install-db", "sacctmgr")
_START_S = 60.0
_JOBS_END_S = 15.0
"""KillWait is 10: by then jobs that ignore SIGTERM have had their SIGKILL."""


def default_dir() -> Path:
    """``$XDG_STATE_HOME/slime-hpc/devcluster``."""
    return Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser() / "slime-hpc" / "devcluster"


class DevCluster:
    """The devcluster of one directory. ``say`` gets one line per step of ``up`` and ``down``."""

    def __init__(self, root: Path, say: Callable[[str], None] = lambda line: None) -> None:
        self.layout = Layout(root.expanduser().resolve())
        self._say = say

    @property
    def root(self) -> Path:
        return self.layout.root

    def client_env(self) -> dict[str, str]:
        """All a Slurm client needs to find this cluster; UserError if there is none."""
        if self.status().state == "down":
            raise UserError(f"no devcluster is up in {self.root}; start it: {self._command('up')}")
        return {"SLURM_CONF": str(self.layout.slurm_conf)}

    # Reporting

    def status(self) -> Status:
        record = self._load()
        if record is None:
            return Status(self.root, self.layout.slurm_conf)
        found = tuple(self._daemon_status(record, daemon) for daemon in self._roster(record))
        node_states = self._node_states() if all(daemon.alive for daemon in found) else {}
        nodes = tuple(
            NodeStatus(node, partition, record.network.hosts.nodes[node].address, node_states.get(node))
            for partition, names in record.shape.partitions.items()
            for node in names
        )
        return Status(
            self.root,
            self.layout.slurm_conf,
            self._overall(record, found, node_states),
            record.shape,
            record.network.kind,
            record.network.note,
            found,
            nodes,
        )

    def _overall(
        self, record: Record, found: tuple[DaemonStatus, ...], node_states: dict[str, str]
    ) -> Literal["up", "partial", "down"]:
        if not any(daemon.alive for daemon in found):
            return "down"
        return "up" if node_states and record.network.is_whole() else "partial"

    def _daemon_status(self, record: Record, daemon: Daemon) -> DaemonStatus:
        process = record.processes.get(daemon.name)
        alive = process is not None and self._is_alive(process)
        return DaemonStatus(daemon.name, process.pid if process else None, alive)

    def _is_alive(self, process: ProcessRecord) -> bool:
        if self.layout.state.stat().st_uid != os.geteuid():
            return daemons.is_same_process(process)
        return daemons.is_alive(process, self.root)

    def _node_states(self) -> dict[str, str]:
        """Slurm's word for each node; empty if the controller does not answer."""
        try:
            text = self._tool("sinfo", "--Node", "--noheader", "--format=%N %T", timeout_s=15)
        except ClusterError:
            return {}  # no answer is the answer; whoever waits for one reports the logs
        return dict(line.split() for line in text.splitlines())

    # Starting

    def up(self, shape: Shape) -> Status:
        """Start what does not run; nothing if all does. A failed start is taken back, its logs kept."""
        config.require_usable_path(self.root)
        users.me()  # a nameless user learns it now, not half-way
        self._require_installed(shape)
        obstacle = obstacle_to_namespaces(shape.netns)
        shape = replace(shape, netns=obstacle is None)
        with users.umask():
            files.claim_directory(self.layout)
            with self._locked():
                return self._up(shape, obstacle)

    def _up(self, shape: Shape, obstacle: str | None) -> Status:
        record, status = self._load(), self.status()
        if record is not None and status.state != "down":
            self._require_same_shape(record.shape, shape)
        if status.state == "up":
            self._say(f"already up in {self.root}")
            self._admit_users(shape)
            return status
        if record is not None and record.complete and status.state == "partial":
            self._repair(record, status)
        else:
            self._start(shape, obstacle, record)
        return self.status()

    def _require_same_shape(self, existing: Shape, asked: Shape) -> None:
        was, wanted = asdict(existing), asdict(asked)
        different = [f"{key} {was[key]}, not {wanted[key]}" for key in was if was[key] != wanted[key]]
        if different:
            raise UserError(
                f"the devcluster in {self.root} runs with {'; '.join(different)}; ask for the same, "
                f"or take it down first: {self._command('down')}"
            )

    def _require_installed(self, shape: Shape) -> None:
        accounting = _ACCOUNTING_BINARIES if shape.accounting else ()
        network = _NETWORK_BINARIES if shape.netns and users.is_root() else ()
        daemons.require_binaries((*_BINARIES, *accounting, *network))

    def _start(self, shape: Shape, obstacle: str | None, remains: Record | None) -> None:
        if remains is not None:
            self._say("removing what an earlier start has left")
            self._take_down(remains)
        record = Record(shape, plan_network(self.root, shape.nodes, obstacle))
        record.save(self.layout.state)
        try:
            files.write_files(self.layout, shape, record.network.hosts)
            record.network.create()
            self._say(f"network: {record.network.note}")
            self._boot(record)
            record.complete = True
            record.save(self.layout.state)
        except BaseException:
            self._say(f"the start failed; stopping what was started, logs stay in {self.layout.log}")
            self._take_down(record)
            raise

    def _repair(self, record: Record, status: Status) -> None:
        if not record.network.is_whole():
            raise ClusterError(f"the network of {self.root} is damaged; take it down, then up: {self._command('down')}")
        dead = [daemon.name for daemon in status.daemons if not daemon.alive]
        self._say(f"half dead: {', '.join(dead) or 'slurmctld does not answer'}; starting what is missing")
        try:
            self._boot(record)
        except BaseException:
            self._say(f"the repair failed; jobs are left alone. To begin afresh: {self._command('down')}")
            raise

    def _boot(self, record: Record) -> None:
        """Every daemon that does not run, stage by stage."""
        for stage in roster.stages(self.layout, record.shape, record.network.hosts):
            missing = [daemon for daemon in stage if not self._daemon_status(record, daemon).alive]
            for daemon in missing:
                self._prepare(record, daemon)
                self._launch(record, daemon)
            for daemon in missing:
                self._await_daemon(record, daemon)
            if missing:
                self._say(f"up: {', '.join(daemon.name for daemon in missing)}")
        self._await_nodes(record)

    def _prepare(self, record: Record, daemon: Daemon) -> None:
        """What must exist before this daemon starts for the first time."""
        if record.complete:
            return
        if daemon.name == "mariadbd":
            self._tool(*roster.create_database(self.layout), timeout_s=120)
            self._say("database created")
        if daemon.name == "slurmctld" and record.shape.accounting:
            self._tool("sacctmgr", "--immediate", stdin=config.accounting_commands(), timeout_s=120)
            self._say(f"account {config.ACCOUNT}, qos normal and {config.QOS} made")
            self._admit_users(record.shape)

    def _admit_users(self, shape: Shape) -> None:
        """Let everyone submit whose jobs we can run; where accounts are not asked for, everyone may already."""
        if not shape.accounting:
            return
        columns = ("--noheader", "--parsable2", "list", "associations", f"account={config.ACCOUNT}", "format=user")
        known = self._tool("sacctmgr", *columns).split()
        missing = [name for name in users.submitters() if name not in known]
        if missing:
            self._tool("sacctmgr", "--immediate", stdin=config.admission_commands(missing), timeout_s=120)
            self._say(f"may submit: {', '.join(missing)}")

    def _launch(self, record: Record, daemon: Daemon) -> None:
        argv = list(daemon.argv)
        if daemon.host is not None:
            argv = record.network.on_host(daemon.host, self.layout.hosts, argv)
        env = {**self._env(), **daemon.env}
        record.processes[daemon.name] = daemons.start(argv, env=env, log=self._output(daemon), cwd=self.layout.log)
        record.save(self.layout.state)

    def _await_daemon(self, record: Record, daemon: Daemon) -> None:
        def explain() -> str:
            return f"its last words, from {self._output(daemon)}:\n{daemons.tail(self._output(daemon))}"

        def is_ready() -> bool:
            if not self._daemon_status(record, daemon).alive:
                raise ClusterError(f"{daemon.name} ended as soon as it was started; {explain()}")
            return daemons.accepts(daemon.endpoint)

        daemons.wait_until(f"{daemon.name} listens", is_ready, timeout_s=_START_S, explain=explain)

    def _await_nodes(self, record: Record) -> None:
        def missing() -> dict[str, str]:
            states = self._node_states()
            seen = {node: states.get(node, "not seen") for node in record.shape.nodes}
            return {node: state for node, state in seen.items() if not _is_registered(state)}

        daemons.wait_until(
            "nodes register",
            lambda: not missing(),
            timeout_s=_START_S,
            explain=lambda: f"still missing: {missing()}; logs are in {self.layout.log}",
        )

    # Stopping

    def down(self) -> bool:
        """Leave no process, namespace or interface; only logs stay. False if nothing was there."""
        with files.naming(self.root):
            if not self.root.exists():
                return False
        with self._locked():
            try:
                record = self._load()
            except ClusterError as error:
                self._say(str(error))
                record = None  # processes and network are found without it, only not in the gentlest order
            if record is None:
                return self._take_down_unrecorded()
            self._end_jobs(record)
            self._take_down(record)
            return True

    def _take_down_unrecorded(self) -> bool:
        killed = self._kill_strays(unrecorded_network(self.root))
        if not self.layout.state.exists():
            return killed > 0
        files.remove_files(self.layout)
        return True

    def _take_down(self, record: Record) -> None:
        for stage in reversed(roster.stages(self.layout, record.shape, record.network.hosts)):
            processes = [record.processes[daemon.name] for daemon in stage if daemon.name in record.processes]
            daemons.stop(processes, self.root)
        self._kill_strays(record.network)
        files.remove_files(self.layout)

    def _kill_strays(self, network: Network) -> int:
        """Kill what daemons left behind and remove the network; the number of processes killed."""
        killed = daemons.kill_all(lambda: self._strays(network))
        if killed:
            self._say(f"killed {killed} processes that jobs or daemons had left")
        network.remove()
        return killed

    def _strays(self, network: Network) -> list[int]:
        candidates = {*network.pids(), *(pid for pid in daemons.all_pids() if self._is_ours(pid))}
        return [pid for pid in candidates if daemons.is_running(pid)]

    def _is_ours(self, pid: int) -> bool:
        """True for daemons and slurmstepds by our marker, for processes of jobs by what slurmd told them."""
        environ = read_environ(pid)
        if f"{MARKER}={self.root}".encode() in environ:
            return True
        in_job = any(entry.startswith(b"SLURMD_NODENAME=") for entry in environ)
        return in_job and f"SLURM_CONF={self.layout.slurm_conf}".encode() in environ

    def _end_jobs(self, record: Record) -> None:
        """Give jobs SIGTERM and KillWait; what then still runs is killed as a stray."""
        controller = record.processes.get("slurmctld")
        if controller is None or not daemons.is_alive(controller, self.root):
            return
        try:
            jobs = self._job_ids()
            if jobs:
                self._say(f"cancelling {len(jobs)} jobs")
                self._tool("scancel", *jobs)
            daemons.wait_until(
                "jobs end", lambda: not self._job_ids(), timeout_s=_JOBS_END_S, explain=lambda: "gave up"
            )
        except ClusterError as error:
            self._say(f"not all jobs ended by themselves: {error}")

    def _job_ids(self) -> list[str]:
        """Of whole jobs: ``12`` for ``12+1`` and ``12_3``."""
        text = self._tool("squeue", "--noheader", "--format=%i", timeout_s=10)
        return sorted({line.split("+")[0].split("_")[0] for line in text.split()})

    # Shared

    def _roster(self, record: Record) -> Iterator[Daemon]:
        for stage in roster.stages(self.layout, record.shape, record.network.hosts):
            yield from stage

    def _output(self, daemon: Daemon) -> Path:
        return self.layout.log / f"{daemon.name}.out"

    def _env(self) -> dict[str, str]:
        """Made from nothing, so that no SLURM_* or SBATCH_* of the caller's reaches a daemon or a job."""
        user = users.me()
        return {
            "PATH": daemons.PATH,
            "HOME": user.pw_dir,
            "USER": user.pw_name,
            "LANG": "C.UTF-8",
            "SLURM_CONF": str(self.layout.slurm_conf),
            MARKER: str(self.root),
        }

    def _tool(self, *argv: str, stdin: str = "", timeout_s: float = 30) -> str:
        return daemons.run_tool(argv, env=self._env(), stdin=stdin, timeout_s=timeout_s)

    def _command(self, verb: str) -> str:
        option = "" if self.root == default_dir().resolve() else f" --dir {self.root}"
        return f"slime-hpc devcluster {verb}{option}"

    def _load(self) -> Record | None:
        """Root's record is for all to read; another's is its owner's alone, as is its Slurm."""
        with files.naming(self.root):
            if not self.layout.state.exists():
                return None
            owner = self.layout.state.stat().st_uid
            if owner not in (os.geteuid(), 0):
                name = users.name_of(owner)
                raise UserError(
                    f"the devcluster in {self.root} is {name}'s, for jobs of {name} only; use another --dir"
                )
            return Record.load(self.layout.state)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """One `up` or `down` at a time; the lock is on the directory, which both leave in place."""
        with files.naming(self.root):
            files.require_owner(self.root)
            fd = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY)
        try:
            self._lock(fd)
            yield
        finally:
            os.close(fd)

    def _lock(self, fd: int) -> None:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"another devcluster command is at work in {self.root}; wait until it is done") from None


def _is_registered(node_state: str) -> bool:
    """False for ``down``, ``unknown``, ``inval`` and for ``idle*``, which does not answer."""
    return not node_state.endswith("*") and not node_state.startswith(("down", "unk", "inval", "not seen"))
