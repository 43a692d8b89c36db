"""A node as people start it, with its supervisor, for tests that kill parts of it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kvstore.errors import KvStoreError
from kvstore.node.remote import RemoteNode

DEADLINE_S = 30.0
_pause = threading.Event()


def eventually(what: Callable[[], Any], deadline_s: float = DEADLINE_S) -> Any:
    """The first true value of `what`; KvStoreErrors on the way count as not yet."""
    end_s = time.monotonic() + deadline_s
    while time.monotonic() < end_s:
        with contextlib.suppress(KvStoreError):
            if value := what():
                return value
        _pause.wait(0.02)
    raise AssertionError(f"not within {deadline_s} s: {what}")


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


class SupervisedNode:
    """`kvstore node` (or another command with a node) in a process of its own. `facts`: its announcements by role."""

    def __init__(
        self, folder: Path, *arguments: str, roles: int = 1, environment: dict[str, str] | None = None
    ) -> None:
        self.folder = folder
        self.errors = folder / "stderr"
        script = Path(sys.executable).with_name("kvstore")
        places = ("--socket-dir", str(folder), "--data-dir", str(folder), "--metrics-address", "127.0.0.1:0")
        command = [script, *arguments, "--control-address", "127.0.0.1:0", *places, "--json"]
        with self.errors.open("w") as errors:
            self.process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=errors, text=True, env={**os.environ, **(environment or {})}
            )
        assert self.process.stdout is not None
        lines = [self.process.stdout.readline() for _ in range(roles)]
        assert all(lines), self.errors.read_text()
        self.facts = {facts["role"]: facts for facts in map(json.loads, lines)}
        self.control_address = self.facts["node"]["control_address"]

    def stats(self) -> dict[str, Any]:
        api = RemoteNode(self.control_address, name="stats")
        try:
            return dict(json.loads(api.stats(2.0)))
        finally:
            api.close()

    @property
    def workers(self) -> list[int]:
        """Process ids of the supervisor's children: one, or none between two."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [int(pid) for pid in children.read_text().split()] if self.process.poll() is None else []

    @property
    def worker(self) -> int:
        """Process id of the present worker."""
        return int(eventually(lambda: self.workers)[0])

    def kill_worker(self, number: signal.Signals = signal.SIGKILL) -> dict[str, Any]:
        """End the worker and return the first figures of the next one."""
        start = int(eventually(self.stats)["worker_start"])
        os.kill(self.worker, number)
        return dict(eventually(lambda: stats if (stats := self.stats())["worker_start"] == start + 1 else None))

    def wait_open(self) -> None:
        """Return when all of the node's memory may be used."""
        eventually(lambda: (stats := self.stats())["open_bytes"] == stats["arena_bytes"])

    def stop(self) -> tuple[int, str]:
        """SIGTERM; returns exit status and what was announced after the start."""
        self.process.send_signal(signal.SIGTERM)
        assert self.process.stdout is not None
        more = self.process.stdout.read()
        return self.process.wait(DEADLINE_S), more


@contextlib.contextmanager
def supervised(folder: Path, *arguments: str, **options: Any) -> Iterator[SupervisedNode]:
    node = SupervisedNode(folder, *arguments, **options)
    try:
        yield node
    finally:
        node.process.kill()  # the worker dies with it
        node.process.wait()
        if node.process.stdout is not None:
            node.process.stdout.close()
