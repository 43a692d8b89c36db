"""What goes when room is needed, and what never does; checked through the core, `check()` after every step."""

from __future__ import annotations

import pytest

from kvstore.errors import LayoutMismatch, LimitExceeded
from kvstore.metadata import EventKind
from kvstore.model.layout import Attention, Dtype, Geometry, PageLayout, Rectangle
from kvstore.model.values import Outcome
from kvstore.node import slots
from kvstore.node.catalog import CatalogWriter
from kvstore.node.core import CoreSettings
from kvstore.node.pool import Pool
from kvstore.node.tier import UNCOVERED_GRACE_S
from tests.unit.node.small_node import SMALL, WIDE, SmallNode, keys_of, namespace

SPACE, OTHER = namespace(), namespace(revision="r2")
HALVES = Geometry.parallel(SMALL, tp=2)


def test_the_oldest_tail_goes_first_and_heads_stay() -> None:
    node = SmallNode(slots=8)
    session = node.open(SPACE)
    first, second = keys_of(SPACE, 1, 5), keys_of(SPACE, 2, 5)
    node.store(session, first)
    assert set(node.store(session, second, tag=50)) == {Outcome.COMMITTED}
    assert node.resident(first) == 3, "two tails made room"
    assert node.tags(first) == [1, 2, 3] and node.tags(second) == [50, 51, 52, 53, 54]
    assert node.core.stats()["evictions"] == 2


def test_use_keeps_a_prefix_young() -> None:
    node = SmallNode(slots=8)
    session = node.open(SPACE)
    first, second, third = (keys_of(SPACE, prompt, 4) for prompt in (1, 2, 3))
    node.store(session, first)
    node.store(session, second)
    node.core.touch(session.number, list(first))
    node.store(session, third)
    assert [node.resident(keys) for keys in (first, second, third)] == [4, 0, 4]


def test_what_is_leased_pinned_or_being_written_stays() -> None:
    node = SmallNode(slots=8)
    session = node.open(SPACE)
    leased, pinned, written = keys_of(SPACE, 1, 2), keys_of(SPACE, 2, 2), keys_of(SPACE, 3, 2)
    node.store(session, leased)
    node.core.acquire(session.number, leased, SMALL.whole, 5000)
    node.store(session, pinned)
    node.reserve(session, pinned, ticket=b"t" * 16)
    node.reserve(session, written)
    answer = node.reserve(session, keys_of(SPACE, 4, 5))
    assert answer.outcomes == [Outcome.GRANTED] * 2 + [Outcome.REFUSED_FULL] * 3
    assert [node.resident(keys) for keys in (leased, pinned)] == [2, 2]


def test_a_chain_never_pushes_out_its_own_head() -> None:
    node = SmallNode(slots=6)
    session = node.open(SPACE)
    keys = keys_of(SPACE, 1, 9)
    node.store(session, keys.slice(0, 4))
    outcomes = node.store(session, keys)
    assert outcomes[:6] == [Outcome.PRESENT] * 4 + [Outcome.COMMITTED] * 2
    assert outcomes[6] is Outcome.REFUSED_FULL and outcomes[7] is Outcome.REFUSED_FULL
    assert node.resident(keys) == 6


def test_a_tail_alone_does_not_push_out_its_parent() -> None:
    """The parent of a chain that does not begin at the prompt's start was the oldest leaf, and went for its child."""
    node = SmallNode(slots=4)
    session = node.open(SPACE)
    keys, others = keys_of(SPACE, 1, 3), keys_of(SPACE, 2, 2)
    node.store(session, keys.slice(0, 2))
    node.store(session, others)
    assert node.store(session, keys.slice(2, 3)) == [Outcome.COMMITTED]
    assert node.resident(keys) == 3 and node.resident(others) == 1


def test_orphans_go_first() -> None:
    node = SmallNode(slots=6)
    one, two = node.open(SPACE), node.open(SPACE)
    chain = keys_of(SPACE, 1, 3)
    held = node.reserve(one, chain.slice(0, 1))
    node.store(two, chain)
    old = keys_of(SPACE, 2, 3)
    node.store(two, old)
    node.core.abort(one.number, held.attempt)  # the head never came: the two below it are orphans
    node.core.check()
    node.core.touch(two.number, list(chain))
    assert node.core.pool.forest.orphans
    node.store(two, keys_of(SPACE, 3, 3))
    assert node.resident(old) == 3, "orphans went although they were used last"
    assert not node.core.pool.forest.orphans


