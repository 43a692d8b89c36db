"""The owner's side of the `tcp` transport: sends ranges of its arena, and generation words, to readers.

The wire format is described in `tcp_wire.py`. `TcpServer` owns a listening socket, a thread that accepts, and one
thread a connection, up to a fixed number of them. No event loop is involved: sendfile and socket calls block in
the kernel without the interpreter's lock. They have no timeouts of their own; every phase of a connection has
an end by which it must be over, and the accepting thread shuts down what is late, which wakes the blocked call.
So a peer that is stopped, dead or slow on purpose holds a thread for a bounded time only.

It knows nothing of keys, leases or tiers: whoever may connect may read the whole arena, and the reader judges
what it got by the generation words. Nothing that a peer sends can end more than its own connection.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Final, NoReturn

import numpy as np
import numpy.typing as npt

from kvstore.errors import ConfigurationError, InvalidRequest
from kvstore.tally import Tally
from kvstore.transport import SLOT_UNIT_BYTES
from kvstore.transport.read_table import SLOT_DTYPE
from kvstore.transport.tcp_stream import BUFFERS_LIMIT, RESET_ON_CLOSE, drop_first
from kvstore.transport.tcp_wire import (
    ANSWER,
    COUNT_LIMIT,
    CREDENTIAL_LIMIT_BYTES,
    DETAIL_LIMIT_BYTES,
    HELLO,
    HELLO_BODY,
    MAGIC,
    PAYLOAD_LIMIT_BYTES,
    RANGE_DTYPE,
    REQUEST,
    VERSION,
    WORD_DTYPE,
    AnswerStatus,
    Refusal,
    RequestKind,
)

CONNECTION_LIMIT: Final = 256
"""Connections, and threads, at a time; one more takes the place of the one idle longest, or is refused as busy."""

SAME_HOST_SEND_BUFFER_BYTES: Final = 1 << 18
"""Send buffer of connections whose two ends have one address: 3.5 GB/s on loopback, 2.0 with the kernel's own
tuning, which lets megabytes queue up. Others keep that tuning: a fixed buffer would limit a longer path."""

SENDFILE_FROM_BYTES: Final = 1 << 18
"""Shorter ranges are copied out of a mapping, up to 1,024 in one call: sendfile takes one call a range, and after
each call a thread waits for the interpreter's lock, up to 5 ms a time when the node is busy."""

_SWEEP_S: Final = 0.25


@dataclass(frozen=True, slots=True)
class TcpServerLimits:
    """How long a connection may stay in one phase, in seconds, and how many there may be."""

    connections: int = CONNECTION_LIMIT
    hello_s: float = 5.0
    """From accept to the end of the hand-shake."""
    idle_s: float = 300.0
    """Between exchanges, and shorter when others need the place; the reader then connects anew."""
    exchange_s: float = 60.0
    """From a request's first byte to the last byte of its answer; and from a read's last byte to its fence."""
    parting_s: float = 1.0
    """For a refused peer to take its answer."""


@dataclass(slots=True, eq=False)
class _Peer:
    socket: socket.socket
    ends_at: float
    thread: threading.Thread | None = None
    idle_since: float | None = None
    """When its last exchange ended; None within one, which for a read includes the way to its fence."""


