"""Reads from another host's node over tcp: every failure is a reason, staging comes back, sessions are opened again."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from kvstore.client import Cache, Client, connect
from kvstore.client.peers import Peer
from kvstore.errors import CapacityExhausted, KvStoreError, Unauthorized
from kvstore.metadata import NodeMatch
from kvstore.metadata.embedded import EmbeddedIndex
from kvstore.model.layout import Rectangle
from kvstore.model.prefix import Keys
from kvstore.model.values import MissReason, NodeInfo, Tier
from tests.chaos.node_thread import NodeThread
from tests.unit.client.pages import LAYOUT, namespace, pages_of, poisoned, prompt


@dataclass
class AlwaysThere(EmbeddedIndex):
    """An index that believes that these nodes have everything."""

    infos: list[NodeInfo] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def match(self, keys: Keys, rectangle: Rectangle | None = None) -> list[NodeMatch]:
        return [NodeMatch(info, len(keys), Tier.DRAM, False) for info in self.infos]


@pytest.fixture
def node(tmp_path: Path) -> Iterator[NodeThread]:
    node = NodeThread(tmp_path, node_id="far")
    yield node
    node.stop()


@pytest.fixture
def writer(node: NodeThread) -> Iterator[Cache]:
    with connect(node.info.socket_path) as client:
        yield client.bind(namespace())


def reader_of(*infos: NodeInfo, staging: int = 1 << 20) -> Client:
    return Client(None, None, AlwaysThere(infos=list(infos)), staging_bytes=staging)


def stored(writer: Cache, chunks: int = 6) -> Keys:
    keys = writer.keys(prompt(1, 16 * chunks))
    assert writer.write(keys, pages_of(keys)).stored == chunks
    return keys


def test_a_read_streams_through_small_staging(node: NodeThread, writer: Cache) -> None:
    keys = stored(writer, 20)
    with reader_of(node.info, staging=40 << 10) as client:
        target = poisoned(writer, 20)
        result = client.bind(namespace()).read(keys, target)
        assert (result.chunks, result.remote_chunks, result.reason) == (20, 20, None)
        assert np.array_equal(target, pages_of(keys))
        assert result.bytes_by_path["tcp"] >= 20 * LAYOUT.chunk_bytes
        client.staging.check()
        assert client.staging.usage().free_bytes == client.staging.total_bytes
    assert node.call(node.core.stats)["leases"] == 0


def test_parts_of_chunks_come_over_tcp_too(node: NodeThread, writer: Cache) -> None:
    keys = stored(writer, 2)
    part = Rectangle(1, 3, 1, 2)
    with reader_of(node.info) as client:
        target = poisoned(writer, 2, part)
        assert client.bind(namespace()).read(keys, target, rectangle=part).chunks == 2
        assert np.array_equal(target, pages_of(keys)[:, 1:3, :, 1:2])


def test_staging_smaller_than_a_chunk_is_a_miss_with_a_reason(node: NodeThread, writer: Cache) -> None:
    """It was an exception out of a read."""
    keys = stored(writer, 2)
    with reader_of(node.info, staging=4096) as client:
        result = client.bind(namespace()).read(keys, poisoned(writer, 2))
        assert (result.chunks, result.reason) == (0, MissReason.STAGING_FULL)


def test_staging_that_others_hold_is_waited_for_until_the_deadline(node: NodeThread, writer: Cache) -> None:
    keys = stored(writer, 1)
    with reader_of(node.info) as client:
        cache, target = client.bind(namespace()), poisoned(writer, 1)
        assert cache.read(keys, target).chunks == 1
        block = client.staging.acquire(client.staging.total_bytes, 1.0)
        assert block is not None
        started = time.monotonic()
        assert cache.read(keys, target, deadline_s=0.2).reason in (MissReason.STAGING_FULL, MissReason.DEADLINE)
        assert time.monotonic() - started < 2.0
        client.staging.release(block)
        assert cache.read(keys, target).chunks == 1


@pytest.mark.parametrize("error", [CapacityExhausted("busy"), Unauthorized("no"), KvStoreError("odd")])
@pytest.mark.parametrize("place", ["acquire", "take"])
def test_errors_of_the_other_side_are_reasons(
    node: NodeThread, writer: Cache, monkeypatch: pytest.MonkeyPatch, error: KvStoreError, place: str
) -> None:
    keys = stored(writer, 1)

    def fail(*_: object, **__: object) -> None:
        raise error

    with reader_of(node.info) as client:
        if place == "take":
            monkeypatch.setattr(Peer, "take", fail)
        else:
            monkeypatch.setattr(Peer, "register", fail)
        result = client.bind(namespace()).read(keys, poisoned(writer, 1))
        assert (result.chunks, result.reason) == (0, MissReason.UNREACHABLE)
        client.staging.check()
        assert client.staging.usage().free_bytes == client.staging.total_bytes


def test_f15_the_first_read_after_an_idle_time_hits(node: NodeThread, writer: Cache) -> None:
    """The node ended the idle session; the client opens another instead of missing."""
    keys = stored(writer, 2)
    with reader_of(node.info) as client:
        cache, target = client.bind(namespace()), poisoned(writer, 2)
        assert cache.read(keys, target).chunks == 2
        remote = [session.number for session in node.core.sessions.values() if not session.shared]
        assert remote
        for number in remote:
            node.call(lambda number=number: node.core.process_gone(number))  # type: ignore[misc]
        assert cache.read(keys, target).chunks == 2


def test_a_connection_that_comes_back_to_a_dropped_peer_is_closed(node: NodeThread, writer: Cache) -> None:
    """It was kept by the peer that nobody knew any more: a socket, and over NIXL an agent, for each."""
    stored(writer, 1)
    with reader_of(node.info) as client:
        peer = client.peer(node.info, 5.0)
        connection, _ = peer.take(5.0)
        client.drop_peer(node.info.node_id, node.info.epoch)
        peer.give_back(connection, healthy=True)
        assert not connection.is_open


def test_another_node_is_asked_where_the_first_fails(node: NodeThread, writer: Cache) -> None:
    keys = stored(writer, 2)
    gone = NodeInfo("gone", 1, "x", "127.0.0.1:1", "127.0.0.1:1")
    old = NodeInfo(node.info.node_id, 99, "x", node.info.control_address, node.info.data_address)
    for bad in (gone, old):
        renamed = NodeInfo(f"{bad.node_id}-bad", bad.epoch, "x", bad.control_address, bad.data_address)
        with reader_of(renamed, node.info) as client:
            target = poisoned(writer, 2)
            assert client.bind(namespace()).read(keys, target).chunks == 2
            assert np.array_equal(target, pages_of(keys))


def test_a_destination_that_fails_leaves_no_staging_in_use(node: NodeThread, writer: Cache) -> None:
    """A failing scatter while the next batch was received kept that batch's staging for ever."""

    class Broken:
        def scatter(self, index: int, piece: object, layer_start: int, head_start: int) -> None:
            raise RuntimeError("no such block")

    keys = stored(writer, 20)
    with reader_of(node.info, staging=48 << 10) as client:
        cache = client.bind(namespace())
        with pytest.raises(RuntimeError, match="no such block"):
            cache.read(keys, Broken())
        client.staging.check()
        assert client.staging.usage().free_bytes == client.staging.total_bytes
        assert cache.read(keys, poisoned(writer, 20)).chunks == 20
    assert node.call(node.core.stats)["leases"] == 0


