"""The node's verbs besides writing: sessions, leases, tickets, removal, events. `check()` after every step."""

from __future__ import annotations

import random
from collections.abc import Callable, Generator

import pytest

from kvstore.errors import CapacityExhausted, LayoutMismatch, LimitExceeded, NotFound, SessionLost
from kvstore.metadata import GEOMETRIES_A_NAMESPACE_LIMIT, Batch, EventKind
from kvstore.metadata.embedded import EmbeddedIndex
from kvstore.model.layout import Dtype, Geometry, PageLayout, Rectangle
from kvstore.model.prefix import Keys
from kvstore.model.values import MissReason, Outcome
from kvstore.node import LEASE_LIMIT_MS, TICKET_LIFETIME_MS, core, news
from kvstore.node.core import REMOTE_IDLE_S
from kvstore.node.memory import GEOMETRY_LIMIT, NAMESPACE_LIMIT
from tests.unit.node.small_node import SMALL, SmallNode, keys_of, namespace

SPACE = namespace()
KEYS = keys_of(SPACE, 1, 4)
HALVES = Geometry.parallel(SMALL, tp=2)
TICKET = b"t" * 16


@pytest.fixture
def node() -> SmallNode:
    return SmallNode()


# --- sessions ------------------------------------------------------------------------------------------------


def test_an_unknown_session_is_lost_for_every_verb(node: SmallNode) -> None:
    node.open(SPACE)
    shard = Geometry.whole(SMALL).shard(0)
    calls: list[Callable[[], object]] = [
        lambda: node.core.register_namespace(7, SPACE, None, ()),
        lambda: node.core.reserve(7, KEYS, shard, b""),
        lambda: node.core.commit(7, 1, [0], [0], True),
        lambda: node.core.abort(7, 1),
        lambda: node.core.acquire(7, KEYS, SMALL.whole, 1),
        lambda: node.core.release(7, [1], []),
        lambda: node.core.remove(7, SPACE.id, [KEYS[0]]),
        lambda: node.core.touch(7, [KEYS[0]]),
        lambda: node.core.renew(7),
    ]
    for call in calls:
        with pytest.raises(SessionLost):
            call()
        node.core.check()
    node.core.session_lost(7)
    node.core.process_gone(7)


def test_a_lost_session_holds_its_slots_until_the_process_is_gone(node: SmallNode) -> None:
    session, other = node.open(SPACE), node.open(SPACE)
    answer = node.reserve(session, KEYS)
    node.core.session_lost(session.number)
    node.core.check()
    stats = node.core.stats()
    assert (stats["reserved_slots"], stats["quarantined_bytes"], stats["sessions"]) == (0, 4 * 4096, 2)
    again = node.reserve(other, KEYS)
    assert not set(again.slots) & set(answer.slots)
    node.core.process_gone(session.number)
    node.core.check()
    assert node.core.stats()["quarantined_bytes"] == 0 and node.core.stats()["sessions"] == 1


def test_a_session_without_grants_leaves_nothing(node: SmallNode) -> None:
    session = node.open(SPACE)
    node.store(session, KEYS)
    node.core.acquire(session.number, KEYS, SMALL.whole, 5000)
    node.core.session_lost(session.number)
    node.core.check()
    assert not node.core.sessions and not node.core.holds.leases and not node.core.holds.by_session


def test_sessions_are_bounded(node: SmallNode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "SESSIONS_LIMIT", 3)
    opened = [node.core.open_session("x", shared=False) for _ in range(3)]
    with pytest.raises(CapacityExhausted, match="3"):
        node.core.open_session("x", shared=True)
    node.core.process_gone(opened[0].number)
    node.core.open_session("x", shared=True)


def test_idle_sessions_of_other_hosts_end(node: SmallNode) -> None:
    idle, busy, shared = (node.open(SPACE, shared=each) for each in (False, False, True))
    node.clock.now += REMOTE_IDLE_S - 1
    node.core.acquire(busy.number, KEYS, SMALL.whole, 0)
    node.clock.now += 1
    node.core.tick()
    assert set(node.core.sessions) == {busy.number, shared.number}
    with pytest.raises(SessionLost):
        node.core.acquire(idle.number, KEYS, SMALL.whole, 0)


