"""Owners for tests of the nixl transport: one beside this process, and one in processes of its own.

Run as a script it is the first of these: `nixl_owners.py ARENA_FD WORDS_FD EPOCH PORT`; it prints its addresses (tcp,
gRPC) and serves until its standard input ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable

from kvstore.rpc import serving
from kvstore.rpc.v1 import data_plane_pb2_grpc
from kvstore.transport.data_plane import DataPlane, DataPlaneServicer
from kvstore.transport.nixl import NixlTransport
from kvstore.transport.nixl_process import NixlProcess
from kvstore.transport.tcp_server import TcpServer
from tests.contract.transport_owner import EPOCH
from tests.unit.transport.tcp_owner import OwnerMemory, ProcessOwner


class Exchange:
    """A gRPC server with the data plane's service alone, on a loop of its own."""

    def __init__(self, plane: Callable[[], DataPlane], epoch: int, secret: bytes = b"") -> None:
        self._loop = asyncio.new_event_loop()
        self.address = ""
        servicer = DataPlaneServicer(epoch, plane, secret)
        started = threading.Event()

        async def start() -> None:
            self._server = serving.Server(("kvstore.v1.DataPlaneService",))
            self._server.add(data_plane_pb2_grpc.add_DataPlaneServiceServicer_to_server, servicer)
            self.address = await self._server.start("127.0.0.1:0")

        def run() -> None:
            asyncio.set_event_loop(self._loop)
            self._loop.run_until_complete(start())
            started.set()
            self._loop.run_forever()
            self._loop.close()

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()
        assert started.wait(10)

    def stop(self) -> None:
        asyncio.run_coroutine_threadsafe(self._server.stop(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)


class LocalNixlOwner(OwnerMemory):
    """An owner whose tcp and gRPC side is in this process, so that a test can reach into it."""

    def __init__(self, epoch: int = EPOCH, secret: bytes = b"") -> None:
        super().__init__()
        self.serving = Serving(self, epoch, 0, secret)
        self.address, self.control_address = self.serving.addresses
        self.stopped = False

    def read_by(self, reader: NixlTransport) -> None:
        """The transport whose hook stands for what happens behind the payload; memory as it was at the start."""
        self._reader = reader
        self.fill()

    def after_payload(self, callback: Callable[[], None]) -> None:
        self._reader.hold_for_tests(before_fence=callback)

    def pause(self) -> None:
        raise NotImplementedError("only a process can be paused")

    resume = kill = pause

    def stop(self) -> None:
        self.stopped = True
        self.serving.stop()


class NixlProcessOwner(ProcessOwner):
    """An owner in processes of its own over memory that is mapped here too."""

    script = __file__

    def pause(self) -> None:
        os.killpg(self.process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOWAIT)

    def resume(self) -> None:
        os.killpg(self.process.pid, signal.SIGCONT)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def stop(self) -> None:
        self.kill()
        self.process.communicate(timeout=10)


class Serving:
    """What a node does for NIXL readers: the process that serves, its metadata by gRPC, the fence over tcp."""

    def __init__(self, memory: OwnerMemory, epoch: int, port: int = 0, secret: bytes = b"") -> None:
        words, size = memory.words, len(memory.arena)
        self.process = NixlProcess("test-owner", epoch, memory.arena_fd, size)
        self.tcp = TcpServer(memory.arena_fd, size, lambda slots: words[list(slots)].tolist(), epoch, port=port)
        self._exchange: Exchange | None = Exchange(self.process.plane, epoch, secret)
        self.addresses = self.tcp.address, self._exchange.address

    def stop(self) -> None:
        if self._exchange is not None:
            self._exchange.stop()
            self._exchange = None
        self.process.stop()
        assert self.tcp.stop(10.0)


def main() -> None:
    arena_fd, words_fd, epoch, port = map(int, sys.argv[1:])
    serving = Serving(OwnerMemory.of(arena_fd, words_fd), epoch, port)
    print(*serving.addresses, flush=True)
    sys.stdin.read()
    serving.stop()


if __name__ == "__main__":
    main()
