"""Which of a node's addresses the other nodes reach it by."""

from __future__ import annotations

import os
import socket

import psutil

from slime_hpc.errors import ClusterError

ONE_HOST = "SLIME_HPC_ONE_HOST"
"""Set in the environment of a run on one host: then nothing of it is to be reached from others."""
LOOPBACK = "127.0.0.1"


def node_name() -> str:
    """Slurm's name of this node."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname().split(".")[0]


def own_address(peer: str) -> str:
    """The local address of the route to ``peer``, a node's name; sends nothing.

    Not the address of our own host name, which many hosts resolve to a loopback one.
    """
    if ONE_HOST in os.environ:
        return LOOPBACK
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)
            address: str = probe.getsockname()[0]
    except OSError as error:
        raise ClusterError(
            f"node {node_name()} finds no way to node {peer} ({error}); do the two partitions share a network?"
        ) from error
    return address


def interface_of(address: str) -> str:
    """Name of the network interface that has this local address."""
    for name, addresses in psutil.net_if_addrs().items():
        if address in (entry.address for entry in addresses):
            return name
    raise ClusterError(f"node {node_name()} has no network interface with address {address}")


def free_ports(host: str, count: int) -> list[int]:
    """Ports that nobody listens on at this moment."""
    listeners = [socket.create_server((host, 0)) for _ in range(count)]
    ports = [int(listener.getsockname()[1]) for listener in listeners]
    for listener in listeners:
        listener.close()
    return ports