def test_a_session_sees_only_its_own_attempts(node: SmallNode) -> None:
    session, thief = node.open(SPACE), node.open(SPACE)
    answer = node.reserve(session, KEYS)
    assert node.commit(thief, answer.attempt, [0]) == [Outcome.REFUSED_STALE]
    node.core.abort(thief.number, answer.attempt)
    node.core.check()
    assert node.commit(session, answer.attempt, [0, 1, 2, 3]) == [Outcome.COMMITTED] * 4


# --- look-ups and leases -------------------------------------------------------------------------------------


def test_a_miss_has_a_reason(node: SmallNode) -> None:
    session = node.open(SPACE, HALVES)
    whole = SMALL.whole

    def reason(keys: Keys = KEYS, rectangle: Rectangle = whole) -> MissReason | None:
        answer = node.core.acquire(session.number, keys, rectangle, 0)
        node.core.check()
        return answer.reason

    assert reason() is MissReason.ABSENT
    pending = node.reserve(session, KEYS, shard=HALVES.shard(0))
    assert reason() is MissReason.IN_PROGRESS
    node.commit(session, pending.attempt, [0, 1, 2, 3])
    assert reason() is MissReason.NOT_COVERED and reason(rectangle=HALVES.rectangles[0]) is None
    assert KEYS.fingerprints is not None
    assert reason(Keys(SPACE.id, SPACE.id, KEYS.blob, KEYS.fingerprints + 1, 4, 4)) is MissReason.COLLISION
    assert reason(KEYS.slice(0, 0)) is None
    with pytest.raises(LayoutMismatch):
        reason(rectangle=Rectangle(0, 9, 0, 9))
    with pytest.raises(NotFound):
        reason(keys_of(namespace(revision="r9"), 1, 1))


def test_a_lease_keeps_the_run_and_ends_with_release(node: SmallNode) -> None:
    session, thief = node.open(SPACE), node.open(SPACE)
    node.store(session, KEYS)
    answer = node.core.acquire(session.number, KEYS, SMALL.whole, 5000)
    assert answer.run == 4 and answer.lease and answer.lease_ms == 5000
    node.core.release(thief.number, [answer.lease, 12345], [])
    node.core.check()
    assert node.core.stats()["leases"] == 1, "a session ends its own leases only"
    for _ in range(2):
        node.core.release(session.number, [answer.lease], [])
        node.core.check()
    assert node.core.stats()["leases"] == 0


def test_leases_are_cut_and_run_out(node: SmallNode) -> None:
    session = node.open(SPACE)
    node.store(session, KEYS)
    answer = node.core.acquire(session.number, KEYS, SMALL.whole, 10**9)
    assert answer.lease_ms == LEASE_LIMIT_MS
    node.clock.now += LEASE_LIMIT_MS / 1000
    node.core.tick()
    node.core.check()
    assert node.core.stats()["leases"] == 0


def test_a_probe_keeps_nothing_and_touches_nothing() -> None:
    node = SmallNode(slots=4)
    session = node.open(SPACE)
    old, new = keys_of(SPACE, 1, 2), keys_of(SPACE, 2, 2)
    node.store(session, old)
    node.store(session, new)
    assert node.core.acquire(session.number, old, SMALL.whole, 0).lease == 0
    node.store(session, keys_of(SPACE, 3, 2))
    assert [node.resident(keys) for keys in (old, new)] == [0, 2]


# --- tickets -------------------------------------------------------------------------------------------------


def test_a_ticket_pins_what_is_committed_and_what_was_there() -> None:
    node = SmallNode(slots=16)
    session = node.open(SPACE)
    node.store(session, KEYS.slice(0, 2))
    answer = node.reserve(session, KEYS, ticket=TICKET)
    node.commit(session, answer.attempt, [2, 3])
    assert node.core.stats()["pinned_bytes"] == 4 * 4096
    for prompt in range(10, 30):
        node.store(session, keys_of(SPACE, prompt, 3))
    assert node.resident(KEYS) == 4
    node.core.release(session.number, [], [TICKET, b"u" * 16])
    node.core.check()
    for prompt in range(10, 30):
        node.store(session, keys_of(SPACE, prompt, 3))
    assert node.resident(KEYS) == 0


def test_a_ticket_that_nobody_reads_runs_out(node: SmallNode) -> None:
    session = node.open(SPACE)
    answer = node.reserve(session, KEYS, ticket=TICKET)
    node.commit(session, answer.attempt, [0, 1, 2, 3])
    node.core.session_lost(session.number)
    node.clock.now += TICKET_LIFETIME_MS / 1000 - 1
    node.core.tick()
    assert node.core.stats()["tickets"] == 1, "the writer may be gone before the reader comes"
    node.clock.now += 1
    node.core.tick()
    node.core.check()
    assert node.core.stats()["tickets"] == node.core.stats()["pinned_bytes"] == 0


