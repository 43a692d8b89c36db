"""The `tcp` transport: its wire format and the reading side. The owner's side is `tcp_server.py`.

A connection belongs to one node incarnation and carries one exchange at a time. Integers are little-endian
and unsigned, fields follow each other without padding:

    reader → owner   hello    magic 8 bytes | version u16 | credential_bytes u16 | epoch u64 | credential
    owner → reader   answer   body = epoch u64 | arena_bytes u64
    reader → owner   request  kind u32 = 1 (read)  | count u32 | count * (offset u64 | length u64)
    owner → reader   answer   body = the ranges' bytes in the order asked, back to back
    reader → owner   request  kind u32 = 2 (fence) | count u32 | count * slot u32
    owner → reader   answer   body = count * generation u64, in the order asked

    answer = status u32 | detail_bytes u32 | body_bytes u64 | detail (UTF-8) | body

`status` 0 has no detail; any other has no body, says why in `detail`, and the owner closes behind it. Offsets,
lengths and slots (4096-byte units) lie inside the arena; the limits are the constants below.

Why the fence is a message of its own: the owner's sendfile queues pages, not bytes. Words sent behind the
payload would have been read while the payload's pages could still change under the queued references; so the
reader asks for them when the last byte lies in its staging.

Why no socket timeouts of Python's: they make the socket non-blocking, and every few hundred KiB would then come
back to the interpreter and wait for its lock. Here the kernel fills all of a read's buffers in one blocking
call (MSG_WAITALL) that it ends itself when the time is up (SO_RCVTIMEO).
"""

from __future__ import annotations

import contextlib
import enum
import os
import socket
import struct
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
    LimitExceeded,
    StaleReference,
    Unauthorized,
    Unreachable,
)
from kvstore.model.values import NodeInfo
from kvstore.transport import ReadDescriptor, ReadResult, ReadStatus
from kvstore.transport.read_table import ReadTable

MAGIC: Final = b"KVSTREAM"
VERSION: Final = 1
HELLO: Final = struct.Struct("<8sHHQ")
HELLO_BODY: Final = struct.Struct("<QQ")
REQUEST: Final = struct.Struct("<II")
ANSWER: Final = struct.Struct("<IIQ")
RANGE_DTYPE: Final = np.dtype("<u8")
WORD_DTYPE: Final = np.dtype("<u8")

COUNT_LIMIT: Final = 1 << 16
"""Most ranges of a read and slots of a fence; the owner refuses more."""
PAYLOAD_LIMIT_BYTES: Final = 1 << 30
"""Most payload bytes of one read; the owner refuses more."""
CREDENTIAL_LIMIT_BYTES: Final = 4096
DETAIL_LIMIT_BYTES: Final = 1024

RESET_ON_CLOSE: Final = struct.pack("@ii", 1, 0)
"""SO_LINGER for a socket whose close voids what is still queued, in both directions, instead of delivering it."""

BUFFERS_LIMIT: Final = 1024
"""Most buffers of one system call (IOV_MAX of Linux)."""

_WAIT_LIMIT_S: Final = 3600.0
_TIMEVAL: Final = struct.Struct("@ll")


class RequestKind(enum.IntEnum):
    """What the reader asks for."""

    READ = 1
    FENCE = 2


class AnswerStatus(enum.IntEnum):
    """How the owner answers; all but OK end the connection."""

    OK = 0
    STALE_EPOCH = 1
    UNAUTHORIZED = 2
    BUSY = 3
    VERSION = 4
    BAD_REQUEST = 5


class Refusal(Exception):
    """The owner said no; raised on the owner's side to send it, on the reader's when it arrives."""

    def __init__(self, status: AnswerStatus, detail: str) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail


class _DeadlinePassed(Exception):
    """Not TimeoutError: the kernel also uses that one for a peer that is gone."""


