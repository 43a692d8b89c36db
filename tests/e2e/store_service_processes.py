"""Server processes for tests of the store service: started by the console script, ended with the `with` block."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvstore.node.remote import RemoteNode

STOP_DEADLINE_S = 20.0


@contextlib.contextmanager
def server(*arguments: str) -> Iterator[dict[str, Any]]:
    """Run `kvstore ARGUMENTS --json`; gives what it announces."""
    script = Path(sys.executable).with_name("kvstore")
    with subprocess.Popen([script, *arguments, "--json"], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line, f"kvstore {' '.join(arguments)} did not start"
            yield json.loads(line)
        finally:
            process.terminate()
            try:
                process.wait(STOP_DEADLINE_S)
            finally:
                process.kill()


def wait_populated(address: str) -> None:
    """Return when all of the node's memory is open for slots; until then it may be called full."""
    api, pause = RemoteNode(address, name="populated"), threading.Event()
    try:
        for _ in range(1000):
            figures = json.loads(api.stats(5.0))
            if figures["open_bytes"] == figures["arena_bytes"]:
                return
            pause.wait(0.02)
    finally:
        api.close()
    raise AssertionError(f"the node at {address} did not prepare its memory within 20 s")


@contextlib.contextmanager
def node(folder: Path, dram: str, *more: str, host_id: str = "test") -> Iterator[dict[str, Any]]:
    """A node with its own folders, on free ports."""
    folder.mkdir()
    addresses = ("--control-address", "127.0.0.1:0", "--metrics-address", "")
    places = ("--socket-dir", str(folder), "--data-dir", str(folder), "--host-id", host_id)
    with server("node", *addresses, *places, "--dram", dram, *more) as facts:
        wait_populated(facts["control_address"])
        yield facts


@contextlib.contextmanager
def metadata() -> Iterator[dict[str, Any]]:
    """A metadata service on a free port."""
    with server("metadata", "--address", "127.0.0.1:0", "--metrics-address", "") as facts:
        yield facts


@contextlib.contextmanager
def router(metadata_address: str) -> Iterator[dict[str, Any]]:
    """A scheduler on a free port."""
    with server("router", "--address", "127.0.0.1:0", "--metadata-address", metadata_address) as facts:
        yield facts
