"""Owners for tests of the tcp transport: a `TcpServer` in this process, and one in a process of its own.

Run as a script it is that process: `tcp_owner.py ARENA_FD WORDS_FD EPOCH PORT`; it prints its address and serves until
its standard input ends.
"""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

from kvstore.transport import SLOT_UNIT_BYTES
from kvstore.transport.tcp_server import TcpServer, TcpServerLimits
from tests.contract.transport_owner import ARENA_BYTES, EPOCH


class OwnerMemory:
    """An arena and its generation words in memfds, mapped here."""

    def __init__(self, arena_bytes: int = ARENA_BYTES) -> None:
        self.arena_fd = os.memfd_create("test-arena")
        self.words_fd = os.memfd_create("test-words")
        os.ftruncate(self.arena_fd, arena_bytes)
        os.ftruncate(self.words_fd, 8 * (arena_bytes // SLOT_UNIT_BYTES))
        self._map()
        self.fill()

    def fill(self) -> None:
        """Bytes and words as they are at the start."""
        self.arena[:] = np.random.default_rng(99).integers(0, 256, len(self.arena), dtype=np.uint8)
        self.words[:] = np.arange(len(self.words), dtype=np.uint64) * 2 + (EPOCH << 40)

    @classmethod
    def of(cls, arena_fd: int, words_fd: int) -> OwnerMemory:
        """What another process has made."""
        memory = cls.__new__(cls)
        memory.arena_fd, memory.words_fd = arena_fd, words_fd
        memory._map()
        return memory

    def _map(self) -> None:
        self.arena = np.frombuffer(mmap.mmap(self.arena_fd, 0), dtype=np.uint8)
        self.words = np.frombuffer(mmap.mmap(self.words_fd, 0), dtype=np.uint64)

    def close(self) -> None:
        os.close(self.arena_fd)
        os.close(self.words_fd)


class LocalOwner(OwnerMemory):
    """A server in this process. `words_of` may be replaced by a test."""

    def __init__(
        self,
        authorize: Callable[[bytes], bool] | None = None,
        limits: TcpServerLimits | None = None,
        host: str = "127.0.0.1",
        epoch: int = EPOCH,
    ) -> None:
        super().__init__()
        self.words_of: Callable[[list[int]], list[int]] = lambda slots: self.words[slots].tolist()
        self.server = TcpServer(
            self.arena_fd, ARENA_BYTES, lambda slots: self.words_of(list(slots)), epoch, host, 0, authorize, limits
        )
        self.address = self.server.address
        self.control_address = ""

    def after_payload(self, callback: Callable[[], None]) -> None:
        self.server.hold_for_tests(callback)

    def pause(self) -> None:
        raise NotImplementedError("only a process can be paused")

    resume = kill = pause

    def stop(self) -> None:
        assert self.server.stop(10.0)


class ProcessOwner(OwnerMemory):
    """A server in another process over memory that is mapped here too. `script`: what that process runs."""

    script = __file__

    def __init__(self, epoch: int = EPOCH, port: int = 0) -> None:
        super().__init__()
        fds = (self.arena_fd, self.words_fd)
        root = Path(__file__).resolve().parents[3]
        self.process = subprocess.Popen(
            [sys.executable, self.script, *map(str, (*fds, epoch, port))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=fds,
            text=True,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": str(root)},
        )
        assert self.process.stdout is not None
        self.address, *others = self.process.stdout.readline().split()
        self.control_address = others[0] if others else ""

    def after_payload(self, callback: Callable[[], None]) -> None:
        raise NotImplementedError("only an owner in this process can call back")

    def pause(self) -> None:
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOWAIT)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()

    def stop(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=10)


def main() -> None:
    arena_fd, words_fd, epoch, port = map(int, sys.argv[1:])
    words = np.frombuffer(mmap.mmap(words_fd, 0), dtype=np.uint64)
    arena_bytes = os.fstat(arena_fd).st_size
    with TcpServer(arena_fd, arena_bytes, lambda slots: words[slots].tolist(), epoch, port=port) as server:
        print(server.address, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