def drop_first(buffers: list[memoryview], count: int) -> None:
    """Take the first `count` bytes off a list of buffers, as a call that moved so many leaves them."""
    done = 0
    while done < len(buffers) and count >= len(buffers[done]):
        count -= len(buffers[done])
        done += 1
    del buffers[:done]
    if count:
        buffers[0] = buffers[0][count:]


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
        address, epoch = node.data_address, node.epoch
        if not 0 <= epoch < 1 << 64:
            raise InvalidRequest(f"an epoch is a u64, not {epoch}")
        deadline = time.monotonic() + deadline_s
        host, port = _split(address)
        stream: _Stream | None = None
        welcome = bytearray(HELLO_BODY.size)
        try:
            stream = _Stream(_dial(host, port, deadline))
            stream.send(HELLO.pack(MAGIC, VERSION, len(self._credential), epoch) + self._credential, deadline)
            if stream.answer(deadline) != len(welcome):
                raise ConnectionError("it does not speak this protocol")
            stream.receive([memoryview(welcome)], deadline)
            connection = TcpConnection(stream, HELLO_BODY.unpack(welcome)[1], self._before_payload)
            stream = None
            return connection
        except Refusal as exc:
            errors = {AnswerStatus.STALE_EPOCH: StaleReference, AnswerStatus.UNAUTHORIZED: Unauthorized}
            raise errors.get(exc.status, Unreachable)(f"{address}: {exc.detail}") from exc
        except _DeadlinePassed as exc:
            raise DeadlineExceeded(f"{address} did not answer within {deadline_s:g} s") from exc
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
    """A path to one node incarnation. One thread reads and closes; `cancel` may come from any other.

    `arena_bytes` is the size of the remote arena.
    """

    name = "tcp"

    def __init__(self, stream: _Stream, arena_bytes: int, before_payload: Callable[[], None] | None = None) -> None:
        self.arena_bytes = arena_bytes
        self._stream = stream
        self._before_payload = before_payload
        self._cancelled = False
        self._pid = os.getpid()

    def read(
        self, descriptors: Sequence[ReadDescriptor], staging: npt.NDArray[np.uint8], deadline_s: float
    ) -> ReadResult:
        """Read all descriptors into `staging` (one-dimensional, contiguous), then the generation words.

        Descriptors must not overlap in staging. Raises InvalidRequest, before anything was sent, for places that do
        not exist in `staging` and for numbers that do not fit the format; every other failure is in the result.
        All writing into `staging` is done by this call's own thread, so none can follow its return.
        """
        self._check_process()
        deadline = time.monotonic() + deadline_s
        plan = _Plan.of(descriptors, staging)
        return self._closing_on_failure(lambda: self._exchange(plan, deadline), plan.table)

    def fence(self, table: ReadTable, deadline: float) -> ReadResult:
        """The generation words alone, read by the owner now, for a payload that came on another path.

        `deadline` in `time.monotonic` seconds.
        """
        self._check_process()
        return self._closing_on_failure(lambda: self._words(table.slots, deadline), table)

    def _closing_on_failure(self, exchange: Callable[[], npt.NDArray[np.uint64]], table: ReadTable) -> ReadResult:
        status, detail = ReadStatus.UNREACHABLE, "the read was interrupted"
        try:
            words = exchange()
            status = ReadStatus.DONE
            return ReadResult(status, tuple(words[table.word_indices].tolist()), table.payload_bytes)
        except _DeadlinePassed:
            status, detail = ReadStatus.DEADLINE, "the owner did not deliver in time"
        except Refusal as exc:
            status, detail = ReadStatus.REFUSED, exc.detail
        except OSError as exc:
            detail = str(exc)
        finally:
            if status is not ReadStatus.DONE:
                self._stream.close()
        return ReadResult(ReadStatus.CANCELLED if self._cancelled else status, detail=detail)

    def cancel(self) -> None:
        """End the read that is going on, from another thread: it returns CANCELLED, unless it was done. Idempotent."""
        self._check_process()
        self._cancelled = True
        self._stream.interrupt()

    def close(self) -> None:
        """End the path. Idempotent. Not while another thread reads: `cancel` ends its read, which closes."""
        self._stream.close()

    @property
    def is_open(self) -> bool:
        """False once either side has closed; looks at the socket, sends nothing."""
        return self._stream.is_open

    def _exchange(self, plan: _Plan, deadline: float) -> npt.NDArray[np.uint64]:
        if not len(plan.table.slots):
            return np.zeros(0, dtype=WORD_DTYPE)
        stream = self._stream
        stream.send(REQUEST.pack(RequestKind.READ, len(plan.ranges)) + plan.ranges.tobytes(), deadline)
        if self._before_payload is not None:
            self._before_payload()
        stream.expect(plan.table.payload_bytes, deadline)
        stream.receive(plan.buffers, deadline)
        return self._words(plan.table.slots, deadline)

    def _words(self, slots: npt.NDArray[np.uint32], deadline: float) -> npt.NDArray[np.uint64]:
        words, stream = np.zeros(len(slots), dtype=WORD_DTYPE), self._stream
        stream.send(REQUEST.pack(RequestKind.FENCE, len(slots)) + slots.tobytes(), deadline)
        stream.expect(words.nbytes, deadline)
        stream.receive([words.view(np.uint8).data], deadline)
        return words

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise ForkedProcess("a connection belongs to the process that made it; connect again")


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


