"""Child processes of the demo and the replay: started by console script, talked to in JSON lines, always ended.

A child's first line on stdout is one JSON object that announces it. Its stderr goes to a file in the scratch
folder, whose end is quoted when the child fails. Children run in process groups of their own, so that Ctrl-C reaches
only this process, which then ends them in reverse order.

Not in sessions of their own: Linux shares the CPU by session (autogroup), and with a session each, ranks of an engine
that wait by sched_yield kept others off their core for ten seconds [tried, Linux 6.18, 2 cores].
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Final

from kvstore.errors import ConfigurationError, DeadlineExceeded, Unreachable

START_DEADLINE_S: Final = 60.0
"""A child that has not announced itself by then counts as failed (an engine imports torch first)."""

STOP_DEADLINE_S: Final = 5.0
"""Time between SIGTERM and SIGKILL."""

_LINE_LIMIT_BYTES: Final = 16 << 20
_QUOTED_LINES: Final = 12


class Child:
    """One running process. `announcement` is its first line. Used by one thread at a time."""

    def __init__(self, name: str, command: Sequence[str], folder: Path, environment: Mapping[str, str]) -> None:
        self.name = name
        self.announcement: dict[str, Any] = {}
        self._log_path = folder / f"{name}.log"
        self._pending = b""
        with self._log_path.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=folder,
                env=dict(environment),
                process_group=0,
            )

    @property
    def pid(self) -> int:
        """Process id; also the id of its process group."""
        return self._process.pid

    def send(self, message: Mapping[str, Any]) -> None:
        """Write one JSON line to its stdin. Raises Unreachable if it has ended."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message, separators=(",", ":")).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as exc:
            raise Unreachable(self._complaint("does not take commands")) from exc

    def receive(self, deadline_s: float) -> dict[str, Any]:
        """The next JSON line of its stdout. Raises DeadlineExceeded, or Unreachable if it ended or wrote no JSON."""
        assert self._process.stdout is not None
        ends_at_s = time.monotonic() + deadline_s
        descriptor = self._process.stdout.fileno()
        while b"\n" not in self._pending:
            if not select.select([descriptor], [], [], max(0.0, ends_at_s - time.monotonic()))[0]:
                raise DeadlineExceeded(self._complaint(f"did not answer within {deadline_s:g} s"))
            data = os.read(descriptor, 1 << 16)
            self._pending += data
            if not data:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(1.0)  # for its exit status; the end of stdout comes first
                raise Unreachable(self._complaint("ended"))
            if len(self._pending) > _LINE_LIMIT_BYTES:
                raise Unreachable(self._complaint("wrote an endless line"))
        line, self._pending = self._pending.split(b"\n", 1)
        try:
            message = json.loads(line)
        except ValueError as exc:
            raise Unreachable(self._complaint(f"wrote something that is not JSON: {line[:80]!r}")) from exc
        if not isinstance(message, dict):
            raise Unreachable(self._complaint(f"wrote {line[:80]!r} instead of a JSON object"))
        return message

    def call(self, message: Mapping[str, Any], deadline_s: float) -> dict[str, Any]:
        """Send a command and wait for its answer."""
        self.send(message)
        return self.receive(deadline_s)

    def kill(self) -> None:
        """SIGKILL to the whole process group, and wait until it is gone."""
        self._signal(signal.SIGKILL)
        self._process.wait()

    def terminate(self) -> None:
        """SIGTERM to the process; does not wait."""
        if self._process.poll() is None:
            self._process.terminate()

    def wait_end(self, deadline_s: float) -> None:
        """Wait for the end after `terminate`, then kill whatever is left of its group."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(deadline_s)
        self.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def _complaint(self, what: str) -> str:
        lines = self._log_path.read_text(errors="replace").splitlines()[-_QUOTED_LINES:]
        code = self._process.poll()
        ended = "" if code is None else f" (exit status {code})"
        return "\n  ".join([f"{self.name} {what}{ended}", *lines])


class Children:
    """The processes of one run with their scratch folder. A context manager: its end is theirs, also on Ctrl-C
    and SIGTERM."""

    def __init__(self) -> None:
        self._running: list[Child] = []
        self._looks = 0
        self._environment = {
            name: value
            for name, value in os.environ.items()
            # A setting of the user's own pool has no business here.
            if not name.upper().startswith(("KVSTORE_NODE_", "KVSTORE_METADATA_", "KVSTORE_ROUTER_"))
        }

    def __enter__(self) -> Children:
        self.folder = Path(tempfile.mkdtemp(prefix="kvstore-"))
        self._old_handler: Any = None
        if threading.current_thread() is threading.main_thread():
            self._old_handler = signal.signal(signal.SIGTERM, _exit_on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for child in reversed(self._running):
            child.terminate()
        ends_at_s = time.monotonic() + STOP_DEADLINE_S
        for child in reversed(self._running):
            child.wait_end(max(0.0, ends_at_s - time.monotonic()))
        shutil.rmtree(self.folder, ignore_errors=True)
        if self._old_handler is not None:
            signal.signal(signal.SIGTERM, self._old_handler)

    def start(self, name: str, command: Sequence[str]) -> Child:
        """Start a process without waiting for its announcement."""
        child = Child(name, command, self.folder, self._environment)
        self._running.append(child)
        return child

    def start_console(self, name: str, arguments: Sequence[str]) -> Child:
        """Start `kvstore ARGUMENTS --json` and wait for its announcement."""
        return self.announced(self.start(name, [console_script(), *arguments, "--json"]))

    def announced(self, child: Child) -> Child:
        """Wait for the announcement of a child that was started."""
        child.announcement = child.receive(START_DEADLINE_S)
        return child

    def start_metadata(self) -> Child:
        """A metadata service on a free loopback port."""
        return self.start_console("metadata", ["metadata", "--address", "127.0.0.1:0", "--metrics-address", ""])

    def start_node(self, name: str, metadata_address: str, *options: str) -> Child:
        """A node with host id, socket and data folder of its own, so that other nodes are remote to it."""
        home = self.folder / name
        home.mkdir()
        return self._start_node(name, metadata_address, "127.0.0.1:0", "127.0.0.1:0", options)

    def restart_node(self, node: Child, metadata_address: str, *options: str) -> Child:
        """Start a node again that has ended: same id, folders and addresses; what is only in DRAM is lost."""
        said = node.announcement
        return self._start_node(
            said["node_id"], metadata_address, said["control_address"], said["data_address"], options
        )

    def _start_node(self, name: str, metadata_address: str, control: str, data: str, options: Sequence[str]) -> Child:
        home = self.folder / name
        fixed = {
            "--control-address": control,
            "--data-address": data,
            "--metrics-address": "",
            "--metadata-address": metadata_address,
            "--host-id": name,
            "--node-id": name,
            "--socket-dir": str(home),
            "--data-dir": str(home),
        }
        return self.start_console(name, ["node", *(part for pair in fixed.items() for part in pair), *options])

    def node_statistics(self, node: Child) -> dict[str, Any]:
        """Counters of a node, as `kvstore stats --json` prints them."""
        self._looks += 1
        address = node.announcement["control_address"]
        return self.start_console(f"stats-{self._looks}", ["stats", "--node", address]).announcement


def console_script() -> str:
    """Path of the `kvstore` command of this Python; raises ConfigurationError if the package is not installed."""
    beside = Path(sys.executable).parent / "kvstore"
    found = str(beside) if beside.is_file() else shutil.which("kvstore")
    if found is None:
        raise ConfigurationError("there is no `kvstore` command beside this Python; install the package first")
    return found


def _exit_on_signal(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
