"""Sessions by Unix socket: who shares memory with this node, and when they are certainly gone. A thin shell.

A client gets the descriptors of catalog and arena (SCM_RIGHTS) only in exchange for a pidfd of itself; without
one the arena's descriptor is read-only. When the socket closes, the session is lost: its grants go to
quarantine, because the process may still be in the middle of a copy. Only when the pidfd shows that the process
has ended are they freed. Runs on the node's event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from kvstore.errors import CapacityExhausted, ConfigurationError, InvalidRequest, KvStoreError
from kvstore.node.arena.dram import DramArena
from kvstore.node.core import NodeCore, Session
from kvstore.node.handover import Seat
from kvstore.rpc import handshake
from kvstore.rpc.handshake import Kind

logger = logging.getLogger(__name__)
HELLO_TIMEOUT_S = 5.0
ACCEPT_PAUSE_S = 1.0
"""Time without new clients after one found no descriptor left."""
_NO_ROOM = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
CALLS_LIMIT = 64
"""Calls of one session under way at a time."""

Serve = Callable[[int, str, bytes], Awaitable[bytes]]
"""(session number, verb of handshake.VERBS, request message) -> response message; raises errors of the tree."""


class SessionServer:
    """Accepts clients on `path` (mode 0660) and translates their sockets' lives for the core."""

    def __init__(
        self,
        core: NodeCore,
        catalog_fd: int,
        arena: DramArena,
        path: str,
        serve: Serve | None = None,
        seat: Seat | None = None,
    ) -> None:
        self._core = core
        self._serve = serve
        self._seat = seat
        self._catalog_fd = catalog_fd
        self._arena = arena
        self._path = Path(path)
        self._loop = asyncio.get_running_loop()
        self._listener: socket.socket | None = None
        self._connections: set[_Connection] = set()
        self._complained = False

    def start(self) -> None:
        """Bind and listen. Raises ConfigurationError if another live node owns the path."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if self._path.exists() and not _dead_socket(self._path):
            raise ConfigurationError(f"another node listens on {self._path}; stop it or use another --socket-dir")
        with contextlib.suppress(FileNotFoundError):
            self._path.unlink()
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        try:
            listener.bind(str(self._path))
        except OSError as exc:
            listener.close()
            raise ConfigurationError(f"cannot listen on {self._path}: {exc}; use another --socket-dir") from exc
        self._path.chmod(0o660)
        listener.listen(128)
        self._listener = listener
        self._loop.add_reader(listener, self._accept, listener)

    def _accept(self, listener: socket.socket) -> None:
        try:
            peer, _ = listener.accept()
        except (BlockingIOError, ConnectionError):
            return
        except OSError as exc:
            if exc.errno not in _NO_ROOM:
                raise
            self._pause(listener, exc)
            return
        self._complained = False
        peer.setblocking(False)
        connection = _Connection(
            self._core, self._catalog_fd, self._arena, peer, self._connections.discard, self._serve, self._seat
        )
        self._connections.add(connection)

    def _pause(self, listener: socket.socket, exc: OSError) -> None:
        """Leave the listener alone for a while: it stays readable, and the loop would do nothing but try again."""
        if not self._complained:
            logger.warning("no new clients for now: %s; raise the limit of open files (ulimit -n)", exc)
            self._complained = True
        self._loop.remove_reader(listener)
        self._loop.call_later(ACCEPT_PAUSE_S, self._resume, listener)

    def _resume(self, listener: socket.socket) -> None:
        if listener is self._listener:  # not stopped meanwhile
            self._loop.add_reader(listener, self._accept, listener)

    def stop(self) -> None:
        """Close the listener and all sessions; the path is removed."""
        if self._listener is not None:
            self._loop.remove_reader(self._listener)
            self._listener.close()
            self._path.unlink(missing_ok=True)
            self._listener = None
        for connection in list(self._connections):
            connection.close()


class _Connection:
    """One client's socket and, once it said hello, its session and pidfd."""

    def __init__(
        self,
        core: NodeCore,
        catalog_fd: int,
        arena: DramArena,
        peer: socket.socket,
        on_end: Callable[[_Connection], None],
        serve: Serve | None,
        seat: Seat | None,
    ) -> None:
        self._serve = serve
        self._calls: set[asyncio.Task[None]] = set()
        self._core = core
        self._seat = seat
        self._catalog_fd = catalog_fd
        self._arena = arena
        self._peer: socket.socket | None = peer
        self._pidfd: int | None = None
        self._session: Session | None = None
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._timeout = self._loop.call_later(HELLO_TIMEOUT_S, self.close)
        self._loop.add_reader(peer, self._readable, peer)

    def _readable(self, peer: socket.socket) -> None:
        try:
            packet, descriptors, _, _ = socket.recv_fds(peer, handshake.PACKET_BYTES, 1)
        except BlockingIOError:
            return
        except OSError:
            packet, descriptors = b"", []
        if not packet:
            self._close_all(descriptors)
            self.close()
            return
        try:
            if self._session is None:
                self._hello(peer, packet, descriptors)
            else:
                self._close_all(descriptors)
                self._message(peer, self._session, packet)
        except KvStoreError as exc:
            logger.warning("a client on the session socket was refused: %s", exc)
            with contextlib.suppress(OSError):
                peer.send(handshake.describe(Kind.REFUSED, {"reason": str(exc)}))
            self.close()
        except OSError as exc:
            logger.info("a client's socket failed: %s", exc)
            self.close()

    def _hello(self, peer: socket.socket, packet: bytes, descriptors: list[int]) -> None:
        self._pidfd = descriptors[0] if descriptors else None
        kind, fields = handshake.described(packet)
        if kind is not Kind.HELLO or fields.get("version") != handshake.HANDSHAKE_VERSION:
            raise InvalidRequest(f"this node speaks hand-shake version {handshake.HANDSHAKE_VERSION}")
        owner = _owner(fields) if self._pidfd is not None else (0, 0)
        session = self._core.open_session(str(fields.get("name", ""))[:128], shared=True, owner=owner)
        self._session = session
        self._timeout.cancel()
        if self._pidfd is not None:
            self._loop.add_reader(self._pidfd, self._process_ended)
            if self._seat is not None:  # before it gets memory: whoever can write is known to the supervisor
                self._seat.keep(session.number, owner, self._pidfd)
        info = self._core.info
        answer = handshake.describe(
            Kind.WELCOME,
            {
                "session": session.number,
                "node_id": info.node_id,
                "epoch": info.epoch,
                "host_id": info.host_id,
                "control_address": info.control_address,
                "data_address": info.data_address,
                "socket_path": info.socket_path,
                "catalog_bytes": self._core.pool.catalog.shape.total_bytes,
                "arena_bytes": self._arena.size_bytes,
                "populated_bytes": self._arena.populated_bytes,
                "writable": self._pidfd is not None,
            },
        )
        arena_fd = self._arena.fd if self._pidfd is not None else self._arena.read_only_fd
        try:
            socket.send_fds(peer, [answer], [self._catalog_fd, arena_fd])
        finally:
            if self._pidfd is None:
                os.close(arena_fd)

    def _message(self, peer: socket.socket, session: Session, packet: bytes) -> None:
        if packet[0] == Kind.TOUCH:
            for prefix in handshake.touched(packet):
                self._core.touch(session.number, prefix)
        elif packet[0] == Kind.RENEW:
            self._core.renew(session.number)
        elif packet[0] == Kind.PING:
            with contextlib.suppress(BlockingIOError):  # a client that does not read its answers
                peer.send(handshake.ping(Kind.PONG, handshake.pinged(packet)))
        elif packet[0] == Kind.CALL and self._serve is not None:
            verb, number, request = handshake.called(packet)
            if len(self._calls) >= CALLS_LIMIT:
                busy = f"this session has {CALLS_LIMIT} calls under way already; wait for some of them"
                peer.send(handshake.answer(number, None, CapacityExhausted.__name__, busy))
                return
            task = self._loop.create_task(self._answer(self._serve, session.number, verb, number, request))
            self._calls.add(task)
            task.add_done_callback(self._calls.discard)
        else:
            raise InvalidRequest(f"unknown message kind {packet[0]}")

    async def _answer(self, serve: Serve, session: int, verb: str, number: int, request: bytes) -> None:
        try:
            packet = handshake.answer(number, await serve(session, verb, request))
        except KvStoreError as exc:
            packet = handshake.answer(number, None, type(exc).__name__, str(exc))
        if self._peer is None:
            return
        try:
            self._peer.send(packet)
        except OSError as exc:  # also a client that does not read its answers
            logger.info("a client's socket failed: %s", exc)
            self.close()

    def close(self) -> None:
        """The socket is closed: the session is lost. The pidfd stays until the process has ended."""
        self._timeout.cancel()
        if self._peer is not None:
            self._loop.remove_reader(self._peer)
            self._peer.close()
            self._peer = None
        if self._session is None:
            self._finish()
        elif self._pidfd is None:
            self._core.process_gone(self._session.number)
            self._finish()
        else:
            self._core.session_lost(self._session.number)
            if self._session.number not in self._core.sessions:
                self._finish()

    def _process_ended(self) -> None:
        if self._session is not None:
            self._core.process_gone(self._session.number)
        if self._peer is not None:
            self._loop.remove_reader(self._peer)
            self._peer.close()
            self._peer = None
        self._finish()

    def _finish(self) -> None:
        if self._pidfd is not None:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None
            if self._seat is not None and self._session is not None:
                self._seat.drop(self._session.number)
        self._on_end(self)

    @staticmethod
    def _close_all(descriptors: list[int]) -> None:
        for descriptor in descriptors:
            os.close(descriptor)


def _owner(fields: dict[str, Any]) -> tuple[int, int]:
    """(pid, start time) as the client states them: notes for people and for a restarted worker, not a proof."""
    pid, start = fields.get("pid", 0), fields.get("start_time", 0)
    if not isinstance(pid, int) or not isinstance(start, int) or not 0 <= pid < 1 << 32 or not 0 <= start < 1 << 63:
        raise InvalidRequest("pid and start_time of a hand-shake are non-negative integers")
    return pid, start


def _dead_socket(path: Path) -> bool:
    """True if nobody listens on the path."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except OSError:
            return True
        return False
