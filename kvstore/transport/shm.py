"""Same host: the node's catalog and arena mapped into this process, and the session that goes with them.

The hand-over works only on the node's own host, which is the definition of *local*. The mappings are dropped
when the node closes the socket; a copy that is under way is waited for first. They are not inherited by forked
children (`kvstore.forks`), so that a child can never write into a slot of its parent.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Mapping
from queue import Empty, SimpleQueue

import numpy as np
import numpy.typing as npt
from grpc import StatusCode

from kvstore.errors import DeadlineExceeded, ForkedProcess, InvalidRequest, SessionLost, Unreachable
from kvstore.forks import leave_out_of_children
from kvstore.model.values import NodeInfo
from kvstore.node.lookup import CatalogReader
from kvstore.rpc import handshake, wire
from kvstore.rpc.handshake import Kind
from kvstore.rpc.v1 import node_pb2

TOUCH_DELAY_S = 0.05
RENEW_EVERY_S = 5.0
TOUCHES_WAITING_LIMIT = 4096
_MADV_POPULATE_READ = 22
_MADV_POPULATE_WRITE = 23
_MAP_STEP_BYTES = 16 << 20
_libc = ctypes.CDLL(None)


class SharedNode:
    """An open session with the node on this host. Thread-safe.

    `arena`: the DRAM tier as uint8 (writable if `writable`). `reader`: its catalog. One background thread sends
    touches and renewals and notices the end of the session.
    """

    def __init__(self, peer: socket.socket, welcome: Mapping[str, object], catalog_fd: int, arena_fd: int) -> None:
        fields = {name: welcome[name] for name in NodeInfo.__slots__}
        self.info = NodeInfo(**fields)  # type: ignore[arg-type]
        self.session = int(str(welcome["session"]))
        self.writable = bool(welcome["writable"])
        catalog = mmap.mmap(catalog_fd, int(str(welcome["catalog_bytes"])), prot=mmap.PROT_READ)
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if self.writable else 0)
        arena = mmap.mmap(arena_fd, int(str(welcome["arena_bytes"])), prot=protection)
        leave_out_of_children(arena)
        self.arena: npt.NDArray[np.uint8] = np.frombuffer(arena, dtype=np.uint8)
        self.reader = CatalogReader(catalog)
        self.touches_dropped = 0
        self._peer = peer
        self._lock = threading.Lock()
        self._touches: list[bytes] = []
        self._pongs = threading.Condition(self._lock)
        self._pong = self._ping = 0
        self._inboxes: dict[int, SimpleQueue[bytes | None]] = {}
        self._given_up: set[int] = set()
        self._last_call = 0
        self._pid = os.getpid()
        peer.setblocking(False)
        self._alive = True
        self._ended = False
        self._on_end: list[Callable[[], None]] = []
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name="kvstore-session", daemon=True)
        self._thread.start()
        populated = int(str(welcome.get("populated_bytes", 0)))
        threading.Thread(target=self._map_ahead, args=(populated,), name="kvstore-map", daemon=True).start()

    def _map_ahead(self, populated_bytes: int) -> None:
        """Fill this process's page table for what the node has populated: a first touch page by page costs ten times as
        much. Never beyond that, or the pages would be charged to this process. Does without where the kernel cannot.
        """
        advice = _MADV_POPULATE_WRITE if self.writable else _MADV_POPULATE_READ
        address = self.arena.ctypes.data
        for start in range(0, populated_bytes, _MAP_STEP_BYTES):
            length = min(_MAP_STEP_BYTES, populated_bytes - start)
            if not self._alive or _libc.madvise(ctypes.c_void_p(address + start), ctypes.c_size_t(length), advice):
                return

    @classmethod
    def connect(cls, path: str, name: str, deadline_s: float) -> SharedNode:
        """Shake hands with the node that listens on `path`. Raises Unreachable."""
        peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        peer.settimeout(deadline_s)
        descriptors: list[int] = []
        try:
            peer.connect(path)
            hello = {
                "version": handshake.HANDSHAKE_VERSION,
                "name": name,
                "pid": os.getpid(),
                "start_time": handshake.process_start_time(os.getpid()),
            }
            pidfd = os.pidfd_open(os.getpid())
            try:
                socket.send_fds(peer, [handshake.describe(Kind.HELLO, hello)], [pidfd])
            finally:
                os.close(pidfd)
            packet, descriptors, _, _ = socket.recv_fds(peer, handshake.PACKET_BYTES, 2)
            kind, fields = handshake.described(packet) if packet else (Kind.REFUSED, {"reason": "connection closed"})
            if kind is not Kind.WELCOME or len(descriptors) != 2:
                raise Unreachable(f"the node on {path} refused the session: {fields.get('reason', 'no reason given')}")
            return cls(peer, fields, *descriptors)
        except OSError as exc:
            peer.close()
            raise Unreachable(f"no node answers on {path}: {exc}; is `kvstore node` running on this host?") from exc
        except (Unreachable, InvalidRequest):
            peer.close()
            raise
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    @property
    def alive(self) -> bool:
        """False once the session has ended; the mapped memory must not be trusted any more."""
        return self._alive and self.reader.alive()

    def touch(self, prefix: bytes) -> None:
        """Tell the node, at most 0.1 s late, that these keys (head first, 16 bytes each) were used."""
        with self._lock:
            if len(self._touches) >= TOUCHES_WAITING_LIMIT:
                self.touches_dropped += 1
            else:
                self._touches.append(prefix)

    def flush(self, deadline_s: float) -> None:
        """Return when the node has seen all touches so far. Raises SessionLost or DeadlineExceeded."""
        end = time.monotonic() + deadline_s
        with self._lock:
            self._ping += 1
            wanted = self._ping
            waiting, self._touches = self._touches, []
        for packet in handshake.touches(waiting):
            self._send(packet, end)
        self._send(handshake.ping(Kind.PING, wanted), end)
        with self._lock:
            while self._pong < wanted and self._alive:
                if not self._pongs.wait(max(0.0, end - time.monotonic())):
                    raise DeadlineExceeded(f"node {self.info.node_id} did not answer within {deadline_s} s")
            if not self._alive:
                raise self._lost()

    def call(self, verb: str, request: bytes, deadline_s: float) -> bytes:
        """The response to one of `handshake.VERBS`, over the session's socket. Raises what the call by gRPC would."""
        if os.getpid() != self._pid:
            raise ForkedProcess("this session belongs to the parent process; connect anew after the fork, or use spawn")
        end = time.monotonic() + deadline_s
        inbox: SimpleQueue[bytes | None] = SimpleQueue()
        with self._lock:
            if not self._alive:
                raise self._lost()
            self._last_call = number = (self._last_call + 1) & 0xFFFFFFFF
            self._inboxes[number] = inbox
        try:
            self._send(handshake.call(verb, number, request), end)
            packet = inbox.get(timeout=max(0.0, end - time.monotonic()))
        except Empty as exc:
            if verb == "Reserve":
                with self._lock:
                    self._given_up.add(number)
            late = f"node {self.info.node_id} did not answer {verb} within {deadline_s:.3f} s"
            raise DeadlineExceeded(late) from exc
        finally:
            with self._lock:
                self._inboxes.pop(number, None)
        if packet is None:
            raise self._lost()
        _, response, error, details = handshake.answered(packet)
        if response is None:
            raise wire.error_from_status(StatusCode.UNKNOWN, details, error)
        return response

    def _give_back(self, packet: bytes) -> None:
        """A Reserve was answered after its caller had given up: nobody writes into its slots, so abort it."""
        _, response, _, _ = handshake.answered(packet)
        attempt = node_pb2.ReserveResponse.FromString(response).attempt if response is not None else 0
        if attempt:
            request = node_pb2.AbortRequest(session=self.session, attempt=attempt)
            self._peer.send(handshake.call("Abort", 0, request.SerializeToString()))

    def _send(self, packet: bytes, end: float) -> None:
        """Send one packet, waiting for room in the socket until `end`."""
        while True:
            try:
                self._peer.send(packet)
                return
            except BlockingIOError:
                poller = select.poll()
                poller.register(self._peer, select.POLLOUT)
                if not poller.poll(max(0.0, end - time.monotonic()) * 1000):
                    raise DeadlineExceeded(f"node {self.info.node_id} does not read its session's socket") from None
            except OSError as exc:
                raise self._lost() from exc

    def _lost(self) -> SessionLost:
        return SessionLost(f"the session with node {self.info.node_id} ended")

    def on_end(self, release: Callable[[], None]) -> None:
        """Call `release` in the session's thread when the session has ended, here and now if it has."""
        with self._lock:
            if not self._ended:
                self._on_end.append(release)
                return
        release()

    def close(self) -> None:
        """End the session. The caller has stopped copying; what `on_end` was given waits for copies of devices."""
        with self._lock:
            self._alive = False
            self._pongs.notify_all()
            if not self._ended:  # the thread closes the pipe when it ends; its number may be somebody else's then
                os.write(self._wake_write, b"x")
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=5.0)

    def _run(self) -> None:
        renew_at = time.monotonic() + RENEW_EVERY_S
        poller = select.poll()
        poller.register(self._peer, select.POLLIN)
        poller.register(self._wake_read, select.POLLIN)
        while self._alive:
            ready = poller.poll(TOUCH_DELAY_S * 1000)
            try:
                if any(fd == self._peer.fileno() for fd, _ in ready) and not self._receive():
                    break
                self._send_touches()
                if time.monotonic() >= renew_at:
                    renew_at = time.monotonic() + RENEW_EVERY_S
                    self._peer.send(bytes([Kind.RENEW]))
            except BlockingIOError:
                continue
            except OSError:
                break
        with self._lock:
            self._alive = False
            self._ended = True
            self._pongs.notify_all()
            for inbox in self._inboxes.values():
                inbox.put(None)
            os.close(self._wake_read)
            os.close(self._wake_write)
        with contextlib.suppress(OSError):
            # A forked child may hold this socket too; the node must see its end all the same.
            self._peer.shutdown(socket.SHUT_RDWR)
        self._peer.close()
        for release in self._on_end:
            release()
        self._on_end.clear()

    def _receive(self) -> bool:
        packet = self._peer.recv(handshake.PACKET_BYTES)
        if packet and packet[0] == Kind.ANSWER:
            number = handshake.answered(packet)[0]
            with self._lock:
                inbox = self._inboxes.get(number)
                given_up = number in self._given_up
                self._given_up.discard(number)
            if inbox is not None:
                inbox.put(packet)
            elif given_up:
                self._give_back(packet)
        elif packet and packet[0] == Kind.PONG:
            with self._lock:
                self._pong = max(self._pong, handshake.pinged(packet))
                self._pongs.notify_all()
        return bool(packet)

    def _send_touches(self) -> None:
        with self._lock:
            waiting, self._touches = self._touches, []
        packets = list(handshake.touches(waiting))
        for place, packet in enumerate(packets):
            try:
                self._peer.send(packet)
            except BlockingIOError:
                self.touches_dropped += len(packets) - place
                return
