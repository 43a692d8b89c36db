"""AdminService of a whole node: sockets, gRPC, a client that stores real pages."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.client import Cache, connect
from kvstore.errors import ConfigurationError, InvalidRequest, LimitExceeded, NotFound
from kvstore.model.layout import Geometry
from kvstore.model.namespace import Namespace
from kvstore.model.prefix import Keys
from kvstore.model.values import NodeInfo
from kvstore.node.operators import admin
from kvstore.node.operators.moving import Drained, Replicated
from kvstore.rpc import wire
from kvstore.rpc.channel import Channel
from kvstore.rpc.v1 import admin_pb2, admin_pb2_grpc, node_pb2
from tests.chaos.node_thread import NodeThread
from tests.unit.client.pages import LAYOUT, namespace, pages_of, prompt

OTHER_NODE = node_pb2.NodeInfo(node_id="other", epoch=3, control_address="127.0.0.1:1", data_address="127.0.0.1:2")
SLOT = 12 << 10


class FakeMover:
    """Says what it was asked."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    async def replicate(
        self,
        space: Namespace,
        geometries: Sequence[tuple[Geometry, tuple[int, ...]]],
        keys: Keys,
        source: NodeInfo,
        deadline_s: float,
    ) -> Replicated:
        self.asked.append((space, list(geometries), list(keys), source.node_id, 0 < deadline_s < 6))
        return Replicated(2, 1, 8192, "absent")

    async def drain(self, targets: Sequence[NodeInfo]) -> AsyncIterator[Drained]:
        self.asked.append([target.node_id for target in targets])
        yield Drained(3, 1, 0, "")
        yield Drained(3, 2, 1, "unreachable")


class Operator:
    """A node with pages, and who asks it."""

    def __init__(self, folder: Path) -> None:
        self.node = NodeThread(folder, dram_bytes=64 * SLOT, node_id="operated")
        self.channel = Channel(self.node.info.control_address)
        self.stub = self.channel.stub(admin_pb2_grpc.AdminServiceStub)
        self.client = connect(self.node.info.socket_path)
        self.cache: Cache = self.client.bind(namespace())

    def ask(self, verb: str, **fields: Any) -> Any:
        answer = self.channel.call(getattr(self.stub, verb), getattr(admin_pb2, f"{verb}Request")(**fields), 5)
        self.node.call(self.node.core.check)
        return answer

    def stream(self, verb: str, request: Any) -> list[Any]:
        return list(self.channel.stream(getattr(self.stub, verb), request, 5))

    def store(self, number: int, chunks: int) -> Keys:
        keys = self.cache.keys(prompt(number, 16 * chunks))
        assert self.cache.write(keys, pages_of(keys)).stored == chunks
        return keys

    def close(self) -> None:
        self.client.close()
        self.channel.close()
        self.node.stop()


@pytest.fixture
def operator(tmp_path: Path) -> Iterator[Operator]:
    with contextlib.closing(Operator(tmp_path)) as made:
        yield made


def test_namespaces_and_chunks(operator: Operator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin, "RECORDS_A_MESSAGE", 2)
    keys = operator.store(1, 5)
    (figures,) = operator.ask("ListNamespaces").namespaces
    assert Namespace.from_canonical(figures.namespace) == namespace() and figures.namespace_id == namespace().id
    assert (figures.chunks, figures.dram_bytes, figures.ssd_bytes) == (5, 5 * SLOT, 0)
    assert list(figures.geometries[0].written_here) == [0]
    assert wire.geometry_from_messages(figures.geometries[0].rectangles) == Geometry.whole(LAYOUT)
    request = admin_pb2.ListChunksRequest(namespace_id=namespace().id)
    messages = operator.stream("ListChunks", request)
    records = [record for message in messages for record in message.chunks]
    assert len(messages) >= 3 and [record.key for record in records] == list(keys)
    assert [record.parent_key for record in records] == [namespace().id, *list(keys)[:-1]]
    assert keys.fingerprints is not None
    assert [record.fingerprint for record in records] == [int(f) & ((1 << 48) - 1) for f in keys.fingerprints[1:]]
    assert [record.parent_fingerprint for record in records] == keys.fingerprints[:-1].tolist()
    assert all(len(r.dram_shards) == 1 and r.token_count == 16 and r.unused_ms < 60_000 for r in records)
    request.up_to_key = keys[2]
    assert [r.key for message in operator.stream("ListChunks", request) for r in message.chunks] == list(keys)[:3]
    with pytest.raises(NotFound):
        operator.stream("ListChunks", admin_pb2.ListChunksRequest(namespace_id=b"n" * 16))