def test_chunks_that_stay_uncovered_go_after_a_minute() -> None:
    node = SmallNode(slots=6)
    session = node.open(SPACE, HALVES)
    half, old = keys_of(SPACE, 1, 2), keys_of(SPACE, 2, 2)
    for shard in (0, 1):
        node.store(session, old, shard=HALVES.shard(shard))
    node.store(session, half, shard=HALVES.shard(0))
    assert len(node.core.pool.forest.uncovered) == 2
    node.clock.now += UNCOVERED_GRACE_S - 1
    more = keys_of(SPACE, 3, 1)
    assert node.store(session, more, shard=HALVES.shard(0)) == [Outcome.COMMITTED]
    assert node.resident(old) == 1, "within the grace the oldest tail goes"
    node.clock.now += 2
    node.core.tick()
    node.store(session, more, shard=HALVES.shard(1))
    assert node.store(session, keys_of(SPACE, 4, 1), shard=HALVES.shard(0)) == [Outcome.COMMITTED]
    assert node.resident(old) == 1
    assert len(node.core.pool.forest.uncovered) < 3


def test_a_rank_that_joins_late_leaves_chunks_uncovered() -> None:
    """Rectangles declared later make chunks uncovered that were covered without them."""
    node = SmallNode()
    session = node.core.open_session("rank 0", shared=True)
    node.core.register_namespace(session.number, SPACE, HALVES, [0])
    node.store(session, keys_of(SPACE, 1, 2), shard=HALVES.shard(0))
    assert not node.core.pool.forest.uncovered
    node.core.register_namespace(session.number, SPACE, HALVES, [1])
    node.core.check()
    assert len(node.core.pool.forest.uncovered) == 2


def test_a_full_catalog_refuses_and_leaks_nothing() -> None:
    node = SmallNode(slots=256, entries=1)
    session = node.open(SPACE)
    refused = []
    for prompt in range(60):
        outcomes = node.store(session, keys_of(SPACE, prompt, 2))
        if Outcome.REFUSED_CATALOG_FULL in outcomes:
            refused.append(prompt)
        assert not node.core.pool.forest.orphans, "no tail is stored whose head was refused"
    assert refused, "64 entries do not hold 120 chunks"
    stats = node.core.stats()
    assert stats["catalog_entries"] == stats["chunks"] == stats["used_bytes"] // 4096 <= 64
    assert not stats["reserved_slots"]
    gone = refused[0]
    for prompt in range(60):
        node.core.remove(session.number, SPACE.id, list(keys_of(SPACE, prompt, 2)))
        node.core.check()
    assert node.core.stats()["catalog_entries"] == 0
    assert set(node.store(session, keys_of(SPACE, gone, 2))) == {Outcome.COMMITTED}


def test_room_chunks_caps_what_is_kept_not_what_is_reserved() -> None:
    node = SmallNode(slots=16, settings=CoreSettings(room_chunks=4, session_share=1.0))
    session = node.open(SPACE)
    for prompt in (1, 2, 3):
        assert set(node.store(session, keys_of(SPACE, prompt, 3))) == {Outcome.COMMITTED}
        assert node.core.pool.chunk_count <= 4
    assert node.resident(keys_of(SPACE, 3, 3)) == 3