def test_pins_beyond_their_share_are_counted_not_refused(node: SmallNode) -> None:
    session = node.open(SPACE)
    keys = keys_of(SPACE, 1, 8)
    answer = node.reserve(session, keys, ticket=TICKET)
    assert node.commit(session, answer.attempt, range(8)) == [Outcome.COMMITTED] * 8
    assert node.core.stats()["pinned_bytes"] == 4 * 4096 and node.core.stats()["unpinned_for_room"] == 4


# --- removal -------------------------------------------------------------------------------------------------


def test_remove_takes_what_hangs_below_and_nothing_else(node: SmallNode) -> None:
    session = node.open(SPACE)
    node.store(session, KEYS)
    node.store(session, keys_of(SPACE, 2, 2))
    with pytest.raises(NotFound):
        node.core.remove(session.number, b"?" * 16, [KEYS[0]])
    assert node.core.remove(session.number, SPACE.id, [b"?" * 16]) == 0
    assert node.core.remove(session.number, SPACE.id, [KEYS[2], KEYS[3]]) == 2
    node.core.check()
    assert node.resident(KEYS) == 2 and node.resident(keys_of(SPACE, 2, 2)) == 2


def test_a_key_of_another_namespace_is_not_removed(node: SmallNode) -> None:
    session = node.open(SPACE)
    other = namespace(revision="r2")
    node.core.register_namespace(session.number, other, Geometry.whole(SMALL), ())
    node.store(session, KEYS)
    assert node.core.remove(session.number, other.id, [KEYS[0]]) == 0
    assert node.resident(KEYS) == 4


def test_remove_asks_nobody(node: SmallNode) -> None:
    """Leases and pins keep from eviction, not from removal; their ends afterwards harm nobody."""
    session = node.open(SPACE)
    answer = node.reserve(session, KEYS, ticket=TICKET)
    node.commit(session, answer.attempt, [0, 1, 2, 3])
    lease = node.core.acquire(session.number, KEYS, SMALL.whole, 5000).lease
    assert node.core.remove(session.number, SPACE.id, [KEYS[0]]) == 4
    node.core.check()
    node.store(session, KEYS)
    node.core.release(session.number, [lease], [TICKET])
    node.core.check()
    assert node.resident(KEYS) == 4


# --- limits --------------------------------------------------------------------------------------------------


def test_a_call_has_a_bounded_number_of_keys(node: SmallNode) -> None:
    session = node.open(SPACE)
    many = Keys(SPACE.id, SPACE.id, bytes(16 * 65_537), None, 4, 4)
    for call in (
        lambda: node.core.acquire(session.number, many, SMALL.whole, 0),
        lambda: node.core.reserve(session.number, many, Geometry.whole(SMALL).shard(0), b""),
    ):
        with pytest.raises(LimitExceeded, match="65536"):
            call()


def test_no_keys_are_no_error(node: SmallNode) -> None:
    session = node.open(SPACE)
    nothing = KEYS.slice(0, 0)
    answer = node.reserve(session, nothing)
    assert (answer.attempt, answer.outcomes, answer.slots) == (0, [], [])
    assert node.core.acquire(session.number, nothing, SMALL.whole, 500).lease == 0
    assert node.core.remove(session.number, SPACE.id, []) == 0
    assert not node.core.sessions[session.number].writer.attempts


def test_unknown_shards_and_rectangles_are_refused(node: SmallNode) -> None:
    session = node.open(SPACE)
    with pytest.raises(NotFound, match="shard"):
        node.reserve(session, KEYS, shard=HALVES.shard(0))
    with pytest.raises(LayoutMismatch, match="written_here"):
        node.core.register_namespace(session.number, SPACE, HALVES, [2])


# --- events --------------------------------------------------------------------------------------------------


def follow(node: SmallNode, index: EmbeddedIndex, acknowledged: int, *, resync: bool = False) -> int:
    for batch in node.core.news.take_batch(acknowledged, 3, resync=resync, lease_ms=60_000):
        applied = index.publish(batch)
        acknowledged = applied.sequence
        assert not applied.resync
    index.check()
    return acknowledged


