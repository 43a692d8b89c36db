"""Writes of one client: order, partial commits, removals in between; nothing stays reserved after a failure."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest

from kvstore.client import Cache, Client, writing
from kvstore.client.buffers import ChunkArray
from kvstore.errors import DeadlineExceeded, InvalidRequest
from kvstore.model import checksum
from kvstore.model.layout import Geometry
from kvstore.model.values import Outcome
from kvstore.node import RESERVATION_LIFETIME_MS
from tests.unit.client.fake_host import BreakableHost
from tests.unit.client.pages import LAYOUT, Bytes, namespace, pages_of, poisoned, prompt


@dataclass
class Pool:
    host: BreakableHost
    client: Client
    cache: Cache

    def read(self, keys_of: int, chunks: int) -> int:
        """Chunks read, all of them right."""
        keys = self.cache.keys(prompt(keys_of, 16 * chunks))
        target = poisoned(self.cache, len(keys))
        done = self.cache.read(keys, target).chunks
        assert np.array_equal(target[:done], pages_of(keys)[:done])
        return done

    def idle(self) -> bool:
        """True if nothing is reserved, held or waiting."""
        self.host.core.check()
        stats = self.host.core.stats()
        return not self.host.core.reservations.attempts and not stats["reserved_slots"] + stats["quarantined_bytes"]


@pytest.fixture
def pool() -> Iterator[Pool]:
    host = BreakableHost()
    client = Client(None, None, None, host=host)
    yield Pool(host, client, client.bind(namespace()))
    client.close()


def source_of(pool: Pool, number: int, chunks: int) -> tuple[object, ChunkArray]:
    keys = pool.cache.keys(prompt(number, 16 * chunks))
    return keys, ChunkArray(pages_of(keys), LAYOUT.whole)


def test_layer_by_layer_and_chunk_by_chunk(pool: Pool) -> None:
    keys = pool.cache.keys(prompt(1, 64))
    source = ChunkArray(pages_of(keys), LAYOUT.whole)
    with pool.cache.begin_write(keys) as pending:
        assert list(pending.granted) == [0, 1, 2, 3]
        for layer in range(4):
            pending.put_layers(layer, layer + 1, source, chunks=(0, 1))
            assert pool.read(1, 4) == 0, "a chunk is visible with all its layers or not at all"
        assert pending.commit(2).visible == 2
        assert pool.read(1, 4) == 2 and list(pending.granted) == [2, 3]
        pending.put_layers(0, 4, source)
        assert pending.commit().stored == 4
    assert pool.read(1, 4) == 4 and pool.idle()


def test_a_chunk_that_lacks_a_layer_is_given_back(pool: Pool) -> None:
    keys = pool.cache.keys(prompt(1, 32))
    source = ChunkArray(pages_of(keys), LAYOUT.whole)
    pending = pool.cache.begin_write(keys)
    pending.put_layers(0, 4, source, chunks=(0,))
    pending.put_layers(0, 3, source, chunks=(1,))
    assert pending.commit().outcomes == (Outcome.COMMITTED, Outcome.REFUSED_STALE)
    assert pool.read(1, 2) == 1 and pool.idle()


def test_layers_outside_the_rectangle_are_refused(pool: Pool) -> None:
    keys = pool.cache.keys(prompt(1, 16))
    with pool.cache.begin_write(keys) as pending:
        for layers in ((0, 5), (2, 2), (-1, 1)):
            with pytest.raises(InvalidRequest):
                pending.put_layers(*layers, ChunkArray(pages_of(keys), LAYOUT.whole))
    assert pool.idle()


def test_a_block_left_without_a_commit_gives_everything_back(pool: Pool) -> None:
    keys = pool.cache.keys(prompt(1, 32))
    with pool.cache.begin_write(keys) as pending:
        pending.put_layers(0, 4, ChunkArray(pages_of(keys), LAYOUT.whole))
    assert pool.idle() and pool.read(1, 2) == 0


def test_a_source_that_fails_gives_everything_back(pool: Pool) -> None:
    class Broken:
        def gather(self, index: int, slot: object, layer_start: int, head_start: int) -> None:
            if index == 2:
                raise RuntimeError("no such block")

    keys = pool.cache.keys(prompt(1, 64))
    with pytest.raises(RuntimeError, match="no such block"):
        pool.cache.write(keys, Broken())
    assert pool.idle() and pool.read(1, 4) == 0


class Overrides(ChunkArray):
    """Stores other bytes than those of its array."""

    def gather(self, index: int, slot: Bytes, layer_start: int, head_start: int) -> None:
        super().gather(index, slot, layer_start, head_start)
        slot ^= 0xFF


class TakesChecksums(ChunkArray):
    """Notes how many layers each call asks for."""

    def __init__(self, pages: Bytes) -> None:
        super().__init__(pages, LAYOUT.whole)
        self.layers: list[int] = []

    def gather(self, index: int, slot: Bytes, layer_start: int, head_start: int) -> None:
        raise AssertionError("the checksums are taken on the way")

    def gather_summed(self, index: int, slot: Bytes, layer_start: int, head_start: int) -> checksum.Table:
        self.layers.append(len(slot))
        return super().gather_summed(index, slot, layer_start, head_start)


def test_what_overrides_gather_alone_is_called(pool: Pool) -> None:
    """What its class inherits for copies with checksums would go past it."""
    keys = pool.cache.keys(prompt(1, 48))
    assert pool.cache.write(keys, Overrides(pages_of(keys), LAYOUT.whole)).stored == 3
    found = poisoned(pool.cache, 3)
    assert pool.cache.read(keys, found).chunks == 3
    assert np.array_equal(found, pages_of(keys) ^ 0xFF)


@pytest.mark.skipif(not checksum.NATIVE, reason="built without a C compiler")
def test_checksums_on_the_way_are_taken_a_few_layers_a_call(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits for the end of a source's copies waits for one call."""
    monkeypatch.setattr(writing, "SUMMED_BYTES", 3 * LAYOUT.chunk_bytes // LAYOUT.layers)
    source = TakesChecksums(pages_of(pool.cache.keys(prompt(1, 48))))
    assert pool.cache.write(pool.cache.keys(prompt(1, 48)), source).stored == 3
    assert source.layers == [3, 1] * 3
    assert pool.read(1, 3) == 3


def test_a_node_that_answers_too_late_leaves_nothing_reserved(pool: Pool) -> None:
    """A commit that ran into its deadline left its slots reserved for as long as the session lived."""

    def too_late() -> None:
        raise DeadlineExceeded("commit")

    keys = pool.cache.keys(prompt(1, 32))
    pool.host.broken.before["commit"] = too_late
    with pytest.raises(DeadlineExceeded):
        pool.cache.write(keys, pages_of(keys))
    assert pool.idle()
    pool.host.broken.before.clear()
    assert pool.cache.write(keys, pages_of(keys)).stored == 2 and pool.read(1, 2) == 2


def test_the_abort_has_time_although_the_write_has_none(pool: Pool) -> None:
    keys = pool.cache.keys(prompt(1, 16))
    pending = pool.cache.begin_write(keys, deadline_s=0.001)
    while time.monotonic() < pending.deadline_s:
        pass
    given: list[float] = []
    original = pool.host.abort
    pool.host.abort = lambda attempt, deadline_s: (given.append(deadline_s), original(attempt, deadline_s))  # type: ignore
    pending.abort()
    assert given and given[0] >= 1.0 and pool.idle()


def test_two_writers_of_one_prompt_keep_their_sources_until_their_own_commit(pool: Pool) -> None:
    keys = pool.cache.keys(prompt(1, 64))
    source = ChunkArray(pages_of(keys), LAYOUT.whole)
    first, second = pool.cache.begin_write(keys), pool.cache.begin_write(keys)
    assert second.outcomes == [Outcome.IN_PROGRESS] * 4 and second.granted == ()
    second.put_layers(0, 4, source)
    first.put_layers(0, 4, source, chunks=(0,))
    first.commit(1)
    first.abort()  # gives up after one chunk: the other takes over
    assert second.commit().outcomes == (Outcome.PRESENT, *[Outcome.COMMITTED] * 3)
    assert pool.read(1, 4) == 4 and pool.idle()


def slots_of_others_stay(pool: Pool, end: str) -> bool:
    """A write whose reservation ends half-way goes on; true if it then reaches no slot of somebody else."""
    keys, other = pool.cache.keys(prompt(1, 64)), pool.cache.keys(prompt(2, 64))
    source = ChunkArray(pages_of(keys, version=9), LAYOUT.whole)
    pending = pool.cache.begin_write(keys)
    pending.put_layers(0, 2, source)
    pending.put_layers(2, 4, source, chunks=(0,))
    if end == "removed":
        pool.cache.remove(keys)
    else:
        for attempt in pool.host.core.reservations.attempts.values():
            attempt.expires_s = time.monotonic() - RESERVATION_LIFETIME_MS
    assert pending.commit(1).outcomes[0] is Outcome.REFUSED_STALE
    assert pool.cache.write(other, pages_of(other)).stored == 4, "the slots are free again, and used"
    pending.put_layers(2, 4, source)
    pending.commit()
    target = poisoned(pool.cache, 4)
    return pool.cache.read(other, target).chunks == 4 and np.array_equal(target, pages_of(other))


@pytest.mark.parametrize("end", ["removed", "ran out"])
def test_a07_b04_a_write_that_lost_its_reservation_reaches_no_slot_of_others(pool: Pool, end: str) -> None:
    """After the first refused commit the client acknowledged the end, and then wrote the next layers all the same."""
    assert slots_of_others_stay(pool, end)
    assert pool.idle()


def test_the_test_above_can_fail(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    def acknowledge_only(pending: writing.PendingWrite) -> None:
        pending.host.api.abort(pending.answer.attempt, 1.0)

    monkeypatch.setattr(writing.PendingWrite, "abort", acknowledge_only)
    assert not slots_of_others_stay(pool, "removed")


def test_ranks_store_their_parts(pool: Pool) -> None:
    halves = Geometry.parallel(LAYOUT, tp=2)
    ranks = [pool.client.bind(namespace("tp2"), geometry=halves, rank=rank) for rank in (0, 1)]
    keys = ranks[0].keys(prompt(1, 32))
    whole = pages_of(keys)
    for rank, cache in enumerate(ranks):
        assert cache.match(keys, rectangle=LAYOUT.whole).local_chunks == 0
        assert cache.write(keys, whole[:, :, :, rank : rank + 1]).stored == 2
    target = poisoned(ranks[0], 2, LAYOUT.whole)
    assert ranks[0].read(keys, target, rectangle=LAYOUT.whole).chunks == 2
    assert np.array_equal(target, whole)
