"""Leases and pins alone: both end, both are bounded."""

from __future__ import annotations

import pytest

from kvstore.node import holds
from kvstore.node.chunks import Chunk, KnownNamespace
from kvstore.node.holds import Holds
from tests.unit.node.small_node import namespace


@pytest.fixture
def chunks() -> list[Chunk]:
    space = KnownNamespace(namespace(), 1)
    return [Chunk(bytes([n]) * 16, space.namespace.id, space, 4, None, None, 0.0) for n in range(1, 9)]


def test_a_lease_ends_once(chunks: list[Chunk]) -> None:
    table = Holds(1000)
    number = table.lease(5, chunks[0], 10.0)
    assert chunks[0].holds == 1
    table.check(chunks)
    for _ in range(2):
        table.end_lease(number)
        table.check(chunks)
    assert chunks[0].holds == 0


def test_leases_run_out_and_end_with_their_session(chunks: list[Chunk]) -> None:
    table = Holds(1000)
    table.lease(5, chunks[0], 10.0)
    table.lease(5, chunks[1], 20.0)
    table.lease(6, chunks[1], 20.0)
    table.expire(10.0)
    table.check(chunks)
    assert [chunk.holds for chunk in chunks[:2]] == [0, 2]
    table.end_session(5)
    table.check(chunks)
    assert chunks[1].holds == 1 and list(table.by_session) == [6]
    table.expire(20.0)
    assert not table.leases and not chunks[1].holds


def test_too_many_leases_of_a_session_are_no_failure(chunks: list[Chunk]) -> None:
    table = Holds(1000)
    numbers = [table.lease(5, chunks[0], 10.0) for _ in range(holds.LEASES_PER_SESSION + 3)]
    assert numbers[-3:] == [0, 0, 0] and numbers[-4] > 0
    assert table.lease(6, chunks[0], 10.0), "another session still gets one"
    table.check(chunks)


def test_pins_take_at_most_a_quarter_of_the_tier(chunks: list[Chunk]) -> None:
    table = Holds(1000)
    assert table.pin(b"t" * 16, chunks[:4], lambda _: 100, 60.0) == 2
    assert table.pinned_bytes == 200
    table.check(chunks)
    table.end_ticket(b"t" * 16)
    table.end_ticket(b"t" * 16)
    table.check(chunks)
    assert not table.pinned_bytes and not any(chunk.holds for chunk in chunks)


def test_a_pinned_chunk_that_grows_counts_with_its_new_size(chunks: list[Chunk]) -> None:
    """Each rank of a writer pins at its own commit; the pins of the first once stood for the shards of all."""
    table = Holds(1000)
    assert table.pin(b"t" * 16, chunks[:2], lambda _: 100, 60.0) == 0
    assert table.pin(b"t" * 16, chunks[:1], lambda _: 150, 60.0) == 0
    assert table.pinned_bytes == 250
    table.check(chunks)
    assert table.pin(b"t" * 16, chunks[1:2], lambda _: 200, 60.0) == 1, "it does not fit any more"
    assert table.pinned_bytes == 150 and chunks[1].holds == 0
    table.check(chunks)


def test_tickets_are_bounded(chunks: list[Chunk], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holds, "TICKETS", 3)
    table = Holds(1000)
    left_out = [table.pin(bytes([n]) * 16, chunks[:1], lambda _: 1, 60.0) for n in range(5)]
    assert left_out == [0, 0, 0, 1, 1]
    table.check(chunks)


def test_the_check_notices_a_hold_that_nobody_has(chunks: list[Chunk]) -> None:
    table = Holds(1000)
    chunks[0].holds += 1
    with pytest.raises(AssertionError, match="holds"):
        table.check(chunks)