@pytest.mark.slow
def test_many_prefetches_at_once_end(node: NodeThread, writer: Cache, tmp_path: Path) -> None:
    """Prefetches waited for work that queued behind them in the same threads."""
    near = NodeThread(tmp_path, node_id="near")
    chains = []
    for number in range(8):
        keys = writer.keys(prompt(number, 16 * 6))
        writer.write(keys, pages_of(keys))
        chains.append(keys)
    with connect(near.info.socket_path, staging="64KiB") as client:
        client._index = AlwaysThere(infos=[node.info])
        cache = client.bind(namespace())
        futures = [cache.prefetch(keys) for keys in chains]
        assert [future.result(20.0).chunks for future in futures] == [6] * 8
        target = poisoned(cache, 6)
        for keys in chains:
            assert cache.read(keys, target).local_chunks == 6
            assert np.array_equal(target, pages_of(keys))
    near.stop()


def test_a_prefetch_says_that_another_one_is_storing_what_it_brings(
    node: NodeThread, writer: Cache, tmp_path: Path
) -> None:
    """It is not absent: the own node has it as soon as that writer is done."""
    near, keys = NodeThread(tmp_path, node_id="near"), stored(writer)
    with connect(near.info.socket_path) as other, connect(near.info.socket_path) as client:
        client._index = AlwaysThere(infos=[node.info])
        cache, theirs = client.bind(namespace()), other.bind(namespace())
        theirs.write(keys.slice(0, 2), pages_of(keys.slice(0, 2)))
        with theirs.begin_write(keys) as pending:
            result = cache.prefetch(keys).result(20.0)
            assert (result.chunks, result.reason) == (2, MissReason.IN_PROGRESS)
            pending.abort()
        near.call(lambda: setattr(near.core.reservations, "draining", True))
        result = cache.prefetch(keys).result(20.0)
        assert (result.chunks, result.reason) == (2, MissReason.ABSENT), "refused, and nobody else has it in hand"
        near.call(lambda: setattr(near.core.reservations, "draining", False))
        assert cache.prefetch(keys).result(20.0).chunks == 6
    near.stop()


def test_readers_share_one_staging(node: NodeThread, writer: Cache) -> None:
    keys = stored(writer, 12)
    with reader_of(node.info, staging=64 << 10) as client:
        cache = client.bind(namespace())
        results: list[bool] = []

        def read() -> None:
            target = poisoned(writer, 12)
            for _ in range(5):
                done = cache.read(keys, target).chunks
                results.append(done == 12 and np.array_equal(target, pages_of(keys)))

        threads = [threading.Thread(target=read) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert results == [True] * 30
        client.staging.check()
