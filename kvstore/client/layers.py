"""A read that tells of its layers as they come, so that an engine computes layer 0 while the rest is in flight.

    Reading, in a thread of the client's       caller
    group 0 fenced, verified, scattered  ──►   LayersReady(0, 2, chunks)   computes layers 0 and 1
    group 1 …                            ──►   LayersReady(2, 4, chunks)
    the end                              ──►   LayersReady of the layers left, if any; `result`

Layers are told in order, each once, and only when they are there for every chunk of the keys that can still count. So
nothing is told early unless one source has all that is left; else nobody could start, and all layers are told at
the end. A source may still fail behind what it has told: then the chunks that are missing come from another, with
the same bytes (equal keys, equal bytes), or nobody has them and `result` counts fewer chunks than were told.

Invariant: after `close` nothing of the read is written into the destination any more.
"""

from __future__ import annotations

import contextlib
import enum
import queue
import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as NotDone
from dataclasses import dataclass
from types import TracebackType

from kvstore.client.nodes import Nodes
from kvstore.client.reading import Reading
from kvstore.client.values import Bytes, Destination, ReadResult, scatter_checked, scatters_at_once
from kvstore.errors import DeadlineExceeded, InvalidRequest
from kvstore.model import checksum
from kvstore.model.layout import PageLayout, Rectangle
from kvstore.model.namespace import Namespace
from kvstore.model.prefix import Keys
from kvstore.model.ticket import Ticket
from kvstore.model.values import MissReason
from kvstore.transport import Connection

THRESHOLD_TOKENS = 512
"""From so many tokens on `auto` goes layer by layer: for fewer the exchanges cost more than the wait that they save."""
LEAST_PART_BYTES = 64 << 10
"""Least bytes of one chunk in a group: below it a transport pays more for the descriptor than for the bytes."""
LATE_S = 0.5
"""A read ends by itself at its deadline; one that has not so long after it is given up."""


class TransferMode(enum.StrEnum):
    """When a read tells of layers."""

    SERIALIZED = "serialized"
    """All at the end."""
    LAYERWISE = "layerwise"
    """Each group as soon as it is there."""
    AUTO = "auto"
    """Layerwise from a number of tokens on."""


def choose(mode: TransferMode, tokens: int, threshold_tokens: int = THRESHOLD_TOKENS) -> TransferMode:
    """SERIALIZED or LAYERWISE for a read that is expected to bring `tokens`."""
    if mode is not TransferMode.AUTO:
        return mode
    return TransferMode.LAYERWISE if tokens >= threshold_tokens else TransferMode.SERIALIZED


