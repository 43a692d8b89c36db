"""Nodes that offer NIXL, in processes of their own, with what serves them; what a process must not leak."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvstore.model.values import NodeInfo
from kvstore.node.remote import ask_info
from kvstore.transport.nixl_agent import _LIVING
from tests.chaos.pool_processes import Process, Processes, stats_of, until


@contextlib.contextmanager
def only_tcp() -> Iterator[None]:
    """Agents that are made meanwhile, here and in processes started from here, use TCP, as between hosts."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("UCX_TLS", "tcp")
        yield


def nixl_processes(pid: int) -> list[int]:
    """Processes of NIXL under the node process `pid`: the one that forks, and the one that serves."""
    forking = [child for child in _children(pid) if b"nixl_owner" in _read(f"/proc/{child}/cmdline")]
    return forking + [child for parent in forking for child in _children(parent)]


def nixl_server(pid: int) -> int:
    """What serves NIXL for the node process `pid`, in a moment at least."""
    return until(lambda: nixl_processes(pid)[1:])[0]


def _children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task")
    with contextlib.suppress(OSError):
        return [int(child) for task in tasks.iterdir() for child in _read(f"{task}/children").split()]
    return []


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError:
        return b""


def state_of(pid: int) -> str:
    """R, S, T, Z, … as the kernel has it; empty: it is gone."""
    return _read(f"/proc/{pid}/stat").decode().rpartition(")")[2].strip()[:1]


@dataclass
class NixlNode:
    """One node: its process, and those of NIXL under it."""

    process: Process
    info: NodeInfo
    socket_path: str

    @property
    def nixl(self) -> int:
        """Process id of what serves now."""
        return nixl_server(self.process.pid)

    def stop(self) -> None:
        """SIGSTOP for all; returns when all stand still."""
        self.process.stop()
        for pid in nixl_processes(self.process.pid):
            os.kill(pid, signal.SIGSTOP)
            until(lambda pid=pid: state_of(pid) in ("T", "Z", ""))  # type: ignore[misc]

    def go_on(self) -> None:
        for pid in nixl_processes(self.process.pid):
            os.kill(pid, signal.SIGCONT)
        self.process.go_on()

    def stats(self) -> dict[str, Any]:
        return stats_of(self.process)


def nixl_node(processes: Processes, name: str, **settings: Any) -> NixlNode:
    """Started with `transport=nixl`; the same name again is the same node, restarted."""
    process = processes.node(name, **{"transport": "nixl", **settings})
    return NixlNode(process, ask_info(process.said["control_address"], 5.0), process.said["socket_path"])


@dataclass(frozen=True)
class Held:
    """What this process holds of the system, to be compared before and after."""

    threads: int
    descriptors: int
    agents: int
    children: int

    @classmethod
    def now(cls) -> Held:
        return cls(
            threading.active_count(),
            sum(1 for _ in Path("/proc/self/fd").iterdir()),
            sum(agent._agent is not None for agent in _LIVING),
            len(_children(os.getpid())),
        )


class Once:
    """Runs `action` at the first call, which comes from whichever thread reads first."""

    def __init__(self, action: Callable[[], object]) -> None:
        self._action = action
        self._lock = threading.Lock()
        self.happened = False

    def __call__(self) -> None:
        with self._lock:
            first, self.happened = not self.happened, True
        if first:
            self._action()
