"""A node that the processes of one engine share and nobody else: the embedded pool of an engine of several processes.

The first process that needs it starts it, under a lock in a folder that all of them know by the engine's name. It ends
when that process closes it or dies (PR_SET_PDEATHSIG), and is not started again: then the engine goes on without.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path

import kvstore
from engine_adapter.pool_access import PoolAccess, to_node
from kvstore.errors import ConfigurationError

START_DEADLINE_S = 30.0
STOP_DEADLINE_S = 5.0
_NODE_ID = "private"
_BOOT = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)
if os.getppid() != int(sys.argv.pop(1)):
    sys.exit("the engine ended first")
from kvstore.cli import main
main()
"""


def private_node(name: str, dram: str, *, verify: bool = False) -> PoolAccess:
    """The pool of the engine of that name. ConfigurationError where its node does not start."""
    folder = _own_folder(name)
    path = folder / f"{_NODE_ID}.sock"
    started: subprocess.Popen[bytes] | None = None
    with _locked(folder / "lock"):
        if not _answers(path):
            started = _start(folder, dram)
    access = to_node(str(path), "", transport="auto", staging="4MiB", name="engine", host_id="", verify=verify)
    if started is not None:
        access.after_close = lambda: _stop(started)
    return access


def _own_folder(name: str) -> Path:
    """A folder that only this user may enter."""
    digest = blake2b(name.encode(), digest_size=8).hexdigest()
    folder = Path(tempfile.gettempdir()) / f"kvstore-{os.getuid()}-{digest}"
    folder.mkdir(mode=0o700, exist_ok=True)
    stat = folder.lstat()
    if stat.st_uid != os.getuid() or stat.st_mode & 0o077 or folder.is_symlink():
        raise ConfigurationError(f"{folder} belongs to somebody else; set TMPDIR to a folder of your own")
    return folder


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe, suppress(OSError):
        probe.connect(str(path))
        return True
    return False


def _start(folder: Path, dram: str) -> subprocess.Popen[bytes]:
    """The node's process, once it has said that it serves."""
    environment = {name: value for name, value in os.environ.items() if not name.upper().startswith("KVSTORE_NODE_")}
    source = str(Path(kvstore.__file__).resolve().parent.parent)
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (source, environment.get("PYTHONPATH"))))
    # The node is no part of the engine's computation: it runs on all cores that there are, at first on this one's.
    flags = {"control-address": "127.0.0.1:0", "data-address": "127.0.0.1:0", "metrics-address": "", "dram": dram}
    flags |= {"socket-dir": str(folder), "data-dir": str(folder), "node-id": _NODE_ID, "transport": "tcp"}
    command = [sys.executable, "-c", _BOOT, str(os.getpid()), "node", "--json"]
    command += [part for name, value in flags.items() for part in (f"--{name}", value)]
    log_path = folder / "node.log"
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, cwd=folder, env=environment
        )
    if not _announced(process):
        _stop(process)
        raise ConfigurationError(f"the engine's own node did not start; {log_path} says why:\n{_end_of(log_path)}")
    return process


def _announced(process: subprocess.Popen[bytes]) -> bool:
    assert process.stdout is not None
    line, end_s = b"", time.monotonic() + START_DEADLINE_S
    while not line.endswith(b"\n") and (left_s := end_s - time.monotonic()) > 0:
        if select.select([process.stdout], [], [], left_s)[0]:
            part = os.read(process.stdout.fileno(), 1 << 16)
            if not part:
                break
            line += part
    with suppress(ValueError, KeyError, IndexError):
        return bool(json.loads(line.splitlines()[0])["role"] == "node")
    return False


def _end_of(path: Path) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-5:])


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_DEADLINE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()
