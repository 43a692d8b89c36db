"""Law 6 on every transport: bytes of a read that was given up reach no memory that somebody else may use by then.

The owner is stopped in the middle of a payload, the caller gives up at its deadline, its buffer gets a new user, the
owner goes on (A16). The last test of the transports takes the guard away and sees the bytes arrive.
"""

from __future__ import annotations

import importlib.util
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvstore.client import Cache, Client, connect
from kvstore.client.transports import Way
from kvstore.errors import Unreachable
from kvstore.model.values import MissReason
from kvstore.transport import Connection, ReadResult, ReadStatus, Transport
from kvstore.transport.nixl import NixlConnection, NixlTransport
from kvstore.transport.nixl_agent import Agent
from kvstore.transport.tcp import TcpTransport
from tests.chaos.nixl_nodes import NixlNode, nixl_node, only_tcp
from tests.chaos.pool_processes import Processes, until
from tests.contract.transport_owner import ARENA_BYTES, EPOCH, POISON, at, descriptor, poisoned
from tests.unit.client.pages import MIB, namespace, pages_of, prompt
from tests.unit.client.test_remote_read import AlwaysThere
from tests.unit.transport.nixl_owners import NixlProcessOwner
from tests.unit.transport.tcp_owner import ProcessOwner

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="needs the nixl package"),
    pytest.mark.nixl,
    pytest.mark.slow,
    pytest.mark.xdist_group("nixl"),
]

COPIES = 8
"""A read takes the arena so often: more than socket buffers hold, so that it can be stopped half-way."""
LARGE = [descriptor(0, ARENA_BYTES, number * ARENA_BYTES) for number in range(COPIES)]
GIVE_UP_S = 1.0
NEXT_USER = 0x3C
CHUNKS = 24
"""MiB of a read through the client: more than socket buffers hold, again."""


class ReadPath:
    """One way to read, with an owner in processes of its own."""

    def __init__(self, name: str, environment: pytest.MonkeyPatch) -> None:
        self.name = name
        if name != "nixl one-sided":
            environment.setenv("UCX_TLS", "tcp")
        self.owner = ProcessOwner() if name == "tcp" else NixlProcessOwner()
        self.transport: Transport = TcpTransport() if name == "tcp" else NixlTransport()

    def connect(self) -> Connection:
        """To an owner that may need a moment, at most 20 s, to serve (again)."""
        return until(self._try)

    def _try(self) -> Connection | None:
        try:
            return self.transport.connect(at(self.owner.address, EPOCH, self.owner.control_address), 5.0)
        except Unreachable:
            return None

    def end(self) -> None:
        if isinstance(self.transport, NixlTransport):
            self.transport.close()
        self.owner.stop()
        self.owner.close()


@pytest.fixture
def over(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ReadPath]]:
    monkeypatch.delenv("UCX_TLS", raising=False)
    made: list[ReadPath] = []

    def over(name: str) -> ReadPath:
        made.append(ReadPath(name, monkeypatch))
        return made[-1]

    yield over
    for way in made:
        way.end()


def stopped_halfway(way: ReadPath, connection: Connection, staging: npt.NDArray[np.uint8]) -> ReadResult:
    """A read whose owner stands still from the first bytes on."""
    arrived, over = threading.Event(), threading.Event()

    def stop_the_owner() -> None:
        while not over.is_set():
            if staging[0] != POISON or staging[-1] != POISON:
                way.owner.pause()
                arrived.set()
                return

    watcher = threading.Thread(target=stop_the_owner)
    watcher.start()
    started = time.monotonic()
    result = connection.read(LARGE, staging, GIVE_UP_S)
    assert time.monotonic() - started < GIVE_UP_S + 1.0
    over.set()
    watcher.join(20)
    assert arrived.is_set() and result.status is ReadStatus.DEADLINE, result
    came = float((staging != POISON).mean())
    assert 0 < came < 0.9, "the owner was not stopped in the middle"
    return result


@pytest.mark.parametrize("name", ["tcp", "nixl over tcp"])
def test_a16_late_bytes_of_a_stopped_owner_reach_nobody(over: Callable[[str], ReadPath], name: str) -> None:
    way = over(name)
    connection = way.connect()
    staging = poisoned(COPIES * ARENA_BYTES)
    result = stopped_halfway(way, connection, staging)
    assert result.ended is None or until(result.ended)
    staging[:] = NEXT_USER
    way.owner.resume()
    # Another read of the same owner: it has run again, and whatever this side still had of it was moved on.
    other = way.connect()
    again = poisoned(ARENA_BYTES)
    assert other.read(LARGE[:1], again, 10.0).status is ReadStatus.DONE
    assert (again == way.owner.arena).all()
    assert (staging == NEXT_USER).all()
    other.close()


