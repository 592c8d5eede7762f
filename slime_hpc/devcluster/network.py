"""Where the hosts of a devcluster live: a network namespace each, or, without the rights for it, loopback."""

from __future__ import annotations

import hashlib
import ipaddress
import json
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from slime_hpc.devcluster import daemons, users
from slime_hpc.devcluster.config import CONTROLLER_PORT, DATABASE_PORT, NODE_PORT, Host, Hosts
from slime_hpc.errors import ClusterError

# Reserved for benchmarks inside one installation (RFC 2544), so hardly any site routes it.
_SUBNETS = tuple(ipaddress.IPv4Network("198.18.0.0/15").subnets(new_prefix=24))
_NETNS_DIR = Path("/run/netns")
_CONTROLLER = "ctl"
_FIRST_NODE = 11
_LOGIN = 254
_FIRST_PORT = 20000
"""Ports from here to 32768 are below Linux's ephemeral range."""


class Network(Protocol):
    """Where hosts live, how a process is started on one, and which processes are there."""

    @property
    def kind(self) -> str: ...

    @property
    def note(self) -> str:
        """What the user should know about it."""

    @property
    def hosts(self) -> Hosts: ...

    def to_json(self) -> dict[str, Any]: ...

    def create(self) -> None: ...

    def is_whole(self) -> bool: ...

    def remove(self) -> None:
        """Also what an earlier, interrupted ``create`` left."""

    def on_host(self, host: Host, hosts_file: Path, argv: Sequence[str]) -> list[str]:
        """The command that runs ``argv`` on a host; it execs, so the pid stays the same."""

    def pids(self) -> list[int]:
        """Processes known to be the devcluster's because of where they run."""


def obstacle_to_namespaces(wanted: bool) -> str | None:
    """Why nodes get no namespaces of their own; None if they do."""
    if not wanted:
        return "--no-netns"
    if not users.is_root():
        return "not root"
    trial = subprocess.run(
        ["unshare", "--net", "--uts", "--mount", "true"], capture_output=True, text=True, check=False
    )
    return None if trial.returncode == 0 else trial.stderr.strip()


def plan_network(root: Path, node_names: Sequence[str], obstacle: str | None) -> Network:
    """Namespaces on a free subnet; where there is an obstacle to them, loopback, on free ports."""
    if obstacle is None:
        return NamespaceNetwork(_tag(root), _free_subnet(_number(root)), tuple(node_names))
    return LoopbackNetwork(_free_ports(_number(root), len(node_names) + 2), tuple(node_names), obstacle)


def network_from_json(value: Mapping[str, Any], node_names: Sequence[str]) -> Network:
    if value["kind"] == "namespaces":
        return NamespaceNetwork(value["tag"], value["subnet"], tuple(node_names))
    return LoopbackNetwork(value["first_port"], tuple(node_names), value["obstacle"])


def unrecorded_network(root: Path) -> Network:
    """For cleaning up where the record of what was created is gone: it knows names, not addresses."""
    return NamespaceNetwork(_tag(root), str(_SUBNETS[0]), ())


