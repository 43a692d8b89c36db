"""Reading from another host's node: Acquire, payload into staging, fence, checksums, then scatter.

Nothing lands in the caller's memory before its fence and checksums have passed. A larger read streams through
staging batch by batch. The checksum table travels with its payload and is believed only if it matches the hash
of the catalog entry, which came by Acquire.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Executor, Future
from dataclasses import dataclass, replace

from kvstore.client.values import Bytes, Destination
from kvstore.errors import DeadlineExceeded, KvStoreError, NotFound, SessionLost, StaleReference
from kvstore.model import checksum
from kvstore.model.layout import Geometry, PageLayout, Rectangle
from kvstore.model.namespace import Namespace
from kvstore.model.prefix import Keys
from kvstore.model.reshard import ShardPart
from kvstore.model.values import MissReason, NodeInfo
from kvstore.node import AcquireAnswer, ShardPlace
from kvstore.node.remote import RemoteNode
from kvstore.transport import Connection, ReadDescriptor, ReadStatus, Transport
from kvstore.transport.staging import Staging, StagingBlock

BATCH_BYTES = 8 << 20
"""Payload bytes asked for in one exchange; at most a quarter of the staging."""
CONNECTIONS_KEPT = 8
UNIT_BYTES = 4096

_REASON_OF_STATUS = {
    ReadStatus.DEADLINE: MissReason.DEADLINE,
    ReadStatus.UNREACHABLE: MissReason.UNREACHABLE,
    ReadStatus.REFUSED: MissReason.UNREACHABLE,
    ReadStatus.CANCELLED: MissReason.DEADLINE,
}


@dataclass(frozen=True, slots=True)
class RemoteRead:
    """`chunks` leading chunks were delivered; `payload_bytes` came over the network (tables included).

    `ssd_tokens` of them the peer had on its SSD only. `more`: it has the next chunk, on a slower tier.
    """

    chunks: int
    reason: MissReason | None
    payload_bytes: int
    ssd_tokens: int = 0
    more: bool = False


@dataclass(frozen=True, slots=True)
class _Piece:
    """One shard of one chunk in a staging block: payload (whole shard) at `start`, its table right behind."""

    chunk: int
    place: ShardPlace
    part: ShardPart
    start: int
    payload_bytes: int
    held_bytes: int


class Peer:
    """One incarnation of another node: its gRPC session and some idle data connections. Thread-safe."""

    def __init__(self, info: NodeInfo, transport: Transport, name: str, deadline_s: float) -> None:
        self.info = info
        self._transport = transport
        self.api = RemoteNode(info.control_address, name=name, deadline_s=deadline_s)
        if self.api.info is not None and self.api.info.epoch != info.epoch:
            self.api.close()
            raise StaleReference(f"node {info.node_id} has restarted")
        self._lock = threading.Lock()
        self._idle: list[Connection] = []
        self._registered: set[bytes] = set()
        self._written: set[tuple[bytes, Geometry, tuple[int, ...]]] = set()

    def register(self, namespace: Namespace, deadline_s: float) -> None:
        """Tell the node of the namespace, once."""
        if namespace.id not in self._registered:
            self.api.register_namespace(namespace, None, (), deadline_s)
            self._registered.add(namespace.id)

    def register_writer(
        self, namespace: Namespace, geometry: Geometry, written_here: tuple[int, ...], deadline_s: float
    ) -> None:
        """Tell the node how this client cuts the namespace's chunks, once."""
        place = namespace.id, geometry, written_here
        if place not in self._written:
            self.api.register_namespace(namespace, geometry, written_here, deadline_s)
            self._written.add(place)

    def take(self, deadline_s: float) -> tuple[Connection, bool]:
        """(a connection for one thread, whether it was kept from an earlier read)."""
        while True:
            with self._lock:
                kept = self._idle.pop() if self._idle else None
            if kept is None:
                break
            if kept.is_open:
                return kept, True
            kept.close()  # the owner has ended it meanwhile
        return self._transport.connect(self.info, deadline_s), False

    def give_back(self, connection: Connection, *, healthy: bool) -> None:
        """Keep a healthy connection for the next read, close any other."""
        with self._lock:
            if healthy and len(self._idle) < CONNECTIONS_KEPT:
                self._idle.append(connection)
                return
        connection.close()

    def close(self) -> None:
        """End everything."""
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()
        self.api.close()


