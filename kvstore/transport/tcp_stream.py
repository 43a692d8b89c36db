"""A blocking socket whose calls end at a deadline, and the answers that come over it.

Why no socket timeouts of Python's: they make the socket non-blocking, and every few hundred KiB would then come
back to the interpreter and wait for its lock. Here the kernel fills all of a read's buffers in one blocking
call (MSG_WAITALL) that it ends itself when the time is up (SO_RCVTIMEO).
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from typing import Final

from kvstore.errors import InvalidRequest
from kvstore.transport.tcp_wire import ANSWER, DETAIL_LIMIT_BYTES, AnswerStatus, Refusal

RESET_ON_CLOSE: Final = struct.pack("@ii", 1, 0)
"""SO_LINGER for a socket whose close voids what is still queued, in both directions, instead of delivering it."""

BUFFERS_LIMIT: Final = 1024
"""Most buffers of one system call (IOV_MAX of Linux)."""

_WAIT_LIMIT_S: Final = 3600.0
_TIMEVAL: Final = struct.Struct("@ll")


class DeadlinePassed(Exception):
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


class Stream:
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
        return self._peek() is None

    @property
    def has_ended(self) -> bool:
        """True once the other side has closed or this one has; an answer that another thread waits for is no end."""
        return self._peek() == b""

    def _peek(self) -> bytes | None:
        """What is readable, at most a byte; b"" at the end, None if nothing is."""
        if self._socket.fileno() < 0:
            return b""
        try:
            return self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None
        except OSError:
            return b""

    def _bound(self, option: int, deadline: float) -> None:
        remaining_s = min(deadline - time.monotonic(), _WAIT_LIMIT_S)
        if remaining_s <= 0:
            raise DeadlinePassed
        seconds, fraction = divmod(remaining_s, 1)
        # 0 would mean for ever.
        self._socket.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL.pack(int(seconds), max(1, int(fraction * 1e6))))


def split(address: str) -> tuple[str, int]:
    """Host and port. Raises InvalidRequest."""
    host, _, port = address.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise InvalidRequest(f"{address!r} is not host:port")
    return host.removeprefix("[").removesuffix("]"), int(port)


def dial(host: str, port: int, deadline: float) -> socket.socket:
    """A connected blocking socket: the addresses of `host` in turn. A name is resolved in the system's own time."""
    try:
        places = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except UnicodeError as exc:
        raise ConnectionError(f"{host!r} is not a host name") from exc
    last: OSError = ConnectionError("no address")
    for family, kind, protocol, _, place in places:
        remaining_s = deadline - time.monotonic()
        if remaining_s <= 0:
            raise DeadlinePassed
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
        raise DeadlinePassed from last
    raise last
