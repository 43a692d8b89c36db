"""Node to node over the same protocol: this node's process pulls chunks as a client of both nodes.

What it reads comes over the network like any remote read: fence and checksums pass in the client's own staging. What
it stores goes through a session with the own node like any same-host write: Reserve, copy into the slots, Commit. So
nobody ever writes into another node's memory, and chunks that are here or on their way are not moved again.

A chain is pulled in windows, each for all wanted rectangles, first to last: what is stored when something fails is a
prefix, and the next call goes on from there. All of it runs in a few threads, never on the node's event loop, which
answers the calls that these threads make.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from kvstore.client import Cache, Client
from kvstore.client.buffers import ChunkArray
from kvstore.client.host import HostNode, SocketHost
from kvstore.client.pipeline import Delivery
from kvstore.client.remote import RemoteRead, read_remote
from kvstore.client.transports import Way
from kvstore.draining import Drain
from kvstore.errors import (
    CapacityExhausted,
    DeadlineExceeded,
    InvalidRequest,
    KvStoreError,
    SessionLost,
    Unreachable,
)
from kvstore.model.layout import Geometry
from kvstore.model.namespace import Namespace
from kvstore.model.prefix import Keys
from kvstore.model.values import MissReason, NodeInfo, Outcome
from kvstore.node import HANDOFF_WAIT_MS
from kvstore.node.core import NodeCore
from kvstore.node.operators.moving import PULLED_BYTES, Drained, Replicated
from kvstore.node.slots import slot_bytes

PULLS = 2
"""Chains that are pulled at a time."""
ASKED_LIMIT = 64
"""Replications under way or waiting; a further one is refused."""
WINDOW_BYTES = 32 << 20
"""Slots that one pull reserves at a time; at most an eighth of the arena."""
STAGING_BYTES = 32 << 20
_OPEN_S = 5.0
_STORE_SHARE, _STORE_LIMIT_S = 0.1, 1.0
"""Part of the deadline, and most seconds of it, that are kept for the Commit or Abort after the last byte came."""
_ANSWER_S = 1.5
"""An Abort may end this long after the deadline."""
_TRIES = 4
"""Times that one chunk may fail a fence, be removed under the copy, or lose its session."""
_SHORT_LIVED = {MissReason.FENCE.value, MissReason.SESSION_LOST.value, Outcome.REFUSED_STALE.name.lower()}
_OTHERS_WRITE = {MissReason.IN_PROGRESS.value, Outcome.REFUSED_SESSION_LIMIT.name.lower()}
_PARENT_MISSING = Outcome.REFUSED_PARENT_MISSING.name.lower()
_WAIT_ID = b"wait to replicat"
"""Names no ticket: an Acquire that names one waits for commits."""

Wanted = Sequence[tuple[Geometry, tuple[int, ...]]]


class NodeMover:
    """`kvstore.node.operators.moving.Mover` for the node around `core`. Made and used on the node's event loop."""

    def __init__(self, core: NodeCore, way: Way | None = None) -> None:
        self._core = core
        self._way = way or Way()
        self._threads = ThreadPoolExecutor(PULLS, thread_name_prefix="kvstore-pull")
        self._lock = threading.Lock()
        self._client: Client | None = None
        self._closed = False
        self._asked: set[_Pull] = set()

    async def replicate(
        self, namespace: Namespace, geometries: Wanted, keys: Keys, source: NodeInfo, deadline_s: float
    ) -> Replicated:
        """See Mover. What fails on the source's side is a reason, not an error.

        A chunk that the source has for other rectangles only is passed over. Raises InvalidRequest for what is not a
        whole chain, CapacityExhausted over 64 replications, Unreachable where the own node cannot be written to.
        """
        _check(namespace, keys)
        if source.node_id == self._core.info.node_id:
            raise InvalidRequest(f"node {source.node_id} cannot replicate from itself")
        if self._closed or len(self._asked) >= ASKED_LIMIT:
            raise CapacityExhausted(f"this node pulls {len(self._asked)} chains already; ask again later")
        if not len(keys) or not geometries:
            return Replicated(0, 0, 0, "")
        pull = _Pull(namespace, geometries, keys, source, deadline_s)
        self._asked.add(pull)
        path = self._core.info.socket_path
        future: Future[Replicated] = self._threads.submit(lambda: pull.run(self._own_client(path)))
        future.add_done_callback(lambda _: self._asked.discard(pull))
        try:
            async with asyncio.timeout(deadline_s + _ANSWER_S):
                return await asyncio.wrap_future(future)
        except TimeoutError:
            raise DeadlineExceeded(f"the chain was not pulled within {deadline_s:.3f} s") from None
        finally:
            pull.stopped = True  # of no effect on one that has ended

    def drain(self, targets: Sequence[NodeInfo]) -> AsyncIterator[Drained]:
        """See Mover. The node goes on serving; keeping new writes out is the caller's business."""
        return Drain(self._core, targets).run()

    def figures(self) -> dict[str, int]:
        """See Mover."""
        counts = self._client.counters.snapshot() if self._client is not None else {}
        return {name: counts.get(name, 0) for name in PULLED_BYTES.values()}

    async def close(self) -> None:
        """End what is under way, then the session with the own node, which must still answer. Idempotent."""
        self._closed = True
        for pull in list(self._asked):
            pull.stopped = True
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)
        if self._client is not None:
            self._client.close()

    def _own_client(self, path: str) -> Client:
        with self._lock:
            if self._client is None:
                host = SocketHost(path, "replication", _OPEN_S)
                self._client = Client(
                    path, host.info, None, way=self._way, staging_bytes=STAGING_BYTES, name="replication", host=host
                )
            return self._client


