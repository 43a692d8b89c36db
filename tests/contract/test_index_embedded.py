"""The index suite over `EmbeddedIndex`, and leases on a clock that the test moves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from kvstore.metadata import Applied
from kvstore.metadata.embedded import EmbeddedIndex
from tests.contract.index_suite import Copy, IndexSuite, Publisher, chain, contents, events


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


class TestEmbeddedIndex(IndexSuite):
    @pytest.fixture
    def control_address(self) -> str:
        return "127.0.0.1:7420"

    @pytest.fixture
    def index(self, clock: Clock) -> Iterator[EmbeddedIndex]:
        index = EmbeddedIndex(clock)
        yield index
        index.check()

    def test_a_silent_node_is_suspect_then_dead(
        self, index: EmbeddedIndex, one: Publisher, two: Publisher, clock: Clock
    ) -> None:
        index.publish(replace(one.batch(events(chain(5))), lease_ms=3000))
        index.publish(replace(two.batch(events(chain(2))), lease_ms=3000))
        clock.now_s += 2.9
        index.publish(replace(two.batch(), lease_ms=3000))
        assert not any(match.suspect for match in index.match(chain(5)))
        clock.now_s += 0.2
        assert [(m.node.node_id, m.suspect) for m in index.match(chain(5))] == [("node-2", False), ("node-1", True)]
        assert [(s.suspect, s.silent_ms) for s in index.nodes()] == [(True, 3100), (False, 200)]
        clock.now_s += 2.9
        assert self.runs(index, chain(5)) == [("node-2", 2)]
        assert len(index.nodes()) == 1

    def test_heartbeats_repeats_and_gaps_renew_the_lease(
        self, index: EmbeddedIndex, one: Publisher, clock: Clock
    ) -> None:
        first = one.batch(events(chain(2)))
        index.publish(first)
        gap = replace(one.batch(), first_sequence=99)
        for batch in (one.batch(), first, gap, replace(one.batch(), events=events(chain(3).slice(2, 3)))):
            clock.now_s += 60
            assert index.nodes()[0].suspect
            index.publish(batch)
            assert not index.nodes()[0].suspect
        assert self.runs(index, chain(3)) == [("node-1", 3)]

    def test_an_old_epoch_does_not_renew_the_lease(self, index: EmbeddedIndex, one: Publisher, clock: Clock) -> None:
        one.restarted().send()
        clock.now_s += 60
        one.send()
        assert index.nodes()[0].suspect

    def test_a_node_back_from_the_dead_is_asked_for_a_snapshot(
        self, index: EmbeddedIndex, one: Publisher, clock: Clock
    ) -> None:
        one.send(events(chain(2)))
        copy = Copy(index)
        clock.now_s += 120
        index.expire()
        assert copy.dropped[-1] == "node-1"
        assert one.send(events(chain(3).slice(2, 3))) == Applied(0, resync=True)
        one.send(events(chain(3)), snapshot=True)
        assert contents(copy.index) == contents(index)
        assert self.runs(copy.index, chain(3)) == [("node-1", 3)]
