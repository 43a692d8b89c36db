"""Keeps a node's NIXL processes going: starts them, tells them that peers read, knows how they are.

The process started here forks the one that serves (`nixl_owner.py`), another one each time that this dies; another is
started when the first dies itself. What serves anew has new metadata: readers that still use the old one get an error,
ask again and go on.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, Final

from kvstore.errors import ConfigurationError, InvalidRequest, KvStoreError, Unreachable
from kvstore.transport.data_plane import DataPlane
from kvstore.transport.nixl_owner import plane_from_json

logger = logging.getLogger(__name__)
START_S: Final = 60.0
START_TRIES: Final = 3
"""A first start that is killed is tried again so often: a node that takes over its memory must not go with it."""
BACK_OFF_S: Final = 0.1
BACK_OFF_LIMIT_S: Final = 5.0
"""Wait before another start: this, doubled with each one in a row that did not come to serve for so long."""
DEATHS_LIMIT: Final = 3
DEATHS_WINDOW_S: Final = 60.0
"""Degraded is also what serves, but died so often within this time."""
END_S: Final = 5.0
_GONE_S: Final = 1.0
"""Time between the end of a process's output and its own."""


class NixlProcess:
    """Offers the arena behind `arena_fd` over NIXL. Thread-safe. `interface`: the only one on which UCX listens and of
    which it tells peers; empty: it takes what it finds.

    Raises ConfigurationError if it cannot be started: NIXL is not there, or a back-end or device is not.
    """

    def __init__(
        self,
        name: str,
        epoch: int,
        arena_fd: int,
        arena_bytes: int,
        *,
        backend: str = "UCX",
        devices: Sequence[str] = (),
        interface: str = "",
    ) -> None:
        if not 0 < arena_bytes <= os.fstat(arena_fd).st_size:
            raise InvalidRequest(f"the arena's file has {os.fstat(arena_fd).st_size} bytes, not {arena_bytes}")
        self._arena_fd = os.dup(arena_fd)
        self._job = {
            "parent": os.getpid(),
            "name": name,
            "epoch": epoch,
            "arena_fd": self._arena_fd,
            "arena_bytes": arena_bytes,
            "backend": backend,
            "devices": list(devices),
        }
        # NumPy would make threads that nobody needs, and a fork is for processes with one.
        self._environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        if interface:
            self._environment["UCX_NET_DEVICES"] = interface
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._plane: DataPlane | None = None
        self._why_down = self._why_died = ""
        self._is_refused = False
        self._deaths: deque[float] = deque(maxlen=DEATHS_LIMIT)
        self.pid = 0
        """Of the process that serves now, or served last."""
        self.restarts = 0
        """Processes that served, died and were replaced."""
        started: Future[None] = Future()
        # All processes are started by this thread: the kernel ends them with the thread that started them.
        self._watcher = threading.Thread(target=self._watch, args=(started,), name="nixl-watch", daemon=True)
        self._watcher.start()
        started.result()

    @property
    def is_serving(self) -> bool:
        """False while another process starts."""
        return self._plane is not None

    @property
    def trouble(self) -> str:
        """Why this way is not to be relied on now; empty: it is."""
        if self._plane is None:
            return f"down: {self._why_down}"
        deaths = [at_s for at_s in list(self._deaths) if at_s > time.monotonic() - DEATHS_WINDOW_S]
        if len(deaths) < DEATHS_LIMIT:
            return ""
        return f"died {DEATHS_LIMIT} times within {DEATHS_WINDOW_S:g} s, last because {self._why_died}"

    def plane(self) -> DataPlane:
        """What it offers. Raises Unreachable while a new process starts."""
        self.wake()
        plane = self._plane
        if plane is None:
            raise Unreachable("the node's NIXL process is starting again; try again in a moment")
        return plane

    def wake(self) -> None:
        """Peers read, or are about to. Never waits; worth saying every 100 ms while they do."""
        with self._lock:  # never while it is closed: the descriptor's number may be given out again
            stdin = self._process.stdin if self._process is not None else None
            if stdin is not None and not stdin.closed:
                with contextlib.suppress(OSError):  # full: it knows; gone: the watcher knows
                    os.write(stdin.fileno(), b"r")

    def stop(self, deadline_s: float = END_S) -> None:
        """Offer nothing any more: what peers read ends with an error. Idempotent."""
        self._stopping.set()
        serves, self._plane = self._plane is not None, None
        self._end(deadline_s if serves else 0.0)  # one that is starting has nothing to end in order
        self._watcher.join(deadline_s)

    # --- the watcher's thread ----------------------------------------------------------------------------

    def _watch(self, started: Future[None]) -> None:
        try:
            self._keep_going(started)
        except (KvStoreError, OSError) as exc:
            started.set_exception(exc)
        finally:
            os.close(self._arena_fd)

    def _keep_going(self, started: Future[None]) -> None:
        """Raises ConfigurationError or OSError where none comes to serve at first."""
        pause_s, tries = BACK_OFF_S, 0
        while not self._stopping.is_set():
            began_s = time.monotonic()
            try:
                self._run(started)
            except OSError as exc:
                if not started.done():
                    raise
                self._why_down = f"it could not be started: {exc.strerror or exc}"
            tries += 1
            took_s = time.monotonic() - began_s
            if not started.done() and (self._is_refused or tries >= START_TRIES or took_s >= START_S):
                raise ConfigurationError(f"the NIXL process did not start: {self._why_down}")
            if took_s > BACK_OFF_LIMIT_S:
                pause_s = BACK_OFF_S
            if not self._stopping.wait(pause_s):
                logger.warning("NIXL's processes are gone (%s); starting others", self._why_down)
            pause_s = min(2 * pause_s, BACK_OFF_LIMIT_S)

    def _run(self, started: Future[None]) -> None:
        """Start a process and listen to it until it has ended. Raises OSError where there is none to be had."""
        process = subprocess.Popen(
            [sys.executable, "-m", "kvstore.transport.nixl_owner", json.dumps(self._job)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=(self._arena_fd,),
            env=self._environment,
        )
        assert process.stdin is not None and process.stdout is not None
        os.set_blocking(process.stdin.fileno(), False)
        with self._lock:
            self._process = process
        if self._stopping.is_set():  # `stop` may have looked for a process just before
            process.kill()
        overdue = threading.Timer(START_S, process.kill)
        overdue.daemon = True
        overdue.start()
        self._why_down = ""
        with process.stdout:
            for line in process.stdout:
                self._hear(line)
                if self._plane is not None:
                    overdue.cancel()
                    if not started.done():
                        started.set_result(None)
        overdue.cancel()
        self._end(_GONE_S)
        if self._plane is not None or not self._why_down:
            self._note_end(f"what starts it ended with status {process.returncode}")

    def _hear(self, line: bytes) -> None:
        try:
            message: dict[str, Any] = json.loads(line)
        except ValueError:  # empty, half a line of one that was killed, or a library's own
            return
        if "plane" in message:
            self.restarts += self.pid != 0
            self.pid, self._plane = message["pid"], plane_from_json(message["plane"])
            logger.info("NIXL is served by process %d", self.pid)
        elif "refused" in message:
            self._is_refused = True
            self._note_end(message["refused"])
        elif "down" in message:
            self._note_end(message["down"])

    def _note_end(self, why: str) -> None:
        if self._plane is not None:
            self._deaths.append(time.monotonic())
            self._plane, self._why_died = None, why
            if not self._stopping.is_set():
                logger.warning("the process that serves NIXL is gone: %s", why)
        self._why_down = why

    def _end(self, deadline_s: float) -> None:
        """Close the present process's input, which ends it; kill it at the deadline."""
        with self._lock:
            process = self._process
            if process is None or process.stdin is None:
                return
            process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(deadline_s)
            return
        process.kill()
        process.wait()