def layer_groups(layout: PageLayout, rectangle: Rectangle, layers_at_once: int = 0) -> tuple[Rectangle, ...]:
    """The rectangle cut into groups of `layers_at_once` layers, in order; the last may have fewer.

    0: as few layers as give a chunk's part of a group 64 KiB. InvalidRequest for less than 0.
    """
    if layers_at_once < 0:
        raise InvalidRequest(f"layers_at_once is {layers_at_once}; it must be 0 (chosen here) or more")
    step = layers_at_once or -(-LEAST_PART_BYTES * rectangle.layers // layout.payload_bytes(rectangle))
    starts = range(rectangle.layer_start, rectangle.layer_stop, step)
    heads = rectangle.head_start, rectangle.head_stop
    return tuple(Rectangle(start, min(start + step, rectangle.layer_stop), *heads) for start in starts)


def groups_for(
    mode: TransferMode | str,
    tokens: int,
    threshold_tokens: int,
    layout: PageLayout,
    rectangle: Rectangle,
    layers_at_once: int,
) -> tuple[Rectangle, ...]:
    """The groups of a read; none where it is serialized. InvalidRequest for an unknown mode."""
    try:
        chosen = choose(TransferMode(mode), tokens, threshold_tokens)
    except ValueError as exc:
        raise InvalidRequest(f"unknown transfer mode {mode!r}; known: {', '.join(TransferMode)}") from exc
    groups = layer_groups(layout, rectangle, layers_at_once)
    return groups if chosen is TransferMode.LAYERWISE and len(groups) > 1 else ()


@dataclass(frozen=True, slots=True)
class LayersReady:
    """Layers [layer_start, layer_stop) (numbers of the model) of the first `chunks` chunks lie in the destination."""

    layer_start: int
    layer_stop: int
    chunks: int


class LayerRead:
    """An iterator over the `LayersReady` of one read, made by `Cache.read_layers`. It belongs to one thread.

    Each wait ends with the read's deadline. Use it as a context manager, or `close` it: until then, or until `result`
    has answered, the destination is the read's. An exception of a destination is raised by iterator and `result`.
    """

    def __init__(self, read: _Read, end_s: float, mode: TransferMode, future: Future[ReadResult]) -> None:
        self.mode = mode
        """What was chosen."""
        self._read = read
        self._end_s = end_s + LATE_S
        self._future = future
        self._given_up = False
        future.add_done_callback(lambda _: read.told.put(None))

    def __iter__(self) -> Iterator[LayersReady]:
        return self

    def __next__(self) -> LayersReady:
        """The next layers, in order; ends when there are no more to come, or at the deadline."""
        if self._given_up:
            raise StopIteration
        try:
            ready = self._read.told.get(timeout=self._left_s())
        except queue.Empty:
            self.close()
            raise StopIteration from None
        if ready is not None:
            return ready
        self._read.told.put(None)  # asked again it ends again
        if not self._future.cancelled() and (error := self._future.exception()) is not None:
            raise error
        raise StopIteration

    def result(self, deadline_s: float | None = None) -> ReadResult:
        """How the read ended: `chunks` leading chunks count, in all layers, whatever was told of some.

        Waits for it, at most `deadline_s` (then DeadlineExceeded, the read goes on) and at most until the read's own
        deadline. A read that was given up before its end counts nothing.
        """
        if self._given_up:
            return _MISS
        left_s = self._left_s()
        try:
            return self._future.result(left_s if deadline_s is None else min(left_s, deadline_s))
        except CancelledError:
            return ReadResult(0, 0, 0, 0, MissReason.SESSION_LOST)
        except NotDone as exc:
            if self._left_s() > 0:
                raise DeadlineExceeded(f"the read has not ended within {deadline_s:g} s") from exc
            self.close()
            return _MISS

    def close(self) -> None:
        """Give up what has not ended. When this returns, the destination is the caller's again. Idempotent."""
        if not self._future.done():
            self._given_up = True
            self._future.cancel()
        self._read.close()

    def __enter__(self) -> LayerRead:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _left_s(self) -> float:
        return max(0.0, self._end_s - time.monotonic())


_MISS = ReadResult(0, 0, 0, 0, MissReason.DEADLINE)


class _Closed(Exception):
    """The caller has given the read up; not an error of the pool, which would be tried elsewhere."""


class _Read:
    """The read's side of it: a destination that can be closed, and what was told so far."""

    def __init__(self, destination: Destination, groups: tuple[Rectangle, ...], chunks: int, wanted: Rectangle) -> None:
        self.told: queue.SimpleQueue[LayersReady | None] = queue.SimpleQueue()
        """None: nothing more comes."""
        self.reading: Reading
        self.early = False
        """True if layers were told before the rest was there."""
        self._destination = destination
        self._groups = groups
        self._chunks = chunks
        self._next, self._stop = wanted.layer_start, wanted.layer_stop
        self._open = True
        self.scatters_at_once = scatters_at_once(destination)
        self._writers = 0
        self._writing, self._moving = threading.Condition(), threading.Lock()
        self._connection: Connection | None = None

    def scatter(self, index: int, piece: Bytes, layer_start: int, head_start: int) -> None:
        """See Destination."""
        with self._write():
            self._destination.scatter(index, piece, layer_start, head_start)

    def scatter_checked(
        self, index: int, piece: Bytes, layer_start: int, head_start: int, table: checksum.Table
    ) -> bool:
        """See Checking."""
        with self._write():
            return scatter_checked(self._destination, index, piece, layer_start, head_start, table)

    @contextlib.contextmanager
    def _write(self) -> Iterator[None]:
        """While a piece is written. Raises _Closed after `close`."""
        with self._writing:
            if not self._open:
                raise _Closed
            self._writers += 1
        try:
            yield
        finally:
            with self._writing:
                self._writers -= 1
                self._writing.notify_all()

    def close(self) -> None:
        """Wait for the pieces that are being written; no other is written afterwards, and nothing more is moved."""
        self._open = False  # before the lock, which the next piece may get first
        self.reading.give_up()
        with self._moving:
            if self._connection is not None:
                self._connection.cancel()
        with self._writing:
            self._writing.wait_for(lambda: not self._writers)

    def on_connection(self, connection: Connection | None) -> None:
        """What moves bytes now; nothing may once the read is given up."""
        with self._moving:
            self._connection = connection
            if connection is not None and not self._open:
                connection.cancel()

    def on_group(self, number: int) -> None:
        """All chunks are there in this group. A source that starts anew repeats groups that were told."""
        group = self._groups[number]
        if group.layer_start == self._next:
            self.early = True
            self._tell(group.layer_stop, self._chunks)

    def _tell(self, layer_stop: int, chunks: int) -> None:
        self.told.put(LayersReady(self._next, layer_stop, chunks))
        self._next = layer_stop

    def run(self, nodes: Nodes, ticket: Ticket | None) -> ReadResult:
        """The whole read, in a thread of the client."""
        with contextlib.suppress(_Closed):  # what is complete counts as read, the rest is too late
            self.reading.run(ticket)
        result = self.reading.result()
        if result.chunks and self._next < self._stop:
            self._tell(self._stop, result.chunks)
        nodes.counters.add("reads_layerwise" if self.early else "reads_serialized")
        return result


def start_read(
    nodes: Nodes,
    namespace: Namespace,
    keys: Keys,
    wanted: Rectangle,
    destination: Destination,
    end_s: float,
    *,
    groups: tuple[Rectangle, ...],
    ticket: Ticket | None,
) -> LayerRead:
    """Begin a read in a thread of the client. `groups` as `layer_groups` cuts them; none for a serialized read."""
    mode = TransferMode.LAYERWISE if groups else TransferMode.SERIALIZED
    read = _Read(destination, groups, len(keys), wanted)
    read.reading = Reading(nodes, namespace, keys, wanted, read, end_s, groups, read.on_group, read.on_connection)
    future: Future[ReadResult] = Future()
    if nodes.closed:
        future.set_result(ReadResult(0, 0, 0, 0, MissReason.SESSION_LOST))
    else:
        future = nodes.readers().submit(read.run, nodes, ticket)
    return LayerRead(read, end_s, mode, future)