def _check(namespace: Namespace, keys: Keys) -> None:
    if keys.namespace_id != namespace.id or keys.parent != namespace.id:
        raise InvalidRequest("a chain to replicate starts at the beginning of its prompt, in the namespace named")
    if keys.fingerprints is None:
        raise InvalidRequest("a chain to replicate carries its fingerprints: they are stored with the chunks")


class _Pull:
    """One replication under way, in one thread. `stopped` (set from any thread) ends it before its next step."""

    def __init__(
        self, namespace: Namespace, geometries: Wanted, keys: Keys, source: NodeInfo, deadline_s: float
    ) -> None:
        self._namespace = namespace
        self._geometries = geometries
        self._keys = keys
        self._source = source
        self._end_s = time.monotonic() + deadline_s
        self._read_end_s = self._end_s - min(_STORE_LIMIT_S, _STORE_SHARE * deadline_s)
        self._reason = ""
        self._pulled: set[int] = set()
        self._pulled_bytes = 0
        self.stopped = False

    def run(self, client: Client) -> Replicated:
        """Pull the chain, window by window."""
        self._client = client
        caches = self._register()
        rectangles = [cache.rectangle for several in caches for cache in several]
        layout = self._namespace.layout
        step = self._window_chunks(max(slot_bytes(layout, rectangle) for rectangle in rectangles))
        self._buffer = np.empty(step * max(layout.payload_bytes(rectangle) for rectangle in rectangles), dtype=np.uint8)
        held = 0
        for start in range(0, len(self._keys), step):
            window = self._keys.slice(start, start + step)
            whole = self._store_window(caches, window)
            held = max([held, *(start + place + 1 for place, here in enumerate(whole) if here)])
            if len(whole) < len(window):
                break
        reason = self._reason or (MissReason.NOT_COVERED.value if held < len(self._keys) else "")
        return Replicated(held, len(self._pulled), self._pulled_bytes, reason)

    def _register(self) -> list[list[Cache]]:
        """For each geometry one cache a rectangle that is written here; the own node knows them then."""
        host = self._own_node()
        caches = []
        for geometry, written_here in self._geometries:
            ranks = written_here or tuple(range(len(geometry.rectangles)))
            several = [
                Cache(
                    self._client,
                    self._namespace,
                    secret=b"",
                    geometry=geometry,
                    rank=rank,
                    written_here=ranks,
                    checksums=True,
                )
                for rank in ranks
            ]
            several[0].register(host, self._left())
            caches.append(several)
        self._arena_bytes = host.arena.nbytes
        return caches

    def _window_chunks(self, slot: int) -> int:
        # All pulls share the session, which may reserve half of the arena.
        return max(1, min(WINDOW_BYTES, self._arena_bytes // (4 * PULLS)) // slot)

    def _store_window(self, caches: list[list[Cache]], keys: Keys) -> list[bool]:
        """For each leading chunk until one fails: whether all rectangles of a geometry are here."""
        whole = [False] * len(keys)
        for several in caches:
            here = [True] * len(keys)
            for cache in several:
                stored = self._store(cache, keys)
                keys = keys.slice(0, len(stored))
                here = [both and own for both, own in zip(here, stored, strict=False)]
            whole = [other or own for other, own in zip(whole, here, strict=False)]
        return whole

    def _store(self, cache: Cache, keys: Keys) -> list[bool]:
        """For each leading chunk until one fails: True = its shard is here, False = the source has no such shard."""
        stored: list[bool] = []
        tries = 0
        while len(stored) < len(keys):
            if self.stopped or time.monotonic() >= self._read_end_s:
                self._reason = MissReason.DEADLINE.value
                break
            got, reason = self._store_some(cache, keys.slice(len(stored), len(keys)))
            stored += [True] * got
            tries = 0 if got else tries + 1
            if reason == MissReason.NOT_COVERED.value:
                stored.append(False)
            elif reason in _OTHERS_WRITE:
                self._wait(cache, keys.slice(len(stored), len(keys)))
            elif (reason and reason not in _SHORT_LIVED) or tries >= _TRIES:
                parent_passed_over = stored and not stored[-1] and reason == _PARENT_MISSING
                self._reason = MissReason.NOT_COVERED.value if parent_passed_over else reason or MissReason.ABSENT.value
                break
        return stored

    def _store_some(self, cache: Cache, keys: Keys) -> tuple[int, str]:
        """(leading chunks that are here now, why not the next).

        Slots are asked for only after the source has said what it has: a Reserve may evict, which must not be for
        nothing.
        """
        here = self._own_node().api.acquire(keys, cache.rectangle, 0, b"", 0, self._left()).run
        if here == len(keys):
            return here, ""
        wanted = keys.slice(here, len(keys))
        offered, missed = self._offered(cache, wanted)
        if not offered:
            return here, missed
        got, reason = self._pull(cache, wanted.slice(0, offered))
        return here + got, missed if got == offered else reason

    def _wait(self, cache: Cache, keys: Keys) -> None:
        """Until others have committed these, or have committed nothing for a while."""
        left_s = self._read_end_s - time.monotonic()
        if left_s > 0:
            with contextlib.suppress(DeadlineExceeded):  # the caller looks at the time next
                self._own_node().api.acquire(keys, cache.rectangle, 0, _WAIT_ID, HANDOFF_WAIT_MS, left_s)

    def _offered(self, cache: Cache, keys: Keys) -> tuple[int, str]:
        """(leading chunks that the source has, why not the next)."""
        left_s = max(0.001, self._read_end_s - time.monotonic())
        try:
            peer = self._client.peer(self._source, left_s)
            peer.register(self._namespace, left_s)
            answer = peer.api.acquire(keys, cache.rectangle, 0, b"", 0, left_s)
            if answer.more:  # on its SSD: it begins to read, and says how many there are
                rest = keys.slice(answer.run, len(keys))
                return answer.run + peer.api.prefetch(rest, cache.rectangle, left_s)[0], ""
            return answer.run, answer.reason.value if answer.reason is not None else ""
        except DeadlineExceeded:
            return 0, MissReason.DEADLINE.value
        except SessionLost:
            reason = MissReason.SESSION_LOST
        except KvStoreError:  # gone, or restarted
            reason = MissReason.UNREACHABLE
        self._client.drop_peer(self._source.node_id, self._source.epoch)
        return 0, reason.value

    def _pull(self, cache: Cache, keys: Keys) -> tuple[int, str]:
        """(leading chunks that are here now, why not the next); one reservation, which ends in here."""
        with cache.begin_write(keys, deadline_s=self._left()) as pending:
            granted = pending.granted
            pages = self._pages(cache, len(keys))
            filled, missed = self._fetch(cache, keys, granted, pages)
            outcomes = pending.outcomes
            if filled:
                rectangle = cache.rectangle
                pending.put_layers(rectangle.layer_start, rectangle.layer_stop, pages, filled)
                outcomes = list(pending.commit().outcomes)
        for place in filled:
            if outcomes[place] is Outcome.COMMITTED:
                self._pulled.add(keys.first_index + place)
                self._pulled_bytes += cache.layout.payload_bytes(cache.rectangle)
        for place, outcome in enumerate(outcomes):
            if outcome not in (Outcome.COMMITTED, Outcome.PRESENT):
                unfilled = missed is not None and place in granted and place not in filled
                return place, str(missed) if unfilled else outcome.name.lower()
        return len(keys), ""

    def _pages(self, cache: Cache, count: int) -> ChunkArray:
        """Private memory for the pages of `count` chunks; the same for every call."""
        shape = count, *cache.layout.shape(cache.rectangle)
        return ChunkArray(self._buffer[: int(np.prod(shape))].reshape(shape), cache.rectangle)

    def _fetch(
        self, cache: Cache, keys: Keys, places: Sequence[int], pages: ChunkArray
    ) -> tuple[list[int], MissReason | None]:
        """Read these places from the source until one is a miss: (places that came, why not the next)."""
        filled: list[int] = []
        for first, stop in _runs(places):
            result = self._read(cache, keys.slice(first, stop), pages, first)
            filled += range(first, first + result.chunks)
            if result.reason is not None:
                if result.reason in (MissReason.UNREACHABLE, MissReason.SESSION_LOST):
                    self._client.drop_peer(self._source.node_id, self._source.epoch)
                return filled, result.reason
        return filled, None

    def _read(self, cache: Cache, keys: Keys, pages: ChunkArray, first: int) -> RemoteRead:
        client = self._client
        try:
            peer = client.peer(self._source, max(0.001, self._read_end_s - time.monotonic()))
        except KvStoreError:
            return RemoteRead(0, MissReason.UNREACHABLE, 0)
        delivery = Delivery(
            self._namespace, cache.rectangle, pages, client.staging, client.background(), self._read_end_s
        )
        result = read_remote(peer, delivery, keys, first)
        if result.path in PULLED_BYTES:
            client.counters.add(PULLED_BYTES[result.path], result.payload_bytes)
        return result

    def _own_node(self) -> HostNode:
        host = self._client.host(self._left())
        if host is None:
            raise Unreachable("the node does not answer its own process")
        return host

    def _left(self) -> float:
        return max(0.001, self._end_s - time.monotonic())


def _runs(places: Sequence[int]) -> Iterator[tuple[int, int]]:
    """[first, stop) of each run of consecutive places."""
    first = 0
    for at in range(1, len(places) + 1):
        if at == len(places) or places[at] != places[at - 1] + 1:
            yield places[first], places[at - 1] + 1
            first = at