def test_pins_over_a_restart_of_the_node(tmp_path: Path) -> None:
    with contextlib.closing(Operator(tmp_path)) as operator:
        keys = operator.store(1, 3)
        fields = {"namespace_id": namespace().id, "key": keys[-1]}
        answer = operator.ask("Pin", name="system", lifetime_ms=3_600_000, **fields)
        assert (answer.pinned_chunks, answer.pinned_bytes, answer.refused_chunks) == (3, 3 * SLOT, 0)
        operator.ask("Pin", name="gone", lifetime_ms=1000, **fields)
        assert operator.ask("Unpin", name="gone").found and not operator.ask("Unpin", name="gone").found
    with contextlib.closing(Operator(tmp_path)) as operator:
        (pin,) = operator.ask("ListPins").pins
        assert (pin.name, pin.key, pin.chunks) == ("system", keys[-1], 0)
        assert 3_000_000 < pin.left_ms <= 3_600_000
        operator.store(1, 3)
        ends_s = time.monotonic() + 20
        while not (pin := operator.ask("ListPins").pins[0]).chunks:  # the node's tick finds it
            assert time.monotonic() < ends_s
        assert (pin.chunks, pin.bytes) == (3, 3 * SLOT)
        operator.ask("RemoveNamespace", namespace_id=namespace().id)
        assert not operator.ask("ListPins").pins
        assert '"pins": []' in (tmp_path / "pins.json").read_text()


def test_remove_namespace(operator: Operator) -> None:
    keys = operator.store(1, 4)
    assert operator.ask("RemoveNamespace", namespace_id=namespace().id).removed_chunks == 4
    assert operator.cache.match(keys).local_chunks == 0
    with pytest.raises(InvalidRequest, match="namespace_id has 3 bytes"):
        operator.ask("RemoveNamespace", namespace_id=b"abc")


def test_a25_a_check_finds_the_flipped_byte_and_repairs_it(operator: Operator) -> None:
    keys = operator.store(1, 6)
    clean = operator.ask("Check", sample_chunks=100)
    assert (clean.chunks, clean.sampled_chunks, len(clean.findings)) == (6, 6, 0)
    slot = next(iter(operator.node.core.pool.forest.chunks[keys[2]].copies.values())).slot
    arena = np.frombuffer(operator.node.daemon._memory.arena.memory, dtype=np.uint8)
    arena[slot * 4096 + 77] ^= 1
    (finding,) = operator.ask("Check", sample_chunks=100).findings
    assert (finding.kind, finding.key, finding.repaired) == ("dram_checksum", keys[2], False)
    assert keys[2].hex() in finding.text
    assert operator.cache.match(keys).local_chunks == 6
    (finding,) = operator.ask("Check", sample_chunks=100, repair=True).findings
    assert finding.repaired and "4 chunks removed" in finding.text
    assert operator.cache.match(keys).local_chunks == 2
    assert not operator.ask("Check", sample_chunks=100).findings
    with pytest.raises(LimitExceeded):
        operator.ask("Check", sample_chunks=1 << 20)


def test_a_slot_that_is_used_anew_during_the_check_is_no_finding(
    operator: Operator, monkeypatch: pytest.MonkeyPatch
) -> None:
    operator.store(1, 1)
    core = operator.node.core

    def torn(shard: admin.SampledShard, arena: object) -> bool:
        operator.node.call(lambda: core.drop(core.pool.forest.chunks[shard.key], "removed"))
        return True

    monkeypatch.setattr(admin.SampledShard, "is_broken", torn)
    answer = operator.ask("Check", sample_chunks=5, repair=True)
    assert answer.sampled_chunks == 1 and not answer.findings