class TcpServer:
    """Serves `arena_bytes` of the file `arena_fd` from construction until `stop`.

    `generations(slots)` gives the present generation word (u64) of each slot (4096-byte units); it is called on
    connection threads and must not block. `authorize(credential)` decides on a peer; None lets everyone in.
    Raises ConfigurationError if host and port cannot be bound, InvalidRequest if the file is shorter.
    """

    def __init__(
        self,
        arena_fd: int,
        arena_bytes: int,
        generations: Callable[[Sequence[int]], Sequence[int]],
        epoch: int,
        host: str = "127.0.0.1",
        port: int = 0,
        authorize: Callable[[bytes], bool] | None = None,
        limits: TcpServerLimits | None = None,
    ) -> None:
        if not 0 < arena_bytes <= os.fstat(arena_fd).st_size:
            raise InvalidRequest(f"the arena's file has {os.fstat(arena_fd).st_size} bytes, not {arena_bytes}")
        self._listener = _listen(host, port)
        name = self._listener.getsockname()
        self.address = f"[{name[0]}]:{name[1]}" if ":" in name[0] else f"{name[0]}:{name[1]}"
        """The bound `host:port`; the port is the real one also when 0 was asked for."""
        self._arena_fd = os.dup(arena_fd)
        self._arena = mmap.mmap(arena_fd, arena_bytes, prot=mmap.PROT_READ)
        self._arena_bytes = arena_bytes
        self._generations = generations
        self._epoch = epoch
        self._authorize = authorize
        self._limits = limits or TcpServerLimits()
        self._after_payload: Callable[[], None] | None = None
        self._lock = threading.Lock()
        self._peers: set[_Peer] = set()
        self._payload_bytes_sent = 0
        self._send_seconds = Tally()
        self._stopping = threading.Event()
        self._acceptor = threading.Thread(target=self._accept, name="tcp-accept", daemon=True)
        self._acceptor.start()

    @property
    def connection_count(self) -> int:
        """Connections that are open now."""
        with self._lock:
            return len(self._peers)

    @property
    def payload_bytes_sent(self) -> int:
        """Payload bytes of all reads that were sent to their end."""
        with self._lock:
            return self._payload_bytes_sent

    def drain_send_seconds(self) -> Tally:
        """How long the reads took that were sent to their end since the last call."""
        with self._lock:
            return self._send_seconds.drain()

    def stop(self, deadline_s: float = 5.0) -> bool:
        """Close everything and wait for the threads. False if one was still running at the deadline. Idempotent."""
        deadline = time.monotonic() + deadline_s
        self._stopping.set()
        with self._lock:
            if self._listener.fileno() >= 0:
                _shut(self._listener)
            peers = list(self._peers)
            for peer in peers:
                _drop(peer)
        threads = [self._acceptor, *(peer.thread for peer in peers if peer.thread is not None)]
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if any(thread.is_alive() for thread in threads):
            return False  # the arena's descriptor stays open: a number given out again would send another file
        with self._lock:
            if self._arena_fd >= 0:
                os.close(self._arena_fd)
                self._arena_fd = -1
                self._arena.close()
        return True

    def __enter__(self) -> TcpServer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    def hold_for_tests(self, after_payload: Callable[[], None] | None) -> None:
        """Call this on the connection's thread when the last payload page is queued, before the fence is read."""
        self._after_payload = after_payload

    # -- the accepting thread ---------------------------------------------------------------------------------

    def _accept(self) -> None:
        with self._listener:
            while not self._stopping.is_set():
                try:
                    self._welcome(self._listener.accept()[0])
                except TimeoutError:
                    pass  # time to look for late peers
                except OSError:
                    # Stopping; or no descriptors are left, and waiting is all that can be done.
                    self._stopping.wait(_SWEEP_S)
                self._drop_late()

    def _welcome(self, accepted: socket.socket) -> None:
        peer = _Peer(accepted, time.monotonic() + self._limits.hello_s)
        peer.thread = threading.Thread(target=self._serve, args=(peer,), name="tcp-serve", daemon=True)
        self._make_room()
        with self._lock:
            refused = len(self._peers) >= self._limits.connections or self._stopping.is_set()
            if not refused:
                self._peers.add(peer)
                try:
                    peer.thread.start()
                except RuntimeError:  # the system gives no more threads
                    self._peers.discard(peer)
                    refused = True
        if refused:
            frame = _refusal_frame(Refusal(AnswerStatus.BUSY, "the owner has no connection to spare"))
            with accepted, contextlib.suppress(OSError):
                accepted.send(frame, socket.MSG_DONTWAIT)

    def _make_room(self) -> None:
        """At the limit, end the connection that has been idle longest, if one is idle: its keeper lost interest."""
        with self._lock:
            full = len(self._peers) >= self._limits.connections
            idle = [(peer.idle_since, peer) for peer in self._peers if full and peer.idle_since is not None]
            idle.sort(key=lambda pair: pair[0])
            leaver = next((peer for _, peer in idle if not _has_unread(peer.socket)), None)
            if leaver is None:
                return
            _shut(leaver.socket)  # no reset: the last answer may still be on its way
        if leaver.thread is not None:
            leaver.thread.join(_SWEEP_S)  # it has nothing to do but to leave

    def _drop_late(self) -> None:
        now = time.monotonic()
        with self._lock:
            for peer in self._peers:
                if peer.ends_at <= now:
                    _drop(peer)

    # -- a connection's thread --------------------------------------------------------------------------------

    def _serve(self, peer: _Peer) -> None:
        try:
            try:
                self._hello(peer)
                fence_due = False
                while True:
                    self._await_request(peer, fence_due)
                    fence_due = self._answer(peer) is RequestKind.READ
            except Refusal as exc:
                self._part(peer, exc)
        except OSError:
            pass  # the peer left, or was late and has been shut down
        finally:
            with self._lock:  # never while another thread shuts down this descriptor
                self._peers.discard(peer)
                peer.socket.close()

    def _hello(self, peer: _Peer) -> None:
        if peer.socket.getsockname()[0] == peer.socket.getpeername()[0]:
            peer.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SAME_HOST_SEND_BUFFER_BYTES)
        magic, version, credential_bytes, epoch = HELLO.unpack(_receive(peer.socket, HELLO.size))
        if magic != MAGIC:
            raise ConnectionError("another protocol")
        if version != VERSION:
            raise Refusal(AnswerStatus.VERSION, f"the owner speaks version {VERSION}, not {version}")
        if credential_bytes > CREDENTIAL_LIMIT_BYTES:
            raise Refusal(AnswerStatus.BAD_REQUEST, f"a credential has at most {CREDENTIAL_LIMIT_BYTES} bytes")
        credential = _receive(peer.socket, credential_bytes)
        if self._authorize is not None and not self._authorize(credential):
            raise Refusal(AnswerStatus.UNAUTHORIZED, "the credential was not accepted")
        if epoch != self._epoch:
            raise Refusal(AnswerStatus.STALE_EPOCH, f"the node's epoch is {self._epoch}, not {epoch}")
        body = HELLO_BODY.pack(self._epoch, self._arena_bytes)
        peer.socket.sendall(ANSWER.pack(AnswerStatus.OK, 0, len(body)) + body)

    def _await_request(self, peer: _Peer, fence_due: bool) -> None:
        """Return when a request's first byte is there; it stays in the socket until the peer no longer counts as idle,
        so that `_make_room` never takes a peer that has asked for something."""
        now = time.monotonic()
        with self._lock:
            peer.idle_since = None if fence_due else now
            peer.ends_at = now + (self._limits.exchange_s if fence_due else self._limits.idle_s)
        if not peer.socket.recv(1, socket.MSG_PEEK):
            raise ConnectionResetError("the peer closed the connection, or was idle and had to make room")
        with self._lock:
            peer.idle_since = None
            peer.ends_at = time.monotonic() + self._limits.exchange_s

    def _answer(self, peer: _Peer) -> RequestKind:
        kind, count = REQUEST.unpack(_receive(peer.socket, REQUEST.size))
        if not 1 <= count <= COUNT_LIMIT:
            _refuse(f"a request has 1..{COUNT_LIMIT} entries, not {count}")
        if kind == RequestKind.READ:
            entries = np.frombuffer(_receive(peer.socket, count * 2 * RANGE_DTYPE.itemsize), dtype=RANGE_DTYPE)
            self._send_payload(peer.socket, entries.reshape(-1, 2))
        elif kind == RequestKind.FENCE:
            slots = np.frombuffer(_receive(peer.socket, count * SLOT_DTYPE.itemsize), dtype=SLOT_DTYPE)
            self._send_words(peer.socket, slots)
        else:
            _refuse(f"no request is of kind {kind}")
        return RequestKind(kind)

    def _send_payload(self, connected: socket.socket, ranges: npt.NDArray[np.uint64]) -> None:
        offsets, lengths = ranges[:, 0], ranges[:, 1]
        # In an order in which no u64 can wrap around.
        if (lengths == 0).any() or (lengths > self._arena_bytes).any():
            _refuse(f"a range is empty or longer than the arena of {self._arena_bytes} bytes")
        if (offsets > self._arena_bytes - lengths).any():
            _refuse(f"a range does not lie in the arena of {self._arena_bytes} bytes")
        began_s, payload_bytes = time.monotonic(), sum(lengths.tolist())
        if payload_bytes > PAYLOAD_LIMIT_BYTES:
            _refuse(f"a read has at most {PAYLOAD_LIMIT_BYTES} bytes, not {payload_bytes}")
        # Corked, head and short ranges share segments; letting go of the cork pushes the last one.
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, 1)
        connected.sendall(ANSWER.pack(AnswerStatus.OK, 0, payload_bytes))
        arena = memoryview(self._arena)
        short: list[memoryview] = []
        for offset, length in ranges.tolist():
            if length < SENDFILE_FROM_BYTES:
                short.append(arena[offset : offset + length])
            else:
                self._send_copied(connected, short)  # what was asked for before it
                self._send_file(connected, offset, length)
        self._send_copied(connected, short)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, 0)
        with self._lock:
            self._payload_bytes_sent += payload_bytes
            self._send_seconds.add(time.monotonic() - began_s)
        if self._after_payload is not None:
            self._after_payload()

    def _send_file(self, connected: socket.socket, offset: int, length: int) -> None:
        end = offset + length
        while offset < end:
            sent = os.sendfile(connected.fileno(), self._arena_fd, offset, end - offset)
            if not sent:
                raise ConnectionError("the arena's file is shorter than the arena")
            offset += sent

    def _send_copied(self, connected: socket.socket, pieces: list[memoryview]) -> None:
        """Send all pieces and empty the list."""
        while pieces:
            drop_first(pieces, connected.sendmsg(pieces[:BUFFERS_LIMIT]))

    def _send_words(self, connected: socket.socket, slots: npt.NDArray[np.uint32]) -> None:
        if int(slots.max()) * SLOT_UNIT_BYTES >= self._arena_bytes:
            _refuse(f"a slot does not lie in the arena of {self._arena_bytes} bytes")
        words = np.array(self._generations(slots.tolist()), dtype=WORD_DTYPE)
        assert len(words) == len(slots), "generations() gives one word a slot"
        connected.sendall(ANSWER.pack(AnswerStatus.OK, 0, words.nbytes) + words.tobytes())

    def _part(self, peer: _Peer, refusal: Refusal) -> None:
        """Say why, then read what the peer had still sent: closing over unread bytes would destroy the answer."""
        peer.ends_at = time.monotonic() + self._limits.parting_s
        peer.socket.sendall(_refusal_frame(refusal))
        peer.socket.shutdown(socket.SHUT_WR)
        while peer.socket.recv(1 << 16):
            pass


