"""The `tcp` transport, reading side. The wire format is in `tcp_wire.py`, the owner's side in `tcp_server.py`.

A reader may ask for the next payload while one is still arriving, so that the link never waits for a request. An owner
answers in order, and the words of one payload must not wait behind the bytes of the next: a connection that has more
than one exchange under way asks for them over a second stream, the side stream, made when it is first needed. The
words of the newest exchange go over the main one, which is how the owner knows that the reader is idle afterwards.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstore.errors import (
    DeadlineExceeded,
    ForkedProcess,
    InvalidRequest,
    KvStoreError,
    LimitExceeded,
    StaleReference,
    Unauthorized,
    Unreachable,
)
from kvstore.model.values import NodeInfo
from kvstore.transport import ReadDescriptor, ReadResult, ReadStatus
from kvstore.transport.read_table import ReadTable
from kvstore.transport.tcp_stream import DeadlinePassed, Stream, dial, split
from kvstore.transport.tcp_wire import (
    CREDENTIAL_LIMIT_BYTES,
    HELLO,
    HELLO_BODY,
    MAGIC,
    RANGE_DTYPE,
    REQUEST,
    VERSION,
    WORD_DTYPE,
    AnswerStatus,
    Refusal,
    RequestKind,
)

AHEAD_REQUEST_BYTES: Final = 32 << 10
"""A longer request is not sent while a payload arrives: each side could wait for the other to take its bytes."""

SIDE_S: Final = 0.5
"""Longest wait for a side stream: `cancel` does not end it, and without one it only goes slower."""


class TcpTransport:
    """Connects to owners. `credential` (at most 4096 bytes) is shown to each of them."""

    name = "tcp"
    path = "tcp"

    def __init__(self, credential: bytes = b"") -> None:
        if len(credential) > CREDENTIAL_LIMIT_BYTES:
            raise LimitExceeded(f"a credential has at most {CREDENTIAL_LIMIT_BYTES} bytes")
        self._credential = credential
        self._before_payload: Callable[[], None] | None = None

    def connect(self, node: NodeInfo, deadline_s: float) -> TcpConnection:
        """Connect to the node's data address (`host:port`) and check that its epoch is the one named.

        Raises Unreachable (nobody there, too many connections, another protocol or version), StaleReference
        (another epoch), Unauthorized, DeadlineExceeded, InvalidRequest (not an address).
        """
        if not 0 <= node.epoch < 1 << 64:
            raise InvalidRequest(f"an epoch is a u64, not {node.epoch}")
        stream, arena_bytes = self._open(node, time.monotonic() + deadline_s)
        return TcpConnection(stream, arena_bytes, lambda end_s: self._open(node, end_s)[0], self._before_payload)

    def _open(self, node: NodeInfo, deadline: float) -> tuple[Stream, int]:
        """A stream that has said hello, and the size of the remote arena."""
        address, left_s = node.data_address, deadline - time.monotonic()
        host, port = split(address)
        stream: Stream | None = None
        welcome = bytearray(HELLO_BODY.size)
        try:
            stream = Stream(dial(host, port, deadline))
            stream.send(HELLO.pack(MAGIC, VERSION, len(self._credential), node.epoch) + self._credential, deadline)
            if stream.answer(deadline) != len(welcome):
                raise ConnectionError("it does not speak this protocol")
            stream.receive([memoryview(welcome)], deadline)
            opened, stream = stream, None
            return opened, HELLO_BODY.unpack(welcome)[1]
        except Refusal as exc:
            errors = {AnswerStatus.STALE_EPOCH: StaleReference, AnswerStatus.UNAUTHORIZED: Unauthorized}
            raise errors.get(exc.status, Unreachable)(f"{address}: {exc.detail}") from exc
        except DeadlinePassed as exc:
            raise DeadlineExceeded(f"{address} did not answer within {left_s:.3g} s") from exc
        except OSError as exc:
            raise Unreachable(f"{address}: {exc}") from exc
        finally:
            if stream is not None:
                stream.close()

    def close(self) -> None:
        """Nothing is held: each connection has a socket of its own."""

    def hold_for_tests(self, before_payload: Callable[[], None] | None) -> None:
        """Connections made from now on call this between a read's request and the first payload byte they take."""
        self._before_payload = before_payload


