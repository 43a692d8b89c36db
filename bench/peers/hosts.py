"""Two hosts of one machine: processes that share no network and no /run, joined by one link. Needs root.

The namespaces have no names: they end with the process that keeps them, also if this one is killed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass

from kvstore.analytics.processes import Children
from peers.sides import Place

LINK = "link0"
START_DEADLINE_S = 20.0
SET_UP = (
    "mount -t tmpfs none /run && mount -t tmpfs none /var/lib && mount -t sysfs none /sys && ip link set lo up && "
    "echo '{\"ready\": true}' && exec cat"
)


@dataclass(frozen=True, slots=True)
class Host:
    """One of the two; `inside` goes before a command that is to run on it."""

    address: str
    keeper_pid: int

    @property
    def inside(self) -> tuple[str, ...]:
        """Enter its namespaces."""
        return ("nsenter", f"--target={self.keeper_pid}", "--net", "--mount", "--uts")


def missing() -> str:
    """Why there can be no two hosts; empty if there can."""
    if os.geteuid():
        return "network namespaces need root"
    absent = [name for name in ("ip", "unshare", "nsenter") if shutil.which(name) is None]
    return f"these commands are missing: {' '.join(absent)}" if absent else ""


def two_hosts(children: Children) -> Place:
    """A host for the stores and one for the clients; they end with `children`."""
    unshare = ["unshare", "--net", "--mount", "--uts", "--propagation", "private", "sh", "-c", SET_UP]
    hosts = []
    for number in (1, 2):
        keeper = children.start(f"host-{number}", unshare)
        keeper.receive(START_DEADLINE_S)
        hosts.append(Host(f"10.77.0.{number}", keeper.pid))
    stores, clients = hosts
    ends = ["netns", str(stores.keeper_pid), "type", "veth", "peer", "name", LINK, "netns", str(clients.keeper_pid)]
    subprocess.run(["ip", "link", "add", LINK, *ends], check=True)
    for host in hosts:
        subprocess.run([*host.inside, "ip", "address", "add", f"{host.address}/24", "dev", LINK], check=True)
        subprocess.run([*host.inside, "ip", "link", "set", LINK, "up"], check=True)
    return Place(stores.address, clients.address, stores.inside, clients.inside)