def test_a16_without_its_guard_late_bytes_arrive(
    over: Callable[[str], ReadPath], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the end of the agent is for: the library's own release of the transfer does not keep them off."""
    kept: list[Agent] = []
    monkeypatch.setattr(Agent, "close", lambda self: kept.append(self))
    way = over("nixl over tcp")
    connection = way.connect()
    staging = poisoned(COPIES * ARENA_BYTES)
    stopped_halfway(way, connection, staging)
    staging[:] = NEXT_USER
    way.owner.resume()

    def written() -> bool:
        for agent in kept:
            agent.progress()
        return bool((staging[::4096] != NEXT_USER).any())

    until(written)
    monkeypatch.undo()
    for agent in kept:
        agent.close()


def test_a16_a_one_sided_read_that_is_given_up_writes_nothing_later(over: Callable[[str], ReadPath]) -> None:
    """UCX takes all bytes in the call that posts the read, so nothing is under way when it can be given up. Should it
    ever take them later, the first assertion fails, and the quarantine has to be shown here as it is over TCP.
    """
    way = over("nixl one-sided")
    connection = way.connect()
    staging = poisoned(COPIES * ARENA_BYTES)
    taken: list[bool] = []

    def give_up() -> None:
        taken.append(all((part == way.owner.arena).all() for part in (staging[:ARENA_BYTES], staging[-ARENA_BYTES:])))
        way.owner.pause()
        connection.cancel()

    assert isinstance(way.transport, NixlTransport)
    way.transport.hold_for_tests(before_payload=give_up)
    result = connection.read(LARGE, staging, 10.0)
    assert taken == [True]
    assert result.status is ReadStatus.CANCELLED
    assert result.ended is None or until(result.ended)
    staging[:] = NEXT_USER
    way.owner.resume()
    way.transport.hold_for_tests()
    other = way.connect()
    assert other.read(LARGE[:1], poisoned(ARENA_BYTES), 10.0).status is ReadStatus.DONE
    assert (staging == NEXT_USER).all()
    other.close()


# --- through the whole client ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def node(shared_processes: Processes) -> Iterator[NixlNode]:
    with only_tcp():
        node = nixl_node(shared_processes, "far", dram=64 << 20)
        stored(node)
        yield node


@pytest.fixture
def client(node: NixlNode) -> Iterator[Client]:
    with only_tcp():
        with Client(None, None, AlwaysThere(infos=[node.info]), way=Way("nixl"), staging_bytes=32 << 20) as client:
            yield client


def stored(node: NixlNode) -> None:
    with connect(node.socket_path) as writer:
        cache = writer.bind(namespace(layout=MIB))
        keys = cache.keys(prompt(1, 64 * CHUNKS))
        assert cache.write(keys, pages_of(keys, MIB)).stored == CHUNKS


def read_of(cache: Cache, deadline_s: float, **more: Any) -> tuple[int, MissReason | None]:
    keys = cache.keys(prompt(1, 64 * CHUNKS))
    target = cache.empty(CHUNKS)
    target[:] = POISON
    result = cache.read(keys, target, deadline_s=deadline_s, **more)
    assert np.array_equal(target[: result.chunks], pages_of(keys, MIB)[: result.chunks])
    assert (target[result.chunks :] == POISON).all()
    return result.chunks, result.reason


@contextmanager
def stopped_when_asked(node: NixlNode) -> Iterator[None]:
    """The node stands still from the next transfer on: it is asked for all of it, and sends it when it goes on.

    From the first bytes on would be too late: a quick owner has sent two exchanges by then.
    """
    start = NixlConnection.start

    def stop_and_start(self: NixlConnection, *arguments: Any) -> Any:
        node.stop()
        return start(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NixlConnection, "start", stop_and_start)
        yield


def test_a16_a_client_hands_its_staging_on_only_when_nothing_comes_any_more(client: Client, node: NixlNode) -> None:
    """B01 too: the read is a miss at its deadline, and the next one after the node goes on is whole."""
    cache = client.bind(namespace(layout=MIB))
    assert read_of(cache, 10.0) == (CHUNKS, None)
    with stopped_when_asked(node):
        started = time.monotonic()
        assert read_of(cache, 1.0) == (0, MissReason.DEADLINE)
        assert time.monotonic() - started < 2.0
    until(lambda: client.staging.usage().free_bytes == client.staging.total_bytes)
    block = client.staging.acquire(client.staging.total_bytes // 2, 5.0)  # the first half: where the bytes were to land
    assert block is not None and block.offset_bytes == 0
    block.view[:] = NEXT_USER
    node.go_on()
    until(lambda: read_of(cache, 5.0) == (CHUNKS, None))
    assert (block.view == NEXT_USER).all()
    client.staging.release(block)
    client.staging.check()


def test_a16_staging_stays_locked_up_while_another_read_keeps_the_agent(client: Client, node: NixlNode) -> None:
    """Two reads share the agent of a peer; the one that was given up waits, in quarantine, for the other's end."""
    cache = client.bind(namespace(layout=MIB))
    assert read_of(cache, 10.0) == (CHUNKS, None)
    nixl = client._transports._nixl
    assert isinstance(nixl, NixlTransport)
    moving, go_on = threading.Event(), threading.Event()

    def wait_within() -> None:
        moving.set()
        assert go_on.wait(20)

    nixl.hold_for_tests(before_payload=wait_within)
    first = threading.Thread(target=lambda: read_of(cache, 10.0))
    first.start()
    assert moving.wait(20)
    nixl.hold_for_tests()
    with stopped_when_asked(node):
        assert read_of(cache, 1.0) == (0, MissReason.DEADLINE)
    usage = client.staging.usage()
    assert usage.quarantined_bytes > 0
    client.staging.check()
    node.go_on()
    go_on.set()
    first.join(20)
    until(lambda: client.staging.usage().free_bytes == client.staging.total_bytes)
    until(lambda: read_of(cache, 5.0) == (CHUNKS, None))