class TcpConnection:
    """A path to one node incarnation. One thread starts, takes payloads and closes; another one may ask for words, and
    `cancel` may come from any.

    `arena_bytes` is the size of the remote arena. `open_side` makes another stream to the same incarnation.
    """

    name = "tcp"

    def __init__(
        self,
        stream: Stream,
        arena_bytes: int,
        open_side: Callable[[float], Stream],
        before_payload: Callable[[], None] | None = None,
    ) -> None:
        self.arena_bytes = arena_bytes
        self._stream = stream
        self._side: Stream | None = None
        self._open_side = open_side
        self._before_payload = before_payload
        self._turn = threading.Lock()
        """Held by who uses the main stream for a fence or to send, and by who changes the three below."""
        self._newest: _TcpExchange | None = None
        self._arriving = 0
        """Payloads asked for that have not come yet."""
        self._failed = self._cancelled = False
        self._pid = os.getpid()

    def read(
        self, descriptors: Sequence[ReadDescriptor], staging: npt.NDArray[np.uint8], deadline_s: float
    ) -> ReadResult:
        """See Connection."""
        exchange = self.start(descriptors, staging, deadline_s)
        assert exchange is not None, "nothing else is under way"
        result = exchange.payload()
        return exchange.fence() if result.status is ReadStatus.DONE else result

    def start(
        self, descriptors: Sequence[ReadDescriptor], staging: npt.NDArray[np.uint8], deadline_s: float
    ) -> _TcpExchange | None:
        """See Connection. All writing into `staging` is done by `payload`'s own thread, so none can follow it."""
        self._check_process()
        plan, deadline = _Plan.of(descriptors, staging), time.monotonic() + deadline_s
        exchange, request = _TcpExchange(self, plan, deadline), plan.request()
        if not len(plan.table.slots):
            return exchange
        with self._turn:
            if self._arriving and len(request) > AHEAD_REQUEST_BYTES:
                return None
            alone = self._newest is None or self._newest.fenced or self._failed or self._cancelled
            if not alone and not self._side_is_made(deadline):
                return None
            self._newest, self._arriving = exchange, self._arriving + 1
            exchange.failure = self._guarded(lambda: self._stream.send(request, deadline), self._stream)
        return exchange

    def fence(self, table: ReadTable, deadline: float) -> ReadResult:
        """The generation words alone, read by the owner now, for a payload that came on another path.

        `deadline` in `time.monotonic` seconds.
        """
        self._check_process()
        words: list[int] = []
        failure = self._guarded(lambda: words.extend(_words(self._stream, table, deadline)), self._stream)
        return failure or ReadResult(ReadStatus.DONE, tuple(words), table.payload_bytes)

    def cancel(self) -> None:
        """End what is going on, from another thread: it returns CANCELLED, unless it was done. Idempotent."""
        self._check_process()
        self._cancelled = True
        self._interrupt()

    def close(self) -> None:
        """End the path. Idempotent. Not while another thread reads: `cancel` ends its read."""
        self._stream.close()
        if self._side is not None:
            self._side.close()

    @property
    def is_open(self) -> bool:
        """False once either side has closed; looks at the socket, sends nothing."""
        return not self._failed and self._stream.is_open

    @property
    def has_ended(self) -> bool:
        """True once either side has closed, also while another thread asks for words."""
        return self._failed or self._stream.has_ended

    def receive(self, exchange: _TcpExchange) -> ReadResult | None:
        """Fill the exchange's buffers; None, or how that failed."""
        plan, stream = exchange.plan, self._stream

        def take() -> None:
            if self._before_payload is not None:
                self._before_payload()
            stream.expect(plan.table.payload_bytes, exchange.deadline)
            stream.receive(plan.buffers, exchange.deadline)

        failure = self._guarded(take, stream)
        with self._turn:
            self._arriving -= 1
        return failure

    def ask_words(self, exchange: _TcpExchange) -> ReadResult:
        """The exchange's words: over the main stream, unless a later payload is coming there."""
        table, deadline = exchange.plan.table, exchange.deadline
        with self._turn:
            if exchange is self._newest:
                exchange.fenced = True
                return self.fence(table, deadline)
            side = self._side
        assert side is not None, "`start` made it before it asked for the later payload"
        words: list[int] = []

        def ask() -> None:
            try:
                words.extend(_words(side, table, deadline))
            except OSError:  # idle meanwhile, it may have had to make room for others: later words are as good
                side.close()
                words.extend(_words(self._another_side(deadline), table, deadline))

        return self._guarded(ask, side) or ReadResult(ReadStatus.DONE, tuple(words), table.payload_bytes)

    def _side_is_made(self, deadline: float) -> bool:
        if self._side is None:
            try:
                self._side = self._open_side(min(deadline, time.monotonic() + SIDE_S))
            except KvStoreError:  # the owner may have no connection to spare: one exchange at a time, then
                return False
        return True

    def _another_side(self, deadline: float) -> Stream:
        if not (self._failed or self._cancelled):
            try:
                self._side = self._open_side(deadline)
            except DeadlineExceeded as exc:
                raise DeadlinePassed from exc
            except KvStoreError as exc:
                raise ConnectionError(str(exc)) from exc
        if self._failed or self._cancelled or self._side is None:  # perhaps just now: nobody has interrupted this one
            raise ConnectionError("the connection has ended")
        return self._side

    def _guarded(self, step: Callable[[], object], stream: Stream) -> ReadResult | None:
        """Do one step on a stream that is this thread's; None, or how it failed. A failure ends the connection."""
        status, detail, done = ReadStatus.UNREACHABLE, "the read was interrupted", False
        try:
            step()
            done = True
            return None
        except DeadlinePassed:
            status, detail = ReadStatus.DEADLINE, "the owner did not deliver in time"
        except Refusal as exc:
            status, detail = ReadStatus.REFUSED, exc.detail
        except OSError as exc:
            detail = str(exc)
        finally:
            if not done:
                self._failed = True
                stream.close()
                self._interrupt()  # who uses the other one
        return ReadResult(ReadStatus.CANCELLED if self._cancelled else status, detail=detail)

    def _interrupt(self) -> None:
        self._stream.interrupt()
        side = self._side
        if side is not None:
            side.interrupt()

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise ForkedProcess("a connection belongs to the process that made it; connect again")


