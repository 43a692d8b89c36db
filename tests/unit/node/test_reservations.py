"""Who may write where: attempts, second looks, quarantine; `check()` after every step."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore.errors import InvalidRequest, LimitExceeded
from kvstore.model.layout import Geometry
from kvstore.model.namespace import Namespace
from kvstore.model.prefix import Keys
from kvstore.model.values import Outcome
from kvstore.node import RESERVATION_LIFETIME_MS, reservations
from kvstore.node.catalog import UNIT_BYTES
from kvstore.node.core import CoreSettings
from kvstore.node.quotas import Quota
from kvstore.node.tier import Bounds
from tests.unit.node.small_node import SMALL, WIDE, SmallNode, keys_of, namespace

SPACE = namespace()
KEYS = keys_of(SPACE, 1, 4)
HALVES = Geometry.parallel(SMALL, tp=2)
LIFE_S = RESERVATION_LIFETIME_MS / 1000


@pytest.fixture
def node() -> SmallNode:
    return SmallNode()


def test_one_first_copy_per_node(node: SmallNode) -> None:
    one, two = node.open(SPACE), node.open(SPACE)
    first = node.reserve(one, KEYS)
    second = node.reserve(two, KEYS)
    assert first.outcomes == [Outcome.GRANTED] * 4 and len(set(first.slots)) == 4
    assert second.outcomes == [Outcome.IN_PROGRESS] * 4 and second.slots == [0] * 4
    node.commit(one, first.attempt, [0, 1, 2, 3])
    answer = node.core.commit(two.number, second.attempt, [], [], True)
    assert answer.waiting == [(index, Outcome.PRESENT, 0) for index in range(4)]
    assert node.reserve(two, KEYS).outcomes == [Outcome.PRESENT] * 4
    assert node.core.stats()["reserved_slots"] == 0 and not node.core.reservations.attempts


def test_keys_that_came_free_are_granted_in_the_answer_to_the_commit(node: SmallNode) -> None:
    one, two = node.open(SPACE), node.open(SPACE)
    first = node.reserve(one, KEYS)
    second = node.reserve(two, KEYS)
    node.commit(one, first.attempt, [0], last=False)
    node.core.abort(one.number, first.attempt)
    answer = node.core.commit(two.number, second.attempt, [], [], True)
    node.core.check()
    assert [(index, outcome) for index, outcome, _ in answer.waiting] == [
        (0, Outcome.PRESENT),
        *((index, Outcome.GRANTED) for index in (1, 2, 3)),
    ]
    assert node.commit(two, second.attempt, [1, 2, 3]) == [Outcome.COMMITTED] * 3
    assert node.resident(KEYS) == 4


def test_a_second_look_grants_no_chunk_whose_parent_is_not_there() -> None:
    node = SmallNode(settings=CoreSettings(session_share=0.25))  # four slots a session
    one, two = node.open(SPACE), node.open(SPACE)
    keys = keys_of(SPACE, 1, 6)
    first = node.reserve(one, keys.slice(0, 4))
    second = node.reserve(two, keys)
    assert second.outcomes == [Outcome.IN_PROGRESS] * 4 + [Outcome.GRANTED] * 2
    node.core.abort(one.number, first.attempt)
    node.core.check()
    answer = node.core.commit(two.number, second.attempt, [4], [1], True)
    node.core.check()
    assert [outcome for _, outcome, _ in answer.waiting].count(Outcome.GRANTED) == 4
    node.core.abort(two.number, second.attempt)
    node.core.check()
    assert node.resident(keys) == 0 and node.core.pool.chunk_count == 1
    assert node.core.pool.forest.orphans, "the one below the missing ones is an orphan"


def test_present_means_covered_by_any_geometry(node: SmallNode) -> None:
    session = node.open(SPACE)
    node.core.register_namespace(session.number, SPACE, HALVES, ())
    node.store(session, KEYS)
    for shard in (HALVES.shard(0), HALVES.shard(1)):
        assert node.reserve(session, KEYS, shard=shard).outcomes == [Outcome.PRESENT] * 4


def test_a_chunk_without_a_parent_is_not_stored(node: SmallNode) -> None:
    session = node.open(SPACE)
    answer = node.reserve(session, KEYS.slice(1, 4))
    assert answer.outcomes == [Outcome.REFUSED_PARENT_MISSING] * 3 and answer.attempt == 0
    assert not node.core.pool.forest.chunks and not node.core.stats()["used_bytes"]


def test_a_parent_of_another_namespace_is_none(node: SmallNode) -> None:
    other = namespace(revision="r2")
    session = node.open(SPACE)
    node.store(session, KEYS)
    node.core.register_namespace(session.number, other, Geometry.whole(SMALL), ())
    forged = Keys(other.id, KEYS[3], b"x" * 16, np.zeros(2, dtype=np.uint64), SMALL.chunk_tokens, SMALL.chunk_tokens)
    assert node.reserve(session, forged).outcomes == [Outcome.REFUSED_PARENT_MISSING]


@pytest.mark.parametrize("names", [[b"a", b"a"], [b"a", b"b", b"a"], [b"p"], [b"n"]])
def test_a_chain_that_bites_its_tail_is_refused(node: SmallNode, names: list[bytes]) -> None:
    """A chunk that was its own ancestor made the next walk below it endless."""
    session = node.open(SPACE)
    parent = b"p" * 16 if names == [b"p"] else SPACE.id
    blob = b"".join(SPACE.id if name == b"n" else name * 16 for name in names)
    prints = np.arange(len(names) + 1, dtype=np.uint64)
    chain = Keys(SPACE.id, parent, blob, prints, SMALL.chunk_tokens, SMALL.chunk_tokens)
    with pytest.raises(InvalidRequest):
        node.reserve(session, chain)
    node.core.check()
    assert not node.core.pool.forest.chunks


def test_a_commit_names_places_of_its_chain(node: SmallNode) -> None:
    session = node.open(SPACE)
    answer = node.reserve(session, KEYS)
    for indices in ([4], [-1]):
        with pytest.raises(LimitExceeded):
            node.core.commit(session.number, answer.attempt, indices, [1], False)
        node.core.check()
    assert node.commit(session, answer.attempt, [0, 0, 1], last=False) == [Outcome.COMMITTED] * 3, (
        "repeats are harmless"
    )
    assert node.commit(session, answer.attempt, [1, 2, 3]) == [Outcome.COMMITTED] * 3


def test_what_is_not_committed_is_given_back(node: SmallNode) -> None:
    session = node.open(SPACE)
    answer = node.reserve(session, KEYS)
    node.commit(session, answer.attempt, [0, 1])
    assert node.resident(KEYS) == 2 and node.core.stats()["used_bytes"] == 2 * 4096
    assert node.commit(session, answer.attempt, [2]) == [Outcome.REFUSED_STALE]


def test_removed_while_it_is_written(node: SmallNode) -> None:
    session, other = node.open(SPACE), node.open(SPACE)
    answer = node.reserve(session, KEYS)
    node.commit(session, answer.attempt, [0], last=False)
    assert node.core.remove(other.number, SPACE.id, [KEYS[0]]) == 1
    node.core.check()
    again = node.reserve(other, KEYS)
    assert again.outcomes == [Outcome.GRANTED] * 4
    assert not set(again.slots) & set(answer.slots[1:]), "the first writer may still write there"
    assert node.commit(session, answer.attempt, [1, 2, 3]) == [Outcome.REFUSED_STALE] * 3
    assert node.commit(other, again.attempt, [0, 1, 2, 3]) == [Outcome.COMMITTED] * 4
    assert node.resident(KEYS) == 4


def test_a_reservation_runs_out_into_quarantine(node: SmallNode) -> None:
    session, other = node.open(SPACE), node.open(SPACE)
    answer = node.reserve(session, KEYS)
    node.clock.now += LIFE_S
    node.core.tick()
    node.core.check()
    again = node.reserve(other, KEYS)
    assert again.outcomes == [Outcome.GRANTED] * 4 and not set(again.slots) & set(answer.slots)
    assert node.commit(session, answer.attempt, [0, 1, 2, 3]) == [Outcome.REFUSED_STALE] * 4
    assert session.writer.held_bytes == 4 * 4096
    node.core.abort(session.number, answer.attempt)  # the writer says that it has stopped
    node.core.check()
    assert session.writer.held_bytes == 0


def test_a_commit_after_the_end_is_refused_also_before_the_next_tick(node: SmallNode) -> None:
    session = node.open(SPACE)
    answer = node.reserve(session, KEYS)
    node.clock.now += LIFE_S
    assert node.commit(session, answer.attempt, [0]) == [Outcome.REFUSED_STALE]
    assert node.resident(KEYS) == 0


def test_renewal_keeps_a_reservation(node: SmallNode) -> None:
    session = node.open(SPACE)
    answer = node.reserve(session, KEYS)
    for _ in range(5):
        node.clock.now += LIFE_S - 1
        node.core.renew(session.number)
        node.core.tick()
        node.core.check()
    assert node.commit(session, answer.attempt, [0, 1, 2, 3]) == [Outcome.COMMITTED] * 4


def test_a_sessions_bytes_are_bounded() -> None:
    node = SmallNode(slots=16, settings=CoreSettings(session_share=0.5))
    session, other = node.open(SPACE), node.open(SPACE)
    keys = keys_of(SPACE, 1, 10)
    answer = node.reserve(session, keys)
    assert answer.outcomes == [Outcome.GRANTED] * 8 + [Outcome.REFUSED_SESSION_LIMIT] * 2
    node.clock.now += LIFE_S
    node.core.tick()
    assert node.reserve(session, keys).outcomes == [Outcome.REFUSED_SESSION_LIMIT] + [Outcome.REFUSED_SESSION_LIMIT] * 9
    assert node.reserve(other, keys_of(SPACE, 2, 8)).outcomes == [Outcome.GRANTED] * 8


def test_reservations_of_a_session_are_bounded(node: SmallNode, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attempts that only wait hold no bytes, so the bound on bytes never ended them."""
    monkeypatch.setattr(reservations, "ATTEMPTS_PER_SESSION", 5)
    writer, waiting = node.open(SPACE), node.open(SPACE)
    node.reserve(writer, KEYS.slice(0, 2))
    answers = [node.reserve(waiting, KEYS.slice(0, 2)) for _ in range(9)]
    assert len(waiting.writer.attempts) == 5
    assert [answer.outcomes[0] for answer in answers[4:6]] == [Outcome.IN_PROGRESS, Outcome.REFUSED_SESSION_LIMIT]
    node.core.abort(waiting.number, answers[0].attempt)
    node.core.check()
    assert node.reserve(waiting, KEYS.slice(0, 2)).outcomes == [Outcome.IN_PROGRESS] * 2