def known(index: EmbeddedIndex) -> set[tuple[bytes, int]]:
    return {(event.key, event.shard) for batch in index.snapshot() for event in batch.events}


def test_events_are_numbered_without_gaps_and_repeated_until_acknowledged(node: SmallNode) -> None:
    session = node.open(SPACE)
    node.store(session, KEYS)
    (first,) = node.core.news.take_batch(0, 3, resync=False, lease_ms=1000)
    (again,) = node.core.news.take_batch(0, 3, resync=False, lease_ms=1000)
    assert (first.first_sequence, len(first.events)) == (1, 3) and list(again.events) == list(first.events)
    (rest,) = node.core.news.take_batch(3, 3, resync=False, lease_ms=1000)
    assert (rest.first_sequence, [event.key for event in rest.events]) == (4, [KEYS[3]])
    node.core.remove(session.number, SPACE.id, [KEYS[0]])
    (gone,) = node.core.news.take_batch(4, 9, resync=False, lease_ms=1000)
    assert [event.kind for event in gone.events] == [EventKind.WITHDRAW] * 4
    assert [event.key for event in gone.events] == list(KEYS)[::-1], "children before parents"


def test_a_snapshot_says_the_same_as_the_events(node: SmallNode) -> None:
    session = node.open(SPACE)
    followed, late = EmbeddedIndex(node.clock), EmbeddedIndex(node.clock)
    acknowledged = 0
    for prompt in (1, 2, 3):
        node.store(session, keys_of(SPACE, prompt, 3))
        while acknowledged < node.core.news.last_sequence:
            acknowledged = follow(node, followed, acknowledged)
    node.core.remove(session.number, SPACE.id, [keys_of(SPACE, 2, 3)[1]])
    follow(node, followed, acknowledged)
    after = follow(node, late, 0, resync=True)
    assert known(late) == known(followed) and len(known(late)) == 7
    node.store(session, keys_of(SPACE, 4, 2))
    follow(node, late, after)
    assert len(known(late)) == 9


