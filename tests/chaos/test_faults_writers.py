"""Writers that race, fail half-way, are overtaken or told late (A07, A13, A16, A22, A23, A24, D11)."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvstore.client import Cache, Client, connect
from kvstore.client.buffers import ChunkArray
from kvstore.client.values import Bytes
from kvstore.model.values import Outcome
from kvstore.node.reservations import Reservations
from tests.chaos.node_thread import NodeThread
from tests.chaos.pool_processes import Processes, stats_of, until
from tests.unit.client.pages import LAYOUT, namespace, pages_of, poisoned, prompt

SLOTS = 40


@pytest.fixture
def node(tmp_path: Path) -> Iterator[NodeThread]:
    node = NodeThread(tmp_path, dram_bytes=SLOTS * (12 << 10), node_id="writers")
    yield node
    node.stop()


@pytest.fixture
def large_node(tmp_path: Path) -> Iterator[NodeThread]:
    node = NodeThread(tmp_path, dram_bytes=4 << 20, node_id="large")
    yield node
    node.stop()


def client_of(node: NodeThread) -> Client:
    return connect(node.info.socket_path)


def reads_right(cache: Cache, number: int, chunks: int, version: int = 0) -> int:
    """Chunks read; each is the page of its key."""
    keys = cache.keys(prompt(number, 16 * chunks))
    target = poisoned(cache, chunks)
    done = cache.read(keys, target).chunks
    assert np.array_equal(target[:done], pages_of(keys, version=version)[:done])
    return done


def test_a07_a_put_that_was_under_way_when_all_was_removed_is_rejected(node: NodeThread) -> None:
    with client_of(node) as writer, client_of(node) as updater:
        cache, other = writer.bind(namespace()), updater.bind(namespace())
        keys = cache.keys(prompt(1, 64))
        cache.write(keys.slice(0, 2), pages_of(keys)[:2])
        pending = cache.begin_write(keys)
        pending.put_layers(0, 2, ChunkArray(pages_of(keys), LAYOUT.whole))
        assert other.remove(keys) == 2
        pending.put_layers(2, 4, ChunkArray(pages_of(keys), LAYOUT.whole))
        assert pending.commit().outcomes[2:] == (Outcome.REFUSED_STALE,) * 2
        assert reads_right(other, 1, 4) == 0
        node.call(node.core.check)
        stats = node.call(node.core.stats)
        assert stats["used_bytes"] == stats["reserved_slots"] == stats["quarantined_bytes"] == 0
        assert other.write(keys, pages_of(keys, version=2)).stored == 4
        assert reads_right(other, 1, 4, version=2) == 4


class Blocks(ChunkArray):
    """An engine's blocks: preempted ones are given to another request and overwritten."""

    def __init__(self, pages: Bytes) -> None:
        self.pages = pages.copy()
        super().__init__(self.pages, LAYOUT.whole)

    def preempt(self) -> None:
        self.pages[:] = 0xEE


def test_a13_blocks_given_away_after_the_copy_change_nothing(node: NodeThread) -> None:
    with client_of(node) as client:
        cache = client.bind(namespace())
        keys = cache.keys(prompt(1, 64))
        blocks = Blocks(pages_of(keys))
        pending = cache.begin_write(keys)
        pending.put_layers(0, 4, blocks)
        blocks.preempt()
        assert pending.commit().stored == 4
        assert reads_right(cache, 1, 4) == 4


def test_a13_a_put_cancelled_at_preemption_stores_nothing_of_the_next_owner(node: NodeThread) -> None:
    """Keys in progress are copied at the last commit: a preempted request must end its write before that."""
    with client_of(node) as one, client_of(node) as two:
        first, second = one.bind(namespace()), two.bind(namespace())
        keys = first.keys(prompt(1, 64))
        held = first.begin_write(keys)
        blocks = Blocks(pages_of(keys))
        with second.begin_write(keys) as waiting:
            waiting.put_layers(0, 4, blocks)
            held.abort()
        blocks.preempt()
        assert reads_right(second, 1, 4) == 0
        assert second.write(keys, pages_of(keys)).stored == 4


def late_writes_reach_others(node: NodeThread) -> bool:
    """A writer whose session was lost goes on writing while another client fills the whole node."""
    with client_of(node) as quick:
        lost = client_of(node)
        pending = lost.bind(namespace()).begin_write(lost.bind(namespace()).keys(prompt(1, 64)))
        arena, slots = pending.host.arena, list(pending._slots.values())
        host = lost._host
        lost._host = None
        host.close()  # type: ignore[union-attr]
        until(lambda: not node.core.reservations.attempts)
        cache = quick.bind(namespace())
        stored = [
            cache.write(keys, pages_of(keys)).stored for keys in (cache.keys(prompt(n, 64)) for n in range(2, 11))
        ]
        for slot in slots:
            arena[slot * 4096 :][:8192] = 0xEE
        node.call(node.core.check)
        right = True
        for number in range(2, 11):
            try:
                reads_right(cache, number, 4)
            except AssertionError:
                right = False
        lost.close()
        assert sum(stored) >= 30
        return not right


