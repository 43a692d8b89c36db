"""Side objects through the public surface: on the own host, from another host, all or nothing with the chunks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvstore.client import Cache, Client, HandoffResult, SideResult, connect
from kvstore.errors import (
    DeadlineExceeded,
    InvalidRequest,
    KvStoreError,
    LimitExceeded,
    SessionLost,
    StaleReference,
    Unreachable,
)
from kvstore.metadata import NodeStatus
from kvstore.metadata.embedded import EmbeddedIndex
from kvstore.model.side_object import SideObject
from kvstore.model.ticket import TicketRank
from kvstore.model.values import MissReason, NodeInfo
from tests.chaos.node_thread import NodeThread
from tests.unit.client.pages import LAYOUT, POISON, namespace, pages_of, poisoned, prompt
from tests.unit.client.side_objects import BOTH, HIDDEN, LOGITS, patience, same, ticket_of


class Listed(EmbeddedIndex):
    """An index that knows where these nodes are, and nothing else."""

    def __init__(self, *infos: NodeInfo) -> None:
        super().__init__()
        self._infos = infos

    def nodes(self) -> list[NodeStatus]:
        return [NodeStatus(info, False, 0, 0, 0) for info in self._infos]


@dataclass
class Handoff:
    """A prefill worker on `node`, and the decode worker's cache, there or elsewhere."""

    node: NodeThread
    writer: Cache
    reader: Cache

    def __post_init__(self) -> None:
        self.keys = self.writer.keys(prompt(1, 48))
        self.ticket = ticket_of(self.keys, self.node.info)

    def write(self) -> None:
        assert self.writer.write(self.keys, pages_of(self.keys), for_ticket=self.ticket).stored == 3

    def put(self) -> None:
        assert self.writer.put_side_objects(self.ticket, BOTH, keys=self.keys) == 60.0

    def read(self, **more: Any) -> HandoffResult:
        """Read the whole handoff; the pages are right as far as it says."""
        target = poisoned(self.reader, 3)
        result = self.reader.read_handoff(self.ticket, self.keys, target, **more)
        assert np.array_equal(target[: result.read.chunks], pages_of(self.keys)[: result.read.chunks])
        assert (target[result.read.chunks :] == POISON).all()
        return result

    def change(self, change: Callable[[SideObject], SideObject]) -> None:
        """What the node keeps as `hidden` becomes something else."""

        def work() -> None:
            kept = self.node.core.side_objects._handoffs[self.ticket.id].objects
            kept["hidden"] = change(kept["hidden"])

        self.node.call(work)

    def figure(self, name: str) -> int:
        return self.node.call(self.node.core.stats).get(name, 0)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    patience(monkeypatch, 20)


def watch_looks(node: NodeThread) -> threading.Semaphore:
    """Released whenever the node looks for side objects: then the call is under way."""
    looked, real = threading.Semaphore(0), node.core.side_objects.look

    def look(*arguments: Any) -> Any:
        looked.release()
        return real(*arguments)

    node.core.side_objects.look = look  # type: ignore[method-assign]
    return looked


@pytest.fixture
def node(tmp_path: Path) -> Iterator[NodeThread]:
    node = NodeThread(tmp_path, node_id="prefill")
    yield node
    node.call(node.core.check)
    node.stop()


@pytest.fixture(params=["own host", "other host"])
def handoff(request: pytest.FixtureRequest, node: NodeThread) -> Iterator[Handoff]:
    with connect(node.info.socket_path) as writing:
        if request.param == "own host":
            reading = connect(node.info.socket_path)
        else:
            reading = Client(None, None, Listed(node.info), staging_bytes=1 << 20)
        with reading:
            yield Handoff(node, writing.bind(namespace()), reading.bind(namespace()))


# --- the whole handoff ---------------------------------------------------------------------------------------


def test_chunks_and_objects_come_together(handoff: Handoff) -> None:
    handoff.write()
    handoff.put()
    for _ in range(2):
        found = handoff.read()
        assert found.reason is None and found.read.chunks == 3 and same(found, BOTH)
    assert same(handoff.reader.read_side_objects(handoff.ticket, names=["logits"]), {"logits": LOGITS})
    assert same(handoff.reader.read_side_objects(handoff.ticket, rank=0), BOTH)


