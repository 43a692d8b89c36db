"""Node and metadata processes for benches: started by the console script, ended with the `with` block."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from types import TracebackType
from typing import Any

from kvstore.node.remote import RemoteNode


class Server:
    """A child that announces itself in one JSON line."""

    def __init__(self, *arguments: str) -> None:
        # Not the console script: the project may be on the path without being installed.
        start = [sys.executable, "-c", "from kvstore.cli import main; main()"]
        self.process = subprocess.Popen([*start, *arguments, "--json"], stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"`kvstore {' '.join(arguments)}` did not start (exit {self.process.wait()})")
        self.facts: dict[str, Any] = json.loads(line)
        self.control_address: str = self.facts["control_address"]

    def __enter__(self) -> Server:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.process.terminate()
        self.process.wait(20)


class Metadata(Server):
    """A metadata service."""

    def __init__(self) -> None:
        super().__init__("metadata", "--address", "127.0.0.1:0", "--metrics-address", "")


class Node(Server):
    """A node with its own folders and host id."""

    def __init__(
        self, *, dram: str, host_id: str = "bench", metadata: str = "", slots: int = 0, more: tuple[str, ...] = ()
    ) -> None:
        self._folder = tempfile.mkdtemp(prefix="kvstore-bench-")
        super().__init__(
            "node",
            "--control-address",
            "127.0.0.1:0",
            "--metrics-address",
            "",
            "--dram",
            dram,
            "--host-id",
            host_id,
            "--socket-dir",
            self._folder,
            "--data-dir",
            self._folder,
            "--slots",
            str(slots),
            "--metadata-address",
            metadata,
            *more,
        )

    def statistics(self) -> dict[str, Any]:
        """The node's figures."""
        api = RemoteNode(self.control_address, name="bench")
        try:
            figures: dict[str, Any] = json.loads(api.stats(5.0))
            return figures
        finally:
            api.close()

    def wait_populated(self, deadline_s: float = 60.0) -> None:
        """Until the whole arena is touched."""
        api = RemoteNode(self.control_address, name="bench")
        end = time.monotonic() + deadline_s
        while time.monotonic() < end:
            figures = json.loads(api.stats(5.0))
            if figures["populated_bytes"] == figures["arena_bytes"]:
                return api.close()
            time.sleep(0.05)
        raise SystemExit("the node did not populate its memory in time")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        super().__exit__(kind, error, at)
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Node:
        return self
