"""The reading side against owners that stop short, lie or trickle; cancelling; forks."""

from __future__ import annotations

import socket
import struct
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from kvstore.errors import DeadlineExceeded, InvalidRequest, LimitExceeded, Unreachable
from kvstore.transport import Exchange, ReadDescriptor, ReadStatus
from kvstore.transport.tcp import AHEAD_REQUEST_BYTES, TcpConnection, TcpTransport
from kvstore.transport.tcp_server import TcpServerLimits
from tests.contract.transport_owner import ARENA_BYTES, EPOCH, POISON, at, descriptor, poisoned
from tests.unit.transport.tcp_owner import LocalOwner

HELLO_BYTES = 20
WELCOME = struct.pack("<IIQQQ", 0, 0, 16, EPOCH, ARENA_BYTES)


@pytest.fixture
def owner() -> Iterator[LocalOwner]:
    owner = LocalOwner()
    yield owner
    owner.stop()
    owner.close()


@pytest.fixture
def impostor() -> Iterator[Callable[[Callable[[socket.socket], None]], str]]:
    """Starts a one-connection owner that behaves as the given function says; gives its address."""
    threads: list[threading.Thread] = []

    def start(behave: Callable[[socket.socket], None]) -> str:
        listener = socket.create_server(("127.0.0.1", 0))

        def serve() -> None:
            with listener, listener.accept()[0] as raw:
                raw.settimeout(10)
                try:
                    behave(raw)
                    while raw.recv(4096):
                        pass
                except OSError:  # the reader has left already
                    pass

        threads.append(threading.Thread(target=serve))
        threads[-1].start()
        return f"127.0.0.1:{listener.getsockname()[1]}"

    yield start
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()


def after_hello(answer: bytes) -> Callable[[socket.socket], None]:
    """Answers the hello, and the first request with `answer`; then closes its sending half."""

    def behave(raw: socket.socket) -> None:
        raw.recv(HELLO_BYTES, socket.MSG_WAITALL)
        raw.sendall(WELCOME)
        raw.recv(24, socket.MSG_WAITALL)
        raw.sendall(answer)
        raw.shutdown(socket.SHUT_WR)

    return behave


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"short",
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        struct.pack("<8sHHQ", b"KVSTREAM", 1, 0, EPOCH) + bytes(12),  # an echo of the hello
        struct.pack("<IIQ", 0, 0, 17) + bytes(17),
        struct.pack("<IIQ", 0, 3, 16) + bytes(19),
        struct.pack("<IIQ", 3, 1 << 30, 0),
        struct.pack("<IIQ", 99, 0, 0),
    ],
)
def test_something_else_listens_there(impostor: Callable[..., str], answer: bytes) -> None:
    def behave(raw: socket.socket) -> None:
        raw.sendall(answer)
        raw.shutdown(socket.SHUT_WR)

    with pytest.raises(Unreachable):
        TcpTransport().connect(at(impostor(behave), EPOCH), 5.0)


def test_an_owner_that_says_nothing(impostor: Callable[..., str]) -> None:
    started = time.monotonic()
    with pytest.raises(DeadlineExceeded):
        TcpTransport().connect(at(impostor(lambda raw: None), EPOCH), 0.1)
    assert time.monotonic() - started < 2.0


