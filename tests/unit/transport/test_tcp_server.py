"""The owner's side, spoken to by raw sockets as a stranger in another language would: limits, garbage, phases."""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from kvstore.errors import ConfigurationError, InvalidRequest, Unauthorized, Unreachable
from kvstore.transport import ReadStatus
from kvstore.transport.tcp import TcpTransport
from kvstore.transport.tcp_server import TcpServer, TcpServerLimits, _Peer
from kvstore.transport.tcp_wire import COUNT_LIMIT, PAYLOAD_LIMIT_BYTES, AnswerStatus
from tests.contract.transport_owner import ARENA_BYTES, EPOCH, at, descriptor, poisoned
from tests.unit.transport.tcp_owner import LocalOwner

Dial = Callable[[LocalOwner], socket.socket]
HELLO = struct.pack("<8sHHQ", b"KVSTREAM", 1, 0, EPOCH)
READ = struct.pack("<IIQQ", 1, 1, 0, 4)
"""Four bytes of payload."""
FENCE = struct.pack("<III", 2, 1, 7)


@pytest.fixture
def start() -> Iterator[Callable[..., LocalOwner]]:
    """Starts owners; stops them after the test."""
    owners = []

    def start(**options: object) -> LocalOwner:
        owners.append(LocalOwner(**options))  # type: ignore[arg-type]
        return owners[-1]

    yield start
    for owner in owners:
        owner.stop()
        owner.close()


@pytest.fixture
def owner(start: Callable[..., LocalOwner]) -> LocalOwner:
    return start()


@pytest.fixture
def dial() -> Iterator[Dial]:
    """Raw connections without a hello; closed after the test."""
    made: list[socket.socket] = []

    def dial(owner: LocalOwner) -> socket.socket:
        host, port = owner.address.rsplit(":", 1)
        made.append(socket.create_connection((host, int(port)), timeout=10))
        return made[-1]

    yield dial
    for one in made:
        one.close()


def receive(raw: socket.socket, length: int) -> bytes:
    got = b""
    while len(got) < length:
        part = raw.recv(length - len(got))
        assert part, f"closed after {len(got)} of {length} bytes"
        got += part
    return got


def greet(raw: socket.socket) -> socket.socket:
    raw.sendall(HELLO)
    assert struct.unpack("<IIQQQ", receive(raw, 32)) == (0, 0, 16, EPOCH, ARENA_BYTES)
    return raw


def refusal(raw: socket.socket) -> tuple[AnswerStatus, str]:
    """The refusal that comes, and the end behind it."""
    status, detail_bytes, body_bytes = struct.unpack("<IIQ", receive(raw, 16))
    detail = receive(raw, detail_bytes).decode()
    assert body_bytes == 0
    assert raw.recv(1) == b""
    return AnswerStatus(status), detail


def assert_serves(owner: LocalOwner) -> None:
    connection = TcpTransport().connect(at(owner.address, EPOCH), 5.0)
    staging = poisoned(4096)
    assert connection.read([descriptor(4096, 4096, 0)], staging, 5.0).status is ReadStatus.DONE
    assert (staging == owner.arena[4096:8192]).all()
    connection.close()


def until(true: Callable[[], bool]) -> None:
    """Wait for something that the owner does on its own, at most 10 s."""
    event, deadline = threading.Event(), time.monotonic() + 10
    while not true():
        assert time.monotonic() < deadline
        event.wait(0.01)


def peer_of(owner: LocalOwner, raw: socket.socket) -> _Peer:
    """What the owner knows of the other end of `raw`."""
    with owner.server._lock:
        return next(peer for peer in owner.server._peers if peer.socket.getpeername() == raw.getsockname())


def until_idle(peer: _Peer) -> None:
    """An answer is here a moment before its thread counts the peer as idle."""
    until(lambda: peer.idle_since is not None)


def is_closed(raw: socket.socket) -> bool:
    """By the owner, in order, with nothing left to take."""
    raw.setblocking(False)
    try:
        return raw.recv(1) == b""
    except BlockingIOError:
        return False