def test_release_ends_the_objects(handoff: Handoff) -> None:
    handoff.write()
    handoff.put()
    handoff.reader.release(handoff.ticket)
    assert handoff.figure("side_tickets") == handoff.figure("side_bytes") == handoff.figure("tickets") == 0
    found = handoff.read()
    assert (found.read.chunks, found.objects, found.reason) == (3, {}, MissReason.ABSENT)


def test_a_removed_chunk_takes_the_objects_with_it(handoff: Handoff) -> None:
    handoff.write()
    handoff.put()
    assert handoff.writer.remove(handoff.keys.slice(2, 3)) == 1
    found = handoff.reader.read_side_objects(handoff.ticket)
    assert (found.objects, found.reason) == ({}, MissReason.CHUNK_MISSING)
    both = handoff.read()
    assert (both.read.chunks, both.objects, both.reason) == (2, {}, both.read.reason)
    assert both.reason is not None
    assert handoff.figure("side_miss_chunk_missing") == 1


def test_objects_without_their_chunks_are_none(handoff: Handoff) -> None:
    handoff.put()
    found = handoff.read(deadline_s=2.0)
    assert (found.read.chunks, found.objects) == (0, {}) and found.reason is found.read.reason is not None


@pytest.mark.parametrize(
    "change",
    [
        lambda each: replace(each, data=bytes([each.data[0] ^ 1]) + each.data[1:]),
        lambda each: replace(each, data=each.data[:-1] + bytes([each.data[-1] ^ 0x80])),
        lambda each: replace(each, shape=each.shape[::-1]),
        lambda each: replace(each, dtype="int32"),
        lambda each: SideObject.made_for(b"u" * 16, each.name, each.dtype, each.shape, each.data),
    ],
    ids=["first byte", "last byte", "shape", "dtype", "another ticket's"],
)
def test_one_flipped_byte_is_a_miss_of_all(handoff: Handoff, change: Callable[[SideObject], SideObject]) -> None:
    handoff.write()
    handoff.put()
    handoff.change(change)
    found = handoff.read()
    assert (found.read.chunks, found.objects, found.reason) == (3, {}, MissReason.CHECKSUM)
    assert handoff.reader._nodes.stats()["side_misses_checksum"] == 1


def test_objects_outlive_the_worker_that_wrote_them(handoff: Handoff) -> None:
    handoff.write()
    handoff.put()
    handoff.writer._nodes.close()
    assert same(handoff.read(), BOTH)


def test_a_reader_waits_for_objects_that_are_still_coming(handoff: Handoff, monkeypatch: pytest.MonkeyPatch) -> None:
    patience(monkeypatch, 9000)
    handoff.write()
    looked = watch_looks(handoff.node)
    found: list[SideResult] = []
    reading = threading.Thread(target=lambda: found.append(handoff.reader.read_side_objects(handoff.ticket)))
    reading.start()
    assert looked.acquire(timeout=10.0)
    handoff.put()
    reading.join(10.0)
    assert same(found[0], BOTH)