@pytest.mark.parametrize(
    ("answer", "status"),
    [
        (b"", ReadStatus.UNREACHABLE),
        (struct.pack("<IIQ", 0, 0, 99) + bytes(99), ReadStatus.UNREACHABLE),
        (struct.pack("<IIQ", 0, 0, 101) + bytes(101), ReadStatus.UNREACHABLE),
        (struct.pack("<IIQ", 0, 0, 100) + bytes(99), ReadStatus.UNREACHABLE),
        (struct.pack("<IIQ", 0, 0, 100) + bytes(100), ReadStatus.UNREACHABLE),
        (struct.pack("<IIQ", 0, 0, 100) + bytes(100) + struct.pack("<IIQ", 0, 0, 16) + bytes(16), "unreachable"),
        (struct.pack("<IIQ", 0, 0, 100) + bytes(100) + struct.pack("<IIQ", 0, 0, 8) + bytes(7), "unreachable"),
        (struct.pack("<IIQ", 5, 2, 0) + b"no", ReadStatus.REFUSED),
        (struct.pack("<IIQ", 0, 0, 100) + bytes(100) + struct.pack("<IIQ", 5, 2, 0) + b"no", ReadStatus.REFUSED),
    ],
)
def test_answers_that_stop_short_or_lie(impostor: Callable[..., str], answer: bytes, status: ReadStatus) -> None:
    connection = TcpTransport().connect(at(impostor(after_hello(answer)), EPOCH), 5.0)
    staging = poisoned(300)
    result = connection.read([descriptor(0, 100, 100)], staging, 5.0)
    assert (result.status, result.generations, result.payload_bytes) == (status, (), 0)
    assert result.detail
    assert (staging[:100] == POISON).all() and (staging[200:] == POISON).all()
    assert not connection.is_open


def test_a_trickle_does_not_stretch_the_deadline(impostor: Callable[..., str]) -> None:
    """Bytes that keep coming must not wind the clock up again."""
    done = threading.Event()

    def behave(raw: socket.socket) -> None:
        after = struct.pack("<IIQ", 0, 0, 1 << 20)
        raw.recv(HELLO_BYTES, socket.MSG_WAITALL)
        raw.sendall(WELCOME)
        raw.recv(24, socket.MSG_WAITALL)
        raw.sendall(after)
        while not done.wait(0.01):
            raw.sendall(b"x")

    connection = TcpTransport().connect(at(impostor(behave), EPOCH), 5.0)
    started = time.monotonic()
    result = connection.read([descriptor(0, 1 << 20, 0)], poisoned(1 << 20), 0.3)
    took_s = time.monotonic() - started
    done.set()
    assert result.status is ReadStatus.DEADLINE
    assert 0.25 < took_s < 1.0


@pytest.mark.parametrize("receives", [0, 1 << 16])
def test_an_owner_that_takes_no_request(impostor: Callable[..., str], receives: int) -> None:
    """A request of 1 MiB does not fit into the socket's buffers: sending it has the deadline too."""

    def behave(raw: socket.socket) -> None:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.recv(HELLO_BYTES, socket.MSG_WAITALL)
        raw.sendall(WELCOME)
        raw.recv(receives, socket.MSG_WAITALL)
        over.wait(10)

    over = threading.Event()
    connection = TcpTransport().connect(at(impostor(behave), EPOCH), 5.0)
    descriptors = [ReadDescriptor(0, 2 * index, 1, index) for index in range(1 << 16)]
    started = time.monotonic()
    result = connection.read(descriptors, poisoned(1 << 16), 0.3)
    took_s = time.monotonic() - started
    over.set()
    assert result.status is ReadStatus.DEADLINE
    assert took_s < 2.0


# -- cancel ---------------------------------------------------------------------------------------------------


def test_cancel_ends_a_waiting_read(owner: LocalOwner) -> None:
    release = threading.Event()
    connection = TcpTransport().connect(at(owner.address, EPOCH), 5.0)

    def hold() -> None:
        connection.cancel()  # on the owner's thread, while the reader waits for the fence
        release.wait(10)

    owner.after_payload(hold)
    started = time.monotonic()
    result = connection.read([descriptor(0, 1 << 20, 0)], poisoned(1 << 20), 20.0)
    assert (result.status, result.generations) == (ReadStatus.CANCELLED, ())
    assert time.monotonic() - started < 10.0
    release.set()
    connection.cancel()
    assert connection.read([descriptor(0, 1, 0)], poisoned(1), 1.0).status is ReadStatus.CANCELLED


def test_cancel_before_a_read(owner: LocalOwner) -> None:
    connection = TcpTransport().connect(at(owner.address, EPOCH), 5.0)
    connection.cancel()
    staging = poisoned(100)
    assert connection.read([descriptor(0, 100, 0)], staging, 5.0).status is ReadStatus.CANCELLED
    assert (staging == POISON).all()


