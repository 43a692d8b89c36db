"""An index that does not listen, or comes and goes, must not slow a node down (B08), and is right again afterwards."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.client import Cache, connect
from kvstore.errors import Unreachable
from kvstore.metadata import Applied, Batch
from kvstore.metadata.embedded import EmbeddedIndex
from kvstore.node import news
from kvstore.node import publisher as publisher_module
from kvstore.node.core import NodeCore
from kvstore.node.publisher import Publisher
from tests.chaos.node_thread import NodeThread
from tests.chaos.pool_processes import until
from tests.unit.client.pages import namespace, pages_of, prompt

PUTS = 300


class Consumer(EmbeddedIndex):
    """An index that can stand still, be away, or lose everything; batches arrive one at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.listening = threading.Event()
        self.listening.set()
        self.away = False
        self.batches: list[Batch] = []
        self.gaps = 0

    def publish(self, batch: Batch) -> Applied:
        assert self.listening.wait(30)
        if self.away:
            raise Unreachable("nobody there")
        self.batches.append(batch)
        applied = super().publish(batch)
        self.gaps += applied.resync
        return applied

    def held(self) -> set[tuple[bytes, int]]:
        return {(event.key, event.shard) for batch in self.snapshot() for event in batch.events}


class Watched:
    """A node whose publisher feeds a `Consumer`."""

    def __init__(self, folder: Path) -> None:
        self.node = NodeThread(folder, dram_bytes=64 * (12 << 10), node_id="events")
        self.index = Consumer()
        self.publisher = Publisher(self.node.core, self.node._loop, self.index)
        self.publisher.start()
        self.client = connect(self.node.info.socket_path)
        self.cache: Cache = self.client.bind(namespace())

    def put(self, count: int, first: int = 0) -> float:
        """So many puts; the longest of them in seconds."""
        longest = 0.0
        for number in range(first, first + count):
            keys = self.cache.keys(prompt(number, 16))
            started = time.monotonic()
            assert self.cache.write(keys, pages_of(keys)).stored == 1
            longest = max(longest, time.monotonic() - started)
        return longest

    def agrees(self) -> bool:
        """The index holds what the node would say of itself."""
        return self.index.held() == self.node.call(lambda: published(self.node.core))

    def stop(self) -> None:
        self.index.listening.set()
        self.client.close()
        self.publisher.stop(10.0)
        self.node.stop()


def published(core: NodeCore) -> set[tuple[bytes, int]]:
    return {
        (chunk.key, shard) for chunk in core.pool.forest.chunks.values() if chunk.published for shard in chunk.copies
    }


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    monkeypatch.setattr(news, "EVENTS_LIMIT", 50)
    monkeypatch.setattr(publisher_module, "HEARTBEAT_S", 0.05)
    watched = Watched(tmp_path)
    yield watched
    watched.stop()


@pytest.mark.slow
def test_b08_a_paused_consumer_stalls_no_put_and_resynchronises(watched: Watched) -> None:
    watched.put(3)
    until(watched.agrees)
    watched.index.listening.clear()
    longest = watched.put(PUTS, first=10)
    assert longest < 2.0, "a put waited for the consumer"
    stats = watched.node.call(watched.node.core.stats)
    assert stats["events_waiting"] <= 50, "the queue is bounded"
    before = len(watched.index.batches)
    watched.index.listening.set()
    until(watched.agrees)
    assert any(batch.snapshot_begin for batch in watched.index.batches[before:]), "dropped events end in a snapshot"
    watched.index.check()


@pytest.mark.slow
def test_b08_an_index_that_was_away_gets_everything_once_more(watched: Watched) -> None:
    watched.put(5)
    until(watched.agrees)
    watched.index.away = True
    assert watched.put(100, first=10) < 2.0
    until(lambda: watched.publisher.failed_batches > 2)
    watched.index.away = False
    until(watched.agrees)
    watched.put(5, first=200)
    until(watched.agrees)


@pytest.mark.slow
def test_b08_an_index_that_forgot_asks_for_a_snapshot(watched: Watched) -> None:
    watched.put(20)
    until(watched.agrees)
    watched.index.drop_node(watched.node.info.node_id)
    assert not watched.index.held()
    until(watched.agrees)
    assert watched.index.gaps, "the gap in the sequence was noticed"


@pytest.mark.slow
def test_a_node_that_leaves_is_dropped_at_once(watched: Watched) -> None:
    watched.put(2)
    until(watched.agrees)
    watched.publisher.stop(10.0)
    assert watched.index.nodes() == []
