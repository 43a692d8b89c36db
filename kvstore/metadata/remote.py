"""The index behind the metadata service, as a client sees it. Thread-safe, synchronous, every call has a deadline.

A service that is away gives Unreachable at once; the channel reconnects by itself, also after a long idle time.
A watch is a thread that follows the service and starts again from a snapshot whenever it lost touch.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any, Final

from kvstore.errors import KvStoreError
from kvstore.metadata import Applied, Batch, NodeMatch, NodeStatus
from kvstore.metadata.messages import batch_from_message, batch_to_message, match_from_message, status_from_message
from kvstore.model.layout import Rectangle
from kvstore.model.prefix import Keys
from kvstore.rpc import wire
from kvstore.rpc.channel import Channel, Stream
from kvstore.rpc.v1 import metadata_pb2
from kvstore.rpc.v1.metadata_pb2_grpc import MetadataServiceStub

logger = logging.getLogger(__name__)

DEADLINE_S: Final = 3.0
"""Longest call by default; a node's first batch alone may take a second for the call back."""

SNAPSHOT_DEADLINE_S: Final = 60.0
_END_TIMEOUT_S: Final = 30.0
_BACKOFF_FIRST_S: Final = 0.05
_BACKOFF_LAST_S: Final = 1.0


class RemoteIndex:
    """`WatchedIndex` at `address` (host:port); calls besides `snapshot` take at most `deadline_s` seconds.

    Besides what `Index` names, every method raises Unreachable, DeadlineExceeded or ForkedProcess. `publish`
    raises ConfigurationError when the service cannot reach the node's control address.
    """

    def __init__(self, address: str, *, deadline_s: float = DEADLINE_S) -> None:
        self._channel = Channel(address)
        self._stub: Any = self._channel.stub(MetadataServiceStub)
        self._deadline_s = deadline_s
        self._watches: set[_Watch] = set()

    def publish(self, batch: Batch) -> Applied:
        """See `Index.publish`."""
        answer = self._channel.call(self._stub.Publish, batch_to_message(batch), self._deadline_s)
        return Applied(answer.applied_sequence, answer.resync)

    def match(
        self, keys: Keys, rectangle: Rectangle | None = None, *, deadline_s: float | None = None
    ) -> list[NodeMatch]:
        """See `Index.match`. `deadline_s` (seconds) replaces the default of this object."""
        request = metadata_pb2.MatchRequest(
            chain=wire.chain_to_message(keys, with_fingerprints=False),
            rectangle=None if rectangle is None else wire.rectangle_to_message(rectangle),
        )
        limit_s = self._deadline_s if deadline_s is None else deadline_s
        return [match_from_message(match) for match in self._channel.call(self._stub.Match, request, limit_s).nodes]

    def drop_node(self, node_id: str) -> None:
        """See `Index.drop_node`: the service is told that this incarnation of the node is leaving."""
        for status in self.nodes():
            if status.node.node_id == node_id:
                self.publish(Batch(status.node, status.applied_sequence + 1, leaving=True))

    def nodes(self, *, deadline_s: float | None = None) -> list[NodeStatus]:
        """See `Index.nodes`. `deadline_s` (seconds) replaces the default of this object."""
        limit_s = self._deadline_s if deadline_s is None else deadline_s
        answer = self._channel.call(self._stub.ListNodes, metadata_pb2.ListNodesRequest(), limit_s)
        return [status_from_message(status) for status in answer.nodes]

    def snapshot(self) -> Iterator[Batch]:
        """See `Index.snapshot`. The call is open while the caller iterates, at most SNAPSHOT_DEADLINE_S seconds."""
        stream = self._channel.stream(self._stub.Watch, metadata_pb2.WatchRequest(), SNAPSHOT_DEADLINE_S)
        try:
            # The service takes its copy when the call begins; waiting for the first answer makes that "now".
            response = next(stream)
        except KvStoreError:
            stream.cancel()
            raise
        return _until_mark(stream, response)

    def watch(self, on_batch: Callable[[Batch], None], on_dropped: Callable[[str], None]) -> Callable[[], None]:
        """See `WatchedIndex.watch`. Returns at once; callbacks come from the watch's thread, one at a time.

        A callback that raises an error of the tree makes the watch start again from a snapshot.
        """
        watch = _Watch(self._channel, self._stub.Watch, on_batch, on_dropped)
        self._watches.add(watch)

        def end() -> None:
            watch.end()
            self._watches.discard(watch)

        return end

    def close(self) -> None:
        """End all watches and the connection. Idempotent."""
        while self._watches:
            self._watches.pop().end()
        self._channel.close()


def _until_mark(stream: Stream, response: Any) -> Iterator[Batch]:
    try:
        while not response.snapshot_end:
            yield batch_from_message(response.batch)
            response = next(stream)
    finally:
        stream.cancel()


class _Watch:
    """A thread that follows the service. `_told` are the nodes which the callbacks have heard of."""

    def __init__(
        self, channel: Channel, method: Any, on_batch: Callable[[Batch], None], on_dropped: Callable[[str], None]
    ) -> None:
        self._channel = channel
        self._method = method
        self._on_batch = on_batch
        self._on_dropped = on_dropped
        self._told: set[str] = set()
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._stream: Stream | None = None
        self._backoff_s = _BACKOFF_FIRST_S
        self._thread = threading.Thread(target=self._follow, name="kvstore-watch", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """No callback runs after this returned. Idempotent; waits for a callback that runs now, at most 30 s."""
        with self._lock:
            self._ended.set()
            if self._stream is not None:
                self._stream.cancel()
        if threading.current_thread() is not self._thread:
            self._thread.join(_END_TIMEOUT_S)

    def _follow(self) -> None:
        while not self._ended.is_set():
            try:
                self._follow_stream()
            except KvStoreError as exc:
                if not self._ended.is_set():
                    logger.info(
                        "the watch of %s starts again in %.2f s: %s", self._channel.address, self._backoff_s, exc
                    )
            self._ended.wait(self._backoff_s)
            self._backoff_s = min(2 * self._backoff_s, _BACKOFF_LAST_S)

    def _follow_stream(self) -> None:
        with self._lock:
            if self._ended.is_set():
                return
            stream = self._stream = self._channel.stream(self._method, metadata_pb2.WatchRequest(), None)
        missing = set(self._told)
        in_snapshot = True
        try:
            for response in stream:
                if self._ended.is_set():
                    return
                if response.HasField("batch"):
                    batch = batch_from_message(response.batch)
                    missing.discard(batch.node.node_id)
                    self._tell(batch, starts_over=in_snapshot and batch.snapshot_begin)
                elif response.snapshot_end:
                    in_snapshot = False
                    self._backoff_s = _BACKOFF_FIRST_S
                    for node_id in missing:
                        self._drop(node_id)
                else:
                    self._drop(response.dropped_node_id)
        finally:
            stream.cancel()

    def _tell(self, batch: Batch, *, starts_over: bool) -> None:
        if starts_over:
            self._drop(batch.node.node_id)
        self._told.add(batch.node.node_id)
        self._on_batch(batch)

    def _drop(self, node_id: str) -> None:
        self._on_dropped(node_id)
        self._told.discard(node_id)
