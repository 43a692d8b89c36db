"""The one place where errors of the pool become misses, so that an engine never fails because of the pool.

`guarded` runs a call of the pool and gives the miss instead of an exception; every caught error is counted under
operation and kind and logged at a falling rate. `PoolSession` offers an engine the few verbs that it needs in that
form; `ChunkWriter` stores a prompt layer by layer while it is being computed.

Invariants: no method here raises because of the pool; after a failed write the writer is inert and its reservation
given back; `present_here` never waits. Not here: what to load (`engine_adapter.requests`), and where pages lie in the
engine.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from kvstore.client import (
    Cache,
    Client,
    Destination,
    LayersReady,
    PendingWrite,
    ReadResult,
    Source,
    TransferMode,
    WriteResult,
)
from kvstore.errors import DeadlineExceeded, SessionLost, Unreachable
from kvstore.model.layout import Geometry, Rectangle
from kvstore.model.namespace import Namespace
from kvstore.model.prefix import Keys
from kvstore.model.ticket import Ticket
from kvstore.model.values import MissReason, NodeInfo

RETRY_EVERY_S = 2.0
"""A pool that could not be reached is not tried again for this long."""

T = TypeVar("T")
_log = logging.getLogger(__name__)


def guarded(errors: Counter[str], operation: str, call: Callable[[], T], miss: T) -> T:
    """The result of `call`, or `miss` if it raises; the error is counted in `errors` as `operation:Kind`.

    The only broad catch of the project outside servers: whatever goes wrong below (the pool, its transports, the
    operating system), the engine goes on without cached bytes.
    """
    try:
        return call()
    except Exception as exc:  # noqa: BLE001
        name = f"{operation}:{type(exc).__name__}"
        errors[name] += 1
        count = errors[name]
        # Logged at the 1st, 2nd, 4th, 8th … time, so that a pool that is down cannot fill a disk.
        if count & (count - 1) == 0:
            _log.warning("the pool's %s failed (%d times so far), going on without: %s", operation, count, exc)
        return miss


@dataclass(frozen=True, slots=True)
class Binding:
    """How a rank takes part in a namespace: see `Client.bind`. `geometry` None: one shard a chunk."""

    geometry: Geometry | None = None
    rank: int = 0
    secret: bytes = b""
    checksums: bool = True

    @property
    def arguments(self) -> dict[str, Any]:
        """Of `Client.bind`, where they are not the usual ones."""
        usual = Binding()
        return {
            each.name: mine for each in fields(self) if (mine := getattr(self, each.name)) != getattr(usual, each.name)
        }


class PoolSession:
    """One engine's use of the pool. `open_client` is called at the first use, and again while it fails.

    Thread-safe. Several sessions may share a client, which `open_client` then keeps; the first `close` closes it.
    """

    def __init__(
        self,
        namespace: Namespace,
        open_client: Callable[[], Client],
        binding: Binding = Binding(),
    ) -> None:
        self.errors: Counter[str] = Counter()
        """All so far: their number decides what is logged."""
        self._told: dict[str, int] = {}
        self._namespace = namespace
        self._open_client = open_client
        self._binding = binding
        self._client: Client | None = None
        self._cache: Cache | None = None
        self._retry_at_s = 0.0
        self._connecting = threading.Lock()

    def _connected(self) -> Cache:
        """The bound cache; raises while the pool cannot be reached, or while another thread tries to."""
        cache = self._cache
        if cache is not None:
            return cache
        if not self._connecting.acquire(blocking=False):
            raise Unreachable("another thread is connecting to the pool")
        try:
            return self._connect()
        finally:
            self._connecting.release()

    def _connect(self) -> Cache:
        if self._cache is None:
            if time.monotonic() < self._retry_at_s:
                raise Unreachable("the pool did not answer a moment ago")
            # Set first: an attempt that fails must not be repeated, and waited for, at every call.
            self._retry_at_s = time.monotonic() + RETRY_EVERY_S
            if self._client is None:
                self._client = self._open_client()
            self._cache = self._client.bind(self._namespace, **self._binding.arguments)
        return self._cache

    def open(self) -> None:
        """Connect now instead of at the first use."""
        guarded(self.errors, "connect", self._connected, None)

    def reopen(self, deadline_s: float = 2.0) -> bool:
        """Connect, and open the own node's session again if it was lost; True if there is one. Waits."""

        def call() -> bool:
            self._connected()
            client = self._client
            return client is not None and client.host(deadline_s) is not None

        return guarded(self.errors, "connect", call, False)

    def present_here(self, keys: Keys, rectangle: Rectangle | None = None) -> int | None:
        """Leading chunks that the own host's node has, on whatever tier; None without a session with it.

        Looks into shared memory only: no lock, no call, no waiting.
        """
        cache = self._cache
        if cache is None:
            return None
        return guarded(self.errors, "look", lambda: cache.present_here(keys, rectangle=rectangle), None)

    def present_anywhere(self, keys: Keys, rectangle: Rectangle | None = None, *, deadline_s: float) -> int:
        """Leading chunks that the best node of the pool has. Asks the index, and waits for it."""

        def call() -> int:
            return self._connected().match(keys, rectangle=rectangle, deadline_s=deadline_s).pool_chunks

        return guarded(self.errors, "match", call, 0)

    @property
    def whole(self) -> Rectangle:
        """The rectangle of all layers and heads: what all ranks of an engine together need."""
        return self._namespace.layout.whole

    @property
    def node(self) -> NodeInfo | None:
        """Node of the own host; None while it is not known."""
        return self._client.node if self._client is not None else None

    @property
    def node_id(self) -> str:
        """Node of the own host; empty while it is not known."""
        return self.node.node_id if self.node is not None else ""

    def read(
        self,
        keys: Keys,
        into: Destination,
        *,
        deadline_s: float,
        ticket: Ticket | None = None,
        rectangle: Rectangle | None = None,
    ) -> ReadResult:
        """Load a prefix of the chunks; an error is a miss of all of them. `rectangle`: what the rank holds of them.

        The pages of chunks that were not delivered hold anything afterwards.
        """

        def call() -> ReadResult:
            return self._connected().read(keys, into, deadline_s=deadline_s, ticket=ticket, rectangle=rectangle)

        return self._or_miss("read", keys, call)

    def load_layers(
        self,
        keys: Keys,
        into: Destination,
        layers_ready: Callable[[LayersReady], None],
        *,
        deadline_s: float,
        mode: TransferMode = TransferMode.AUTO,
        ticket: Ticket | None = None,
        rectangle: Rectangle | None = None,
    ) -> ReadResult:
        """Like `read`, and `layers_ready` is called in this thread with layers as they come; see `Cache.read_layers`.

        An error, of `layers_ready` too, is a miss of all chunks, whatever was told before. Afterwards the pages are the
        engine's again.
        """

        def call() -> ReadResult:
            with self._connected().read_layers(
                keys, into, mode=mode, deadline_s=deadline_s, ticket=ticket, rectangle=rectangle
            ) as read:
                for ready in read:
                    layers_ready(ready)
                return read.result()

        return self._or_miss("read", keys, call)

    def _or_miss(self, operation: str, keys: Keys, read: Callable[[], ReadResult]) -> ReadResult:
        """What a read gives; a miss with the reason if it raises."""
        if not len(keys):
            return ReadResult(0, 0, 0, 0, None)
        reason = MissReason.UNREACHABLE

        def call() -> ReadResult:
            nonlocal reason
            try:
                return read()
            except DeadlineExceeded:
                reason = MissReason.DEADLINE
                raise
            except SessionLost:
                reason = MissReason.SESSION_LOST
                raise

        result = guarded(self.errors, operation, call, None)
        return ReadResult(0, 0, 0, 0, reason) if result is None else result

    def writer(
        self, keys: Keys, source: Source, *, ticket: Ticket | None = None, deadline_s: float = 30.0
    ) -> ChunkWriter:
        """Reserve what is missing of a whole chain; on an error the writer does nothing."""

        def call() -> PendingWrite:
            return self._connected().begin_write(keys, for_ticket=ticket, deadline_s=deadline_s)

        pending = guarded(self.errors, "reserve", call, None) if len(keys) else None
        geometry = self._binding.geometry
        stored = geometry.rectangles[self._binding.rank] if geometry is not None else self.whole
        return ChunkWriter(self.errors, pending, source, (stored.layer_start, stored.layer_stop))

    def release(self, ticket: Ticket) -> None:
        """The handoff has been read."""
        guarded(self.errors, "release", lambda: self._connected().release(ticket), None)

    def stats(self) -> dict[str, object]:
        """The client's figures and the errors by operation and kind."""
        client = self._client
        figures: dict[str, object] = {}
        if client is not None:
            figures = guarded(self.errors, "stats", lambda: dict(client.stats()), figures)
        return {"pool": figures, "errors": dict(self.errors)}

    def take_errors(self) -> dict[str, int]:
        """Errors since the last call, as figures: `errors_OPERATION_KIND`. For one thread."""
        told, self._told = self._told, dict(self.errors)
        new = {name: count - told.get(name, 0) for name, count in self._told.items()}
        return {f"errors_{name.replace(':', '_')}": count for name, count in new.items() if count}

    def close(self) -> None:
        """End the session. Idempotent."""
        client, self._client, self._cache = self._client, None, None
        if client is not None:
            guarded(self.errors, "close", client.close, None)


