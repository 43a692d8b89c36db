"""Owners that are stopped, killed and restarted while others read from them over tcp (A16, B01, B02, B11)."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from kvstore.errors import StaleReference, Unreachable
from kvstore.transport import ReadStatus
from kvstore.transport.tcp import TcpTransport
from kvstore.transport.tcp_server import TcpServer
from tests.contract.transport_owner import ARENA_BYTES, EPOCH, at, descriptor, poisoned
from tests.unit.transport.tcp_owner import ProcessOwner


@pytest.fixture
def start() -> Iterator[Callable[..., ProcessOwner]]:
    """Starts owners in processes of their own; ends them after the test."""
    owners: list[ProcessOwner] = []

    def start(epoch: int = EPOCH, port: int = 0) -> ProcessOwner:
        owners.append(ProcessOwner(epoch, port))
        return owners[-1]

    yield start
    for owner in owners:
        owner.stop()
        owner.close()


def assert_serves(owner: ProcessOwner, epoch: int = EPOCH) -> None:
    connection = TcpTransport().connect(at(owner.address, epoch), 5.0)
    staging = poisoned(1 << 20)
    result = connection.read([descriptor(4096, 1 << 20, 0)], staging, 5.0)
    connection.close()
    assert result.status is ReadStatus.DONE
    assert (staging == owner.arena[4096 : 4096 + (1 << 20)]).all()


def test_a16_late_bytes_of_a_stopped_owner_reach_nobody(start: Callable[..., ProcessOwner]) -> None:
    """The owner stands still with a part of the payload under way, and goes on when staging has a new user."""
    owner = start()
    transport = TcpTransport()
    transport.hold_for_tests(owner.pause)  # ARENA_BYTES do not fit into socket buffers: it stops inside sendfile
    connection = transport.connect(at(owner.address, EPOCH), 5.0)
    staging = poisoned(ARENA_BYTES)
    started = time.monotonic()
    result = connection.read([descriptor(0, ARENA_BYTES, 0)], staging, 0.3)
    assert result.status is ReadStatus.DEADLINE
    assert 0.25 < time.monotonic() - started < 2.0
    staging[:] = 0x3C
    owner.resume()
    assert_serves(owner)
    assert (staging == 0x3C).all()


def test_b01_an_owner_killed_inside_a_payload_ends_the_read_at_once(start: Callable[..., ProcessOwner]) -> None:
    owner = start()

    def kill() -> None:
        owner.kill()
        owner.process.wait(10)

    transport = TcpTransport()
    transport.hold_for_tests(kill)
    connection = transport.connect(at(owner.address, EPOCH), 5.0)
    started = time.monotonic()
    result = connection.read([descriptor(0, ARENA_BYTES, 0)], poisoned(ARENA_BYTES), 20.0)
    assert (result.status, result.generations) == (ReadStatus.UNREACHABLE, ())
    assert time.monotonic() - started < 10.0
    with pytest.raises(Unreachable):
        transport.connect(at(owner.address, EPOCH), 5.0)


@pytest.mark.slow
def test_b02_an_owner_that_comes_back_on_its_port_is_another_one(start: Callable[..., ProcessOwner]) -> None:
    """Old paths fail, the old epoch is refused, the new one serves at once; two threads connect at the same time."""
    owner, epoch = start(), EPOCH
    port = int(owner.address.rsplit(":", 1)[1])
    for _ in range(4):
        old = TcpTransport().connect(at(owner.address, epoch), 5.0)
        owner.kill()
        owner.process.wait(10)
        epoch += 1
        owner = start(epoch, port)
        assert old.read([descriptor(0, 4096, 0)], poisoned(4096), 5.0).status is ReadStatus.UNREACHABLE
        with pytest.raises(StaleReference):
            TcpTransport().connect(at(owner.address, epoch - 1), 5.0)
        failures: list[BaseException] = []

        def connect(owner: ProcessOwner = owner, epoch: int = epoch, into: list[BaseException] = failures) -> None:
            try:
                assert_serves(owner, epoch)
            except BaseException as exc:
                into.append(exc)

        threads = [threading.Thread(target=connect) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert not failures


def test_b11_sixteen_owners_started_together_have_sixteen_ports() -> None:
    """Each address that is told belongs to a bound socket, and behind it is the owner who told it."""
    servers: dict[int, TcpServer] = {}
    started = threading.Barrier(16)

    def run(mark: int) -> None:
        arena_fd = os.memfd_create("test-arena")
        os.write(arena_fd, bytes([mark]) * 4096)
        started.wait(10)
        servers[mark] = TcpServer(arena_fd, 4096, lambda slots: [mark] * len(slots), EPOCH)
        os.close(arena_fd)

    with socket.create_server(("127.0.0.1", 0)) as taken:
        threads = [threading.Thread(target=run, args=(mark,)) for mark in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        ports = {server.address.rsplit(":", 1)[1] for server in servers.values()}
        assert len(ports) == 16 and str(taken.getsockname()[1]) not in ports
    for mark, server in servers.items():
        connection = TcpTransport().connect(at(server.address, EPOCH), 5.0)
        staging = poisoned(4096)
        assert connection.read([descriptor(0, 4096, 0)], staging, 5.0).generations == (mark,)
        assert (staging == mark).all()
        connection.close()
        assert server.stop()
