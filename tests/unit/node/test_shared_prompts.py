"""Writers that share a prompt: each stores some of its chunks, in any order; `check()` after every step."""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest

from kvstore.errors import InvalidRequest
from kvstore.metadata import EventKind
from kvstore.model.values import Outcome
from kvstore.node.core import CoreSettings
from kvstore.node.tier import UNCOVERED_GRACE_S
from tests.unit.node.small_node import SMALL, SmallNode, keys_of, namespace

SPACE = namespace()
KEYS = keys_of(SPACE, 1, 6)
EVEN, ODD = [0, 2, 4], [1, 3, 5]
GRANTED, LEFT, PRESENT = Outcome.GRANTED, Outcome.LEFT_TO_OTHERS, Outcome.PRESENT


@pytest.fixture
def node() -> SmallNode:
    return SmallNode()


def told(node: SmallNode) -> list[bytes]:
    """Keys that the index was told, in order."""
    (batch,) = node.core.news.take_batch(0, 100, resync=False, lease_ms=1000)
    assert all(event.kind is EventKind.PUBLISH for event in batch.events)
    return [event.key for event in batch.events]


@pytest.mark.parametrize("seed", range(20))
def test_a12_two_writers_in_any_order_make_one_prefix(node: SmallNode, seed: int) -> None:
    """Reserves and single commits of both come in a random order. What readers find is always a prefix, the index
    hears of parents first."""
    rng = random.Random(seed)
    sessions = [node.open(SPACE), node.open(SPACE)]
    places, attempts = [list(EVEN), list(ODD)], [0, 0]
    committed: set[int] = set()
    while any(places):
        writer = rng.choice([number for number in (0, 1) if places[number]])
        if not attempts[writer]:
            answer = node.reserve(sessions[writer], KEYS, wanted=places[writer])
            expected = [GRANTED if i in places[writer] else PRESENT if i in committed else LEFT for i in range(6)]
            assert answer.outcomes == expected
            attempts[writer] = answer.attempt
            for index in places[writer]:
                node.fill(answer.slots[index], index)
            continue
        index = places[writer].pop(0)
        outcomes = node.commit(sessions[writer], attempts[writer], [index], last=not places[writer])
        assert outcomes == [Outcome.COMMITTED]
        committed.add(index)
        run = next(i for i in range(7) if i not in committed)
        assert node.tags(KEYS) == list(range(run))
        assert told(node) == list(KEYS)[:run]
        acquired = node.core.acquire(sessions[0].number, KEYS, SMALL.whole, 0)
        assert acquired.run == run
    assert node.core.stats()["commits"] == 6 and not node.core.reservations.attempts


def test_a_writer_gets_what_it_wants_and_nothing_else(node: SmallNode) -> None:
    """Also where another one gave it up: this writer has no source for it."""
    one, two = node.open(SPACE), node.open(SPACE)
    first = node.reserve(one, KEYS)
    second = node.reserve(two, KEYS, wanted=ODD)
    assert second.outcomes == [LEFT, Outcome.IN_PROGRESS] * 3
    node.core.abort(one.number, first.attempt)
    answer = node.core.commit(two.number, second.attempt, [], [], True)
    node.core.check()
    assert [(index, outcome) for index, outcome, _ in answer.waiting] == [(index, GRANTED) for index in ODD]
    assert node.commit(two, second.attempt, ODD) == [Outcome.COMMITTED] * 3
    assert node.reserve(one, KEYS).outcomes == [GRANTED, PRESENT] * 3


def test_one_copy_where_both_want_the_same(node: SmallNode) -> None:
    one, two = node.open(SPACE), node.open(SPACE)
    first = node.reserve(one, KEYS, wanted=EVEN)
    second = node.reserve(two, KEYS, wanted=EVEN)
    assert second.outcomes == [Outcome.IN_PROGRESS, LEFT] * 3
    node.commit(one, first.attempt, EVEN)
    answer = node.core.commit(two.number, second.attempt, [], [], True)
    assert answer.waiting == [(index, PRESENT, 0) for index in EVEN]
    assert node.core.stats()["commits"] == 3


