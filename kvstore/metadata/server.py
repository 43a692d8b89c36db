"""MetadataService (grpc.aio): the embedded index for other processes.

The event loop is the index's one owner: every call changes it within one step of the loop. A publisher never waits
for a watcher: each watcher has a bounded backlog, and one that falls behind is cut off, reconnects and starts again
from a snapshot. At the first batch of a node's epoch the service connects to the control address that the node
advertises and refuses one that does not answer: a wrong address is found at the start, not by readers.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

from kvstore.errors import (
    CapacityExhausted,
    ConfigurationError,
    InvalidRequest,
    KvStoreError,
    StaleReference,
    Unreachable,
)
from kvstore.metadata import Batch
from kvstore.metadata.embedded import EmbeddedIndex
from kvstore.metadata.messages import batch_from_message, batch_to_message, match_to_message, status_to_message
from kvstore.model.values import NodeInfo
from kvstore.rpc import serving, wire
from kvstore.rpc.channel import parse_address
from kvstore.rpc.v1 import metadata_pb2, metadata_pb2_grpc

logger = logging.getLogger(__name__)

WATCHERS_LIMIT: Final = 64
BACKLOG_LIMIT_EVENTS: Final = 65_536
"""Events (a batch counts as one more) that may wait for one watcher."""

CALL_BACK_TIMEOUT_S: Final = 1.0
SWEEP_INTERVAL_S: Final = 0.25
"""How late watchers may hear of a dead node."""

_SERVICE: Final = metadata_pb2.DESCRIPTOR.services_by_name["MetadataService"].full_name
_ANY_CHUNK_TOKENS: Final = (1 << 32) - 1
"""The index counts chunks and never tokens, so it does not know a namespace's chunk size."""


class _Watcher:
    """The backlog of one Watch call. It never waits to be filled; above its limit it ends with an error."""

    def __init__(self, limit_events: int) -> None:
        self._limit_events = limit_events
        self._backlog: deque[tuple[metadata_pb2.WatchResponse, int]] = deque()
        self._events = 0
        self._changed = asyncio.Event()
        self._end: KvStoreError | None = None

    def offer(self, response: metadata_pb2.WatchResponse, cost_events: int) -> None:
        """Append, or end the watch where the backlog is full."""
        if self._events + cost_events > self._limit_events:
            self.end(StaleReference(f"the watch fell more than {self._limit_events} events behind; start a new one"))
        elif self._end is None:
            self._backlog.append((response, cost_events))
            self._events += cost_events
            self._changed.set()

    def end(self, reason: KvStoreError) -> None:
        """Forget the backlog; `responses` raises `reason`."""
        if self._end is None:
            self._end = reason
            self._backlog.clear()
            self._changed.set()

    async def responses(self) -> AsyncIterator[metadata_pb2.WatchResponse]:
        """What was offered, in order, until the end."""
        while True:
            await self._changed.wait()
            while self._backlog:
                response, cost_events = self._backlog.popleft()
                self._events -= cost_events
                yield response
            if self._end is not None:
                raise self._end
            self._changed.clear()