def test_a_read_that_is_interrupted_leaves_nothing_behind() -> None:
    """An exception out of a signal handler passes through, and the path is closed behind it."""
    owner = LocalOwner()
    transport = TcpTransport()

    def interrupt() -> None:
        raise KeyboardInterrupt

    transport.hold_for_tests(interrupt)
    connection = transport.connect(at(owner.address, EPOCH), 5.0)
    with pytest.raises(KeyboardInterrupt):
        connection.read([descriptor(0, 1 << 20, 0)], poisoned(1 << 20), 5.0)
    assert not connection.is_open
    owner.stop()
    owner.close()


# -- several under way ----------------------------------------------------------------------------------------


def started(connection: TcpConnection, count: int, length: int = 4096) -> list[Exchange]:
    """Exchange i asks for slot i."""
    begun = [connection.start([descriptor(i * 4096, length, 0)], poisoned(length), 10.0) for i in range(count)]
    return [exchange for exchange in begun if exchange is not None]


def test_words_do_not_wait_behind_the_next_payload(owner: LocalOwner) -> None:
    """The owner stands still between the second payload's request and its bytes: the first one's words come."""
    connection = TcpTransport().connect(at(owner.address, EPOCH), 5.0)
    sent, go_on = threading.Semaphore(0), threading.Event()

    def hold() -> None:
        sent.release()
        go_on.wait(10)

    owner.after_payload(hold)  # the thread that sends payloads; the next request waits for it
    first, second = started(connection, 2)
    assert first.payload().status is ReadStatus.DONE
    assert sent.acquire(timeout=10)
    assert first.fence().generations == (int(owner.words[0]),)
    assert not go_on.is_set()
    go_on.set()
    assert second.payload().status is ReadStatus.DONE
    assert second.fence().generations == (int(owner.words[1]),)
    connection.close()


def test_one_exchange_at_a_time_takes_one_place_of_the_owner(owner: LocalOwner) -> None:
    connection = TcpTransport().connect(at(owner.address, EPOCH), 5.0)
    for _ in range(3):
        assert connection.read([descriptor(0, 4096, 0)], poisoned(4096), 5.0).status is ReadStatus.DONE
    assert owner.server.connection_count == 1
    connection.close()


def test_an_owner_without_a_place_to_spare_is_asked_for_one_after_the_other() -> None:
    owner = LocalOwner(limits=TcpServerLimits(connections=1))
    connection = TcpTransport().connect(at(owner.address, EPOCH), 5.0)
    (first,) = started(connection, 2)
    assert first.payload().status is ReadStatus.DONE
    assert connection.start([descriptor(0, 4096, 0)], poisoned(4096), 5.0) is None, "the first has no words yet"
    assert first.fence().generations == (int(owner.words[0]),)
    assert connection.read([descriptor(4096, 4096, 0)], poisoned(4096), 5.0).generations == (int(owner.words[1]),)
    connection.close()
    owner.stop()
    owner.close()


def test_words_are_asked_for_again_where_the_side_stream_had_to_make_room(owner: LocalOwner) -> None:
    connection = TcpTransport().connect(at(owner.address, EPOCH), 5.0)
    first, second = started(connection, 2)
    assert first.payload().status is second.payload().status is ReadStatus.DONE
    side = connection._side
    assert side is not None
    with owner.server._lock:  # as the owner's thread that accepts does it
        (peer,) = [one for one in owner.server._peers if one.socket.getpeername() == side._socket.getsockname()]
        peer.socket.shutdown(socket.SHUT_RDWR)
    assert first.fence().generations == (int(owner.words[0]),)
    assert second.fence().generations == (int(owner.words[1]),)
    assert connection.is_open
    connection.close()


def test_a_side_stream_that_cannot_be_made_again_fails_the_read(owner: LocalOwner) -> None:
    connection = TcpTransport().connect(at(owner.address, EPOCH), 5.0)
    first, second = started(connection, 2)
    assert first.payload().status is second.payload().status is ReadStatus.DONE
    owner.stop()
    result = first.fence()
    assert (result.status, result.generations) == (ReadStatus.UNREACHABLE, ())
    assert second.fence().status is ReadStatus.UNREACHABLE
    connection.close()


