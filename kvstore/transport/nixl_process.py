"""Keeps a node's NIXL process going: starts it, tells it that peers read, starts another when it dies.

A new process has new metadata: readers that still use the old one get an error, ask again and go on.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Final

from kvstore.errors import ConfigurationError, InvalidRequest, KvStoreError, Unreachable
from kvstore.transport.data_plane import DataPlane
from kvstore.transport.nixl_owner import plane_from_json

logger = logging.getLogger(__name__)
START_S: Final = 60.0
BACK_OFF_S: Final = 0.1
BACK_OFF_LIMIT_S: Final = 5.0
"""Wait before another start: this, doubled with each death in a row; a process that lived longer than the limit starts
anew at the beginning."""


class NixlProcess:
    """Offers the arena behind `arena_fd` over NIXL. Thread-safe.

    Raises ConfigurationError if the first start fails: NIXL is not there, or a back-end or device is not.
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
    ) -> None:
        if not 0 < arena_bytes <= os.fstat(arena_fd).st_size:
            raise InvalidRequest(f"the arena's file has {os.fstat(arena_fd).st_size} bytes, not {arena_bytes}")
        self._arena_fd = os.dup(arena_fd)
        self._job = {
            "name": name,
            "epoch": epoch,
            "arena_fd": self._arena_fd,
            "arena_bytes": arena_bytes,
            "backend": backend,
            "devices": list(devices),
        }
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._plane: DataPlane | None = None
        self.restarts = 0
        """Processes that died and were replaced."""
        started: Future[None] = Future()
        # All processes are started by this thread: the kernel ends them with the thread that started them.
        self._watcher = threading.Thread(target=self._watch, args=(started,), name="nixl-watch", daemon=True)
        self._watcher.start()
        started.result()

    @property
    def pid(self) -> int:
        """Of the process that serves now, or served last."""
        assert self._process is not None, "the constructor returns when there is one"
        return self._process.pid

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

    def stop(self, deadline_s: float = 5.0) -> None:
        """Offer nothing any more: what peers read ends with an error. Idempotent."""
        self._stopping.set()
        serves, self._plane = self._plane is not None, None
        self._end(deadline_s if serves else 0.0)  # one that is starting has nothing to end in order
        self._watcher.join(deadline_s)

    def _start(self) -> DataPlane:
        process = subprocess.Popen(
            [sys.executable, "-m", "kvstore.transport.nixl_owner", json.dumps(self._job)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=(self._arena_fd,),
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
        line = process.stdout.readline()
        overdue.cancel()
        process.stdout.close()
        fields = json.loads(line) if line else {"error": f"it ended with status {process.wait()}"}
        if "error" in fields:
            self._end(0.0)
            raise ConfigurationError(f"the NIXL process did not start: {fields['error']}")
        return plane_from_json(fields)

    def _watch(self, started: Future[None]) -> None:
        try:
            self._plane = self._start()
        except (KvStoreError, OSError, ValueError, LookupError) as exc:
            started.set_exception(exc)
        else:
            started.set_result(None)
            self._keep_going()
        finally:
            os.close(self._arena_fd)

    def _keep_going(self) -> None:
        pause_s = BACK_OFF_S
        while not self._stopping.is_set():
            assert self._process is not None
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(BACK_OFF_LIMIT_S)
            if self._process.returncode is None:
                pause_s = BACK_OFF_S  # it lives, and has for a while
                continue
            self._plane = None
            if self._stopping.is_set():
                return
            logger.warning("the NIXL process ended with status %d; starting another", self._process.returncode)
            self._end(0.0)
            while not self._stopping.wait(pause_s):
                pause_s = min(2 * pause_s, BACK_OFF_LIMIT_S)
                try:
                    self._plane = self._start()
                    self.restarts += 1
                    break
                except (ConfigurationError, OSError) as exc:
                    if not self._stopping.is_set():
                        logger.error("%s; trying again in %.1f s", exc, pause_s)

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
