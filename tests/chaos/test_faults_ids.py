"""Ids that nobody gave out, given out twice, and messages that make no sense (B17): bounded memory, normal errors."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from kvstore.client import connect
from kvstore.errors import KvStoreError, SessionLost
from kvstore.model.layout import Geometry
from kvstore.model.prefix import Keys
from kvstore.node.core import NodeCore
from kvstore.rpc.v1 import node_pb2
from kvstore.rpc.v1.node_pb2_grpc import NodeServiceStub
from tests.chaos.node_thread import NodeThread
from tests.unit.node.small_node import SMALL, SmallNode, keys_of, namespace

SPACE = namespace()
SHARD = Geometry.whole(SMALL).shard(0)
NORMAL = {
    grpc.StatusCode.OK,
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.PERMISSION_DENIED,
}


def sizes(core: NodeCore) -> dict[str, int]:
    """Entries of every table that a call could grow."""
    pool, holds, sessions = core.pool, core.holds, core.sessions.values()
    return {
        "sessions": len(core.sessions),
        "attempts": len(core.reservations.attempts),
        "of sessions": sum(len(s.writer.attempts) + len(s.writer.quarantined) for s in sessions),
        "leases": len(holds.leases) + sum(map(len, holds.by_session.values())) + len(holds.by_session),
        "tickets": len(holds.tickets),
        "chunks": len(pool.forest) + len(pool.forest.orphans) + len(pool.forest.uncovered),
        "spaces": len(pool.spaces),
        "entries": pool.catalog.claimed_count,
        "counts": len(pool.counts),
    }


@pytest.mark.slow
def test_b17_a_hundred_thousand_made_up_ids_leave_nothing() -> None:
    node = SmallNode(slots=64)
    session = node.open(SPACE)
    keys = keys_of(SPACE, 1, 3)
    node.store(session, keys)
    node.core.acquire(session.number, keys, SMALL.whole, 0)
    before, rng = sizes(node.core), random.Random(4)
    for _ in range(20_000):
        unknown = rng.getrandbits(64)
        for call in (
            lambda n=unknown: node.core.commit(n, n, [0], [0], True),
            lambda n=unknown: node.core.release(n, [n], [n.to_bytes(16, "little")]),
        ):
            with pytest.raises(SessionLost):
                call()
        assert node.core.commit(session.number, unknown, [0], [0], True).waiting == []
        node.core.abort(session.number, unknown)
        node.core.release(session.number, [unknown], [unknown.to_bytes(16, "little")])
        node.core.session_lost(unknown)
        node.core.process_gone(unknown)
    node.core.check()
    assert sizes(node.core) == before


def test_b17_an_attempt_that_is_named_twice_is_a_normal_answer() -> None:
    node = SmallNode()
    session = node.open(SPACE)
    keys = keys_of(SPACE, 1, 2)
    answer = node.reserve(session, keys)
    for _ in range(2):
        node.commit(session, answer.attempt, [0, 1])
        node.core.abort(session.number, answer.attempt)
        node.core.check()
    assert node.resident(keys) == 2


def test_b17_look_ups_of_unknown_keys_make_no_entries() -> None:
    node, rng = SmallNode(), random.Random(5)
    session = node.open(SPACE)
    before = sizes(node.core)
    for _ in range(2000):
        keys = Keys(SPACE.id, SPACE.id, rng.randbytes(16 * 8), None, 4, 4)
        assert node.core.acquire(session.number, keys, SMALL.whole, 500).run == 0
        node.core.touch(session.number, list(keys))
        node.core.remove(session.number, SPACE.id, list(keys))
        orphans = Keys(SPACE.id, rng.randbytes(16), keys.blob, np.zeros(9, dtype=np.uint64), 4, 4)
        assert node.core.reserve(session.number, orphans, SHARD, b"").attempt == 0
    node.core.check()
    assert {**sizes(node.core), "counts": 0} == {**before, "counts": 0}


# --- over gRPC -----------------------------------------------------------------------------------------------


@pytest.fixture
def node(tmp_path: Path) -> Iterator[NodeThread]:
    node = NodeThread(tmp_path, dram_bytes=1 << 20, node_id="ids")
    yield node
    node.stop()


@pytest.fixture
def stub(node: NodeThread) -> Iterator[Any]:
    channel = grpc.insecure_channel(node.info.control_address)
    grpc.channel_ready_future(channel).result(20)
    make: Any = NodeServiceStub
    yield make(channel)
    channel.close()


def status(call: Any, request: Any) -> grpc.StatusCode:
    try:
        call(request, timeout=10.0)
    except grpc.RpcError as exc:
        code: grpc.StatusCode = exc.code()
        return code
    return grpc.StatusCode.OK


class Fuzz:
    """Requests with fields that are right now and then, and anything else otherwise."""

    def __init__(self, seed: int, session: int) -> None:
        self.rng = random.Random(seed)
        self.session = session

    def number(self, right: int, bits: int = 64) -> int:
        return self.rng.choice([right, right, 0, self.rng.getrandbits(bits), (1 << bits) - 1])

    def blob(self, right: bytes) -> bytes:
        size = self.rng.choice([0, 1, 15, 16, 17, 32, 160, 4096])
        return self.rng.choice([right, right, right, self.rng.randbytes(size)])

    def chain(self) -> node_pb2.Chain:
        return node_pb2.Chain(
            namespace_id=self.blob(SPACE.id),
            parent_key=self.blob(SPACE.id),
            keys=self.blob(self.rng.choice([b"k" * 32, self.rng.randbytes(16) * 2, self.rng.randbytes(48)])),
            fingerprints=[self.rng.getrandbits(64) for _ in range(self.rng.choice([0, 0, 1, 3, 4]))],
            last_tokens=self.number(4, 32),
        )

    def rectangle(self) -> node_pb2.Rectangle:
        return node_pb2.Rectangle(
            **{
                name: self.number(right, 32)
                for name, right in (("layer_start", 0), ("layer_stop", 2), ("head_start", 0), ("head_stop", 2))
            }
        )

    def request(self, name: str) -> Any:
        rng, session = self.rng, self.number(self.session)
        few = [self.number(0, 32) for _ in range(rng.choice([0, 1, 2, 5]))]
        if name == "RegisterNamespace":
            geometry = [self.rectangle() for _ in range(rng.choice([0, 1, 2, 300]))]
            return node_pb2.RegisterNamespaceRequest(
                session=session, namespace=self.blob(SPACE.canonical), geometry=geometry, written_here=few
            )
        if name == "Reserve":
            return node_pb2.ReserveRequest(
                session=session, chain=self.chain(), shard=self.number(SHARD, 32), ticket_id=self.blob(b"t" * 16)
            )
        if name == "Commit":
            hashes = [rng.getrandbits(64) for _ in range(rng.choice([len(few), len(few), 3]))]
            return node_pb2.CommitRequest(
                session=session, attempt=rng.getrandbits(64), indices=few, table_hashes=hashes, last=rng.random() < 0.5
            )
        if name == "Abort":
            return node_pb2.AbortRequest(session=session, attempt=rng.getrandbits(64))
        if name == "Acquire":
            return node_pb2.AcquireRequest(
                session=session,
                chain=self.chain(),
                rectangle=self.rectangle(),
                lease_ms=self.number(100, 32),
                ticket_id=b"",
                wait_ms=1,
            )
        if name == "Release":
            return node_pb2.ReleaseRequest(session=session, leases=few, ticket_ids=self.blob(b"t" * 16))
        return node_pb2.RemoveRequest(session=session, namespace_id=self.blob(SPACE.id), keys=self.blob(b"k" * 16))


@pytest.mark.slow
def test_b17_malformed_fields_are_normal_errors_and_the_service_goes_on(node: NodeThread, stub: Any) -> None:
    client = connect(node.info.socket_path)  # a session that may reserve
    session = node.call(lambda: next(iter(node.core.sessions)))
    stub.RegisterNamespace(
        node_pb2.RegisterNamespaceRequest(
            session=session,
            namespace=SPACE.canonical,
            geometry=[node_pb2.Rectangle(layer_stop=2, head_stop=2)],
        ),
        timeout=10.0,
    )
    fuzz, seen = Fuzz(6, session), Counter[grpc.StatusCode]()
    names = ("RegisterNamespace", "Reserve", "Commit", "Abort", "Acquire", "Release", "Remove")
    for number in range(3000):
        name = names[number % len(names)]
        seen[status(getattr(stub, name), fuzz.request(name))] += 1
        if number % 300 == 0:
            node.call(node.core.check)
    assert set(seen) <= NORMAL, seen
    assert seen[grpc.StatusCode.OK] > 100 and seen[grpc.StatusCode.INVALID_ARGUMENT] > 100
    assert node.call(node.core.stats)["reserved_slots"] > 0, "no reservation got through: this test has lost its point"
    node.call(lambda: node.core.process_gone(session))
    node.call(node.core.check)
    left = node.call(lambda: sizes(node.core))
    assert left["attempts"] == left["of sessions"] == left["leases"] == 0
    assert node.call(node.core.stats)["reserved_slots"] == 0
    assert status(stub.Stats, node_pb2.StatsRequest()) is grpc.StatusCode.OK
    client.close()


def test_b17_too_many_of_anything_names_the_limit(node: NodeThread, stub: Any) -> None:
    session = stub.OpenSession(node_pb2.OpenSessionRequest(), timeout=10.0).session
    many = bytes(16 * 65_537)
    for request in (
        node_pb2.RemoveRequest(session=session, namespace_id=SPACE.id, keys=many),
        node_pb2.ReleaseRequest(session=session, ticket_ids=many),
        node_pb2.ReleaseRequest(session=session, leases=[1] * 65_537),
    ):
        call = stub.Remove if isinstance(request, node_pb2.RemoveRequest) else stub.Release
        with pytest.raises(grpc.RpcError, match="65536") as caught:
            call(request, timeout=10.0)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    with pytest.raises(KvStoreError):
        node.call(lambda: node.core.session(session + 1))