def test_a_long_request_waits_for_the_payload_before_it(owner: LocalOwner) -> None:
    """Reader and owner would each wait for the other to take its bytes."""
    connection = TcpTransport().connect(at(owner.address, EPOCH), 5.0)
    (first,) = started(connection, 1, ARENA_BYTES)
    long = [descriptor(i * 128, 64, i * 64) for i in range(AHEAD_REQUEST_BYTES // 16)]
    assert connection.start(long, poisoned(len(long) * 64), 5.0) is None
    assert first.payload().status is ReadStatus.DONE
    second = connection.start(long, poisoned(len(long) * 64), 5.0)
    assert second is not None and second.payload().status is ReadStatus.DONE
    assert first.fence().status is second.fence().status is ReadStatus.DONE
    connection.close()


# -- the caller's mistakes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "bad",
    [
        ReadDescriptor(-1, 0, 1, 0),
        ReadDescriptor(1 << 32, 0, 1, 0),
        ReadDescriptor(0, -1, 1, 0),
        ReadDescriptor(0, 1 << 64, 1, 0),
        ReadDescriptor(0, 0, 1 << 62, 1 << 62),
    ],
)
def test_numbers_that_do_not_fit(owner: LocalOwner, bad: ReadDescriptor) -> None:
    connection = TcpTransport().connect(at(owner.address, EPOCH), 5.0)
    with pytest.raises(InvalidRequest):
        connection.read([bad], poisoned(10), 1.0)
    assert connection.is_open
    connection.close()


def test_staging_of_another_shape(owner: LocalOwner) -> None:
    connection = TcpTransport().connect(at(owner.address, EPOCH), 5.0)
    read_only = poisoned(10)
    read_only.flags.writeable = False
    for staging in (poisoned(20)[::2], poisoned(20).reshape(2, 10), read_only, poisoned(16).view(np.uint64)):
        with pytest.raises(InvalidRequest, match="staging"):
            connection.read([descriptor(0, 1, 0)], staging, 1.0)  # type: ignore[arg-type]
    connection.close()


def test_a_credential_has_a_limit() -> None:
    TcpTransport(bytes(4096))
    with pytest.raises(LimitExceeded):
        TcpTransport(bytes(4097))


@pytest.mark.parametrize("epoch", [-1, 1 << 64])
def test_an_epoch_is_a_u64(owner: LocalOwner, epoch: int) -> None:
    with pytest.raises(InvalidRequest):
        TcpTransport().connect(at(owner.address, epoch), 1.0)


@pytest.mark.parametrize("host", ["a..b", "[::1", "\udcff"])
def test_hosts_that_are_none(host: str) -> None:
    with pytest.raises(Unreachable):
        TcpTransport().connect(at(f"{host}:9", EPOCH), 5.0)


# -- processes ------------------------------------------------------------------------------------------------


def test_a_forked_child_cannot_read_and_does_not_end_the_parents_path(owner: LocalOwner) -> None:
    script = f"""
        import os
        import numpy as np
        from kvstore.errors import ForkedProcess
        from kvstore.model.values import NodeInfo
        from kvstore.transport import ReadDescriptor
        from kvstore.transport.tcp import TcpTransport

        connection = TcpTransport().connect(NodeInfo("", {EPOCH}, "", "", {owner.address!r}), 5.0)
        staging = np.zeros(100, dtype=np.uint8)
        child = os.fork()
        if not child:
            refused = 0
            for verb in (lambda: connection.read([ReadDescriptor(0, 0, 1, 0)], staging, 1.0), connection.cancel):
                try:
                    verb()
                except ForkedProcess:
                    refused += 1
            connection.close()
            os._exit(0 if refused == 2 else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert connection.read([ReadDescriptor(0, 0, 100, 0)], staging, 5.0).status == "done"
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, timeout=60)