class ChunkWriter:
    """A write that follows the computation: layers as they are done, commits chunk by chunk in order.

    Used as a context manager it aborts what was neither committed nor finished. Not thread-safe.
    """

    def __init__(
        self, errors: Counter[str], pending: PendingWrite | None, source: Source, layers: tuple[int, int]
    ) -> None:
        self._errors = errors
        self._pending = pending
        self._source = source
        self._layers = layers
        self._granted = frozenset(pending.granted) if pending is not None else frozenset()
        self.stored_chunks = 0
        """Chunks that this writer made visible."""
        self.visible_chunks = 0
        """Leading chunks that are visible on the node, whoever stored them."""

    def __enter__(self) -> ChunkWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.abort()

    def put_layer(self, layer: int, start: int, stop: int) -> None:
        """The layer (number of the model) of chunks [start, stop) is complete in the engine's pages."""
        self._put(layer, layer + 1, range(start, stop))

    def put_chunks(self, start: int, stop: int) -> None:
        """Chunks [start, stop) are complete in the engine's pages; those that the node lacks are stored."""
        self._put(*self._layers, range(start, stop))

    def _put(self, layer_start: int, layer_stop: int, chunks: Sequence[int]) -> None:
        pending, wanted = self._pending, [chunk for chunk in chunks if chunk in self._granted]
        if pending is not None and wanted:
            self._attempt("put", lambda: pending.put_layers(layer_start, layer_stop, self._source, chunks=wanted))

    def commit(self, upto: int) -> None:
        """Make the chunks before `upto` visible; the write goes on."""
        pending = self._pending
        if pending is not None:
            self._attempt("commit", lambda: self._note(pending.commit(upto)))

    def finish(self) -> None:
        """Make the rest visible and end the write. All chunks are complete in the engine's pages."""
        pending = self._pending
        if pending is not None:
            self._attempt("commit", lambda: self._end(pending))
        self._pending = None

    def _end(self, pending: PendingWrite) -> None:
        # Chunks of our own first. What is left then is what others were writing: the client needs a source for all
        # chunks to take over those that came free.
        self._note(pending.commit(len(pending.keys)))
        pending.put_layers(*self._layers, self._source)
        self._note(pending.commit())

    def _note(self, result: WriteResult) -> None:
        self.stored_chunks, self.visible_chunks = result.stored, result.visible

    def abort(self) -> None:
        """Give back what is not committed; nothing is written any more. Idempotent."""
        pending, self._pending = self._pending, None
        if pending is not None:
            guarded(self._errors, "abort", pending.abort, None)

    def _attempt(self, operation: str, call: Callable[[], None]) -> None:
        def done() -> bool:
            call()
            return True

        if not guarded(self._errors, operation, done, False):
            self.abort()