# -- the format, byte by byte ---------------------------------------------------------------------------------


def test_a_whole_exchange(owner: LocalOwner, dial: Dial) -> None:
    raw = greet(dial(owner))
    raw.sendall(struct.pack("<IIQQQQ", 1, 2, 5, 10, 4096, 3))
    assert receive(raw, 16) == struct.pack("<IIQ", 0, 0, 13)
    assert receive(raw, 13) == owner.arena[5:15].tobytes() + owner.arena[4096:4099].tobytes()
    raw.sendall(struct.pack("<IIII", 2, 2, 7, 1))
    assert receive(raw, 16) == struct.pack("<IIQ", 0, 0, 16)
    assert struct.unpack("<QQ", receive(raw, 16)) == (int(owner.words[7]), int(owner.words[1]))


def test_requests_in_dribs_and_all_at_once(owner: LocalOwner, dial: Dial) -> None:
    raw = dial(owner)
    raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    read = struct.pack("<IIQQ", 1, 1, 0, 4)
    for byte in HELLO + read:
        raw.send(bytes([byte]))
    assert receive(raw, 32 + 16 + 4)[-4:] == owner.arena[:4].tobytes()
    raw.sendall(read * 3)
    assert receive(raw, 3 * 20)[-4:] == owner.arena[:4].tobytes()


