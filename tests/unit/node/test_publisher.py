"""The publisher: heartbeats while a snapshot takes its time, and an index that refuses a batch."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Generator, Iterator
from typing import Any

import pytest

from kvstore.errors import KvStoreError, LimitExceeded
from kvstore.metadata import Applied, Batch
from kvstore.metadata.embedded import EmbeddedIndex
from kvstore.node import news, publisher
from kvstore.node.publisher import Publisher
from tests.unit.node.small_node import SmallNode, keys_of, namespace

SPACE = namespace()


class Recording(EmbeddedIndex):
    """Keeps the batches that it was sent; `refusal` says which it refuses, and how."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[Batch] = []
        self.refusal: Callable[[Batch], KvStoreError | None] = lambda _: None

    def publish(self, batch: Batch) -> Applied:
        self.batches.append(batch)
        refused = self.refusal(batch)
        if refused is not None:
            raise refused
        return super().publish(batch)

    def held(self) -> int:
        return sum(status.shard_count for status in self.nodes())


@contextlib.contextmanager
def publishing(node: SmallNode, index: EmbeddedIndex) -> Iterator[Publisher]:
    """A publisher that feeds `index`, with the node's loop in a thread."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    made = Publisher(node.core, loop, index)
    made.start()
    try:
        yield made
    finally:
        made.stop(10.0)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10.0)
        loop.close()


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 10.0
    while not condition():
        assert time.monotonic() < end, "it did not come true within 10 s"
        time.sleep(0.002)


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> SmallNode:
    monkeypatch.setattr(publisher, "HEARTBEAT_S", 0.02)
    node = SmallNode()
    session = node.open(SPACE)
    for prompt in range(3):
        node.store(session, keys_of(SPACE, prompt, 4))
    return node


def test_a_snapshot_that_takes_longer_than_a_heartbeat_is_collected_later(
    node: SmallNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, finish, built = node.core.news._snapshot_steps, threading.Event(), []

    def slow(*args: Any) -> Generator[None, None, list[Batch]]:
        built.append(args)
        while not finish.is_set():
            yield
        return (yield from whole(*args))

    monkeypatch.setattr(node.core.news, "_snapshot_steps", slow)
    node.core.news.start_anew()
    index = Recording()
    with publishing(node, index) as made:
        until(lambda: len(index.batches) >= 5)
        assert len(built) == 1 and not any(batch.events for batch in index.batches)
        assert not made.failed_batches
        finish.set()
        until(lambda: index.held() == 12)
        assert len(built) == 1, "the snapshot was thrown away"


def test_a_large_snapshot_lets_others_have_their_turn(node: SmallNode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(news, "SNAPSHOT_STEP_CHUNKS", 2)

    async def run() -> int:
        made = Publisher(node.core, asyncio.get_running_loop(), EmbeddedIndex())
        node.core.news.start_anew()
        building, turns = asyncio.ensure_future(made._batches()), 0
        while not building.done():
            await asyncio.sleep(0)
            turns += 1
        assert sum(len(batch.events) for batch in building.result()) == 12
        return turns

    assert asyncio.run(run()) >= 6


def test_a_refused_batch_is_named_and_a_snapshot_follows(
    node: SmallNode, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(publisher, "REFUSED_PAUSE_S", 0.2)
    index = Recording()
    index.refusal = lambda batch: LimitExceeded("too many geese") if batch.events else None
    with caplog.at_level(logging.WARNING), publishing(node, index) as made:
        until(lambda: made.failed_batches >= 2)
        kinds = ["events" if batch.events else "heartbeat" for batch in index.batches]
        between = kinds[kinds.index("events") + 1 :]
        assert between.index("events") >= 2, "no heartbeats while the index refuses"
        index.refusal = lambda _: None
        until(lambda: index.held() == 12)
        assert [batch.snapshot_begin for batch in index.batches if batch.events][-1]
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 1 and "refuses" in warnings[0] and "too many geese" in warnings[0]
    assert "reached" not in warnings[0]


def test_refused_heartbeats_are_not_sent_all_the_time(node: SmallNode, monkeypatch: pytest.MonkeyPatch) -> None:
    index = Recording()
    index.refusal = lambda _: LimitExceeded("nothing at all")
    monkeypatch.setattr(publisher, "HEARTBEAT_S", 0.1)
    began = time.monotonic()
    with publishing(node, index):
        until(lambda: len(index.batches) >= 4)
        assert time.monotonic() - began >= 0.25, "tried without a pause"