def _runs(starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """(start, length) of each longest run of pieces that follow each other without a gap, shape (n, 2)."""
    if not len(starts):
        return np.empty((0, 2), dtype=np.int64)
    heads = np.flatnonzero(np.concatenate(([True], starts[1:] != starts[:-1] + lengths[:-1])))
    return np.column_stack((starts[heads], np.add.reduceat(lengths, heads)))


class _Stream:
    """A blocking socket whose every call ends at a deadline (`time.monotonic` seconds)."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._closing = threading.Lock()

    def send(self, data: bytes, deadline: float) -> None:
        """Send all of `data`."""
        rest = memoryview(data)
        while rest:
            self._bound(socket.SO_SNDTIMEO, deadline)
            try:
                rest = rest[self._socket.send(rest) :]
            except BlockingIOError:  # the kernel's time was up; so is ours, unless it rounded
                continue

    def receive(self, buffers: list[memoryview], deadline: float) -> None:
        """Fill all buffers, first to last; the list is used up."""
        while buffers:
            self._bound(socket.SO_RCVTIMEO, deadline)
            try:
                got = self._socket.recvmsg_into(buffers[:BUFFERS_LIMIT], 0, socket.MSG_WAITALL)[0]
            except BlockingIOError:
                continue
            if not got:
                raise ConnectionResetError("the owner closed the connection")
            drop_first(buffers, got)

    def answer(self, deadline: float) -> int:
        """Receive the head of an answer: the length of its body. Raises Refusal."""
        head = bytearray(ANSWER.size)
        self.receive([memoryview(head)], deadline)
        number, detail_bytes, body_bytes = ANSWER.unpack(head)
        if number == AnswerStatus.OK and not detail_bytes:
            return int(body_bytes)
        try:
            status = AnswerStatus(number)
        except ValueError as exc:
            raise ConnectionError("it does not speak this protocol") from exc
        if status is AnswerStatus.OK or detail_bytes > DETAIL_LIMIT_BYTES:
            raise ConnectionError("it does not speak this protocol")
        detail = bytearray(detail_bytes)
        self.receive([memoryview(detail)], deadline)
        raise Refusal(status, detail.decode(errors="replace"))

    def expect(self, body_bytes: int, deadline: float) -> None:
        """Receive the head of an answer whose body must have `body_bytes`."""
        announced = self.answer(deadline)
        if announced != body_bytes:
            raise ConnectionError(f"the owner announced {announced} bytes instead of {body_bytes}")

    def interrupt(self) -> None:
        """Make calls of other threads on this stream fail now."""
        with self._closing:
            with contextlib.suppress(OSError):  # closed already, by either side
                self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket; what is still under way, also a request half sent, is void."""
        with self._closing:  # never while `interrupt` uses the descriptor, whose number may be given out again
            self._socket.close()

    @property
    def is_open(self) -> bool:
        """Between exchanges nothing may arrive, so anything readable is the end."""
        if self._socket.fileno() < 0:
            return False
        try:
            self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def _bound(self, option: int, deadline: float) -> None:
        remaining_s = min(deadline - time.monotonic(), _WAIT_LIMIT_S)
        if remaining_s <= 0:
            raise _DeadlinePassed
        seconds, fraction = divmod(remaining_s, 1)
        # 0 would mean for ever.
        self._socket.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL.pack(int(seconds), max(1, int(fraction * 1e6))))


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise InvalidRequest(f"{address!r} is not host:port")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _dial(host: str, port: int, deadline: float) -> socket.socket:
    """A connected blocking socket: the addresses of `host` in turn. A name is resolved in the system's own time."""
    try:
        places = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except UnicodeError as exc:
        raise ConnectionError(f"{host!r} is not a host name") from exc
    last: OSError = ConnectionError("no address")
    for family, kind, protocol, _, place in places:
        remaining_s = deadline - time.monotonic()
        if remaining_s <= 0:
            raise _DeadlinePassed
        candidate = socket.socket(family, kind, protocol)
        try:
            candidate.settimeout(min(remaining_s, _WAIT_LIMIT_S))
            candidate.connect(place)
            candidate.settimeout(None)
            candidate.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            candidate.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
            return candidate
        except OSError as exc:
            candidate.close()
            last = exc
    if time.monotonic() >= deadline:
        raise _DeadlinePassed from last
    raise last