def test_a_broken_law_is_a_finding(operator: Operator) -> None:
    keys = operator.store(1, 1)
    chunk = operator.node.core.pool.forest.chunks[keys[0]]
    chunk.holds += 1
    request = admin_pb2.CheckRequest()
    (finding,) = operator.channel.call(operator.stub.Check, request, 5).findings
    chunk.holds -= 1
    assert (finding.kind, finding.key, finding.repaired) == ("law", b"", False) and "holds" in finding.text


def test_warm_reports_and_asks_the_promoter_for_what_is_not_in_dram(operator: Operator) -> None:
    keys = operator.store(1, 4)
    operator.store(2, 2)
    for fields, count in (({"key": keys[-1]}, 4), ({}, 6)):
        answer = operator.ask("Warm", namespace_id=namespace().id, **fields)
        assert (answer.asked_chunks, answer.dram_chunks, answer.promoted_chunks) == (count, count, 0)


def test_without_a_mover_nothing_moves_and_writes_go_on(operator: Operator) -> None:
    with pytest.raises(ConfigurationError, match="without a mover"):
        operator.stream("Drain", admin_pb2.DrainRequest(targets=[OTHER_NODE]))
    assert not operator.node.core.draining
    with pytest.raises(ConfigurationError, match="without a mover"):
        operator.ask("Replicate", **_replicate(operator))


def _replicate(operator: Operator) -> dict[str, Any]:
    whole = Geometry.whole(LAYOUT)
    return {
        "namespace": namespace().canonical,
        "geometries": [admin_pb2.Geometry(rectangles=wire.geometry_to_messages(whole), written_here=[0])],
        "chain": wire.chain_to_message(operator.cache.keys(prompt(1, 32))),
        "source": OTHER_NODE,
    }


def test_moving_is_checked_and_handed_to_the_mover(operator: Operator, monkeypatch: pytest.MonkeyPatch) -> None:
    mover = FakeMover()
    monkeypatch.setattr(admin.AdminServicer, "_need_mover", lambda self: mover)
    fields = _replicate(operator)
    answer = operator.ask("Replicate", **fields)
    assert (answer.held_chunks, answer.pulled_chunks, answer.pulled_bytes, answer.reason) == (2, 1, 8192, "absent")
    whole = (Geometry.whole(LAYOUT), (0,))
    assert mover.asked == [(namespace(), [whole], list(operator.cache.keys(prompt(1, 32))), "other", True)]
    me = wire.node_info_to_message(operator.node.info)
    rest = operator.cache.keys(prompt(1, 32)).slice(1, 2)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"source": me}, "this node itself"),
        ({"geometries": []}, "geometries is empty"),
        ({"chain": wire.chain_to_message(rest)}, "start of a prompt"),
        ({"chain": wire.chain_to_message(rest, with_fingerprints=False)}, "fingerprints"),
        ({"namespace": b"{}"}, "canonical"),
    ]
    for changed, text in wrong:
        with pytest.raises(InvalidRequest, match=text):
            operator.ask("Replicate", **{**fields, **changed})
    for targets, text in (([], "targets is empty"), ([OTHER_NODE, me], "this node itself")):
        with pytest.raises(InvalidRequest, match=text):
            operator.stream("Drain", admin_pb2.DrainRequest(targets=targets))
        assert not operator.node.core.draining
    progress = operator.stream("Drain", admin_pb2.DrainRequest(targets=[OTHER_NODE]))
    assert [(p.chunks, p.moved_chunks, p.failed_chunks, p.reason) for p in progress] == [
        (3, 1, 0, ""),
        (3, 2, 1, "unreachable"),
    ]
    assert mover.asked[1:] == [["other"]] and operator.node.core.draining
    keys = operator.cache.keys(prompt(7, 16))
    assert operator.cache.write(keys, pages_of(keys)).stored == 0