def read_remote(
    peer: Peer,
    staging: Staging,
    namespace: Namespace,
    keys: Keys,
    rectangle: Rectangle,
    destination: Destination,
    first: int,
    end_s: float,
    executor: Executor,
    *,
    ticket_id: bytes = b"",
    wait_ms: int = 0,
    verify: bool = True,
) -> RemoteRead:
    """Deliver the longest prefix of `keys` that this peer holds; chunk i goes to place `first + i`.

    Every failure is a reason, not an exception. `executor` runs what overlaps with receiving; the destination is
    called from its threads, one call at a time. `verify` False only for tests. What the peer has to bring from a slower
    tier comes in several parts.
    """
    done = RemoteRead(0, None, 0, more=True)
    while done.more and time.monotonic() < end_s:
        part = _read_part(
            peer,
            staging,
            namespace,
            keys.slice(done.chunks, len(keys)),
            rectangle,
            destination,
            first + done.chunks,
            end_s,
            executor,
            ticket_id,
            wait_ms,
            verify,
        )
        done = RemoteRead(
            done.chunks + part.chunks,
            part.reason,
            done.payload_bytes + part.payload_bytes,
            done.ssd_tokens + part.ssd_tokens,
            part.more and part.chunks > 0,
        )
    return done if done.chunks == len(keys) or done.reason else replace(done, reason=MissReason.DEADLINE)


def _read_part(
    peer: Peer,
    staging: Staging,
    namespace: Namespace,
    keys: Keys,
    rectangle: Rectangle,
    destination: Destination,
    first: int,
    end_s: float,
    executor: Executor,
    ticket_id: bytes,
    wait_ms: int,
    verify: bool,
) -> RemoteRead:
    """One Acquire, and what it leased."""
    try:
        peer.register(namespace, _left(end_s))
        lease_ms = min(60_000, int(_left(end_s) * 1000) + 1000)
        answer = peer.api.acquire(keys, rectangle, lease_ms, ticket_id, wait_ms, _left(end_s))
    except DeadlineExceeded:
        return RemoteRead(0, MissReason.DEADLINE, 0)
    except NotFound:
        return RemoteRead(0, MissReason.ABSENT, 0)
    except SessionLost:
        return RemoteRead(0, MissReason.SESSION_LOST, 0)
    except KvStoreError:
        return RemoteRead(0, MissReason.UNREACHABLE, 0)
    if not answer.run:
        return RemoteRead(0, answer.reason, 0)
    by_chunk: list[list[ShardPlace]] = [[] for _ in range(answer.run)]
    for place in answer.places:
        by_chunk[place.index].append(place)
    try:
        result = _read_places(
            peer, staging, namespace, by_chunk, rectangle, destination, first, end_s, executor, verify
        )
    finally:
        _release(peer, answer, end_s)
    ssd_tokens = min(answer.ssd_tokens, keys.tokens_of_first(result.chunks))
    if result.chunks < answer.run:
        return replace(result, ssd_tokens=ssd_tokens)
    return replace(result, reason=answer.reason, ssd_tokens=ssd_tokens, more=answer.more)


def _read_places(
    peer: Peer,
    staging: Staging,
    namespace: Namespace,
    by_chunk: list[list[ShardPlace]],
    rectangle: Rectangle,
    destination: Destination,
    first: int,
    end_s: float,
    executor: Executor,
    verify: bool,
) -> RemoteRead:
    """Deliver resolved chunks. A kept connection that fails at once is made anew: its owner may just have ended it."""
    while True:
        run = _Run(staging, namespace.layout, rectangle, destination, first, verify)
        connection, kept = None, False
        try:
            connection, kept = peer.take(_left(end_s))
            done, reason = run.read(connection, by_chunk, executor, end_s)
        except DeadlineExceeded:
            done, reason = 0, MissReason.DEADLINE
        except KvStoreError:
            done, reason = 0, MissReason.UNREACHABLE
        finally:
            if connection is not None:
                peer.give_back(connection, healthy=run.healthy)
        if not (kept and done == 0 and reason is MissReason.UNREACHABLE):
            return RemoteRead(done, reason, run.moved)


