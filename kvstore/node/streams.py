"""Put and Get: pages over gRPC for clients without shared memory or the kvstore library. Checksummed, slow.

The node itself is the writer here, and law 5 holds for it too: a slot is written only on the event loop, in
pieces of at most 1 MiB, each right after a look whether its grant still stands. Between that look and the copy
nothing else runs, so a slot whose reservation ended (session gone, time up) cannot be written any more, and no
thread has to be waited for when a client goes away. Work that only reads the arena (checksum tables, hashes)
runs in threads.

Bounded: at most `STREAMS_LIMIT` streams at a time, each with one message in memory; a stream works on a window of
the chain, so that it reserves or leases only what it moves soon. A Get looks at the slots' generations again
after each message is built.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import xxhash

from kvstore.errors import (
    CapacityExhausted,
    DeadlineExceeded,
    InvalidRequest,
    LayoutMismatch,
    LimitExceeded,
    NotFound,
    StaleReference,
)
from kvstore.model import checksum
from kvstore.model.layout import Rectangle
from kvstore.model.prefix import Keys
from kvstore.model.values import MissReason, Outcome
from kvstore.node import RESERVATION_LIFETIME_MS, AcquireAnswer, ReserveAnswer, ShardPlace
from kvstore.node.catalog import UNIT_BYTES
from kvstore.node.core import NodeCore
from kvstore.node.messages import PIECE_BYTES
from kvstore.node.slots import slot_bytes
from kvstore.node.stored import StoredChunk
from kvstore.rpc.v1 import node_pb2

STREAMS_LIMIT = 64
"""Put and Get streams that a node works on at a time."""
WINDOW_CHUNKS = 128
"""Chunks resolved in one go: a few milliseconds of the event loop."""
WINDOW_BYTES = 64 << 20
"""Slots that one Put reserves ahead; one slot may be larger."""
CHUNK_LIMIT_S = RESERVATION_LIFETIME_MS / 1000
"""A Put that takes longer than this to send a chunk is ended; its reservation would end then as well."""
LEASE_MS = 60_000
STAGE_LIMIT_S = 10.0
"""Longest wait for the SSD within a Get."""
INLINE_BYTES = 64 << 10
"""Checksums of less than this are made on the loop: a thread would take longer to start on it."""

Bytes = npt.NDArray[np.uint8]
T = TypeVar("T")
_NO_ROOM = (Outcome.REFUSED_FULL, Outcome.REFUSED_CATALOG_FULL, Outcome.REFUSED_SESSION_LIMIT)


Stage = Callable[[Keys, Rectangle, int, float], Awaitable[tuple[int, MissReason | None]]]
"""`TierStack.stage`: brings chunks from a place on into DRAM until a (monotonic) time."""


class PageStreams:
    """Moves payloads between gRPC streams and the arena (`memory`: the whole arena as uint8)."""

    def __init__(self, core: NodeCore, memory: Bytes, stage: Stage | None = None) -> None:
        self._core = core
        self._memory = memory
        self._stage = stage
        self.open_count = 0

    async def put(
        self, session: int, keys: Keys, shard: int, parts: AsyncIterator[node_pb2.PutRequest]
    ) -> list[Outcome]:
        """Store the payloads that follow the header, one a key; one outcome a key.

        What cannot be stored is skipped, not an error. Raises CapacityExhausted if not even the first chunk fits,
        InvalidRequest, LayoutMismatch or LimitExceeded for wrong messages (chunks before the wrong one stay
        stored), DeadlineExceeded if a chunk takes over 30 s, SessionLost.
        """
        with self._admitted():
            return await _Put(self._core, self._memory, session, keys, shard, parts).run()

    async def get(self, session: int, keys: Keys, rectangle: Rectangle) -> AsyncGenerator[node_pb2.GetResponse, None]:
        """Heads and pieces of the leading chunks that are there, then why the stream ended.

        Where a chunk leaves while it is being sent, its last pieces are missing. To be closed if it is left early.
        Raises LayoutMismatch, SessionLost, CapacityExhausted over 64 streams.
        """
        with self._admitted():
            async with contextlib.aclosing(
                _Get(self._core, self._memory, session, keys, rectangle, self._stage).messages()
            ) as found:
                async for message in found:
                    yield message

    @contextlib.contextmanager
    def _admitted(self) -> Iterator[None]:
        if self.open_count >= STREAMS_LIMIT:
            raise CapacityExhausted(f"this node works on {STREAMS_LIMIT} Put and Get streams already; try again later")
        self.open_count += 1
        try:
            yield
        finally:
            self.open_count -= 1


async def next_part(
    parts: AsyncIterator[node_pb2.PutRequest], patience_s: float = CHUNK_LIMIT_S
) -> node_pb2.PutRequest | None:
    """The next message of a Put, None at the end of the stream. Raises DeadlineExceeded after `patience_s`."""
    try:
        async with asyncio.timeout(patience_s):
            return await anext(parts, None)
    except TimeoutError as exc:
        raise DeadlineExceeded(f"put: a chunk did not arrive within {CHUNK_LIMIT_S:g} s") from exc


class _Put:
    """One Put under way."""

    def __init__(
        self,
        core: NodeCore,
        memory: Bytes,
        session: int,
        keys: Keys,
        shard: int,
        parts: AsyncIterator[node_pb2.PutRequest],
    ) -> None:
        self._core = core
        self._memory = memory
        self._session = session
        self._writer = core.session(session).writer
        self._keys = keys
        self._shard = shard
        self._parts = parts
        space = core.pool.spaces[keys.namespace_id]
        rectangle = space.rectangle(shard)
        if rectangle is None:
            raise NotFound(f"shard {shard:#010x} belongs to no geometry registered for {space.namespace.title}")
        self._layout, self._rectangle = space.layout, rectangle
        self._payload_bytes = space.layout.payload_bytes(rectangle)

    async def run(self) -> list[Outcome]:
        """Window by window; what hangs on a chunk that was not stored is refused without asking."""
        ahead = min(WINDOW_BYTES, self._writer.limit_bytes // 4)  # a session has other writes under way
        width = max(1, min(WINDOW_CHUNKS, ahead // slot_bytes(self._layout, self._rectangle)))
        outcomes: list[Outcome] = []
        for start in range(0, len(self._keys), width):
            window = self._keys.slice(start, start + width)
            if outcomes and outcomes[-1].refused:
                refused = [Outcome.REFUSED_PARENT_MISSING] * len(window)
                outcomes += await self._window(window, ReserveAnswer(0, refused, [0] * len(window)))
                continue
            answer = self._core.reserve(self._session, window, self._shard, b"")
            try:
                if not start and answer.outcomes[0] in _NO_ROOM:
                    why = answer.outcomes[0].name.lower()
                    raise CapacityExhausted(f"put: no room for the first chunk ({why}); try again later")
                outcomes += await self._window(window, answer)
            finally:
                self._end(answer.attempt)
        if await next_part(self._parts) is not None:
            raise InvalidRequest(f"put: more was sent after the last of {len(self._keys)} chunks, which are stored")
        self._core.order(self._session, self._keys)
        self._core.pool.counts["put_chunks"] += outcomes.count(Outcome.COMMITTED)
        return outcomes

    async def _window(self, keys: Keys, answer: ReserveAnswer) -> list[Outcome]:
        outcomes = list(answer.outcomes)
        for index in range(len(keys)):
            committed = await self._chunk(answer.attempt, index)
            if outcomes[index] is Outcome.GRANTED:
                outcomes[index] = committed
        if Outcome.IN_PROGRESS in outcomes:
            # Another writer had these. What has come free meanwhile cannot be filled: its bytes are gone.
            later = self._core.commit(self._session, answer.attempt, [], [], last=True)
            for index, outcome, _ in later.waiting:
                outcomes[index] = Outcome.IN_PROGRESS if outcome is Outcome.GRANTED else outcome
        return outcomes

    async def _chunk(self, attempt: int, index: int) -> Outcome:
        """Take the messages of one chunk, into its slot where there is one; COMMITTED or why not."""
        self._core.renew(self._session)
        began_s = asyncio.get_running_loop().time()
        ends_s = began_s + CHUNK_LIMIT_S
        digest, received = xxhash.xxh3_64(), 0
        while True:
            part = await next_part(self._parts, ends_s - asyncio.get_running_loop().time())
            kind = None if part is None else part.WhichOneof("part")
            if part is None:
                raise InvalidRequest("put: the stream ended before the last chunk's hash")
            if kind == "data":
                self._check_piece(received + len(part.data), len(part.data))
                self._write(attempt, index, received, part.data)
                digest.update(part.data)
                received += len(part.data)
            elif kind == "payload_hash":
                if received != self._payload_bytes:
                    raise LayoutMismatch(f"put: a chunk of this shard has {self._payload_bytes} bytes, not {received}")
                if digest.intdigest() != part.payload_hash:
                    raise InvalidRequest("put: the payload does not match its hash; this chunk was not stored")
                outcome = await self._commit(attempt, index)
                pool = self._core.pool
                pool.counts["put_bytes"] += received
                pool.seconds["grpc_put"].add(asyncio.get_running_loop().time() - began_s)
                return outcome
            else:
                raise InvalidRequest("put: expected data or payload_hash")

    def _check_piece(self, received: int, piece_bytes: int) -> None:
        if piece_bytes > PIECE_BYTES:
            raise LimitExceeded(f"put: a piece of {piece_bytes} bytes; one data message takes at most {PIECE_BYTES}")
        if received > self._payload_bytes:
            raise LayoutMismatch(f"put: a chunk of this shard has {self._payload_bytes} bytes, more were sent")

    def _write(self, attempt: int, index: int, offset: int, data: bytes) -> bool:
        """Copy into the granted slot, if it is (still) ours: no await may come between look and copy."""
        slot = self._slot(attempt, index)
        if slot is not None:
            start = slot * UNIT_BYTES + offset
            self._memory[start : start + len(data)] = np.frombuffer(data, dtype=np.uint8)
        return slot is not None

    def _slot(self, attempt: int, index: int) -> int | None:
        """The slot of a grant that stands, None where there is none (any more)."""
        live = self._core.reservations.attempts.get(attempt)
        grant = live.grants.get(index) if live is not None else None
        return None if grant is None else grant.slot

    async def _commit(self, attempt: int, index: int) -> Outcome:
        slot = self._slot(attempt, index)
        if slot is None:
            return Outcome.REFUSED_STALE
        payload = self._memory[slot * UNIT_BYTES :][: self._payload_bytes]
        table = await _off_loop(lambda: checksum.table_of(payload, self._layout, self._rectangle), len(payload))
        if not self._write(attempt, index, len(payload), table.tobytes()):
            return Outcome.REFUSED_STALE
        done = self._core.commit(self._session, attempt, [index], [checksum.table_hash(table)], last=False)
        return done.outcomes[0]

    def _end(self, attempt: int) -> None:
        """Give back what was not committed. Nothing writes into these slots any more: see `_write`."""
        live = self._writer.attempts.get(attempt)
        if live is not None:
            self._core.reservations.abort(live)
        else:
            self._core.reservations.acknowledge(self._writer, attempt)
        self._core.on_commit()


class _Get:
    """One Get under way."""

    def __init__(
        self, core: NodeCore, memory: Bytes, session: int, keys: Keys, rectangle: Rectangle, stage: Stage | None
    ) -> None:
        self._core = core
        self._memory = memory
        self._session = session
        self._keys = keys
        self._rectangle = rectangle
        self._stage = stage
        self._delivered = self._asked = 0
        self._reason: MissReason | None = None

    @property
    def _ended(self) -> bool:
        return self._delivered == len(self._keys) or self._reason is not None

    async def messages(self) -> AsyncGenerator[node_pb2.GetResponse, None]:
        """See `PageStreams.get`."""
        core, layout = self._core, self._core.pool.spaces[self._keys.namespace_id].layout
        core.session(self._session)
        layout.check_rectangle(self._rectangle)
        size = layout.payload_bytes(self._rectangle)
        while not self._ended:
            window = self._keys.slice(self._delivered, self._delivered + WINDOW_CHUNKS)
            self._asked = self._delivered + len(window)
            answer = await self._acquire(window)
            try:
                for places in _by_chunk(answer.places, answer.run):
                    core.session(self._session)  # a reader that is being served is not idle
                    began_s = time.monotonic()
                    chunk = StoredChunk(self._memory, layout, self._rectangle, places, PIECE_BYTES)
                    digest = await _off_loop(chunk.digest, size)
                    for message in self._messages_of(chunk, digest, size):
                        yield message
                    if self._reason is not None:
                        break
                    core.pool.seconds["grpc_get"].add(time.monotonic() - began_s)
                    core.pool.counts["get_bytes"] += size
                else:
                    self._reason = answer.reason
            finally:
                if answer.lease:
                    with contextlib.suppress(StaleReference):  # the session ended, and its leases with it
                        core.release(self._session, [answer.lease], [])
        self._count()
        yield node_pb2.GetResponse(end_reason="" if self._reason is None else self._reason.value)

    async def _acquire(self, window: Keys) -> AcquireAnswer:
        """A lease of the window's leading chunks; at least one that is on the SSD is brought into DRAM first."""
        answer = self._core.resolve(self._session, window, self._rectangle)
        staged, reason, run = 0, None, answer.run
        if answer.more and not run and self._stage is not None:
            ends_s = time.monotonic() + STAGE_LIMIT_S
            staged, reason = await self._stage(window, self._rectangle, 0, ends_s)
        unstaged = None if staged else reason  # with what came it goes on, and asks anew for the rest
        answer = self._core.acquire(
            self._session, window, self._rectangle, LEASE_MS, staged=range(staged), unstaged=unstaged
        )
        if answer.more and not answer.run:
            answer = replace(answer, reason=MissReason.DEADLINE)
            self._core.count_miss(window, answer)
        return answer

    def _messages_of(self, chunk: StoredChunk, digest: int | None, size: int) -> Iterator[node_pb2.GetResponse]:
        """Head and pieces of one chunk, as long as its slots hold it; a message goes out only after that look."""
        if not self._stands(chunk):
            self._reason = MissReason.FENCE
            return
        if digest is None:
            self._reason = MissReason.CHECKSUM
            self._core.pool.counts["dram_checksum_failures"] += 1
            return
        yield node_pb2.GetResponse(
            head=node_pb2.GetHead(index=self._delivered, payload_bytes=size, payload_hash=digest)
        )
        for piece in chunk.pieces():
            message = node_pb2.GetResponse(data=piece.tobytes())
            if not self._stands(chunk):
                self._reason = MissReason.FENCE
                return
            yield message
        self._delivered += 1

    def _stands(self, chunk: StoredChunk) -> bool:
        generation = self._core.pool.catalog.generation
        return all(generation(place.slot) == place.generation for place in chunk.places)

    def _count(self) -> None:
        counts = self._core.pool.counts
        counts["get_chunks"] += self._delivered
        if self._reason is not None:
            counts[f"get_misses_{self._reason.value}"] += 1
            never_asked = self._keys.token_count - self._keys.tokens_of_first(self._asked)
            counts[f"acquire_miss_tokens_{self._reason.value}"] += never_asked
        if self._delivered > WINDOW_CHUNKS:
            self._core.order(self._session, self._keys.slice(0, self._delivered))


async def _off_loop(work: Callable[[], T], size_bytes: int) -> T:
    """Run what only reads the arena in a thread, unless it is too little for that."""
    return work() if size_bytes <= INLINE_BYTES else await asyncio.to_thread(work)


def _by_chunk(places: Sequence[ShardPlace], run: int) -> list[list[ShardPlace]]:
    found: list[list[ShardPlace]] = [[] for _ in range(run)]
    for place in places:
        found[place.index].append(place)
    return found