@dataclass(frozen=True)
class NamespaceNetwork:
    """One network and UTS namespace per host; the machine itself is the login node.

    The bridge is a device of the controller's namespace: the machine gets a single interface, its
    firewall (Docker's drops bridged packets) has no say between nodes, and no daemon listens outside.
    """

    tag: str
    subnet: str
    node_names: tuple[str, ...]

    kind = "namespaces"

    @property
    def note(self) -> str:
        return f"each node has a network namespace, host name and address of its own ({self.subnet})"

    @property
    def hosts(self) -> Hosts:
        nodes = {name: Host(name, self._address(_FIRST_NODE + i), NODE_PORT) for i, name in enumerate(self.node_names)}
        return Hosts(Host(_CONTROLLER, self._address(1), CONTROLLER_PORT), DATABASE_PORT, nodes)

    def _address(self, number: int) -> str:
        return str(ipaddress.IPv4Network(self.subnet)[number])

    @property
    def interface(self) -> str:
        """The login node's interface; Linux allows 15 characters."""
        return f"slime{self.tag}"

    def namespace(self, host_name: str) -> str:
        return f"slime{self.tag}-{host_name}"

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "tag": self.tag, "subnet": self.subnet}

    def create(self) -> None:
        switch = self.namespace(_CONTROLLER)
        for name in (_CONTROLLER, *self.node_names):
            _ip("netns", "add", self.namespace(name))
            _ip("-n", self.namespace(name), "link", "set", "lo", "up")
        _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        self._configure(self.hosts.controller.address, "bridge", switch)
        for name, host in self.hosts.nodes.items():
            _ip(
                "-n", switch, "link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", self.namespace(name)
            )
            _ip("-n", switch, "link", "set", name, "master", "bridge", "up")
            self._configure(host.address, "eth0", self.namespace(name))
        _ip("link", "add", self.interface, "type", "veth", "peer", "name", "login", "netns", switch)
        _ip("-n", switch, "link", "set", "login", "master", "bridge", "up")
        self._configure(self._address(_LOGIN), self.interface)

    def _configure(self, address: str, device: str, namespace: str | None = None) -> None:
        where = ["-n", namespace] if namespace else []
        _ip(*where, "address", "add", f"{address}/24", "dev", device)
        _ip(*where, "link", "set", device, "up")

    def is_whole(self) -> bool:
        existing = {path.name for path in self._namespaces()}
        wanted = {self.namespace(name) for name in (_CONTROLLER, *self.node_names)}
        return wanted <= existing and self._interface_exists()

    def remove(self) -> None:
        if self._interface_exists():
            _ip("link", "delete", self.interface)
        for path in self._namespaces():
            _ip("netns", "delete", path.name)

    def on_host(self, host: Host, hosts_file: Path, argv: Sequence[str]) -> list[str]:
        # Not `ip netns exec`: it mounts a fresh /sys, and slurmd dies without /sys/fs/cgroup.
        # Propagation "slave", so that `down` of another devcluster can free namespaces mounted here.
        enter = ["nsenter", f"--net={_NETNS_DIR / self.namespace(host.name)}"]
        isolate = ["unshare", "--uts", "--mount", "--propagation", "slave"]
        script = 'mount --bind "$1" /etc/hosts && hostname "$2" && shift 2 && exec "$@"'
        return [*enter, *isolate, "sh", "-c", script, "sh", str(hosts_file), host.name, *argv]

    def pids(self) -> list[int]:
        ours = {_identity(path) for path in self._namespaces()}
        return [pid for pid in daemons.all_pids() if _identity(Path(f"/proc/{pid}/ns/net")) in ours - {None}]

    def _namespaces(self) -> list[Path]:
        return sorted(_NETNS_DIR.glob(f"slime{self.tag}-*"))

    def _interface_exists(self) -> bool:
        return Path("/sys/class/net", self.interface).exists()


@dataclass(frozen=True)
class LoopbackNetwork:
    """All hosts share the machine's name and network; nodes differ by address 127.0.0.N and port."""

    first_port: int
    node_names: tuple[str, ...]
    obstacle: str

    kind = "loopback"

    @property
    def note(self) -> str:
        return (
            f"no namespaces ({self.obstacle}): nodes share this machine's host name and network, have addresses "
            "127.0.0.N, and their ports are open on all interfaces, guarded by munge"
        )

    @property
    def hosts(self) -> Hosts:
        name = socket.gethostname().split(".")[0]
        nodes = {
            node: Host(name, f"127.0.0.{_FIRST_NODE + i}", self.first_port + 2 + i)
            for i, node in enumerate(self.node_names)
        }
        return Hosts(Host(name, "127.0.0.1", self.first_port), self.first_port + 1, nodes)

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "first_port": self.first_port, "obstacle": self.obstacle}

    def create(self) -> None:
        """Loopback addresses are there already."""

    def is_whole(self) -> bool:
        return True

    def remove(self) -> None:
        """Nothing was created."""

    def on_host(self, host: Host, hosts_file: Path, argv: Sequence[str]) -> list[str]:
        return list(argv)

    def pids(self) -> list[int]:
        return []


def _number(root: Path) -> int:
    """The same for the same directory, so that leftovers are found again; spreads directories apart."""
    return int.from_bytes(hashlib.sha256(str(root).encode()).digest()[:3], "big")


def _tag(root: Path) -> str:
    return f"{_number(root):06x}"


def _identity(namespace: Path) -> tuple[int, int] | None:
    try:
        stat = namespace.stat()
    except OSError:
        return None  # the process has ended, or the namespace was deleted: nothing of ours is there
    return stat.st_dev, stat.st_ino


def _free_subnet(seed: int) -> str:
    routes = json.loads(_ip("-json", "-4", "route", "show", "table", "all"))
    taken = [ipaddress.IPv4Network(r["dst"], strict=False) for r in routes if r["dst"] != "default"]
    for offset in range(len(_SUBNETS)):
        subnet = _SUBNETS[(seed + offset) % len(_SUBNETS)]
        if not any(subnet.overlaps(other) for other in taken):
            return str(subnet)
    raise ClusterError("every /24 of 198.18.0.0/15 is routed on this machine; take another devcluster down first")


def _free_ports(seed: int, count: int) -> int:
    """First of ``count`` consecutive TCP ports that nobody listens on."""
    blocks = (32768 - _FIRST_PORT) // count
    for offset in range(blocks):
        first = _FIRST_PORT + (seed + offset) % blocks * count
        if all(_is_free(port) for port in range(first, first + count)):
            return first
    raise ClusterError(f"no {count} consecutive free ports from {_FIRST_PORT} to 32767; see ss -ltn")


def _is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False  # taken, which is the answer
        return True


def _ip(*words: str) -> str:
    return daemons.run_tool(["ip", *words], env={"PATH": daemons.PATH})
