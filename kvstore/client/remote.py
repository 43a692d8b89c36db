"""Reading from another host's node: Acquire, payload into staging, fence, checksums, then scatter.

Of each stored shard only what is wanted is fetched (`kvstore/model/fetch.py`): all layers at once, or group by group.

Nothing lands in the caller's memory before its fence and checksums have passed. A larger read streams through
staging batch by batch. The checksum table travels with its payload and is believed only if it matches the hash
of the catalog entry, which came by Acquire.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np

from kvstore.client.peers import Peer
from kvstore.client.values import Bytes, Destination, synchronize
from kvstore.errors import DeadlineExceeded, KvStoreError, NotFound, SessionLost
from kvstore.model import checksum
from kvstore.model.fetch import FetchPlan, plan_fetch
from kvstore.model.layout import PageLayout, Rectangle
from kvstore.model.namespace import Namespace
from kvstore.model.prefix import Keys
from kvstore.model.reshard import ShardPart
from kvstore.model.values import MissReason
from kvstore.node import AcquireAnswer, ShardPlace
from kvstore.transport import Connection, ReadDescriptor, ReadStatus
from kvstore.transport.staging import Staging, StagingBlock

BATCH_BYTES = 8 << 20
"""Payload bytes asked for in one exchange; at most a quarter of the staging."""
UNIT_BYTES = 4096

_REASON_OF_STATUS = {
    ReadStatus.DEADLINE: MissReason.DEADLINE,
    ReadStatus.UNREACHABLE: MissReason.UNREACHABLE,
    ReadStatus.REFUSED: MissReason.UNREACHABLE,
    ReadStatus.CANCELLED: MissReason.DEADLINE,
}


@dataclass(frozen=True, slots=True)
class RemoteRead:
    """`chunks` leading chunks were delivered; `payload_bytes` came over the network (tables included), by `path`.

    `ssd_tokens` of them the peer had on its SSD only. `more`: it has the next chunk, on a slower tier.
    """

    chunks: int
    reason: MissReason | None
    payload_bytes: int
    ssd_tokens: int = 0
    more: bool = False
    path: str = ""


@dataclass(frozen=True, slots=True)
class Delivery:
    """What a read is to deliver, and how: chunk i of the keys goes to place `first + i` of the destination.

    The destination is called from threads of `executor`, one call at a time. `groups`: parts of the rectangle in the
    order in which they are delivered, layers first to last; `on_group(n)` is called when group n has all its chunks.
    `verify` False only for tests.
    """

    namespace: Namespace
    rectangle: Rectangle
    destination: Destination
    staging: Staging
    executor: Executor
    end_s: float
    verify: bool = True
    groups: tuple[Rectangle, ...] = ()
    on_group: Callable[[int], None] = lambda group: None
    on_connection: Callable[[Connection | None], None] = lambda connection: None
    """Told what moves the bytes from now on, None when nothing does: another thread may cancel it."""

    def in_order(self, whole: bool) -> tuple[Rectangle, ...]:
        """The groups to deliver one after the other; one where the run is not `whole`, since nobody waits for less."""
        return self.groups if whole and self.groups else (self.rectangle,)


@dataclass(frozen=True, slots=True)
class _Piece:
    """What a read fetches of one stored shard: `plan.staged_bytes` at `start` of a staging block."""

    chunk: int
    place: ShardPlace
    plan: FetchPlan
    start: int


def read_remote(
    peer: Peer, delivery: Delivery, keys: Keys, first: int, *, ticket_id: bytes = b"", wait_ms: int = 0
) -> RemoteRead:
    """Deliver the longest prefix of `keys` that this peer holds; chunk i goes to place `first + i`.

    Every failure is a reason, not an exception. What the peer has to bring from a slower tier comes in several parts.
    """
    done = RemoteRead(0, None, 0, more=True)
    while done.more and time.monotonic() < delivery.end_s:
        rest = keys.slice(done.chunks, len(keys))
        part = _read_part(peer, delivery, rest, first + done.chunks, ticket_id, wait_ms)
        done = RemoteRead(
            done.chunks + part.chunks,
            part.reason,
            done.payload_bytes + part.payload_bytes,
            done.ssd_tokens + part.ssd_tokens,
            part.more and part.chunks > 0,
            part.path or done.path,
        )
    return done if done.chunks == len(keys) or done.reason else replace(done, reason=MissReason.DEADLINE)


def _read_part(peer: Peer, delivery: Delivery, keys: Keys, first: int, ticket_id: bytes, wait_ms: int) -> RemoteRead:
    """One Acquire, and what it leased."""
    end_s = delivery.end_s
    try:
        peer.register(delivery.namespace, _left(end_s))
        lease_ms = min(60_000, int(_left(end_s) * 1000) + 1000)
        answer = peer.api.acquire(keys, delivery.rectangle, lease_ms, ticket_id, wait_ms, _left(end_s))
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
        result = _read_places(peer, delivery, by_chunk, first, whole=answer.run == len(keys))
    finally:
        _release(peer, answer, end_s)
    ssd_tokens = min(answer.ssd_tokens, keys.tokens_of_first(result.chunks))
    if result.chunks < answer.run:
        return replace(result, ssd_tokens=ssd_tokens)
    return replace(result, reason=answer.reason, ssd_tokens=ssd_tokens, more=answer.more)


def _read_places(
    peer: Peer, delivery: Delivery, by_chunk: list[list[ShardPlace]], first: int, whole: bool
) -> RemoteRead:
    """Deliver resolved chunks. A kept connection that fails at once is made anew: its owner may just have ended it."""
    while True:
        run = _Run(delivery, first)
        connection, kept, path = None, False, ""
        try:
            connection, kept = peer.take(_left(delivery.end_s))
            path = connection.name
            delivery.on_connection(connection)
            done, reason = run.read(connection, by_chunk, whole)
        except DeadlineExceeded:
            done, reason = 0, MissReason.DEADLINE
        except KvStoreError:
            done, reason = 0, MissReason.UNREACHABLE
        finally:
            if connection is not None:
                delivery.on_connection(None)
                peer.give_back(connection, healthy=run.healthy)
        if not (kept and done == 0 and reason is MissReason.UNREACHABLE):
            return RemoteRead(done, reason, run.moved, path=path)


class _Run:
    """One run of leased chunks on its way: batch n is verified and scattered while batch n + 1 is received."""

    def __init__(self, delivery: Delivery, first: int) -> None:
        self._delivery = delivery
        self._layout = delivery.namespace.layout
        self._staging = delivery.staging
        self._first = first
        self._live = self._grouped = False
        self._upto, self._reason = 0, None  # type: int, MissReason | None
        self.moved = 0
        self.healthy = False

    def read(
        self, connection: Connection, by_chunk: list[list[ShardPlace]], whole: bool
    ) -> tuple[int, MissReason | None]:
        """(chunks delivered, why not more). A chunk that fails in one group is left out of the next ones."""
        self._upto = len(by_chunk)
        groups = self._delivery.in_order(whole)
        self._live = whole and bool(self._delivery.groups)
        under_way: Future[None] | None = None
        self._grouped = len(groups) > 1
        for group, pieces, last in self._batches(by_chunk, groups):
            received = self._receive(connection, pieces)
            try:
                if under_way is not None:
                    earlier, under_way = under_way, None
                    earlier.result()
                if received is None:
                    break
                if pieces[0].chunk >= self._upto:
                    continue
                under_way = self._delivery.executor.submit(self._deliver, pieces, *received, group if last else None)
                received = None
            finally:  # also when the caller's destination raises, or the client was closed under this read
                if received is not None:
                    self._staging.release(received[0])
        if under_way is not None:
            under_way.result()
        return self._upto, self._reason

    def _batches(
        self, by_chunk: list[list[ShardPlace]], groups: Sequence[Rectangle]
    ) -> Iterator[tuple[int, list[_Piece], bool]]:
        """(group, pieces of consecutive chunks, whether they are the group's last) of one exchange after the other.

        As many chunks as fit, at least one; none from the first on that has failed meanwhile.
        """
        limit = min(BATCH_BYTES, self._staging.total_bytes // 4)
        for group, rectangle in enumerate(groups):
            batch: list[_Piece] = []
            size = 0
            for chunk, places in enumerate(by_chunk):
                if chunk >= self._upto:
                    break
                plans = [(place, plan) for place in places if (plan := self._plan(place, rectangle)) is not None]
                more = sum(_rounded(plan.staged_bytes) for _, plan in plans)
                if batch and size + more > limit:
                    yield group, batch, False
                    batch, size = [], 0
                for place, plan in plans:
                    batch.append(_Piece(chunk, place, plan, size))
                    size += _rounded(plan.staged_bytes)
            if batch and batch[0].chunk < self._upto:
                yield group, batch, True

    def _fail(self, chunk: int, reason: MissReason) -> None:
        """This chunk and all behind it are not delivered."""
        if chunk < self._upto or self._reason is None:
            self._upto, self._reason, self._live = min(chunk, self._upto), reason, False

    def _plan(self, place: ShardPlace, rectangle: Rectangle) -> FetchPlan | None:
        common = place.rectangle.intersection(rectangle)
        if common is None:
            return None
        return plan_fetch(self._layout, ShardPart(place.shard & 0xFF, place.rectangle, common))

    def _receive(self, connection: Connection, pieces: list[_Piece]) -> tuple[StagingBlock, tuple[int, ...]] | None:
        """A batch in staging with the generation word of each piece; None: it failed, and `_fail` was told."""
        end_s, last = self._delivery.end_s, pieces[-1]
        size = last.start + _rounded(last.plan.staged_bytes)
        fits = size <= self._staging.total_bytes  # else not even one chunk does
        block = self._staging.acquire(size, _left(end_s)) if fits else None
        if block is None:
            self.healthy = True
            self._break(pieces, MissReason.STAGING_FULL)
            return None
        self.healthy = False
        descriptors = [
            ReadDescriptor(
                piece.place.slot,
                piece.place.slot * UNIT_BYTES + run.source_offset,
                run.length_bytes,
                piece.start + run.target_offset,
            )
            for piece in pieces
            for run in piece.plan.runs
        ]
        try:
            result = connection.read(descriptors, block.view, _left(end_s))
        except BaseException:
            # Nobody can say when its transfer ends: nobody gets this memory again.
            self._staging.quarantine(block, lambda: False)
            raise
        if result.status is not ReadStatus.DONE:
            if result.ended is None:
                self._staging.release(block)
            else:
                self._staging.quarantine(block, result.ended)
            self._break(pieces, _REASON_OF_STATUS[result.status])
            return None
        self.healthy = True
        self.moved += result.payload_bytes
        counts = [len(piece.plan.runs) for piece in pieces]
        firsts = (after - count for after, count in zip(accumulate(counts), counts, strict=True))
        return block, tuple(result.generations[first] for first in firsts)

    def _break(self, pieces: list[_Piece], reason: MissReason) -> None:
        """Nothing more comes. Chunks before this batch count if there is one group: they have all their layers."""
        self._fail(0 if self._grouped else pieces[0].chunk, reason)

    def _deliver(
        self, pieces: list[_Piece], block: StagingBlock, generations: tuple[int, ...], completes: int | None
    ) -> None:
        """Fence, verify and scatter piece by piece, up to the first that fails. `completes`: the group that is done."""
        layout, staged, delivery = self._layout, block.view, self._delivery
        stale = [p.chunk for p, word in zip(pieces, generations, strict=True) if word != p.place.generation]
        try:
            for piece in pieces:
                if stale and piece.chunk >= stale[0]:
                    return self._fail(stale[0], MissReason.FENCE)
                plan = piece.plan
                held = staged[piece.start : piece.start + plan.staged_bytes]
                if delivery.verify and piece.place.table_hash and not _verified(layout, piece, held):
                    return self._fail(piece.chunk, MissReason.CHECKSUM)
                pages = held[: plan.table_offset].reshape(layout.shape(plan.staged))[plan.wanted_slices]
                common = plan.part.common
                delivery.destination.scatter(self._first + piece.chunk, pages, common.layer_start, common.head_start)
        finally:
            try:
                synchronize(delivery.destination)  # it may read the block until then
            finally:
                self._staging.release(block)
        if completes is not None and self._live:
            delivery.on_group(completes)


def _verified(layout: PageLayout, piece: _Piece, held: Bytes) -> bool:
    """True if the table is the one of the catalog, and what was fetched is what the table says."""
    plan, stored = piece.plan, piece.place.rectangle
    table = held[plan.table_offset :]
    if checksum.table_hash(table) != piece.place.table_hash:
        return False
    words = np.frombuffer(table.tobytes(), dtype="<u8").reshape(stored.layers, stored.heads)
    payload = held[: plan.table_offset]
    return np.array_equal(checksum.table_of(payload, layout, plan.staged), words[plan.table_slices])


def _rounded(length_bytes: int) -> int:
    return -(-length_bytes // UNIT_BYTES) * UNIT_BYTES


def _release(peer: Peer, answer: AcquireAnswer, end_s: float) -> None:
    """Give the lease back. Failing that it runs out by itself, within a minute."""
    if answer.lease:
        try:
            peer.api.release([answer.lease], [], min(1.0, max(0.05, _left(end_s))))
        except KvStoreError:
            return


def _left(end_s: float) -> float:
    return max(0.001, end_s - time.monotonic())
