"""A node with Put and Get streams but without sockets, driven message by message."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import numpy as np
import xxhash
from small_node import SmallNode, keys_of, namespace

from kvstore.model.layout import Dtype, Geometry, PageLayout, Rectangle
from kvstore.model.prefix import Keys
from kvstore.model.values import Outcome
from kvstore.node import streams
from kvstore.node.core import CoreSettings, Session
from kvstore.node.streams import PageStreams
from kvstore.rpc.v1 import node_pb2

LARGE = PageLayout(16, 2, 128, Dtype.FP32, 64, 1)
"""Chunks of 2 MiB: two pieces, checksums made in a thread."""
COMMITTED, PRESENT = Outcome.COMMITTED, Outcome.PRESENT


class Feed:
    """The request side of a Put, message by message; `waiting` is set while the node waits for the next one."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[node_pb2.PutRequest | None] = asyncio.Queue()
        self.waiting = asyncio.Event()

    def __aiter__(self) -> Feed:
        return self

    async def __anext__(self) -> node_pb2.PutRequest:
        if self._queue.empty():
            self.waiting.set()
        part = await self._queue.get()
        self.waiting.clear()
        if part is None:
            raise StopAsyncIteration
        return part

    async def send(self, *parts: node_pb2.PutRequest) -> None:
        """Hand over and wait until all is taken and the next one is waited for."""
        self.waiting.clear()
        for part in parts:
            self._queue.put_nowait(part)
        await asyncio.wait_for(self.waiting.wait(), 10)

    def end(self, *parts: node_pb2.PutRequest) -> None:
        for part in (*parts, None):
            self._queue.put_nowait(part)


def pieces(payload: bytes) -> list[node_pb2.PutRequest]:
    cuts = range(0, len(payload), streams.PIECE_BYTES)
    data = [node_pb2.PutRequest(data=payload[at : at + streams.PIECE_BYTES]) for at in cuts]
    return [*data, node_pb2.PutRequest(payload_hash=xxhash.xxh3_64_intdigest(payload))]


def payload_of(layout: PageLayout, seed: int, rectangle: Rectangle | None = None) -> bytes:
    size = layout.payload_bytes(rectangle or layout.whole)
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8).tobytes()


class Setting:
    """A node with streams, a namespace, and a session without shared memory that may put."""

    def __init__(self, layout: PageLayout, slots: int, *, share: float = 1.0) -> None:
        self.node = SmallNode(slots, settings=CoreSettings(session_share=share))
        self.core = self.node.core
        self.layout = layout
        self.space = namespace(layout)
        self.streams = PageStreams(self.core, self.node.arena)
        self.session = self.open()
        self.shard = Geometry.whole(layout).shard(0)

    def open(self, *, shared: bool = False) -> Session:
        return self.node.open(self.space, shared=shared)

    def keys(self, prompt: int, chunks: int) -> Keys:
        return keys_of(self.space, prompt, chunks)

    def start(self, keys: Keys, feed: Feed) -> asyncio.Task[list[Outcome]]:
        return asyncio.create_task(self.streams.put(self.session.number, keys, self.shard, feed))

    async def put(self, keys: Keys, payloads: list[bytes]) -> list[Outcome]:
        feed = Feed()
        feed.end(*(part for payload in payloads for part in pieces(payload)))
        outcomes = await self.streams.put(self.session.number, keys, self.shard, feed)
        self.core.check()
        return outcomes

    async def get(self, keys: Keys, rectangle: Rectangle | None = None) -> tuple[list[bytes], str]:
        found: list[bytes] = []
        async for message in self.streams.get(self.session.number, keys, rectangle or self.layout.whole):
            kind = message.WhichOneof("part")
            if kind == "head":
                found.append(b"")
            elif kind == "data":
                found[-1] += message.data
        return found, message.end_reason

    def assert_idle(self) -> None:
        """Nothing is reserved, quarantined or leased, and no stream counts as open."""
        self.core.check()
        assert self.core.stats()["reserved_slots"] == 0 and not self.core.holds.leases
        assert all(session.writer.held_bytes == 0 for session in self.core.sessions.values())
        assert self.streams.open_count == 0


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 30))