class MetadataServicer(metadata_pb2_grpc.MetadataServiceServicer):
    """The service over one `EmbeddedIndex`, which nobody else may change. Owned by one event loop."""

    def __init__(self, index: EmbeddedIndex, *, backlog_limit_events: int = BACKLOG_LIMIT_EVENTS) -> None:
        self._index = index
        self._backlog_limit_events = backlog_limit_events
        self._watchers: set[_Watcher] = set()
        self._reached: dict[str, tuple[int, str]] = {}
        self._end_listening = index.listen(self._tell_batch, self._tell_dropped)

    async def Publish(self, request: metadata_pb2.PublishRequest, context: Any) -> metadata_pb2.PublishResponse:
        """Apply a batch. The first one of an epoch waits for the call back to the node, at most a second."""
        batch = batch_from_message(request)
        node = batch.node
        if not batch.leaving and self._reached.get(node.node_id) != (node.epoch, node.control_address):
            await _call_back(node)
        applied = self._index.publish(batch)
        if not batch.leaving:
            self._reached[node.node_id] = node.epoch, node.control_address
        return metadata_pb2.PublishResponse(applied_sequence=applied.sequence, resync=applied.resync)

    async def Match(self, request: metadata_pb2.MatchRequest, context: Any) -> metadata_pb2.MatchResponse:
        """How far each node covers the chain."""
        keys = wire.keys_from_message(request.chain, _ANY_CHUNK_TOKENS)
        rectangle = wire.rectangle_from_message(request.rectangle) if request.HasField("rectangle") else None
        return metadata_pb2.MatchResponse(
            nodes=[match_to_message(match) for match in self._index.match(keys, rectangle)]
        )

    async def ListNodes(self, request: metadata_pb2.ListNodesRequest, context: Any) -> metadata_pb2.ListNodesResponse:
        """All nodes that are not dead."""
        return metadata_pb2.ListNodesResponse(nodes=[status_to_message(status) for status in self._index.nodes()])

    async def Watch(
        self, request: metadata_pb2.WatchRequest, context: Any
    ) -> AsyncIterator[metadata_pb2.WatchResponse]:
        """The index as of now, a mark, then every change until the watcher leaves or falls behind."""
        if len(self._watchers) >= WATCHERS_LIMIT:
            raise CapacityExhausted(f"{WATCHERS_LIMIT} watchers are connected already")
        # Snapshot and first change belong to one step of the loop: nothing is missed, nothing comes twice.
        snapshot = self._index.snapshot()
        watcher = _Watcher(self._backlog_limit_events)
        self._watchers.add(watcher)
        try:
            for batch in snapshot:
                yield metadata_pb2.WatchResponse(batch=batch_to_message(batch))
            yield metadata_pb2.WatchResponse(snapshot_end=True)
            async for response in watcher.responses():
                yield response
        finally:
            self._watchers.discard(watcher)

    def close(self) -> None:
        """End all watches."""
        self._end_listening()
        for watcher in self._watchers:
            watcher.end(Unreachable("the metadata service is stopping"))

    def _tell_batch(self, batch: Batch) -> None:
        if self._watchers:
            self._tell(metadata_pb2.WatchResponse(batch=batch_to_message(batch)), 1 + len(batch.events))

    def _tell_dropped(self, node_id: str) -> None:
        self._reached.pop(node_id, None)
        self._tell(metadata_pb2.WatchResponse(dropped_node_id=node_id), 1)

    def _tell(self, response: metadata_pb2.WatchResponse, cost_events: int) -> None:
        for watcher in self._watchers:
            watcher.offer(response, cost_events)


async def _call_back(node: NodeInfo) -> None:
    """Raise ConfigurationError unless something accepts connections at the node's control address."""
    refusal = f"node {node.node_id} advertises the control address {node.control_address!r}, "
    try:
        host, port = parse_address(node.control_address)
    except InvalidRequest as exc:
        raise ConfigurationError(refusal + "which is not HOST:PORT") from exc
    # Connecting to 0.0.0.0 reaches this host, so it would pass here and mean somebody else elsewhere.
    with contextlib.suppress(ValueError):
        if ipaddress.ip_address(host).is_unspecified:
            raise ConfigurationError(refusal + "which names no host; advertise an address that others can reach")
    try:
        async with asyncio.timeout(CALL_BACK_TIMEOUT_S):
            _, writer = await asyncio.open_connection(host, port)
            writer.close()
            await writer.wait_closed()
    except OSError as exc:
        raise ConfigurationError(
            f"{refusal}which does not answer from the metadata service ({exc or 'no answer in time'}); "
            "advertise one that it can reach"
        ) from exc


class MetadataServer:
    """A running service; made by `serve_metadata`. `address` is the bound host:port."""

    def __init__(self, address: str, server: serving.Server, servicer: MetadataServicer, index: EmbeddedIndex) -> None:
        self.address = address
        self._server = server
        self._servicer = servicer
        self._sweep = asyncio.create_task(_sweep(index))

    async def stop(self, grace_s: float = 1.0) -> None:
        """End watches, let other calls finish for at most `grace_s` seconds. Idempotent."""
        self._sweep.cancel()
        self._servicer.close()
        await self._server.stop(grace_s)


async def _sweep(index: EmbeddedIndex) -> None:
    while True:
        await asyncio.sleep(SWEEP_INTERVAL_S)
        index.expire()


async def serve_metadata(
    address: str,
    *,
    insecure: bool = False,
    clock: Callable[[], float] = time.monotonic,
    backlog_limit_events: int = BACKLOG_LIMIT_EVENTS,
) -> MetadataServer:
    """Start the service on the running loop. Raises ConfigurationError for an address that cannot be bound."""
    index = EmbeddedIndex(clock)
    servicer = MetadataServicer(index, backlog_limit_events=backlog_limit_events)
    server = serving.Server((_SERVICE,), without_deadline=(f"/{_SERVICE}/Watch",))
    server.add(metadata_pb2_grpc.add_MetadataServiceServicer_to_server, servicer)
    bound = await server.start(address, insecure=insecure)
    logger.info("metadata service listens on %s", bound)
    return MetadataServer(bound, server, servicer, index)
