"""References that outlive what they name (A15, A17), look-ups that no fetch follows (C01), probes (C03)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.client import Cache, Client, connect
from kvstore.client.peers import Peer
from kvstore.errors import SessionLost
from kvstore.model.prefix import Keys
from kvstore.model.ticket import Ticket, TicketRank
from kvstore.model.values import MissReason, Outcome
from kvstore.node.lookup import CatalogReader
from kvstore.transport import Connection, ReadDescriptor, ReadStatus
from kvstore.transport.tcp import TcpConnection, TcpTransport
from tests.chaos.node_thread import NodeThread
from tests.unit.client.pages import LAYOUT, POISON, namespace, pages_of, poisoned, prompt
from tests.unit.client.test_remote_read import reader_of
from tests.unit.node.small_node import SMALL, SmallNode, keys_of
from tests.unit.node.small_node import namespace as small_namespace

SLOTS = 16
Q = 500
"""Prompts from here on refill what was evicted."""


@pytest.fixture
def node(tmp_path: Path) -> Iterator[NodeThread]:
    node = NodeThread(tmp_path, dram_bytes=SLOTS * (12 << 10), node_id="leases")
    yield node
    node.stop()


@pytest.fixture
def writer(node: NodeThread) -> Iterator[Cache]:
    with connect(node.info.socket_path) as client:
        yield client.bind(namespace())


def stored(writer: Cache, chunks: int) -> Keys:
    keys = writer.keys(prompt(1, 16 * chunks))
    assert writer.write(keys, pages_of(keys)).stored == chunks
    return keys


def refill(node: NodeThread, writer: Cache, seconds: float) -> None:
    """So much later, others have filled the whole node."""
    clock = node.core._clock
    node.core._clock = lambda: clock() + seconds
    node.call(node.core.tick)
    for number in range(Q, Q + 4):
        keys = writer.keys(prompt(number, 16 * 7))
        writer.write(keys, pages_of(keys))
    node.call(node.core.check)


def between(monkeypatch: pytest.MonkeyPatch, node: NodeThread, writer: Cache, seconds: float, lease_ms: int) -> None:
    """Between a remote read's Acquire and its first byte so much time passes, and the space is refilled."""
    take = Peer.take
    acquire = node.core.acquire
    monkeypatch.setattr(node.core, "acquire", lambda s, k, r, ms, **more: acquire(s, k, r, min(ms, lease_ms), **more))

    def late(peer: Peer, deadline_s: float) -> Connection:
        refill(node, writer, seconds)
        return take(peer, deadline_s)

    monkeypatch.setattr(Peer, "take", late)


@pytest.mark.parametrize("chunks", [1, 4])
def test_a17_remote_reads_after_the_lease_deliver_nothing(
    node: NodeThread, writer: Cache, monkeypatch: pytest.MonkeyPatch, chunks: int
) -> None:
    keys = stored(writer, chunks)
    between(monkeypatch, node, writer, seconds=0.6, lease_ms=500)
    with reader_of(node.info) as client:
        target = poisoned(writer, chunks)
        result = client.bind(namespace()).read(keys, target)
    assert (result.chunks, result.tokens) == (0, 0)
    assert (target == POISON).all(), "no byte reached the caller's memory"
    assert result.reason in (MissReason.FENCE, MissReason.ABSENT)


@pytest.mark.parametrize("chunks", [1, 4])
def test_a17_a_slow_read_within_its_lease_succeeds(
    node: NodeThread, writer: Cache, monkeypatch: pytest.MonkeyPatch, chunks: int
) -> None:
    """The lease of a read lasts as long as its deadline: others refill the node, but not these slots."""
    keys = stored(writer, chunks)
    between(monkeypatch, node, writer, seconds=2.0, lease_ms=60_000)
    with reader_of(node.info) as client:
        target = poisoned(writer, chunks)
        assert client.bind(namespace()).read(keys, target, deadline_s=5.0).chunks == chunks
    assert np.array_equal(target, pages_of(keys))
    assert node.call(node.core.stats)["leases"] == 0