def test_a_refused_parent_refuses_what_hangs_on_it() -> None:
    """Only a parent that is left to others may come later; one that this writer did not get does not."""
    node = SmallNode(settings=CoreSettings(session_share=2 / 16))
    one = node.open(SPACE)
    answer = node.reserve(one, KEYS, wanted=[1, 2, 3, 5])
    limit = Outcome.REFUSED_SESSION_LIMIT
    assert answer.outcomes == [LEFT, GRANTED, GRANTED, limit, LEFT, limit]
    node.core.abort(one.number, answer.attempt)
    node.store(one, KEYS.slice(0, 1))
    assert KEYS.fingerprints is not None
    other_tokens = dataclasses.replace(KEYS, fingerprints=KEYS.fingerprints ^ 0xFF00)
    outcomes = node.reserve(one, other_tokens, wanted=ODD).outcomes
    assert outcomes[:2] == [Outcome.REFUSED_COLLISION, Outcome.REFUSED_PARENT_MISSING]


def test_what_waits_for_its_parent_has_a_minute(node: SmallNode) -> None:
    """In a full pool orphans go first; those whose parent another writer was to store, only when it did not come."""
    node = SmallNode(slots=6)
    one = node.open(SPACE)
    waiting, old = keys_of(SPACE, 1, 4), keys_of(SPACE, 2, 4)
    node.store(one, old)
    begun = node.reserve(one, waiting, wanted=[1, 3])
    node.commit(one, begun.attempt, [1, 3])
    chunks = node.core.pool.forest.chunks
    node.clock.now += UNCOVERED_GRACE_S - 1
    node.store(one, keys_of(SPACE, 3, 1))
    assert waiting[1] in chunks and waiting[3] in chunks and node.resident(old) == 3
    node.clock.now += 2
    node.store(one, keys_of(SPACE, 4, 2))
    assert waiting[1] not in chunks and waiting[3] not in chunks and node.resident(old) == 3


def test_the_writer_of_the_parents_pushes_out_none_of_the_others(node: SmallNode) -> None:
    node = SmallNode(slots=6)
    one, two = node.open(SPACE), node.open(SPACE)
    begun = node.reserve(one, KEYS, wanted=ODD)
    node.commit(one, begun.attempt, ODD)
    node.clock.now += 2 * UNCOVERED_GRACE_S
    begun = node.reserve(two, KEYS, wanted=EVEN)
    assert begun.outcomes == [GRANTED, PRESENT] * 3
    node.commit(two, begun.attempt, EVEN)
    assert node.resident(KEYS) == 6


def test_depths_are_those_of_the_prompt(node: SmallNode) -> None:
    """Eviction orders by them, and for a chunk without its parent only the chain knows."""
    one = node.open(SPACE)
    node.reserve(one, KEYS, wanted=ODD)
    chunks = node.core.pool.forest.chunks
    assert [chunks[KEYS[i]].depth for i in ODD] == ODD
    node.reserve(one, KEYS, wanted=EVEN)
    assert [chunks[key].depth for key in KEYS] == list(range(6))


@pytest.mark.parametrize("wanted", [[6], [0, 6], [-1]])
def test_wanted_places_lie_in_the_chain(node: SmallNode, wanted: list[int]) -> None:
    one = node.open(SPACE)
    with pytest.raises(InvalidRequest, match="6 keys"):
        node.reserve(one, KEYS, wanted=wanted)
    assert not node.core.pool.forest.chunks


def test_three_turns(node: SmallNode) -> None:
    sessions = [node.open(SPACE) for _ in range(3)]
    for order in itertools.permutations(range(3)):
        keys = keys_of(SPACE, 10 + order[0] * 3 + order[1], 5)
        for turn in order:
            places = list(range(turn, 5, 3))
            begun = node.reserve(sessions[turn], keys, wanted=places)
            node.commit(sessions[turn], begun.attempt, places)
        assert node.resident(keys) == 5