# -- what is refused ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_bytes", "detail"),
    [
        (struct.pack("<II", 1, 0), "entries"),
        (struct.pack("<II", 1, COUNT_LIMIT + 1) + bytes(16 * (COUNT_LIMIT + 1)), str(COUNT_LIMIT)),
        (struct.pack("<II", 1, 0xFFFFFFFF), str(COUNT_LIMIT)),
        (struct.pack("<II", 2, 0), "entries"),
        (struct.pack("<II", 0, 1), "kind 0"),
        (struct.pack("<II", 3, 1), "kind 3"),
        (struct.pack("<IIQQ", 1, 1, 0, 0), "empty"),
        (struct.pack("<IIQQ", 1, 1, ARENA_BYTES - 1, 2), "arena"),
        (struct.pack("<IIQQ", 1, 1, (1 << 64) - 1, 2), "arena"),
        (struct.pack("<IIQQ", 1, 1, 2, (1 << 64) - 1), "arena"),
        (struct.pack("<IIQQ", 1, 1, 1 << 63, 1 << 63), "arena"),
        (struct.pack("<IIQQQQ", 1, 2, 0, 8, ARENA_BYTES, 1), "arena"),
        (struct.pack("<II", 1, 65) + struct.pack("<QQ", 0, ARENA_BYTES) * 65, str(PAYLOAD_LIMIT_BYTES)),
        (struct.pack("<III", 2, 1, ARENA_BYTES // 4096), "arena"),
        (struct.pack("<III", 2, 1, 0xFFFFFFFF), "arena"),
        (pickle.dumps({"slots": [1, 2, 3]}), "request"),
        (b"GET / HTTP/1.1\r\nHost: owner\r\n\r\n", "request"),
    ],
)
def test_bad_requests_are_refused_by_name(owner: LocalOwner, dial: Dial, request_bytes: bytes, detail: str) -> None:
    raw = greet(dial(owner))
    raw.sendall(request_bytes)
    status, said = refusal(raw)
    assert status is AnswerStatus.BAD_REQUEST
    assert detail in said
    assert_serves(owner)


@pytest.mark.parametrize(
    "first_bytes",
    [
        b"GET / HTTP/1.1\r\nHost: owner\r\n\r\n",
        pickle.dumps(list(range(100))),
        bytes(64),
        HELLO[::-1],
        np.random.default_rng(3).bytes(1 << 16),
    ],
)
def test_another_protocol_is_closed(owner: LocalOwner, dial: Dial, first_bytes: bytes) -> None:
    raw = dial(owner)
    raw.sendall(first_bytes)
    with contextlib.suppress(ConnectionResetError):  # closed over what it had not read
        assert raw.recv(100) == b""
    assert_serves(owner)


def test_another_version(owner: LocalOwner, dial: Dial) -> None:
    raw = dial(owner)
    raw.sendall(struct.pack("<8sHHQ", b"KVSTREAM", 2, 0, EPOCH))
    assert refusal(raw) == (AnswerStatus.VERSION, "the owner speaks version 1, not 2")


def test_a_credential_that_is_too_long(owner: LocalOwner, dial: Dial) -> None:
    raw = dial(owner)
    raw.sendall(struct.pack("<8sHHQ", b"KVSTREAM", 1, 4097, EPOCH) + bytes(4097))
    assert refusal(raw)[0] is AnswerStatus.BAD_REQUEST


@pytest.mark.parametrize("leave_after", [0, 1, 19, 20, 21, 27, 28, 40])
def test_peers_that_leave_in_the_middle(owner: LocalOwner, dial: Dial, leave_after: int) -> None:
    raw = dial(owner)
    raw.sendall((HELLO + struct.pack("<IIQQ", 1, 1, 0, ARENA_BYTES))[:leave_after])
    raw.close()
    assert_serves(owner)
    until(lambda: owner.server.connection_count == 0)


# -- who may come ---------------------------------------------------------------------------------------------


def test_authorize(start: Callable[..., LocalOwner]) -> None:
    owner = start(authorize=lambda credential: credential == b"right")
    TcpTransport(b"right").connect(at(owner.address, EPOCH), 5.0).close()
    for wrong in (b"", b"wrong", b"right\0", bytes(4096)):
        with pytest.raises(Unauthorized, match="credential"):
            TcpTransport(wrong).connect(at(owner.address, EPOCH), 5.0)
    with pytest.raises(Unauthorized):  # the epoch is not told to strangers
        TcpTransport().connect(at(owner.address, EPOCH + 1), 5.0)


def test_one_connection_too_many(start: Callable[..., LocalOwner], dial: Dial) -> None:
    """Busy is: not greeted yet; a request half sent; a payload half taken; a payload without its fence."""
    owner = start(limits=TcpServerLimits(connections=4))
    silent, half, sending, unfenced = dial(owner), *(greet(dial(owner)) for _ in range(3))
    half.sendall(READ[:1])
    sending.sendall(struct.pack("<II", 1, 32) + struct.pack("<QQ", 0, ARENA_BYTES) * 32)
    receive(sending, 1000)
    unfenced.sendall(READ)
    receive(unfenced, 16 + 4)
    for _ in range(3):
        with pytest.raises(Unreachable, match="connection"):
            TcpTransport().connect(at(owner.address, EPOCH), 5.0)
    half.sendall(READ[1:])
    receive(half, 16 + 4)
    for raw in (half, unfenced):
        raw.sendall(FENCE)
        assert receive(raw, 24)[16:] == owner.words[7].tobytes()
    silent.close()
    until(lambda: owner.server.connection_count == 3)
    assert_serves(owner)


# -- idle connections make room -------------------------------------------------------------------------------


def serve_one(owner: LocalOwner, raw: socket.socket) -> None:
    """A whole exchange."""
    raw.sendall(READ)
    assert receive(raw, 20)[16:] == owner.arena[:4].tobytes()
    raw.sendall(FENCE)
    assert receive(raw, 24)[16:] == owner.words[7].tobytes()


def test_at_the_limit_the_one_idle_longest_makes_room(start: Callable[..., LocalOwner], dial: Dial) -> None:
    owner = start(limits=TcpServerLimits(connections=3))
    kept = [greet(dial(owner)) for _ in range(3)]
    for index in (1, 0, 2):
        serve_one(owner, kept[index])
        until_idle(peer_of(owner, kept[index]))
    for leaver in (1, 0, 2):
        newcomer = greet(dial(owner))
        newcomer.sendall(READ)  # busy from now on
        receive(newcomer, 20)
        assert kept[leaver].recv(1) == b"", "an orderly end, not a reset"
        assert owner.server.connection_count == 3
    with pytest.raises(Unreachable, match="connection"):
        TcpTransport().connect(at(owner.address, EPOCH), 5.0)


def test_idle_hosts_do_not_starve_another(start: Callable[..., LocalOwner], dial: Dial) -> None:
    """Thirty-two clients with eight idle connections each, at the default limit; then eight of one more."""
    owner = start()
    kept = [greet(dial(owner)) for _ in range(256)]
    until(lambda: owner.server.connection_count == 256)
    for _ in range(8):
        serve_one(owner, greet(dial(owner)))
    assert owner.server.connection_count == 256
    closed = [raw for raw in kept if is_closed(raw)]
    assert len(closed) == 8


def test_a_request_that_has_arrived_keeps_its_connection(start: Callable[..., LocalOwner], dial: Dial) -> None:
    """The peer's thread has not run yet: what counts is the byte in the socket."""
    owner = start(limits=TcpServerLimits(connections=1))
    raw = greet(dial(owner))
    until_idle(peer_of(owner, raw))
    with owner.server._lock:  # the thread wakes up, but cannot say that it is busy
        newcomer = dial(owner)
        raw.sendall(READ)
    assert receive(raw, 20)[16:] == owner.arena[:4].tobytes()
    assert refusal(newcomer)[0] is AnswerStatus.BUSY
    raw.sendall(FENCE)
    assert receive(raw, 24)[16:] == owner.words[7].tobytes()


def test_the_last_answer_arrives_before_the_end(start: Callable[..., LocalOwner], dial: Dial) -> None:
    """An answer that the peer has not taken yet is not torn up when its connection makes room."""
    owner = start(limits=TcpServerLimits(connections=1))
    raw = greet(dial(owner))
    slots = list(range(ARENA_BYTES // 4096)) * 8  # 256 KiB of words: in both sides' buffers
    raw.sendall(struct.pack(f"<II{len(slots)}I", 2, len(slots), *slots))
    peer = peer_of(owner, raw)
    assert raw.recv(1, socket.MSG_PEEK)
    until_idle(peer)
    serve_one(owner, greet(dial(owner)))
    assert receive(raw, 16 + 8 * len(slots))[16:] == owner.words[slots].tobytes()
    assert raw.recv(1) == b""


def test_a_dropped_reader_sees_it_before_its_next_read(start: Callable[..., LocalOwner], dial: Dial) -> None:
    owner = start(limits=TcpServerLimits(connections=1))
    connection = TcpTransport().connect(at(owner.address, EPOCH), 5.0)
    assert connection.read([descriptor(0, 4096, 0)], poisoned(4096), 5.0).status is ReadStatus.DONE
    assert connection.is_open
    until(lambda: all(peer.idle_since is not None for peer in owner.server._peers))
    serve_one(owner, greet(dial(owner)))
    until(lambda: not connection.is_open)
    connection.close()


def test_a_read_without_its_fence_ends_like_an_exchange(start: Callable[..., LocalOwner], dial: Dial) -> None:
    """Else a peer could hold its place as busy for as long as it may be idle."""
    owner = start(limits=TcpServerLimits(exchange_s=0.05))
    raw = greet(dial(owner))
    raw.sendall(READ)
    until(lambda: owner.server.connection_count == 0)


# -- every phase ends -----------------------------------------------------------------------------------------


def test_silent_peers_are_dropped(start: Callable[..., LocalOwner], dial: Dial) -> None:
    owner = start(limits=TcpServerLimits(hello_s=0.05, idle_s=0.05, exchange_s=0.05))
    silent, idle, half = dial(owner), greet(dial(owner)), greet(dial(owner))
    half.sendall(struct.pack("<II", 1, 100))
    for raw in (silent, idle, half):
        with contextlib.suppress(ConnectionResetError):
            assert raw.recv(1) == b""
    until(lambda: owner.server.connection_count == 0)


def test_a_peer_that_takes_nothing_is_dropped(start: Callable[..., LocalOwner], dial: Dial) -> None:
    owner = start(limits=TcpServerLimits(exchange_s=0.2))
    raw = greet(dial(owner))
    raw.sendall(struct.pack("<II", 1, 32) + struct.pack("<QQ", 0, ARENA_BYTES) * 32)
    until(lambda: owner.server.connection_count == 0)


def test_a_refused_peer_that_stays_is_dropped(start: Callable[..., LocalOwner], dial: Dial) -> None:
    owner = start(limits=TcpServerLimits(parting_s=0.05))
    raw = greet(dial(owner))
    raw.sendall(struct.pack("<II", 9, 1))
    until(lambda: owner.server.connection_count == 0)


def test_stop_ends_threads_in_every_phase(start: Callable[..., LocalOwner], dial: Dial) -> None:
    before = threading.active_count()
    owner = start()
    dial(owner)
    greet(dial(owner))
    sending = greet(dial(owner))
    sending.sendall(struct.pack("<II", 1, 32) + struct.pack("<QQ", 0, ARENA_BYTES) * 32)
    receive(sending, 1000)
    halfway = greet(dial(owner))
    halfway.sendall(struct.pack("<II", 1, 10))
    until(lambda: owner.server.connection_count == 4)
    started = time.monotonic()
    assert owner.server.stop(5.0)
    assert time.monotonic() - started < 2.0
    assert threading.active_count() == before
    assert owner.server.stop(5.0)


def test_stop_says_when_a_thread_is_still_busy(owner: LocalOwner) -> None:
    entered, leave = threading.Event(), threading.Event()

    def hold() -> None:
        entered.set()
        leave.wait(10)

    owner.after_payload(hold)
    connection = TcpTransport().connect(at(owner.address, EPOCH), 5.0)
    assert connection.read([descriptor(0, 1, 0)], poisoned(1), 0.2).status is ReadStatus.DEADLINE
    assert entered.wait(10)
    assert not owner.server.stop(0.05)
    leave.set()
    assert owner.server.stop(10.0)


# -- listening ------------------------------------------------------------------------------------------------


def test_two_owners_never_share_a_port(owner: LocalOwner) -> None:
    """B11: an address that is told to others is one that is really bound, and by nobody else."""
    port = int(owner.address.rsplit(":", 1)[1])
    with pytest.raises(ConfigurationError, match=str(port)):
        TcpServer(owner.arena_fd, ARENA_BYTES, lambda slots: slots, EPOCH, "127.0.0.1", port)


@pytest.mark.parametrize("host", ["192.0.2.1", "no host"])
def test_a_host_that_is_not_here(owner: LocalOwner, host: str) -> None:
    with pytest.raises(ConfigurationError, match=host):
        TcpServer(owner.arena_fd, ARENA_BYTES, lambda slots: slots, EPOCH, host)


def test_ipv6(start: Callable[..., LocalOwner]) -> None:
    try:
        owner = start(host="::1")
    except ConfigurationError as exc:
        pytest.skip(f"no IPv6 loopback here: {exc}")
    assert owner.address.startswith("[::1]:")
    assert_serves(owner)


@pytest.mark.parametrize("arena_bytes", [0, ARENA_BYTES + 1])
def test_an_arena_of_another_size_than_its_file(owner: LocalOwner, arena_bytes: int) -> None:
    with pytest.raises(InvalidRequest, match=str(ARENA_BYTES)):
        TcpServer(owner.arena_fd, arena_bytes, lambda slots: slots, EPOCH)


@pytest.mark.parametrize("length", [16, 1 << 20])
def test_an_arena_cut_short_behind_the_owners_back(length: int) -> None:
    """The read fails, with either way of sending; the owner lives."""
    arena_fd = os.memfd_create("test-arena")
    os.ftruncate(arena_fd, 1 << 22)
    with TcpServer(arena_fd, 1 << 22, lambda slots: slots, EPOCH) as server:
        os.ftruncate(arena_fd, 1 << 20)
        for offset, status in ((1 << 21, ReadStatus.UNREACHABLE), (0, ReadStatus.DONE)):
            connection = TcpTransport().connect(at(server.address, EPOCH), 5.0)
            assert connection.read([descriptor(offset, length, 0)], poisoned(length), 5.0).status is status
            connection.close()
    os.close(arena_fd)