class Slow:
    """A destination during whose first copy the node is refilled."""

    def __init__(self, cache: Cache, count: int, meanwhile: Callable[[], None]) -> None:
        self.target = poisoned(cache, count)
        self._meanwhile: Callable[[], None] | None = meanwhile

    def scatter(self, index: int, piece: Any, layer_start: int, head_start: int) -> None:
        meanwhile, self._meanwhile = self._meanwhile, None
        if meanwhile is not None:
            meanwhile()
        self.target[index] = piece


def same_host_read(node: NodeThread, writer: Cache, chunks: int) -> tuple[int, bool]:
    """(chunks delivered, all of them right), of a read whose slots are refilled in the middle of its copy."""
    keys = stored(writer, chunks)
    with connect(node.info.socket_path) as client:
        cache = client.bind(namespace())
        slow = Slow(cache, chunks, lambda: refill(node, writer, 0.6))
        done = cache.read(keys, slow).chunks
    return done, np.array_equal(slow.target[:done], pages_of(keys)[:done])


@pytest.mark.parametrize("chunks", [1, 4])
def test_a17_same_host_reads_of_refilled_slots_deliver_nothing(node: NodeThread, writer: Cache, chunks: int) -> None:
    assert same_host_read(node, writer, chunks) == (0, True)


def test_a17_the_test_above_can_fail(node: NodeThread, writer: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CatalogReader, "confirm", lambda reader, found: found.run)
    assert same_host_read(node, writer, 4) == (4, False)


# --- A15: a reader with references that it got a while ago ---------------------------------------------------


def pulled(node: NodeThread, slots: Sequence[int], generations: Sequence[int]) -> tuple[ReadStatus, list[bool], Any]:
    """Read these slots over tcp, as a reader does that keeps references: (status, fence held, payloads)."""
    connection: TcpConnection = TcpTransport().connect(node.info, 5.0)
    staging = np.full((len(slots), LAYOUT.chunk_bytes), POISON, dtype=np.uint8)
    descriptors = [
        ReadDescriptor(slot, slot * 4096, LAYOUT.chunk_bytes, i * LAYOUT.chunk_bytes) for i, slot in enumerate(slots)
    ]
    result = connection.read(descriptors, staging.reshape(-1), 5.0)
    connection.close()
    held = [word == wanted for word, wanted in zip(result.generations, generations, strict=False)]
    return result.status, held, staging


def test_a15_references_in_time_expired_refilled_used_twice_and_out_of_range(node: NodeThread, writer: Cache) -> None:
    keys = stored(writer, 8)
    right = pages_of(keys).reshape(8, -1)
    with reader_of(node.info) as client:
        peer = client.peer(node.info, 5.0)
        peer.register(namespace(), 5.0)
        answer = peer.api.acquire(keys, LAYOUT.whole, 1000, b"", 0, 5.0)
        slots, generations = [p.slot for p in answer.places], [p.generation for p in answer.places]

        status, held, payload = pulled(node, slots, generations)  # (a) in time
        assert status is ReadStatus.DONE and all(held) and np.array_equal(payload, right)

        clock = node.core._clock
        node.core._clock = lambda: clock() + 1.1
        node.call(node.core.tick)
        status, held, payload = pulled(node, slots, generations)  # (b) expired, but nobody has used the slots
        assert not all(held) or np.array_equal(payload, right)

        refill(node, writer, 0.0)
        for _ in range(2):  # (c) refilled for others, (d) and once more
            status, held, payload = pulled(node, slots, generations)
            assert status is ReadStatus.DONE
            wrong = [i for i in range(8) if not np.array_equal(payload[i], right[i])]
            assert wrong, "nothing was refilled: this test has lost its point"
            assert not any(held[i] for i in wrong), "bytes of others under a reference that still held"

        beyond = SLOTS * 3
        assert pulled(node, [beyond], [1])[0] is ReadStatus.REFUSED  # (e)
        assert pulled(node, [(1 << 32) - 1], [1])[0] is ReadStatus.REFUSED

        node.call(lambda: node.core.process_gone(peer.api.session))  # (f)
        with pytest.raises(SessionLost):
            peer.api.acquire(keys, LAYOUT.whole, 1000, b"", 0, 5.0)