def test_a16_late_writes_of_a_lost_session_reach_nobody(node: NodeThread) -> None:
    assert not late_writes_reach_others(node)


def test_a16_the_test_above_can_fail(node: NodeThread, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Reservations, "quarantine", Reservations.abort)
    assert late_writes_reach_others(node)


@pytest.mark.slow
def test_a22_eight_writers_of_one_key(processes: Processes) -> None:
    """All race through the same keys; every put is a success, one copy is stored, what is there can be read."""
    node = processes.node(dram=40 << 20)
    writers = [processes.start("client", node=node.said["socket_path"]) for _ in range(8)]
    for writer in writers:
        writer.hear()
    stored = 0
    for layout, prompts in (("small", 120), ("mib", 12)):
        for writer in writers:
            writer.tell(step="storm", prompts=prompts, layout=layout)
        answers = [writer.hear() for writer in writers]
        for answer in answers:
            assert set(answer["said"]) <= {"COMMITTED", "PRESENT", "IN_PROGRESS"}
            assert answer["wrong"] == answer["lost"] == 0
        assert sum(answer["said"].get("COMMITTED", 0) for answer in answers) == prompts
        stats, stored = stats_of(node), stored + prompts
        assert stats["chunks"] == stats["commits"] == stored
        assert not stats["reserved_slots"] and not stats["quarantined_bytes"]


@pytest.mark.slow
def test_a23_only_whole_chunks_are_seen_and_what_failed_is_gone(processes: Processes) -> None:
    node = processes.node()
    writer, reader = processes.client(node), processes.client(node)
    writer.do("reserve", prompt=1, chunks=10)
    for chunk in range(7):
        writer.do("copy", chunks=[chunk])
        assert reader.do("read", prompt=1, chunks=10)["chunks"] == chunk, "copied, but not committed"
        writer.do("commit", upto=chunk + 1)
        answer = reader.do("read", prompt=1, chunks=10)
        assert (answer["chunks"], answer["wrong"]) == (chunk + 1, 0)
    writer.do("copy", chunks=[7])
    writer.kill()  # at page 8
    answer = reader.do("read", prompt=1, chunks=10)
    assert (answer["chunks"], answer["wrong"]) == (7, 0)
    answer = reader.do("write", prompt=1, chunks=10)
    assert answer["outcomes"][:7] == ["PRESENT"] * 7
    stats = stats_of(node)
    assert stats["used_bytes"] == stats["chunks"] * (12 << 10) and not stats["quarantined_bytes"]


def test_a24_overlapping_puts_are_successes(node: NodeThread) -> None:
    """Page 3 is there already; two puts of overlapping sets are under way at once."""
    with client_of(node) as one, client_of(node) as two:
        first, second = one.bind(namespace()), two.bind(namespace())
        keys = first.keys(prompt(1, 16 * 8))
        source = ChunkArray(pages_of(keys), LAYOUT.whole)
        assert first.write(keys.slice(0, 3), pages_of(keys)[:3]).stored == 3
        left, right = first.begin_write(keys.slice(0, 6)), second.begin_write(keys)
        left.put_layers(0, 4, source)
        right.put_layers(0, 4, source)
        done_right, done_left = right.commit(), left.commit()
        assert not any(outcome.refused for outcome in (*done_left.outcomes, *done_right.outcomes))
        assert done_left.visible == 6 and reads_right(second, 1, 8) == 8
        assert second.write(keys, pages_of(keys)).outcomes == (Outcome.PRESENT,) * 8


@pytest.mark.slow
def test_d11_a_herd_copies_each_chunk_once(large_node: NodeThread) -> None:
    """32 clients put the same 100 pages at once. Pages have 8 KiB here, not 1 MiB; what counts is how often."""
    copied, lock = [0], threading.Lock()

    class Counting(ChunkArray):
        def gather(self, index: int, slot: Bytes, layer_start: int, head_start: int) -> None:
            with lock:
                copied[0] += slot.nbytes
            super().gather(index, slot, layer_start, head_start)

    clients = [client_of(large_node) for _ in range(32)]
    caches = [client.bind(namespace()) for client in clients]
    keys = caches[0].keys(prompt(1, 16 * 100))
    source = Counting(pages_of(keys), LAYOUT.whole)
    started = threading.Barrier(32)
    outcomes: list[Outcome] = []

    def put(cache: Cache) -> None:
        started.wait(20)
        outcomes.extend(cache.write(keys, source).outcomes)

    threads = [threading.Thread(target=put, args=(cache,)) for cache in caches]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(outcomes) == 3200 and not any(outcome.refused for outcome in outcomes)
    assert copied[0] <= 1.2 * 100 * LAYOUT.chunk_bytes
    assert reads_right(caches[-1], 1, 100) == 100
    large_node.call(large_node.core.check)
    for client in clients:
        client.close()
