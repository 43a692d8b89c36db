"""Pages of one peer on their way: asked for ahead, received, fenced, verified and scattered, batch by batch.

    reading thread      start n + 2 · payload n + 1 · start n + 3 · payload n + 2 …
    executor's thread           fence n · verify n · scatter n   …

While one batch arrives the next is asked for already, so that the link never waits for a request, and the one before is
delivered. So up to three batches lie in staging. Only the one that nothing of this read is ahead of may wait for room
there: readers that share staging cannot wait for each other.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

import numpy as np

from kvstore.client.values import Bytes, Destination, scatter_checked, synchronize
from kvstore.model import checksum
from kvstore.model.fetch import FetchPlan, plan_fetch
from kvstore.model.layout import Rectangle
from kvstore.model.namespace import Namespace
from kvstore.model.reshard import ShardPart
from kvstore.model.values import MissReason
from kvstore.node import ShardPlace
from kvstore.transport import Connection, Exchange, ReadDescriptor, ReadResult, ReadStatus
from kvstore.transport.staging import Staging, StagingBlock

BATCH_BYTES: Final = 8 << 20
"""Bytes of pages asked for in one exchange; with their tables at most a quarter of the staging."""
ASKED: Final = 2
"""Exchanges under way at a time: the one that arrives and the one behind it."""
UNIT_BYTES: Final = 4096

_REASON_OF_STATUS = {
    ReadStatus.DEADLINE: MissReason.DEADLINE,
    ReadStatus.UNREACHABLE: MissReason.UNREACHABLE,
    ReadStatus.REFUSED: MissReason.UNREACHABLE,
    ReadStatus.CANCELLED: MissReason.DEADLINE,
}


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


@dataclass(frozen=True, slots=True)
class _Batch:
    """Pieces of consecutive chunks that are fetched in one exchange. `completes`: they are the last of that group."""

    pieces: list[_Piece]
    completes: int | None

    @property
    def size_bytes(self) -> int:
        """What it takes in staging."""
        return self.pieces[-1].start + _rounded(self.pieces[-1].plan.staged_bytes)

    def descriptors(self) -> list[ReadDescriptor]:
        """What to ask for."""
        return [
            ReadDescriptor(
                piece.place.slot,
                piece.place.slot * UNIT_BYTES + run.source_offset,
                run.length_bytes,
                piece.start + run.target_offset,
            )
            for piece in self.pieces
            for run in piece.plan.runs
        ]

    def words(self, result: ReadResult) -> list[int]:
        """The generation word of each piece, out of those of all descriptors."""
        counts = [len(piece.plan.runs) for piece in self.pieces]
        return [result.generations[after - count] for after, count in zip(accumulate(counts), counts, strict=True)]


@dataclass(frozen=True, slots=True)
class _Asked:
    """A batch on its way into `block`."""

    batch: _Batch
    block: StagingBlock
    exchange: Exchange


class Pipeline:
    """One run of leased chunks, delivered over one connection. Chunk 0 goes to place `first` of the destination."""

    def __init__(self, delivery: Delivery, first: int, connection: Connection) -> None:
        self._delivery = delivery
        self._layout = delivery.namespace.layout
        self._staging = delivery.staging
        self._first = first
        self._connection = connection
        self._grouped = self._broken = False
        self._plans: dict[int, tuple[tuple[Rectangle, Rectangle], FetchPlan | None]] = {}
        self._tables: dict[tuple[int, int], checksum.Table] = {}
        """Checksum tables of chunks and shards that came with an earlier group of layers, verified."""
        self._asked: deque[_Asked] = deque()
        self._delivering: Future[None] | None = None
        self._ending = threading.Lock()
        """Both threads may find that fewer chunks count."""
        self._live, self._upto, self._reason = False, 0, None  # type: bool, int, MissReason | None
        self.moved = 0
        """Payload bytes that have come."""

    @property
    def healthy(self) -> bool:
        """True if the connection is good for another read."""
        return not self._broken

    def read(self, by_chunk: list[list[ShardPlace]], whole: bool) -> tuple[int, MissReason | None]:
        """(chunks delivered, why not more). A chunk that fails in one group is left out of the next ones.

        Raises what the destination raises.
        """
        self._upto = len(by_chunk)
        groups = self._delivery.in_order(whole)
        self._live, self._grouped = whole and bool(self._delivery.groups), len(groups) > 1
        try:
            batches = self._batches(by_chunk, groups)
            following = next(batches, None)
            while following or self._asked:
                while following and len(self._asked) < ASKED and self._ask(following):
                    following = next(batches, None)
                if not self._asked or not self._receive():
                    break
            self._delivered()
        except BaseException:  # of the destination, or the client was closed under this read
            self._broken = True
            self._connection.cancel()
            raise
        finally:
            self._drain()
        return self._upto, self._reason

    def _batches(self, by_chunk: list[list[ShardPlace]], groups: Sequence[Rectangle]) -> Iterator[_Batch]:
        """One exchange after the other: as many chunks as fit, at least one; none from the first on that has failed."""
        limit = self._staging.total_bytes // 4
        for group, rectangle in enumerate(groups):
            pieces: list[_Piece] = []
            size = page_bytes = 0
            for chunk, places in enumerate(by_chunk):
                if chunk >= self._upto:
                    break
                plans = [(place, plan) for place in places if (plan := self._plan(place, rectangle)) is not None]
                more = sum(_rounded(plan.staged_bytes) for _, plan in plans)
                more_pages = sum(plan.table_offset for _, plan in plans)
                if pieces and (size + more > limit or page_bytes + more_pages > BATCH_BYTES):
                    yield _Batch(pieces, None)
                    pieces, size, page_bytes = [], 0, 0
                for place, plan in plans:
                    pieces.append(_Piece(chunk, place, plan, size))
                    size += _rounded(plan.staged_bytes)
                page_bytes += more_pages
            if pieces and pieces[0].chunk < self._upto:
                yield _Batch(pieces, group)

    def _plan(self, place: ShardPlace, rectangle: Rectangle) -> FetchPlan | None:
        """What to fetch of a shard; mostly what was planned for the same shard of the chunk before."""
        known = self._plans.get(place.shard)
        if known is None or known[0] != (place.rectangle, rectangle):
            known = (place.rectangle, rectangle), self._plan_anew(place, rectangle)
            self._plans[place.shard] = known
        return known[1]

    def _plan_anew(self, place: ShardPlace, rectangle: Rectangle) -> FetchPlan | None:
        common = place.rectangle.intersection(rectangle)
        if common is None:
            return None
        first = max(place.rectangle.layer_start, self._delivery.rectangle.layer_start)
        with_table = rectangle.layer_start <= first < rectangle.layer_stop
        return plan_fetch(self._layout, ShardPart(place.shard & 0xFF, place.rectangle, common), with_table=with_table)

    def _ask(self, batch: _Batch) -> bool:
        """Start an exchange; False: not now, or never where nothing of this read is ahead of it."""
        if batch.pieces[0].chunk >= self._upto:  # not wanted any more
            return True
        ahead, left_s = bool(self._asked), _left(self._delivery.end_s)
        fits = batch.size_bytes <= self._staging.total_bytes  # else not even one chunk does
        block = self._staging.acquire(batch.size_bytes, 0.0 if ahead else left_s) if fits else None
        if block is None:
            if not ahead:
                self._break(batch, MissReason.STAGING_FULL)
            return False
        exchange = None
        try:
            exchange = self._connection.start(batch.descriptors(), block.view, left_s)
            if exchange is None and not ahead:  # until the one that is being delivered has its words
                self._delivered()
                exchange = self._connection.start(batch.descriptors(), block.view, left_s)
        finally:
            if exchange is None:
                self._staging.release(block)
        if exchange is None:
            if not ahead:
                self._broken = True
                self._break(batch, MissReason.UNREACHABLE)
            return False
        self._asked.append(_Asked(batch, block, exchange))
        return True

    def _receive(self) -> bool:
        """Take the payload that is due and have it delivered; False: it failed, and nothing more comes."""
        asked = self._asked.popleft()
        result = self._take(asked)
        if result.status is not ReadStatus.DONE:
            self._broken = True
            self._give_back(asked.block, result)
            self._break(asked.batch, _REASON_OF_STATUS[result.status])
            return False
        self.moved += result.payload_bytes
        handed_on = False
        try:
            self._delivered()
            if asked.batch.pieces[0].chunk < self._upto:
                self._delivering = self._delivery.executor.submit(self._deliver, asked)
                handed_on = True
        finally:  # also when the destination raises, or the client was closed under this read
            if not handed_on:
                self._staging.release(asked.block)
        return True

    def _delivered(self) -> None:
        """Wait for the batch that is being delivered. Raises what the destination raises."""
        if self._delivering is not None:
            self._delivering.result()
            self._delivering = None

    def _drain(self) -> None:
        """Take what was asked for and is of no use any more: until then its bytes may come."""
        with ExitStack() as oldest_first:
            while self._asked:
                oldest_first.callback(self._lay_off, self._asked.pop())
        if self._delivering is not None:
            self._delivering.exception()

    def _lay_off(self, asked: _Asked) -> None:
        self._give_back(asked.block, self._take(asked))

    def _take(self, asked: _Asked) -> ReadResult:
        try:
            return asked.exchange.payload()
        except BaseException:
            # Nobody can say when its transfer ends: nobody gets this memory again.
            self._staging.quarantine(asked.block, lambda: False)
            raise

    def _give_back(self, block: StagingBlock, result: ReadResult) -> None:
        if result.ended is None:
            self._staging.release(block)
        else:
            self._staging.quarantine(block, result.ended)

    def _fail(self, chunk: int, reason: MissReason) -> None:
        """This chunk and all behind it are not delivered."""
        with self._ending:
            if chunk < self._upto or self._reason is None:
                self._upto, self._reason, self._live = min(chunk, self._upto), reason, False

    def _break(self, batch: _Batch, reason: MissReason) -> None:
        """Nothing more comes. Chunks before this batch count if there is one group: they have all their layers."""
        self._fail(0 if self._grouped else batch.pieces[0].chunk, reason)

    def _deliver(self, asked: _Asked) -> None:
        """Fence, verify and scatter piece by piece, up to the first that fails."""
        staged, delivery, batch = asked.block.view, self._delivery, asked.batch
        try:
            result = asked.exchange.fence()
            if result.status is not ReadStatus.DONE:
                self._broken = True
                return self._break(batch, _REASON_OF_STATUS[result.status])
            words = batch.words(result)
            stale = [p.chunk for p, word in zip(batch.pieces, words, strict=True) if word != p.place.generation]
            for piece in batch.pieces:
                if piece.chunk >= self._upto:  # it failed in an earlier group, and has no table then
                    break
                if stale and piece.chunk >= stale[0]:
                    return self._fail(stale[0], MissReason.FENCE)
                if not self._scattered(piece, staged[piece.start : piece.start + piece.plan.staged_bytes]):
                    return self._fail(piece.chunk, MissReason.CHECKSUM)
        finally:
            try:
                synchronize(delivery.destination)  # it may read the block until then
            finally:
                self._staging.release(asked.block)
        if batch.completes is not None and self._live:
            delivery.on_group(batch.completes)

    def _scattered(self, piece: _Piece, held: Bytes) -> bool:
        """Verify what was fetched and hand it on; False: it is not what was stored."""
        plan, delivery, index = piece.plan, self._delivery, self._first + piece.chunk
        destination, common = delivery.destination, plan.part.common
        payload = held[: plan.table_offset].reshape(plan.staged_shape)
        pages = payload[plan.wanted_slices]
        if delivery.verify and piece.place.table_hash:
            table = self._table(piece, held[plan.table_offset :])
            if table is None:
                return False
            if pages.shape == payload.shape:
                return scatter_checked(destination, index, pages, common.layer_start, common.head_start, table)
            if not checksum.matches(payload, table):
                return False
        destination.scatter(index, pages, common.layer_start, common.head_start)
        return True

    def _table(self, piece: _Piece, table: Bytes) -> checksum.Table | None:
        """The checksums of what was fetched, out of the shard's table; None if that is not the one of the catalog."""
        plan, stored, place = piece.plan, piece.place.rectangle, (piece.chunk, piece.place.shard)
        if len(table):
            if checksum.table_hash(table) != piece.place.table_hash:
                return None
            words = np.frombuffer(table.tobytes(), dtype="<u8").reshape(stored.layers, stored.heads)
            if self._grouped:
                self._tables[place] = words
        else:
            words = self._tables[place]
        return words[plan.table_slices]


def _rounded(length_bytes: int) -> int:
    return -(-length_bytes // UNIT_BYTES) * UNIT_BYTES


def _left(end_s: float) -> float:
    return max(0.001, end_s - time.monotonic())