class _Run:
    """One run of leased chunks on its way: batch n is verified and scattered while batch n + 1 is received."""

    def __init__(
        self,
        staging: Staging,
        layout: PageLayout,
        rectangle: Rectangle,
        destination: Destination,
        first: int,
        verify: bool,
    ) -> None:
        self._staging = staging
        self._layout = layout
        self._rectangle = rectangle
        self._destination = destination
        self._first = first
        self._verify = verify
        self.moved = 0
        self.healthy = False

    def read(
        self, connection: Connection, by_chunk: list[list[ShardPlace]], executor: Executor, end_s: float
    ) -> tuple[int, MissReason | None]:
        """(chunks delivered, why not more)."""
        under_way: Future[tuple[int, MissReason | None]] | None = None
        done, reason = len(by_chunk), None
        for chunks in self._batches(by_chunk):
            begin = chunks.start
            received, failure = self._receive(connection, by_chunk, chunks, end_s)
            if under_way is not None:
                failed = True  # also when the caller's destination raises
                try:
                    good, bad = under_way.result()
                    failed = bad is not None
                finally:
                    if failed and received is not None:
                        self._staging.release(received[1])
                under_way = None
                if failed:
                    return good, bad
            if received is None:
                return begin, failure
            try:
                under_way = executor.submit(self._deliver, *received)
            except RuntimeError:  # the client was closed under this read
                self._staging.release(received[1])
                raise
        if under_way is not None:
            good, bad = under_way.result()
            if bad is not None:
                done, reason = good, bad
        return done, reason

    def _batches(self, by_chunk: list[list[ShardPlace]]) -> Iterator[range]:
        """Consecutive chunks that are asked for in one exchange: as many as fit, at least one."""
        limit = min(BATCH_BYTES, self._staging.total_bytes // 4)
        begin = size = 0
        for chunk, places in enumerate(by_chunk):
            more = sum(_held_bytes(self._layout, place.rectangle) for place in places)
            if size and size + more > limit:
                yield range(begin, chunk)
                begin, size = chunk, 0
            size += more
        yield range(begin, len(by_chunk))

    def _receive(
        self, connection: Connection, by_chunk: list[list[ShardPlace]], chunks: range, end_s: float
    ) -> tuple[tuple[list[_Piece], StagingBlock, tuple[int, ...]] | None, MissReason | None]:
        """A batch in staging with its generation words, or why not."""
        pieces, size = _lay_out(self._layout, self._rectangle, by_chunk, chunks)
        fits = size <= self._staging.total_bytes  # else not even one chunk does
        block = self._staging.acquire(size, _left(end_s)) if fits else None
        if block is None:
            self.healthy = True
            return None, MissReason.STAGING_FULL
        self.healthy = False
        descriptors = [
            ReadDescriptor(piece.place.slot, piece.place.slot * UNIT_BYTES, piece.held_bytes, piece.start)
            for piece in pieces
        ]
        result = connection.read(descriptors, block.view, _left(end_s))
        if result.status is not ReadStatus.DONE:
            # Whatever the status, the transport promises that no byte can arrive any more.
            self._staging.release(block)
            return None, _REASON_OF_STATUS[result.status]
        self.healthy = True
        self.moved += result.payload_bytes
        return (pieces, block, result.generations), None

    def _deliver(
        self, pieces: list[_Piece], block: StagingBlock, generations: tuple[int, ...]
    ) -> tuple[int, MissReason | None]:
        """Fence, verify and scatter piece by piece; (chunk of the first failure, reason) or (0, None)."""
        layout, staged = self._layout, block.view
        stale = [p.chunk for p, word in zip(pieces, generations, strict=True) if word != p.place.generation]
        try:
            for piece in pieces:
                if stale and piece.chunk >= stale[0]:
                    return stale[0], MissReason.FENCE
                payload = staged[piece.start : piece.start + piece.payload_bytes]
                if self._verify and piece.place.table_hash and not _verified(layout, piece, payload, staged):
                    return piece.chunk, MissReason.CHECKSUM
                pages = payload.reshape(layout.shape(piece.place.rectangle))
                cut = pages if piece.part.is_whole_shard else pages[piece.part.stored_slices]
                common = piece.part.common
                self._destination.scatter(self._first + piece.chunk, cut, common.layer_start, common.head_start)
            return 0, None
        finally:
            self._staging.release(block)


def _lay_out(
    layout: PageLayout, rectangle: Rectangle, by_chunk: list[list[ShardPlace]], chunks: range
) -> tuple[list[_Piece], int]:
    """Where each shard of a batch lies in its staging block (page-aligned), and the block's size."""
    pieces, at = [], 0
    for chunk in chunks:
        for place in by_chunk[chunk]:
            common = place.rectangle.intersection(rectangle)
            if common is not None:
                part = ShardPart(place.shard & 0xFF, place.rectangle, common)
                payload_bytes = layout.payload_bytes(place.rectangle)
                held_bytes = payload_bytes + checksum.table_bytes(place.rectangle)
                pieces.append(_Piece(chunk, place, part, at, payload_bytes, held_bytes))
                at += -(-held_bytes // UNIT_BYTES) * UNIT_BYTES
    return pieces, at


def _verified(layout: PageLayout, piece: _Piece, payload: Bytes, staged: Bytes) -> bool:
    stored = piece.place.rectangle
    end = piece.start + piece.payload_bytes
    table = staged[end : end + checksum.table_bytes(stored)]
    if checksum.table_hash(table) != piece.place.table_hash:
        return False
    return not checksum.differs(payload, table, layout, stored)


def _held_bytes(layout: PageLayout, rectangle: Rectangle) -> int:
    return layout.payload_bytes(rectangle) + checksum.table_bytes(rectangle)


def _release(peer: Peer, answer: AcquireAnswer, end_s: float) -> None:
    """Give the lease back. Failing that it runs out by itself, within a minute."""
    if answer.lease:
        try:
            peer.api.release([answer.lease], [], min(1.0, max(0.05, _left(end_s))))
        except KvStoreError:
            return


def _left(end_s: float) -> float:
    return max(0.001, end_s - time.monotonic())
