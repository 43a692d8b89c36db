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
from typing import Final

from kvstore.errors import ConfigurationError, InvalidRequest, Unreachable
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
        self._plane: DataPlane | None = None
        self.restarts = 0
        """Processes that died and were replaced."""
        try:
            self._process, self._plane = self._start()
        except BaseException:
            os.close(self._arena_fd)
            raise
        self._watcher = threading.Thread(target=self._watch, name="nixl-watch", daemon=True)
        self._watcher.start()

    @property
    def pid(self) -> int:
        """Of the process that serves now, or served last."""
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
        stdin = self._process.stdin
        if stdin is not None:
            with contextlib.suppress(OSError, ValueError):  # full: it knows; gone or closed: the watcher knows
                os.write(stdin.fileno(), b"r")

    def stop(self, deadline_s: float = 5.0) -> None:
        """Offer nothing any more: what peers read ends with an error. Idempotent."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        self._plane = None
        _end(self._process, deadline_s)
        self._watcher.join(deadline_s)
        os.close(self._arena_fd)

    def _start(self) -> tuple[subprocess.Popen[bytes], DataPlane]:
        process = subprocess.Popen(
            [sys.executable, "-m", "kvstore.transport.nixl_owner", json.dumps(self._job)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=(self._arena_fd,),
        )
        assert process.stdin is not None and process.stdout is not None
        os.set_blocking(process.stdin.fileno(), False)
        overdue = threading.Timer(START_S, process.kill)
        overdue.daemon = True
        overdue.start()
        line = process.stdout.readline()
        overdue.cancel()
        process.stdout.close()
        fields = json.loads(line) if line else {"error": f"it ended with status {process.wait()}"}
        if "error" in fields:
            _end(process, 0.0)
            raise ConfigurationError(f"the NIXL process did not start: {fields['error']}")
        return process, plane_from_json(fields)

    def _watch(self) -> None:
        pause_s = BACK_OFF_S
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(BACK_OFF_LIMIT_S)
            if self._process.returncode is None:
                pause_s = BACK_OFF_S  # it lives, and has for a while
                continue
            self._plane = None
            if self._stopping.is_set():
                return
            logger.warning("the NIXL process ended with status %d; starting another", self._process.returncode)
            _end(self._process, 0.0)
            while not self._stopping.wait(pause_s):
                pause_s = min(2 * pause_s, BACK_OFF_LIMIT_S)
                try:
                    self._process, self._plane = self._start()
                    self.restarts += 1
                    break
                except ConfigurationError as exc:
                    logger.error("%s; trying again in %.1f s", exc, pause_s)


def _end(process: subprocess.Popen[bytes], deadline_s: float) -> None:
    """Close its input, which ends it; kill it at the deadline."""
    if process.stdin is not None:
        process.stdin.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(deadline_s)
        return
    process.kill()
    process.wait()