def test_collisions_are_refused_and_counted(node: SmallNode) -> None:
    session = node.open(SPACE)
    node.store(session, KEYS)
    assert KEYS.fingerprints is not None
    other_tokens = Keys(SPACE.id, KEYS.parent, KEYS.blob, KEYS.fingerprints + 1, 4, 4)
    assert node.reserve(session, other_tokens).outcomes[0] is Outcome.REFUSED_COLLISION
    other_parent = Keys(SPACE.id, SPACE.id, KEYS[2], KEYS.fingerprints[2:4], 4, 4)
    assert node.reserve(session, other_parent).outcomes == [Outcome.REFUSED_COLLISION]
    with pytest.raises(InvalidRequest, match="fingerprints"):
        node.reserve(session, Keys(SPACE.id, KEYS.parent, KEYS.blob, None, 4, 4))
    assert node.core.stats()["collisions"] >= 2


def test_shards_of_two_ranks_are_two_first_copies() -> None:
    node, wide = SmallNode(slots=16), namespace(WIDE)
    halves, keys = Geometry.parallel(WIDE, tp=2), keys_of(wide, 1, 2)
    one, two = node.open(wide, halves), node.open(wide, halves)
    first = node.reserve(one, keys, shard=halves.shard(0))
    second = node.reserve(two, keys, shard=halves.shard(1))
    assert first.outcomes == second.outcomes == [Outcome.GRANTED] * 2
    node.commit(one, first.attempt, [0, 1])
    assert node.resident(keys) == 0 and node.resident(keys, halves.rectangles[0]) == 2
    node.commit(two, second.attempt, [0, 1])
    assert node.resident(keys) == 2


def test_reserved_bytes_count_for_the_maximum_of_a_quota() -> None:
    quota = Quota("model", Bounds(0, 8 * UNIT_BYTES), Bounds())
    node = SmallNode(slots=64, settings=CoreSettings(session_share=0.5, quotas=(quota,)))
    other = Namespace("other", "r1", SMALL)
    others = keys_of(other, 9, 30)
    node.store(node.open(other), others)
    sessions = [node.open(namespace()) for _ in range(2)]
    first = node.reserve(sessions[0], keys_of(namespace(), 1, 8))
    assert node.reserve(sessions[1], keys_of(namespace(), 2, 8)).outcomes == [Outcome.REFUSED_QUOTA] * 8
    assert node.resident(others) == 30
    node.core.abort(sessions[0].number, first.attempt)
    assert node.reserve(sessions[1], keys_of(namespace(), 2, 8)).outcomes == [Outcome.GRANTED] * 8
    node.core.session_lost(sessions[1].number)
    node.core.check()