def _refuse(detail: str) -> NoReturn:
    raise Refusal(AnswerStatus.BAD_REQUEST, detail)


def _refusal_frame(refusal: Refusal) -> bytes:
    detail = refusal.detail.encode()[:DETAIL_LIMIT_BYTES]
    return ANSWER.pack(refusal.status, len(detail), 0) + detail


def _listen(host: str, port: int) -> socket.socket:
    """A listening socket; accepted ones inherit its options.

    The address may be re-used after a crash (TIME_WAIT), but never shared with a listener that lives.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=CONNECTION_LIMIT)
    except (OSError, OverflowError) as exc:
        raise ConfigurationError(f"cannot listen on {host}:{port} for the tcp transport: {exc}") from exc
    listener.settimeout(_SWEEP_S)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 15)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    return listener


def _receive(connected: socket.socket, length: int) -> bytes:
    parts = bytearray()
    while len(parts) < length:
        part = connected.recv(length - len(parts), socket.MSG_WAITALL)
        if not part:
            raise ConnectionResetError("the peer closed the connection")
        parts += part
    return bytes(parts)


def _has_unread(connected: socket.socket) -> bool:
    with contextlib.suppress(OSError):  # nothing there; or it is at its end already
        return bool(connected.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
    return False


def _drop(peer: _Peer) -> None:
    """Wake the peer's thread with an error and have the kernel forget what is still queued."""
    peer.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
    _shut(peer.socket)


def _shut(open_socket: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it may not be connected any more
        open_socket.shutdown(socket.SHUT_RDWR)
