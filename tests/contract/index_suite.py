"""The behaviour that every `WatchedIndex` shares. Implementations subclass `IndexSuite` and give `index`.

Most sequences are applied to a copy fed by `watch` too, which must end up equal.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import pytest

from kvstore.errors import InvalidRequest, LayoutMismatch, LimitExceeded
from kvstore.metadata import EVENTS_A_BATCH_LIMIT, Applied, Batch, EventKind, IndexEvent, WatchedIndex
from kvstore.metadata.embedded import EmbeddedIndex
from kvstore.model.layout import Dtype, Geometry, PageLayout, Rectangle
from kvstore.model.namespace import Namespace
from kvstore.model.prefix import KeyChain, Keys
from kvstore.model.values import NodeInfo, Tier

LAYOUT = PageLayout(layers=4, kv_heads=4, head_dim=8, dtype=Dtype.BF16, page_tokens=16, pages_per_chunk=1)
NAMESPACE = Namespace("model", "revision", LAYOUT)
OTHER_NAMESPACE = Namespace("model", "other revision", LAYOUT)
WHOLE = Geometry.whole(LAYOUT)
HALVES = Geometry.parallel(LAYOUT, tp=2)
QUARTERS = Geometry.parallel(LAYOUT, tp=2, pp=2)
LEFT, RIGHT = HALVES.rectangles
WAIT_S = 10.0


def chain(chunk_count: int, *, first_token: int = 0, namespace: Namespace = NAMESPACE) -> Keys:
    """Keys of a prompt of full chunks."""
    return KeyChain(namespace).keys(range(first_token, first_token + 16 * chunk_count))


def events(
    keys: Keys,
    *,
    kind: EventKind = EventKind.PUBLISH,
    geometry: Geometry = WHOLE,
    numbers: Iterable[int] = (0,),
    tier: Tier = Tier.DRAM,
) -> list[IndexEvent]:
    """One event a chunk and rectangle number, parents first."""
    shards = [geometry.shard(number) for number in numbers]
    parents = [keys.parent, *keys][:-1]
    return [
        IndexEvent(kind, keys.namespace_id, key, parent, shard, tier)
        for parent, key in zip(parents, keys, strict=True)
        for shard in shards
    ]


def withdrawals(keys: Keys, *, numbers: Iterable[int] = (0,), geometry: Geometry = WHOLE) -> list[IndexEvent]:
    """Leaf first, as a node evicts."""
    return events(keys, kind=EventKind.WITHDRAW, numbers=numbers, geometry=geometry)[::-1]


class Publisher:
    """A node's side: numbers its events."""

    def __init__(self, index: WatchedIndex, node: NodeInfo) -> None:
        self.index = index
        self.node = node
        self.next_sequence = 1

    def batch(
        self, changes: Sequence[IndexEvent] = (), *, geometries: Sequence[Geometry] = (WHOLE,), snapshot: bool = False
    ) -> Batch:
        """The next batch; not sent yet."""
        named = [(NAMESPACE.id, geometry) for geometry in geometries]
        batch = Batch(self.node, self.next_sequence, list(changes), named, snapshot_begin=snapshot, lease_ms=60_000)
        self.next_sequence += len(changes)
        return batch

    def send(
        self, changes: Sequence[IndexEvent] = (), *, geometries: Sequence[Geometry] = (WHOLE,), snapshot: bool = False
    ) -> Applied:
        """Publish the next batch."""
        return self.index.publish(self.batch(changes, geometries=geometries, snapshot=snapshot))

    def restarted(self) -> Publisher:
        """The same node, started again."""
        return Publisher(self.index, replace(self.node, epoch=self.node.epoch + 1))


