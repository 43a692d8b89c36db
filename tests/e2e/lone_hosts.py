"""Hosts for tests: processes that share nothing but the kernel and the files outside /run and /var/lib.

A host has its own network (also in /sys, where UCX looks for it), its own /run and /var/lib (so no socket and no data
folder of another host is there), its own name, and none of our `KVSTORE_` variables. Its namespaces have no names: they
end with its last process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvstore.analytics.processes import Child
from kvstore.errors import Unreachable

LINK = "link0"
START_DEADLINE_S = 20.0
_SET_UP = """
mount -t tmpfs none /run && mount -t tmpfs none /var/lib && mount -t sysfs none /sys && hostname {name} &&
ip link set lo up && echo '{{"ready": true}}' && exec cat
"""


class Host:
    """One host at `address`. Commands run in bash, with our Python first on the path."""

    def __init__(self, name: str, address: str, folder: Path) -> None:
        self.name, self.address = name, address
        self._folder = folder
        folder.mkdir()
        self.environment = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "HOME": str(folder)}
        # The host lives as long as this process: the end of its standard input ends it, also if the test is killed.
        unshare = ["unshare", "--net", "--mount", "--uts", "--propagation", "private"]
        command = [*unshare, "sh", "-c", _SET_UP.format(name=name)]
        self._children = [Child("host", command, folder, self.environment)]
        try:
            self._children[0].receive(START_DEADLINE_S)
        except Unreachable as exc:
            self.end()
            if "Operation not permitted" in str(exc):
                pytest.skip(f"netns: this root may not make namespaces ({exc})")
            raise

    @property
    def pid(self) -> int:
        """The process that keeps the namespaces."""
        return self._children[0].pid

    def start(self, name: str, command: str) -> Child:
        """Start a command that stays; it ends with the host."""
        child = Child(name, self._inside(f"exec {command}"), self._folder, self.environment)
        self._children.append(child)
        return child

    def run(self, command: str, deadline_s: float = 60.0) -> str:
        """Standard output of a command that ends by itself, with exit status 0."""
        done = subprocess.run(
            self._inside(command),
            env=self.environment,
            cwd=self._folder,
            capture_output=True,
            text=True,
            timeout=deadline_s,
        )
        assert done.returncode == 0, f"{self.name}: {command}\n{done.stdout}{done.stderr}"
        return done.stdout

    def received_bytes(self) -> int:
        """Bytes that came over the link so far."""
        facts: list[Mapping[str, Any]] = json.loads(self.run(f"ip -json -stats link show dev {LINK}"))
        return int(facts[0]["stats64"]["rx"]["bytes"])

    def end(self) -> None:
        """End all processes."""
        for child in reversed(self._children):
            child.terminate()
        for child in reversed(self._children):
            child.wait_end(5.0)

    def _inside(self, command: str) -> list[str]:
        # Entering a mount namespace leads to its root folder.
        inside = f"cd '{self._folder}' && {command}"
        return ["nsenter", f"--target={self.pid}", "--net", "--mount", "--uts", "bash", "-c", inside]


@contextmanager
def two_hosts(folder: Path) -> Iterator[tuple[Host, Host]]:
    """Two hosts joined by one link; addresses exist only inside of them."""
    hosts: list[Host] = []
    try:
        for name, address in (("host-a", "10.77.0.1"), ("host-b", "10.77.0.2")):
            hosts.append(Host(name, address, folder / name))
        one, other = hosts
        ends = ["netns", str(one.pid), "type", "veth", "peer", "name", LINK, "netns", str(other.pid)]
        subprocess.run(["ip", "link", "add", LINK, *ends], check=True)
        for host in hosts:
            host.run(f"ip address add {host.address}/24 dev {LINK} && ip link set {LINK} up")
            host.environment |= {"HOST_A": one.address, "HOST_B": other.address}
        yield one, other
    finally:
        for host in hosts:
            host.end()
