"""The client object: connecting, losing and finding its node again, other threads, other processes, an index away."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvstore.client import Cache, Client, connect
from kvstore.client import nodes as nodes_module
from kvstore.errors import ConfigurationError, ForkedProcess, NotFound, Unreachable
from kvstore.metadata.embedded import EmbeddedIndex
from kvstore.model.values import MissReason
from kvstore.node.daemon import NodeDaemon
from tests.chaos.node_thread import NodeThread
from tests.unit.client.pages import namespace, pages_of, poisoned, prompt


@pytest.fixture
def node(tmp_path: Path) -> Iterator[NodeThread]:
    node = NodeThread(tmp_path, node_id="own")
    yield node
    node.stop()


def read(cache: Cache, chunks: int = 2) -> tuple[int, MissReason | None]:
    keys = cache.keys(prompt(1, 16 * chunks))
    target = poisoned(cache, chunks)
    result = cache.read(keys, target)
    assert np.array_equal(target[: result.chunks], pages_of(keys)[: result.chunks])
    return result.chunks, result.reason


def write(cache: Cache, chunks: int = 2) -> int:
    keys = cache.keys(prompt(1, 16 * chunks))
    return cache.write(keys, pages_of(keys)).visible


def test_a_node_is_named_by_its_address_or_its_socket(node: NodeThread) -> None:
    for name in (node.info.control_address, node.info.socket_path):
        with connect(name) as client:
            assert client.node == node.info
            assert write(client.bind(namespace())) == 2


def test_the_first_writer_after_a_start_finds_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest of the memory is prepared while the node serves; here it never is."""

    async def never(*_: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(NodeDaemon, "_populate", never)
    node = NodeThread(tmp_path, node_id="fresh")
    try:
        with connect(node.info.socket_path) as client:
            assert write(client.bind(namespace())) == 2
    finally:
        node.stop()


def test_wrong_ways_to_connect_are_told_at_once(node: NodeThread, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="transport"):
        connect(node.info.control_address, transport="rdma")
    with pytest.raises(ConfigurationError):
        connect()
    with pytest.raises(ConfigurationError, match="gRPC address"):
        connect(node.info.socket_path, transport="tcp")
    with pytest.raises(Unreachable):
        connect(str(tmp_path / "nobody.sock"))
    with pytest.raises(Unreachable):
        connect("127.0.0.1:1", deadline_s=2.0)


def test_a_forced_tcp_transport_never_shares_memory(node: NodeThread) -> None:
    with connect(node.info.socket_path) as client:
        write(client.bind(namespace()))
    with connect(node.info.control_address, transport="tcp") as client:
        assert client.host() is None
        cache = client.bind(namespace())
        assert cache.match(cache.keys(prompt(1, 32))).local_chunks == 0


def test_a_node_that_goes_is_a_miss_for_as_long_as_it_is_away(
    node: NodeThread, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first read after the loss missed, every later one raised."""
    monkeypatch.setattr(nodes_module, "RETRY_EVERY_S", 0.0)
    other = NodeThread(tmp_path, node_id="goes")
    client = connect(other.info.socket_path)
    cache = client.bind(namespace())
    assert write(cache) == 2 and read(cache) == (2, None)
    other.stop()
    for _ in range(5):
        assert read(cache)[0] == 0
        assert cache.match(cache.keys(prompt(1, 32))).local_chunks == 0
        with pytest.raises(Unreachable):
            write(cache)
    late = client.bind(namespace("bound while it was away"))
    other = NodeThread(tmp_path, node_id="goes")
    assert client.node is not None and client.node.epoch == other.info.epoch - 1
    assert write(cache) == 2 and read(cache) == (2, None)
    assert write(late) == 2, "namespaces are registered again"
    assert client.node.epoch == other.info.epoch and client.stats()["sessions_lost"] == 1
    assert len(other.call(lambda: other.core.sessions)) == 1
    client.close()
    other.stop()


def test_a_session_that_ends_while_it_is_registered_leaves_nothing_open(
    node: NodeThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nodes_module, "RETRY_EVERY_S", 0.0)
    client = connect(node.info.socket_path)
    cache = client.bind(namespace())
    before = len(list(Path("/proc/self/fd").iterdir()))

    def refuse(*_: object) -> None:
        raise Unreachable("not yet")

    client._on_session.append(refuse)
    for session in list(node.core.sessions):
        node.call(lambda session=session: node.core.session_lost(session))  # type: ignore[misc]
    client._host.close()  # type: ignore[union-attr]
    for _ in range(10):
        assert client.host() is None
    client._on_session.remove(refuse)
    assert len(list(Path("/proc/self/fd").iterdir())) <= before
    assert write(cache) == 2
    client.close()


def test_threads_share_one_client(node: NodeThread) -> None:
    client = connect(node.info.socket_path)
    cache = client.bind(namespace())
    done: list[int] = []

    def work(number: int) -> None:
        keys = cache.keys(prompt(number, 16 * 3))
        for _ in range(20):
            cache.write(keys, pages_of(keys))
            target = poisoned(cache, 3)
            result = cache.read(keys, target)
            assert np.array_equal(target[: result.chunks], pages_of(keys)[: result.chunks])
            done.append(result.chunks)

    threads = [threading.Thread(target=work, args=(number % 4,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    # A read that came while another thread was still writing the same prompt may be short.
    assert len(done) == 160 and done.count(3) > 100
    client.close()
    node.call(node.core.check)
    assert node.call(node.core.stats)["reserved_slots"] == 0


def test_a_forked_child_is_told(node: NodeThread) -> None:
    client = connect(node.info.socket_path)
    cache = client.bind(namespace())
    write(cache)
    client._pid = os.getpid() + 1  # as it looks from a child
    keys = cache.keys(prompt(1, 32))
    calls = (
        lambda: cache.read(keys, poisoned(cache, 2)),
        lambda: cache.write(keys, pages_of(keys)),
        lambda: cache.match(keys),
        lambda: cache.prefetch(keys),
        lambda: cache.remove(keys),
        lambda: client.bind(namespace()),
        client.flush_touches,
        client.close,
    )
    for call in calls:
        with pytest.raises(ForkedProcess):
            call()
    client._pid = os.getpid()
    assert read(cache)[0] == 2
    client.close()


def test_closing_twice_is_harmless_and_ends_the_session(node: NodeThread) -> None:
    client = connect(node.info.socket_path)
    client.close()
    client.close()
    end = time.monotonic() + 5
    while node.core.sessions:
        assert time.monotonic() < end


def test_touches_arrive_when_flushed(node: NodeThread) -> None:
    with connect(node.info.socket_path) as client:
        cache = client.bind(namespace())
        write(cache)
        seen: list[list[bytes]] = []
        node.core.pool.touch = lambda keys: seen.append(list(keys))  # type: ignore[method-assign]
        read(cache)
        client.flush_touches()
        assert seen[-1] == list(cache.keys(prompt(1, 32)))


def test_an_unknown_node_of_a_ticket_is_not_found() -> None:
    with Client(None, None, EmbeddedIndex()) as client:
        with pytest.raises(NotFound):
            client.node_info("nobody", 1, 1.0)
