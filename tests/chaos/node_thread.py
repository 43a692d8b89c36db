"""A whole node (sockets, gRPC, tcp) in this process, on an event loop of its own, so that tests can reach into it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from kvstore.config import NodeSettings
from kvstore.model.values import NodeInfo
from kvstore.node.core import NodeCore
from kvstore.node.daemon import NodeDaemon
from kvstore.transport.tcp_server import TcpServer

T = TypeVar("T")
WAIT_S = 20.0


class NodeThread:
    """Started by the constructor, without an index. `call` runs something where the core may be touched."""

    def __init__(self, folder: Path, dram_bytes: int = 4 << 20, node_id: str = "raced", **more: Any) -> None:
        settings = NodeSettings(
            control_address="127.0.0.1:0",
            metrics_address="",
            dram=dram_bytes,
            slots=more.pop("slots", dram_bytes // 4096),
            host_id=node_id,
            node_id=node_id,
            socket_dir=str(folder),
            data_dir=str(folder),
            **more,
        )
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="test-node")
        self._thread.start()
        self.daemon = NodeDaemon(settings, None)
        try:
            self.facts = asyncio.run_coroutine_threadsafe(self.daemon.start(), self._loop).result(WAIT_S)
        except BaseException:
            self._end_loop()
            raise
        populated = threading.Event()
        while self.core.pool.allocator.open_until < dram_bytes:
            assert not populated.wait(0.001)

    @property
    def core(self) -> NodeCore:
        return self.daemon.core

    @property
    def info(self) -> NodeInfo:
        return self.core.info

    @property
    def tcp(self) -> TcpServer:
        return self.daemon._data._tcp

    def call(self, function: Callable[[], T]) -> T:
        """Run it on the node's loop and wait for its result."""
        done: Future[T] = Future()

        def run() -> None:
            try:
                done.set_result(function())
            except BaseException as exc:
                done.set_exception(exc)

        self._loop.call_soon_threadsafe(run)
        return done.result(WAIT_S)

    def stop(self) -> None:
        asyncio.run_coroutine_threadsafe(self.daemon.stop(), self._loop).result(WAIT_S)
        self._end_loop()

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(WAIT_S)
        self._loop.close()