class _TcpExchange:
    """See Exchange. A failure of the request is told by `payload`."""

    def __init__(self, connection: TcpConnection, plan: _Plan, deadline: float) -> None:
        self.plan = plan
        self.deadline = deadline
        self.fenced = False
        """True once its words were asked for over the main stream."""
        self.failure: ReadResult | None = None
        self._connection = connection

    def payload(self) -> ReadResult:
        """See Exchange."""
        table = self.plan.table
        failure = self.failure or (self._connection.receive(self) if len(table.slots) else None)
        return failure or ReadResult(ReadStatus.DONE, (), table.payload_bytes)

    def fence(self) -> ReadResult:
        """See Exchange."""
        return self._connection.ask_words(self) if len(self.plan.table.slots) else ReadResult(ReadStatus.DONE)


@dataclass(frozen=True, slots=True)
class _Plan:
    """What a read sends and where its bytes go.

    The payload is one run of bytes, so neighbours in the arena become one range and neighbours in staging one
    buffer, each independently of the other.
    """

    ranges: npt.NDArray[np.uint64]
    buffers: list[memoryview]
    table: ReadTable

    @classmethod
    def of(cls, descriptors: Sequence[ReadDescriptor], staging: npt.NDArray[np.uint8]) -> _Plan:
        table, view = ReadTable.of(descriptors, staging), staging.data
        buffers = [view[start : start + size] for start, size in _runs(table.places, table.lengths).tolist()]
        ranges = _runs(table.offsets, table.lengths).astype(RANGE_DTYPE)
        return cls(ranges, buffers, table)

    def request(self) -> bytes:
        """The READ."""
        return REQUEST.pack(RequestKind.READ, len(self.ranges)) + self.ranges.tobytes()


def _runs(starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """(start, length) of each longest run of pieces that follow each other without a gap, shape (n, 2)."""
    if not len(starts):
        return np.empty((0, 2), dtype=np.int64)
    heads = np.flatnonzero(np.concatenate(([True], starts[1:] != starts[:-1] + lengths[:-1])))
    return np.column_stack((starts[heads], np.add.reduceat(lengths, heads)))


def _words(stream: Stream, table: ReadTable, deadline: float) -> list[int]:
    """The generation word of each descriptor's slot, asked for now."""
    words = np.zeros(len(table.slots), dtype=WORD_DTYPE)
    stream.send(REQUEST.pack(RequestKind.FENCE, len(table.slots)) + table.slots.tobytes(), deadline)
    stream.expect(words.nbytes, deadline)
    stream.receive([words.view(np.uint8).data], deadline)
    return [int(word) for word in words[table.word_indices].tolist()]