def test_too_many_events_end_in_a_snapshot(node: SmallNode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(news, "EVENTS_LIMIT", 5)
    session, index = node.open(SPACE), EmbeddedIndex(node.clock)
    for _ in range(3):
        node.store(session, KEYS)
        node.core.remove(session.number, SPACE.id, [KEYS[0]])
    node.store(session, KEYS)
    assert node.core.stats()["events_waiting"] <= 5
    batches = node.core.news.take_batch(0, 3, resync=False, lease_ms=1000)
    assert batches[0].snapshot_begin
    for batch in batches:
        assert not index.publish(batch).resync
    assert known(index) == {(key, Geometry.whole(SMALL).shard(0)) for key in KEYS}


def test_an_index_that_lost_everything_asks_and_is_full_again(node: SmallNode) -> None:
    session, index = node.open(SPACE), EmbeddedIndex(node.clock)
    node.store(session, KEYS)
    follow(node, index, 0)
    (heartbeat,) = node.core.news.take_batch(node.core.news.last_sequence, 9, resync=False, lease_ms=1000)
    fresh = EmbeddedIndex(node.clock)
    assert fresh.publish(heartbeat).resync
    follow(node, fresh, 0, resync=True)
    assert len(known(fresh)) == 4


def test_a_pool_without_an_index_keeps_no_events(node: SmallNode) -> None:
    session = node.open(SPACE)
    node.store(session, KEYS)
    node.core.news.forget()
    assert node.core.stats()["events_waiting"] == 0 and node.core.news.last_sequence == 4
    batch: Batch = node.core.news.take_batch(0, 9, resync=False, lease_ms=1000)[0]
    assert batch.snapshot_begin and batch.first_sequence == 5


def advance(steps: Generator[None, None, list[Batch]]) -> list[Batch] | None:
    """One step; the batches at the last one."""
    try:
        next(steps)
    except StopIteration as end:
        batches: list[Batch] = end.value
        return batches
    return None


@pytest.mark.parametrize("seed", range(8))
def test_what_happens_during_a_snapshot_is_told_behind_it(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    monkeypatch.setattr(news, "SNAPSHOT_STEP_CHUNKS", 1)
    node, index, rng = SmallNode(slots=64), EmbeddedIndex(), random.Random(seed)
    session = node.open(SPACE)
    prompts = [keys_of(SPACE, number, 4) for number in range(6)]
    for keys in prompts:
        node.store(session, keys)
    steps = node.core.news.batch_steps(0, 3, resync=True, lease_ms=60_000)
    turns = 0
    while (batches := advance(steps)) is None:
        turns += 1
        keys = rng.choice(prompts)
        if keys[0] in node.core.pool.forest.chunks:
            node.core.remove(session.number, SPACE.id, [keys[rng.randrange(4)]])
        else:
            node.store(session, keys)
        node.core.check()
    assert turns == 24
    for batch in batches:
        assert not index.publish(batch).resync
    acknowledged = index.nodes()[0].applied_sequence
    while acknowledged < node.core.news.last_sequence:
        acknowledged = follow(node, index, acknowledged)
    forest = node.core.pool.forest.chunks.values()
    assert known(index) == {(chunk.key, shard) for chunk in forest if chunk.published for shard in chunk.copies}


@pytest.mark.parametrize("end", ["given up", "overflow"])
def test_a_snapshot_that_came_to_nothing_is_followed_by_another(
    node: SmallNode, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    monkeypatch.setattr(news, "SNAPSHOT_STEP_CHUNKS", 1)
    monkeypatch.setattr(news, "EVENTS_LIMIT", 5)
    session, index = node.open(SPACE), EmbeddedIndex()
    node.store(session, KEYS)
    steps = node.core.news.batch_steps(0, 3, resync=True, lease_ms=60_000)
    assert advance(steps) is None
    if end == "given up":
        steps.close()
    else:
        for number in range(2, 4):
            node.store(session, keys_of(SPACE, number, 4))
        while (batches := advance(steps)) is None:
            pass
        for batch in batches:
            index.publish(batch)
    (first, *_) = batches = node.core.news.take_batch(node.core.news.last_sequence, 3, resync=False, lease_ms=60_000)
    assert first.snapshot_begin
    for batch in batches:
        assert not index.publish(batch).resync
    assert len(known(index)) == len(node.core.pool.forest)


def test_geometries_go_with_snapshots_and_while_they_are_new(node: SmallNode) -> None:
    def sent(acknowledged: int, *, resync: bool = False) -> set[Geometry]:
        batch = node.core.news.take_batch(acknowledged, 9, resync=resync, lease_ms=1000)[0]
        return {geometry for _, geometry in batch.geometries}

    whole = Geometry.whole(SMALL)
    session = node.open(SPACE)
    assert sent(0) == {whole}
    node.store(session, KEYS)
    assert sent(0) == sent(0) == {whole}, "a lost answer is a repeat"
    assert not sent(4)
    node.open(SPACE, HALVES)
    assert sent(4) == {HALVES}
    node.store(session, keys_of(SPACE, 2, 1))
    assert sent(4) == {HALVES} and not sent(5)
    assert sent(5, resync=True) == {whole, HALVES}


def test_a_geometry_that_comes_during_a_snapshot_goes_with_it(node: SmallNode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(news, "SNAPSHOT_STEP_CHUNKS", 1)
    node.store(node.open(SPACE), KEYS)
    steps = node.core.news.batch_steps(0, 3, resync=True, lease_ms=1000)
    assert advance(steps) is None
    node.open(SPACE, HALVES)
    while (batches := advance(steps)) is None:
        pass
    assert {geometry for _, geometry in batches[0].geometries} == {Geometry.whole(SMALL), HALVES}
    assert not any(batch.geometries for batch in batches[1:])


def test_a_namespace_has_as_many_geometries_as_the_index_takes(node: SmallNode) -> None:
    layout = PageLayout(80, 2, 4, Dtype.FP32, 4, 1)
    space, index = namespace(layout), EmbeddedIndex()
    cuts = [Geometry((Rectangle(0, at, 0, 2), Rectangle(at, 80, 0, 2))) for at in range(1, 66)]
    for geometry in cuts[:-1]:
        session = node.open(space, geometry)
    with pytest.raises(LimitExceeded, match=r"64 geometries .*; use one of them, or restart"):
        node.core.register_namespace(session.number, space, cuts[-1], ())
    node.core.register_namespace(session.number, space, cuts[0], ())
    assert len(node.writer.geometries) == GEOMETRIES_A_NAMESPACE_LIMIT == 64
    follow(node, index, 0)


def test_every_namespace_may_have_a_writer(node: SmallNode) -> None:
    assert GEOMETRY_LIMIT == NAMESPACE_LIMIT
    for number in range(600):
        node.core.know(namespace(revision=f"r{number}"), Geometry.whole(SMALL), [0])