def test_two_classes_share_a_small_arena(monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for a class that has none is made by emptying the extent with the oldest chunks of another."""
    monkeypatch.setattr(slots, "EXTENT_BYTES", 1)
    monkeypatch.setattr(slots, "EXTENT_SLOTS", 4)
    node, wide = SmallNode(slots=24), namespace(WIDE)
    session = node.open(SPACE)
    node.core.register_namespace(session.number, wide, Geometry.whole(WIDE), ())
    for prompt in range(6):
        node.store(session, keys_of(SPACE, prompt, 4))
    assert node.core.stats()["used_bytes"] == 24 * 4096
    assert set(node.store(session, keys_of(wide, 1, 1), tag=90)) == {Outcome.COMMITTED}
    assert node.tags(keys_of(wide, 1, 1)) == [90]
    assert node.resident(keys_of(SPACE, 5, 4)) == 4, "the youngest of the other class stays"
    assert set(node.store(session, keys_of(SPACE, 9, 8))) == {Outcome.COMMITTED}


def test_a_held_extent_is_not_emptied() -> None:
    node, wide = SmallNode(slots=16), namespace(WIDE)
    session = node.open(SPACE)
    node.core.register_namespace(session.number, wide, Geometry.whole(WIDE), ())
    keys = keys_of(SPACE, 1, 16)
    node.store(session, keys)
    node.core.acquire(session.number, keys, SMALL.whole, 5000)
    assert node.store(session, keys_of(wide, 1, 1)) == [Outcome.REFUSED_FULL]
    assert node.resident(keys) == 16
    node.clock.now += 6
    node.core.tick()
    assert node.store(session, keys_of(wide, 1, 1)) == [Outcome.COMMITTED]


def test_limits_of_what_a_catalog_entry_can_say() -> None:
    """65,536 tokens did not fit the entry's two bytes: the commit failed half-way and the slot was lost."""
    layout = PageLayout(1, 1, 1, Dtype.FP8_E4M3, 1 << 15, 2, Attention.MLA)
    node = SmallNode(slots=64)
    session = node.core.open_session("writer", shared=True)
    with pytest.raises(LimitExceeded, match="65535"):
        node.core.register_namespace(session.number, namespace(layout), Geometry.whole(layout), ())
    node.core.check()
    fits = PageLayout(1, 1, 1, Dtype.FP8_E4M3, (1 << 15) - 1, 2, Attention.MLA)
    assert node.store(node.open(namespace(fits)), keys_of(namespace(fits), 1, 1)) == [Outcome.COMMITTED]


def test_a_geometry_must_fit_the_layout() -> None:
    node = SmallNode()
    session = node.core.open_session("writer", shared=True)
    for corners in [(0, 3, 0, 2), (0, 2, 0, 3), (0, 1, 0, 2)]:
        with pytest.raises(LayoutMismatch):
            node.core.register_namespace(session.number, SPACE, Geometry((Rectangle(*corners),)), ())
        node.core.check()


def test_the_index_hears_of_covered_chunks_with_a_known_parent_only() -> None:
    node = SmallNode()
    session = node.open(SPACE, HALVES)
    keys = keys_of(SPACE, 1, 2)
    node.store(session, keys, shard=HALVES.shard(0))
    assert node.core.news.last_sequence == 0
    tail = node.core.reserve(session.number, keys, HALVES.shard(1), b"")
    node.commit(session, tail.attempt, [1], last=False)
    assert node.core.news.last_sequence == 0, "covered, but its parent is not known"
    node.commit(session, tail.attempt, [0])
    (batch,) = node.core.news.take_batch(0, 99, resync=False, lease_ms=1000)
    assert [(event.kind, event.key) for event in batch.events] == [
        (EventKind.PUBLISH, key) for key in (keys[0], keys[0], keys[1], keys[1])
    ]


def test_withdrawn_before_the_slot_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the withdrawal switched off a reader finds the old key over the next prompt's bytes: this test can fail."""

    def reader_sees_new_bytes_under_an_old_key(node: SmallNode) -> bool:
        session = node.open(SPACE)
        old, new = keys_of(SPACE, 1, 4), keys_of(SPACE, 2, 4)
        node.store(session, old, tag=1)
        answer = node.core.reserve(session.number, new, Geometry.whole(SMALL).shard(0), b"")
        for index, slot in enumerate(answer.slots):
            node.fill(slot, 50 + index)
        return any(tag >= 50 for tag in node.tags(old))

    assert not reader_sees_new_bytes_under_an_old_key(SmallNode(slots=4))
    monkeypatch.setattr(CatalogWriter, "withdraw", lambda self, entry, slot: self.unclaim(entry))
    assert reader_sees_new_bytes_under_an_old_key(SmallNode(slots=4))


def test_the_check_notices_a_chunk_that_lost_its_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    node = SmallNode()
    session = node.open(SPACE)
    node.store(session, keys_of(SPACE, 1, 2))
    chunk = next(iter(node.core.pool.forest.chunks.values()))
    node.allocator.release(next(iter(chunk.copies.values())).slot)
    with pytest.raises(AssertionError):
        node.core.check()
    monkeypatch.setattr(Pool, "check", lambda self: None)
    with pytest.raises(AssertionError, match="slot"):
        node.core.check()