def test_b03_readers_hear_at_once_that_the_writer_gave_up(handoff: Handoff, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight readers wait for a prefill that is given up; eight new handoffs succeed right after it."""
    patience(monkeypatch, 9000)
    handoff.put()
    looked = watch_looks(handoff.node)
    found: list[SideResult] = []
    readers = [
        threading.Thread(target=lambda: found.append(handoff.reader.read_side_objects(handoff.ticket, deadline_s=60.0)))
        for _ in range(8)
    ]
    for reader in readers:
        reader.start()
    for _ in readers:
        assert looked.acquire(timeout=10.0)
    handoff.writer.drop_ticket(handoff.ticket)
    for reader in readers:
        reader.join(10.0)
    assert [each.reason for each in found] == [MissReason.DROPPED] * 8
    with pytest.raises(StaleReference, match="new ticket"):
        handoff.put()
    handoff.write()
    for number in range(8):
        handoff.ticket = replace(handoff.ticket, id=bytes([number]) * 16)
        handoff.put()
        assert same(handoff.read(), BOTH)


def test_an_idle_session_that_ended_is_opened_again(handoff: Handoff) -> None:
    handoff.write()
    handoff.put()
    assert same(handoff.read(), BOTH)
    for number in [each.number for each in handoff.node.core.sessions.values() if not each.shared]:
        handoff.node.call(lambda number=number: handoff.node.core.process_gone(number))  # type: ignore[misc]
    assert same(handoff.reader.read_side_objects(handoff.ticket), BOTH)


# --- failures are reasons ------------------------------------------------------------------------------------


def test_a_node_that_is_gone_is_a_reason(handoff: Handoff) -> None:
    handoff.ticket = replace(handoff.ticket, ranks=(TicketRank("gone", 3, LAYOUT.whole),))
    assert handoff.reader.read_side_objects(handoff.ticket).reason is MissReason.UNREACHABLE
    here = ticket_of(handoff.keys, handoff.node.info).ranks
    both = replace(handoff.ticket, ranks=here + handoff.ticket.ranks)
    assert handoff.reader.read_side_objects(both).reason is MissReason.UNREACHABLE, "it may have them"
    nowhere = replace(handoff.ticket, ranks=())
    assert handoff.reader.read_side_objects(nowhere).reason is MissReason.ABSENT
    handoff.writer.drop_ticket(handoff.ticket)
    assert handoff.writer._nodes.stats()["drops_not_told"] == 1


def test_a_deadline_that_has_passed_is_a_reason(handoff: Handoff) -> None:
    handoff.write()
    handoff.put()
    assert handoff.reader.read_side_objects(handoff.ticket, deadline_s=0.0).reason is MissReason.DEADLINE
    assert handoff.read(deadline_s=0.0).objects == {}


def test_a_closed_client_misses(handoff: Handoff) -> None:
    handoff.write()
    handoff.put()
    handoff.reader._nodes.close()
    assert handoff.reader.read_side_objects(handoff.ticket).reason is MissReason.SESSION_LOST
    assert handoff.read().reason is MissReason.SESSION_LOST
    with pytest.raises(InvalidRequest, match="closed"):
        handoff.reader.drop_ticket(handoff.ticket)


def test_a_rank_that_the_ticket_lacks_is_refused(handoff: Handoff) -> None:
    for rank in (-1, 1):
        with pytest.raises(InvalidRequest, match="1 ranks"):
            handoff.reader.read_side_objects(handoff.ticket, rank=rank)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (KvStoreError("odd"), MissReason.UNREACHABLE),
        (Unreachable("no"), MissReason.UNREACHABLE),
        (DeadlineExceeded("late"), MissReason.DEADLINE),
        (SessionLost("again"), MissReason.SESSION_LOST),
    ],
)
def test_errors_of_the_other_side_are_reasons(
    handoff: Handoff, monkeypatch: pytest.MonkeyPatch, error: KvStoreError, reason: MissReason
) -> None:
    def fail(*_: object) -> SideResult:
        raise error

    from kvstore.node.remote import RemoteNode

    monkeypatch.setattr(RemoteNode, "get_side_objects", fail)
    assert handoff.reader.read_side_objects(handoff.ticket).reason is reason


def test_chunks_and_objects_have_one_deadline(handoff: Handoff, monkeypatch: pytest.MonkeyPatch) -> None:
    handoff.write()
    handoff.put()
    late_s = 0.0
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + late_s)
    monkeypatch.setattr("kvstore.client.cache.time", clock)

    class Slow:
        def scatter(self, index: int, piece: object, layer_start: int, head_start: int) -> None:
            nonlocal late_s
            late_s = 60.0

    found = handoff.reader.read_handoff(handoff.ticket, handoff.keys, Slow())
    assert (found.read.chunks, found.objects, found.reason) == (3, {}, MissReason.DEADLINE)


# --- several nodes -------------------------------------------------------------------------------------------


@pytest.fixture
def far(tmp_path: Path) -> Iterator[NodeThread]:
    far = NodeThread(tmp_path, node_id="far")
    yield far
    far.stop()


def test_the_last_ranks_node_is_waited_for_and_the_others_are_asked_after_it(
    node: NodeThread, far: NodeThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvstore.node.remote import RemoteNode

    asked: list[tuple[str, int]] = []
    real = RemoteNode.get_side_objects

    def ask(self: RemoteNode, ticket_id: bytes, names: Any, wait_ms: int, deadline_s: float) -> Any:
        asked.append((self._channel.address, wait_ms))
        return real(self, ticket_id, names, wait_ms, deadline_s)

    monkeypatch.setattr(RemoteNode, "get_side_objects", ask)
    with connect(node.info.socket_path) as near_client, connect(far.info.socket_path) as far_client:
        near_client._index = Listed(node.info, far.info)
        near, distant = near_client.bind(namespace()), far_client.bind(namespace())
        keys = near.keys(prompt(1, 48))
        ticket = ticket_of(keys, node.info, far.info, far.info)
        assert near.read_side_objects(ticket).reason is MissReason.ABSENT
        assert asked == [(far.info.control_address, 20), (node.info.control_address, 0)]
        for cache in (near, distant):
            assert cache.write(keys, pages_of(keys), for_ticket=ticket).stored == 3
        near.put_side_objects(ticket, {"first": LOGITS}, keys=keys)
        assert same(near.read_side_objects(ticket), {"first": LOGITS})
        distant.put_side_objects(ticket, {"last": HIDDEN}, keys=keys)
        assert same(near.read_side_objects(ticket), {"last": HIDDEN})
        assert same(near.read_side_objects(ticket, names=["first"]), {"first": LOGITS})
        assert same(near.read_side_objects(ticket, rank=0), {"first": LOGITS})
        distant.release(ticket)
        gone = replace(ticket, ranks=ticket.ranks[1:])
        near.drop_ticket(gone)
        assert near.read_side_objects(ticket).reason is MissReason.DROPPED, "what is left of it elsewhere is of no use"
        near.drop_ticket(ticket)
        for rank in (0, 1):
            assert near.read_side_objects(ticket, rank=rank).reason is MissReason.DROPPED
        near.release(ticket)
        for each in (node, far):
            assert each.call(each.core.stats)["side_tickets"] == 0


def test_a_writer_without_shared_memory_puts_by_grpc(node: NodeThread) -> None:
    with connect(node.info.control_address, transport="tcp") as client:
        cache = client.bind(namespace())
        keys = cache.keys(prompt(1, 48))
        ticket = ticket_of(keys, node.info)
        cache.put_side_objects(ticket, BOTH, keys=keys)
        assert cache.write(keys, pages_of(keys)).visible == 3
        assert same(cache.read_handoff(ticket, keys, poisoned(cache, 3)), BOTH)


def test_without_a_node_there_is_nowhere_to_put() -> None:
    with Client(None, None, None) as client:
        cache = client.bind(namespace())
        keys = cache.keys(prompt(1, 16))
        with pytest.raises(Unreachable, match="no node on this host"):
            cache.put_side_objects(ticket_of(keys), BOTH, keys=keys)


@pytest.mark.slow
def test_the_most_that_a_ticket_may_have_travels_by_grpc(node: NodeThread) -> None:
    """16 MiB: too much for the session's socket, and close to the largest message."""
    with connect(node.info.socket_path) as client:
        cache = client.bind(namespace())
        keys = cache.keys(prompt(1, 16))
        ticket = ticket_of(keys, node.info)
        cache.write(keys, pages_of(keys), for_ticket=ticket)
        large = {"x": np.random.default_rng(3).integers(0, 256, 16 << 20, dtype=np.uint8)}
        cache.put_side_objects(ticket, large, keys=keys)
        assert same(cache.read_side_objects(ticket), large)
        with pytest.raises(LimitExceeded, match="16777217"):
            cache.put_side_objects(ticket, {"y": np.zeros(1, dtype=np.uint8)}, keys=keys)