def test_a15_a_ticket_that_ran_out_is_a_miss_not_another_prompt(node: NodeThread, writer: Cache) -> None:
    keys = writer.keys(prompt(1, 32))
    info = node.info
    ticket = Ticket(
        b"t" * 16, namespace().id, keys[0], keys[-1], 2, 16, (TicketRank(info.node_id, info.epoch, LAYOUT.whole),)
    )
    assert writer.write(keys, pages_of(keys), for_ticket=ticket).stored == 2
    with connect(info.socket_path) as client:
        cache = client.bind(namespace())
        refill(node, writer, 59.0)
        target = poisoned(cache, 2)
        assert cache.read(keys, target, ticket=ticket).chunks == 2
        assert np.array_equal(target, pages_of(keys))
        refill(node, writer, 2.0)
        refill(node, writer, 0.0)
        started = time.monotonic()
        assert cache.read(keys, target, ticket=ticket, deadline_s=1.0).chunks == 0
        assert time.monotonic() - started < 2.0
        cache.release(ticket)
        cache.release(ticket)
    node.call(node.core.check)


def test_a15_a_ticket_for_another_start_of_the_node_is_a_miss(node: NodeThread, writer: Cache) -> None:
    keys = stored(writer, 1)
    rank = TicketRank("no such node", 7, LAYOUT.whole)
    ticket = Ticket(b"t" * 16, namespace().id, keys[0], keys[0], 1, 16, (rank,))
    with Client(None, None, None) as client:
        result = client.bind(namespace()).read(keys, poisoned(writer, 1), ticket=ticket, deadline_s=1.0)
    assert (result.chunks, result.reason) == (0, MissReason.UNREACHABLE)


# --- C01, C03: look-ups that keep nothing --------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["aborted", "own copy used", "connection dropped", "client died"])
def test_c01_ten_thousand_look_ups_without_a_fetch(ending: str) -> None:
    node, space = SmallNode(slots=100), small_namespace()
    owner = node.open(space)
    for number in range(10):
        node.store(owner, keys_of(space, number, 10))
    chains = [keys_of(space, number, 10) for number in range(10)]
    for number in range(10_000):
        session = owner if ending in ("aborted", "own copy used") else node.open(space, shared=False)
        keys = chains[number % 10]
        lease = node.core.acquire(session.number, keys, SMALL.whole, 500 if ending != "own copy used" else 0).lease
        if ending == "aborted":
            node.core.release(session.number, [lease], [])
        elif ending == "connection dropped":
            node.core.session_lost(session.number)
        elif ending == "client died":
            node.clock.now += 0.5
            node.core.tick()
            node.core.process_gone(session.number)
    node.core.check()
    assert node.core.stats()["leases"] == 0 and len(node.core.sessions) == 1
    assert sum(chunk.holds for chunk in node.core.pool.forest.chunks.values()) == 0
    for number in range(100, 110):
        assert set(node.store(owner, keys_of(space, number, 10))) == {Outcome.COMMITTED}


def test_c03_probes_renew_nothing() -> None:
    """Ten clients probe all keys again and again while 50 new pages are put."""
    node, space = SmallNode(slots=100), small_namespace()
    owner = node.open(space)
    chains = [keys_of(space, number, 10) for number in range(10)]
    for keys in chains:
        node.store(owner, keys)
    probing = [node.open(space, shared=False) for _ in range(10)]
    stored_new = 0
    for number in range(100, 150):
        node.clock.now += 0.2
        node.core.tick()
        for session in probing:
            for keys in chains:
                node.core.acquire(session.number, keys, SMALL.whole, 0)
                node.reader.find(keys, SMALL.whole)
        stored_new += node.store(owner, keys_of(space, number, 1)) == [Outcome.COMMITTED]
    assert stored_new == 50 and not node.core.stats()["leases"]
