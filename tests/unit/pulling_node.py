"""A whole node in this process that can replicate and drain: `Replicate` and `Drain` on a server of their own."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import pytest

from kvstore import replication
from kvstore.client.remote import RemoteRead
from kvstore.model.layout import Geometry
from kvstore.model.namespace import Namespace
from kvstore.model.prefix import Keys
from kvstore.model.values import NodeInfo
from kvstore.node.core import NodeCore
from kvstore.node.operators.moving import Drained, Replicated
from kvstore.replication import NodeMover
from kvstore.rpc import serving, wire
from kvstore.rpc.v1 import admin_pb2, admin_pb2_grpc
from tests.chaos.node_thread import WAIT_S, NodeThread

T = TypeVar("T")


class Moving(admin_pb2_grpc.AdminServiceServicer):
    """The two verbs of the admin service that need a Mover."""

    def __init__(self, mover: NodeMover) -> None:
        self._mover = mover
        self.asked: list[bytes] = []
        """Last keys of the chains that were asked for."""

    async def Replicate(self, request: admin_pb2.ReplicateRequest, context: Any) -> admin_pb2.ReplicateResponse:
        namespace = Namespace.from_canonical(request.namespace)
        keys = wire.keys_from_message(request.chain, namespace.layout.chunk_tokens)
        self.asked.append(keys[-1])
        geometries = [
            (wire.geometry_from_messages(each.rectangles), tuple(each.written_here)) for each in request.geometries
        ]
        source = wire.node_info_from_message(request.source)
        done = await self._mover.replicate(namespace, geometries, keys, source, context.time_remaining())
        return admin_pb2.ReplicateResponse(**dataclasses.asdict(done))

    async def Drain(self, request: admin_pb2.DrainRequest, _: Any) -> AsyncIterator[admin_pb2.DrainProgress]:
        targets = [wire.node_info_from_message(each) for each in request.targets]
        async for progress in self._mover.drain(targets):
            yield admin_pb2.DrainProgress(**dataclasses.asdict(progress))


class PullingNode:
    """`node` and its mover; `admin_info` says where the two verbs are served."""

    def __init__(self, folder: Path, name: str, dram_bytes: int = 4 << 20, **more: Any) -> None:
        (folder / name).mkdir()
        self.node = NodeThread(folder / name, dram_bytes, name, **more)
        self.mover = self.node.call(lambda: NodeMover(self.core))
        self.moving = Moving(self.mover)
        self._loop = self.node._loop
        self._server = self.node.call(lambda: serving.Server(("kvstore.v1.AdminService",)))
        self._server.add(admin_pb2_grpc.add_AdminServiceServicer_to_server, self.moving)
        address = self.run(self._server.start("127.0.0.1:0"))
        self.admin_info = dataclasses.replace(self.info, control_address=address)

    @property
    def core(self) -> NodeCore:
        return self.node.core

    @property
    def info(self) -> NodeInfo:
        return self.node.info

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Begin it on the node's loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.start(work).result(WAIT_S)

    def replicate(
        self,
        keys: Keys,
        source: NodeInfo,
        namespace: Namespace,
        geometries: Sequence[tuple[Geometry, tuple[int, ...]]] | None = None,
        deadline_s: float = 10.0,
    ) -> Future[Replicated]:
        wanted = geometries or [(Geometry.whole(namespace.layout), ())]
        return self.start(self.mover.replicate(namespace, wanted, keys, source, deadline_s))

    def drain(self, *targets: PullingNode) -> list[Drained]:
        async def all_of_it() -> list[Drained]:
            return [progress async for progress in self.mover.drain([target.admin_info for target in targets])]

        return self.run(all_of_it())

    def stats(self) -> dict[str, int]:
        return self.node.call(self.core.stats)

    def settled(self) -> bool:
        """Nothing is reserved, quarantined or leased; the laws hold. What is still on its way gets a moment."""
        pause = threading.Event()
        for _ in range(400):
            stats = self.stats()
            if not stats["reserved_bytes"] + stats["quarantined_bytes"] + stats["leases"]:
                break
            pause.wait(0.005)
        self.node.call(self.core.check)
        return not (stats["reserved_bytes"] or stats["quarantined_bytes"] or stats["leases"])

    def end(self) -> None:
        self.run(self._server.stop(0.0))
        self.run(self.mover.close())
        self.node.stop()


def stop_halfway(monkeypatch: pytest.MonkeyPatch, meanwhile: Callable[[], object]) -> None:
    """Pulls move two small chunks at a time; the first one is held up for `meanwhile` before its second read."""
    monkeypatch.setattr(replication, "WINDOW_BYTES", 2 * 12 << 10)
    plain, reads = replication.read_remote, itertools.count()

    def read(*arguments: Any, **named: Any) -> RemoteRead:
        if next(reads) == 1:
            meanwhile()
        return plain(*arguments, **named)

    monkeypatch.setattr(replication, "read_remote", read)