class Copy:
    """A second index fed by `watch`; `wait` until it satisfies a condition."""

    def __init__(self, watched: WatchedIndex) -> None:
        self.index = EmbeddedIndex()
        self.dropped: list[str] = []
        self._changed = threading.Condition()
        self.end = watched.watch(self._on_batch, self._on_dropped)

    def _on_batch(self, batch: Batch) -> None:
        with self._changed:
            assert not self.index.publish(batch).resync
            self.index.check()
            self._changed.notify_all()

    def _on_dropped(self, node_id: str) -> None:
        with self._changed:
            self.index.drop_node(node_id)
            self.dropped.append(node_id)
            self._changed.notify_all()

    def wait(self, condition: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(condition, WAIT_S), contents(self.index)


def contents(index: WatchedIndex | EmbeddedIndex) -> dict[str, tuple[int, int, frozenset[IndexEvent]]]:
    """Per node: epoch, applied sequence, held shards."""
    held: dict[str, set[IndexEvent]] = {}
    for batch in index.snapshot():
        if batch.snapshot_begin:
            held[batch.node.node_id] = set()
        held[batch.node.node_id].update(batch.events)
    return {
        status.node.node_id: (status.node.epoch, status.applied_sequence, frozenset(held[status.node.node_id]))
        for status in index.nodes()
    }


class IndexSuite:
    """Subclasses provide the fixtures `index` and `control_address`, an address that answers."""

    @pytest.fixture
    def index(self) -> WatchedIndex:
        raise NotImplementedError

    @pytest.fixture
    def control_address(self) -> str:
        raise NotImplementedError

    @pytest.fixture
    def one(self, index: WatchedIndex, control_address: str) -> Publisher:
        return Publisher(index, NodeInfo("node-1", 10, "host-1", control_address, "127.0.0.1:1", "/run/1.sock"))

    @pytest.fixture
    def two(self, index: WatchedIndex, control_address: str) -> Publisher:
        return Publisher(index, NodeInfo("node-2", 20, "host-2", control_address, "127.0.0.1:2"))

    @staticmethod
    def runs(index: WatchedIndex, keys: Keys, rectangle: Rectangle | None = None) -> list[tuple[str, int]]:
        return [(match.node.node_id, match.run) for match in index.match(keys, rectangle)]

    # --- answers -----------------------------------------------------------------------------------------

    def test_nothing_is_known_at_first(self, index: WatchedIndex) -> None:
        assert index.match(chain(3)) == []
        assert index.nodes() == []
        assert list(index.snapshot()) == []
        index.drop_node("nobody")

    def test_no_keys_give_no_matches(self, index: WatchedIndex, one: Publisher) -> None:
        one.send(events(chain(3)))
        assert index.match(chain(0)) == []

    @pytest.mark.parametrize("held", [1, 2, 3, 7, 8, 9, 100])
    @pytest.mark.parametrize("asked", [1, 8, 9, 100, 130])
    def test_a_run_ends_where_the_node_ends(self, index: WatchedIndex, one: Publisher, held: int, asked: int) -> None:
        assert one.send(events(chain(held))) == Applied(held, resync=False)
        (match,) = index.match(chain(asked), LAYOUT.whole)
        assert (match.node, match.run) == (one.node, min(held, asked))
        assert match.tier is Tier.DRAM and not match.suspect

    def test_unknown_keys_and_namespaces_do_not_match(self, index: WatchedIndex, one: Publisher) -> None:
        one.send(events(chain(3)))
        assert index.match(chain(3, first_token=5)) == []
        assert index.match(chain(3, namespace=OTHER_NAMESPACE)) == []

    def test_branches_share_their_prefix(self, index: WatchedIndex, one: Publisher) -> None:
        trunk = list(range(64))
        keys = [KeyChain(NAMESPACE).keys([*trunk, *range(1000 * n, 1000 * n + 64)]) for n in (1, 2, 3)]
        one.send(events(keys[0]))
        one.send(events(keys[1].slice(4, 8)))
        assert [self.runs(index, each) for each in keys] == [[("node-1", 8)], [("node-1", 8)], [("node-1", 4)]]

    def test_two_nodes_longest_first(self, index: WatchedIndex, one: Publisher, two: Publisher) -> None:
        one.send(events(chain(3)))
        two.send(events(chain(5)))
        assert self.runs(index, chain(9)) == [("node-2", 5), ("node-1", 3)]
        assert self.runs(index, chain(3)) == [("node-1", 3), ("node-2", 3)]
        assert [(status.node, status.shard_count) for status in index.nodes()] == [(one.node, 3), (two.node, 5)]

    def test_the_slowest_tier_of_the_run_is_told(self, index: WatchedIndex, one: Publisher) -> None:
        keys = chain(6)
        one.send(events(keys))
        one.send(events(keys.slice(4, 6), tier=Tier.SSD))
        assert [index.match(keys.slice(0, n))[0].tier for n in (4, 5)] == [Tier.DRAM, Tier.SSD]
        one.send(events(keys.slice(4, 6), kind=EventKind.WITHDRAW, tier=Tier.DRAM))
        assert self.runs(index, keys) == [("node-1", 6)]
        one.send(events(keys.slice(4, 6), kind=EventKind.WITHDRAW, tier=Tier.SSD))
        assert self.runs(index, keys) == [("node-1", 4)]

    # --- coverage ----------------------------------------------------------------------------------------

    def test_partial_coverage(self, index: WatchedIndex, one: Publisher) -> None:
        keys = chain(4)
        one.send(events(keys.slice(0, 2), geometry=HALVES, numbers=(0, 1)), geometries=[HALVES])
        one.send(events(keys.slice(2, 4), geometry=HALVES, numbers=(0,)), geometries=[])
        assert self.runs(index, keys, LAYOUT.whole) == [("node-1", 2)]
        assert self.runs(index, keys, LEFT) == [("node-1", 4)]
        assert self.runs(index, keys, RIGHT) == [("node-1", 2)]
        assert self.runs(index, keys) == [("node-1", 4)]

    def test_a_part_of_a_stored_rectangle_is_covered(self, index: WatchedIndex, one: Publisher) -> None:
        one.send(events(chain(2), geometry=QUARTERS, numbers=(0, 1)), geometries=[QUARTERS])
        assert self.runs(index, chain(2), Rectangle(0, 1, 1, 3)) == [("node-1", 2)]
        assert self.runs(index, chain(2), Rectangle(1, 3, 1, 3)) == []

    def test_two_geometries_do_not_mix_within_a_chunk(self, index: WatchedIndex, one: Publisher) -> None:
        keys = chain(3)
        one.send(events(keys.slice(0, 1), geometry=QUARTERS, numbers=range(4)), geometries=[QUARTERS, HALVES])
        one.send(events(keys.slice(1, 2), geometry=HALVES, numbers=(0, 1)), geometries=[QUARTERS, HALVES])
        one.send(events(keys.slice(2, 3), geometry=HALVES, numbers=(0,)))
        one.send(events(keys.slice(2, 3), geometry=QUARTERS, numbers=(1, 3)))
        assert self.runs(index, keys, LAYOUT.whole) == [("node-1", 2)]
        assert self.runs(index, keys, LEFT) == self.runs(index, keys, RIGHT) == [("node-1", 3)]

    def test_shards_of_an_unknown_geometry_cover_nothing_until_it_is_told(
        self, index: WatchedIndex, one: Publisher
    ) -> None:
        one.send(events(chain(2), geometry=HALVES, numbers=(0, 1)), geometries=[])
        assert self.runs(index, chain(2)) == [("node-1", 2)]
        assert self.runs(index, chain(2), LEFT) == []
        one.send(geometries=[HALVES])
        assert self.runs(index, chain(2), LEFT) == [("node-1", 2)]

    def test_a_rectangle_outside_the_chunk_is_never_covered(self, index: WatchedIndex, one: Publisher) -> None:
        one.send(events(chain(2)))
        assert self.runs(index, chain(2), Rectangle(0, 5, 0, 4)) == []

    # --- orphans -----------------------------------------------------------------------------------------

    @pytest.mark.parametrize("gap", [0, 1, 5, 18])
    def test_orphans_do_not_count_until_their_parent_is_there(
        self, index: WatchedIndex, one: Publisher, gap: int
    ) -> None:
        keys = chain(20)
        one.send(events(keys.slice(0, gap)))
        one.send(events(keys.slice(gap + 1, 20)))
        assert self.runs(index, keys) == ([("node-1", gap)] if gap else [])
        one.send(events(keys.slice(gap, gap + 1)))
        assert self.runs(index, keys) == [("node-1", 20)]

    def test_children_before_parents(self, index: WatchedIndex, one: Publisher) -> None:
        keys = chain(9)
        copy = Copy(index)
        for event in reversed(events(keys)):
            one.send([event])
        assert self.runs(index, keys) == [("node-1", 9)]
        copy.wait(lambda: contents(copy.index) == contents(index))
        copy.end()

    def test_a_parent_that_left_first_leaves_orphans(self, index: WatchedIndex, one: Publisher) -> None:
        keys = chain(9)
        one.send(events(keys))
        one.send(withdrawals(keys.slice(3, 5)))
        assert self.runs(index, keys) == [("node-1", 3)]
        one.send(withdrawals(keys.slice(5, 9)))
        one.send(events(keys.slice(3, 4)))
        assert self.runs(index, keys) == [("node-1", 4)]

    def test_a_snapshot_tells_parents_before_children(self, index: WatchedIndex, one: Publisher) -> None:
        for event in reversed(events(chain(40))):
            one.send([event])
        seen = {NAMESPACE.id}
        for batch in index.snapshot():
            for event in batch.events:
                assert event.parent_key in seen
                seen.add(event.key)
        assert len(seen) == 41

    # --- withdraw ----------------------------------------------------------------------------------------

    def test_withdraw_from_the_leaf(self, index: WatchedIndex, one: Publisher) -> None:
        keys = chain(8)
        one.send(events(keys))
        one.send(withdrawals(keys.slice(5, 8)))
        assert self.runs(index, keys) == [("node-1", 5)]
        one.send(withdrawals(keys.slice(0, 5)))
        assert index.match(keys) == []
        (status,) = index.nodes()
        assert (status.shard_count, status.applied_sequence) == (0, 16)

    def test_withdrawing_what_is_not_there_changes_nothing(self, index: WatchedIndex, one: Publisher) -> None:
        one.send(events(chain(2)))
        assert one.send(withdrawals(chain(3, first_token=7))).sequence == 5
        assert one.send(withdrawals(chain(2), geometry=HALVES)).sequence == 7
        assert self.runs(index, chain(2)) == [("node-1", 2)]

    def test_publishing_twice_is_one_shard(self, index: WatchedIndex, one: Publisher) -> None:
        one.send(events(chain(2)))
        one.send(events(chain(2)))
        assert index.nodes()[0].shard_count == 2
        one.send(withdrawals(chain(2)))
        assert index.match(chain(2)) == []

    # --- sequences and epochs ----------------------------------------------------------------------------

    def test_a_repeated_batch_changes_nothing(self, index: WatchedIndex, one: Publisher) -> None:
        first = one.batch(events(chain(4)))
        index.publish(first)
        one.send(withdrawals(chain(4).slice(2, 4)))
        assert index.publish(first) == Applied(6, resync=False)
        assert self.runs(index, chain(4)) == [("node-1", 2)]

    def test_of_a_longer_repeat_only_the_new_events_count(self, index: WatchedIndex, one: Publisher) -> None:
        changes = [*events(chain(4)), *withdrawals(chain(4).slice(2, 4)), *events(chain(3).slice(2, 3))]
        index.publish(replace(one.batch(), events=changes[:6]))
        assert index.publish(replace(one.batch(), events=changes)) == Applied(7, resync=False)
        assert self.runs(index, chain(4)) == [("node-1", 3)]

    def test_a_gap_asks_for_a_resync_and_applies_nothing(self, index: WatchedIndex, one: Publisher) -> None:
        one.send(events(chain(2)))
        lost = one.batch(events(chain(3).slice(2, 3)))
        late = one.batch(events(chain(4).slice(3, 4)))
        assert index.publish(late) == Applied(2, resync=True)
        assert one.send() == Applied(2, resync=True)
        assert index.publish(lost) == Applied(3, resync=False)
        assert index.publish(late) == Applied(4, resync=False)
        assert self.runs(index, chain(4)) == [("node-1", 4)]

    def test_an_unknown_node_in_mid_sequence_is_asked_for_a_snapshot(self, index: WatchedIndex, one: Publisher) -> None:
        one.next_sequence = 57
        assert one.send(events(chain(2))) == Applied(0, resync=True)
        assert index.match(chain(2)) == []
        assert [status.applied_sequence for status in index.nodes()] == [0]
        assert one.send(events(chain(3)), snapshot=True) == Applied(61, resync=False)
        assert self.runs(index, chain(3)) == [("node-1", 3)]

    def test_a_snapshot_replaces_what_was_known(self, index: WatchedIndex, one: Publisher) -> None:
        one.send(events(chain(5)))
        one.send(events(chain(4, first_token=9)), snapshot=True)
        one.send(events(chain(6, first_token=9).slice(4, 6)))
        assert index.match(chain(5)) == []
        assert self.runs(index, chain(6, first_token=9)) == [("node-1", 6)]
        assert index.nodes()[0].shard_count == 6

    def test_an_empty_snapshot_empties(self, index: WatchedIndex, one: Publisher) -> None:
        one.send(events(chain(5)))
        assert one.send(snapshot=True) == Applied(5, resync=False)
        assert index.match(chain(5)) == []

    def test_a_repeated_snapshot_does_not_undo_what_came_after(self, index: WatchedIndex, one: Publisher) -> None:
        snapshot = one.batch(events(chain(2)), snapshot=True)
        index.publish(snapshot)
        one.send(events(chain(5).slice(2, 5)))
        assert index.publish(snapshot) == Applied(5, resync=False)
        assert self.runs(index, chain(5)) == [("node-1", 5)]

    def test_a_restart_forgets_the_old_epoch(self, index: WatchedIndex, one: Publisher) -> None:
        one.send(events(chain(5)))
        again = one.restarted()
        assert again.send() == Applied(0, resync=False)
        assert index.match(chain(5)) == []
        assert again.send(events(chain(2))) == Applied(2, resync=False)
        assert [(match.node.epoch, match.run) for match in index.match(chain(5))] == [(11, 2)]

    def test_a_new_epoch_in_mid_sequence_forgets_and_asks(self, index: WatchedIndex, one: Publisher) -> None:
        one.send(events(chain(5)))
        copy = Copy(index)
        copy.wait(lambda: self.runs(copy.index, chain(5)) == [("node-1", 5)])
        again = one.restarted()
        again.next_sequence = 4
        assert again.send(events(chain(2))) == Applied(0, resync=True)
        assert index.match(chain(5)) == []
        copy.wait(lambda: contents(copy.index) == contents(index))
        copy.end()

    def test_an_old_epoch_is_ignored(self, index: WatchedIndex, one: Publisher) -> None:
        again = one.restarted()
        again.send(events(chain(3)))
        assert one.send(events(chain(5))) == Applied(0, resync=False)
        one.send(snapshot=True)
        index.publish(replace(one.batch(), leaving=True))
        assert [(match.node.epoch, match.run) for match in index.match(chain(5))] == [(11, 3)]

    def test_nodes_do_not_share_sequences(self, index: WatchedIndex, one: Publisher, two: Publisher) -> None:
        one.send(events(chain(5)))
        assert two.send(events(chain(2))) == Applied(2, resync=False)
        two.restarted().send()
        assert self.runs(index, chain(5)) == [("node-1", 5)]

    def test_leaving_and_dropping(self, index: WatchedIndex, one: Publisher, two: Publisher) -> None:
        for publisher in (one, two):
            publisher.send(events(chain(2)))
        index.publish(replace(one.batch(), leaving=True))
        assert self.runs(index, chain(2)) == [("node-2", 2)]
        index.drop_node("node-2")
        assert index.match(chain(2)) == [] and index.nodes() == []
        assert two.send() == Applied(0, resync=True)

    # --- limits ------------------------------------------------------------------------------------------

    def test_wrong_batches_are_refused_and_change_nothing(self, index: WatchedIndex, one: Publisher) -> None:
        one.send(events(chain(2)))
        good = one.batch(events(chain(3).slice(2, 3)))
        too_many = list(good.events) * (EVENTS_A_BATCH_LIMIT + 1)
        with pytest.raises(LimitExceeded, match=str(EVENTS_A_BATCH_LIMIT)):
            index.publish(replace(good, events=too_many))
        with pytest.raises(LimitExceeded, match="lease_ms"):
            index.publish(replace(good, lease_ms=0))
        with pytest.raises(InvalidRequest, match="first_sequence"):
            index.publish(replace(good, first_sequence=0))
        with pytest.raises(InvalidRequest, match="own parent"):
            index.publish(replace(good, events=[replace(good.events[0], parent_key=good.events[0].key)]))
        with pytest.raises(InvalidRequest, match="epoch"):
            index.publish(replace(good, node=replace(good.node, epoch=0)))
        assert index.publish(good) == Applied(3, resync=False)

    def test_two_geometries_with_one_digest_are_refused(self, index: WatchedIndex, one: Publisher) -> None:
        first, second = (
            Geometry((Rectangle(0, 4, 0, cut), Rectangle(0, 4, cut, heads))) for cut, heads in ((8, 18), (40, 42))
        )
        assert first.digest == second.digest == 0x4D6EF5
        one.send(geometries=[first])
        with pytest.raises(LayoutMismatch, match="4d6ef5"):
            one.send(geometries=[second])
        assert one.send(geometries=[first]) == Applied(0, resync=False)

    # --- watch -------------------------------------------------------------------------------------------

    def test_a_copy_by_watch_stays_equal(self, index: WatchedIndex, one: Publisher, two: Publisher) -> None:
        one.send(events(chain(5), geometry=HALVES, numbers=(0, 1)), geometries=[HALVES])
        copy = Copy(index)
        two.send(events(chain(3)))
        one.send(withdrawals(chain(5).slice(3, 5), geometry=HALVES, numbers=(0,)))
        repeated = one.batch(events(chain(2, first_token=3)))
        for batch in (repeated, repeated):
            index.publish(batch)
        two.send(events(chain(7)), snapshot=True)
        one.next_sequence += 5
        one.send()
        copy.wait(lambda: contents(copy.index) == contents(index))
        for keys in (chain(7), chain(2, first_token=3)):
            for rectangle in (None, LEFT, RIGHT, LAYOUT.whole):
                assert self.runs(copy.index, keys, rectangle) == self.runs(index, keys, rectangle)
        copy.end()

    def test_a_watch_tells_of_dropped_nodes(self, index: WatchedIndex, one: Publisher, two: Publisher) -> None:
        one.send(events(chain(3)))
        two.send(events(chain(3)))
        copy = Copy(index)
        copy.wait(lambda: len(copy.index.nodes()) == 2)
        index.publish(replace(one.batch(), leaving=True))
        copy.wait(lambda: self.runs(copy.index, chain(3)) == [("node-2", 3)])
        assert copy.dropped[-1] == "node-1"
        copy.end()

    def test_a_large_snapshot_comes_in_pieces(self, index: WatchedIndex, one: Publisher) -> None:
        keys = chain(3_000)
        one.send(events(keys))
        one.send(withdrawals(keys.slice(2_999, 3_000)))
        batches = list(index.snapshot())
        assert len(batches) > 1 and [batch.snapshot_begin for batch in batches].count(True) == 1
        copy = Copy(index)
        copy.wait(lambda: self.runs(copy.index, keys, LAYOUT.whole) == [("node-1", 2_999)])
        one.send(events(keys.slice(2_999, 3_000)))
        copy.wait(lambda: self.runs(copy.index, keys, LAYOUT.whole) == [("node-1", 3_000)])
        copy.end()

    def test_after_its_end_a_watch_is_silent(self, index: WatchedIndex, one: Publisher) -> None:
        first, second = Copy(index), Copy(index)
        one.send(events(chain(1)))
        first.wait(lambda: len(first.index.nodes()) == 1)
        first.end()
        first.end()
        one.send(events(chain(2).slice(1, 2)))
        second.wait(lambda: self.runs(second.index, chain(2)) == [("node-1", 2)])
        assert self.runs(first.index, chain(2)) == [("node-1", 1)]
        second.end()
