"""`Cache.write` to nodes whose memory the writer does not share: by Put, to real node processes."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import store_service_processes as processes

import kvstore
from kvstore.client import Client
from kvstore.client.values import Bytes
from kvstore.config import NodeSettings
from kvstore.errors import SessionLost, StaleReference, Unreachable
from kvstore.model.layout import Dtype, Geometry, PageLayout, Rectangle
from kvstore.model.namespace import Namespace
from kvstore.model.prefix import KeyChain, Keys
from kvstore.model.ticket import Ticket, TicketRank
from kvstore.model.values import NodeInfo, Outcome
from kvstore.node.daemon import NodeDaemon
from kvstore.node.remote import RemoteNode
from kvstore.rpc import wire
from kvstore.rpc.v1 import node_pb2, node_pb2_grpc

LAYOUT = PageLayout(4, 4, 64, Dtype.FP32, 64, 1)
"""Chunks of 512 KiB."""
SPACE = Namespace("writes", "r1", LAYOUT)
WAIT_S = 20.0

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """Two nodes on two hosts, without an index."""
    folder = tmp_path_factory.mktemp("w")
    with processes.node(folder / "a", "64MiB", host_id="a") as one:
        with processes.node(folder / "b", "64MiB", host_id="b") as other:
            yield one["control_address"], other["control_address"]


def prompt(seed: int, chunks: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 1 << 32, chunks * LAYOUT.chunk_tokens).tolist()


def pages(seed: int, chunks: int, rectangle: Rectangle = LAYOUT.whole) -> Bytes:
    whole = np.random.default_rng(seed).integers(0, 256, (chunks, *LAYOUT.shape(LAYOUT.whole)), dtype=np.uint8)
    part = whole[:, rectangle.layer_start : rectangle.layer_stop, :, rectangle.head_start : rectangle.head_stop]
    return np.ascontiguousarray(part)


def figures(address: str) -> dict[str, Any]:
    api = RemoteNode(address, name="figures")
    try:
        return dict(json.loads(api.stats(5.0)))
    finally:
        api.close()


def wait_until(true: Callable[[], bool]) -> None:
    pause = threading.Event()
    for _ in range(int(WAIT_S / 0.02)):
        if true():
            return
        pause.wait(0.02)
    raise AssertionError("not within 20 s")


def assert_read(address: str, transport: str, keys: Keys, expected: Bytes) -> None:
    with kvstore.connect(address, transport=transport) as reader:
        into = np.full(expected.shape, 0xEE, dtype=np.uint8)
        result = reader.bind(SPACE).read(keys, into)
        assert result.chunks == len(keys), result
        assert (into == expected).all()


def test_a_named_node_gets_the_pages_and_every_path_reads_them(nodes: tuple[str, str]) -> None:
    own, other = nodes
    with kvstore.connect(own, transport="shm") as client:
        cache = client.bind(SPACE)
        keys, source = cache.keys(prompt(1, 5)), pages(1, 5)
        assert cache.write(keys, source, node=other).outcomes == (Outcome.COMMITTED,) * 5
        assert cache.write(keys, source, node=other).outcomes == (Outcome.PRESENT,) * 5
        assert cache.match(keys).local_chunks == 0, "nothing was stored on the own host"
    assert_read(other, "shm", keys, source)
    assert_read(other, "tcp", keys, source)


def test_the_own_node_by_name_is_written_through_memory(nodes: tuple[str, str]) -> None:
    own, _ = nodes
    before = figures(own).get("put_chunks", 0)
    with kvstore.connect(own, transport="shm") as client:
        cache = client.bind(SPACE)
        keys, source = cache.keys(prompt(2, 2)), pages(2, 2)
        assert cache.write(keys, source, node=client.node).stored == 2
        assert cache.write(keys, source, node=own).visible == 2
    assert_read(own, "shm", keys, source)
    assert figures(own).get("put_chunks", 0) == before


def test_a_client_without_shared_memory_writes_to_the_node_that_it_named(nodes: tuple[str, str]) -> None:
    own, _ = nodes
    with kvstore.connect(own, transport="tcp") as client:
        cache = client.bind(SPACE)
        keys, source = cache.keys(prompt(3, 3)), pages(3, 3)
        assert cache.write(keys, source).stored == 3
        into = cache.empty(3)
        result = cache.read(keys, into)
        assert result.chunks == 3 and dict(result.bytes_by_path)["tcp"] > 0
        assert (into == source).all()
        assert cache.write(cache.keys([]), pages(3, 0)).outcomes == ()


def test_ranks_write_their_rectangles(nodes: tuple[str, str]) -> None:
    _, other = nodes
    geometry = Geometry.parallel(LAYOUT, tp=2, pp=2)
    with kvstore.connect(nodes[0]) as client:
        for rank, rectangle in enumerate(geometry.rectangles):
            cache = client.bind(SPACE, geometry=geometry, rank=rank)
            keys = cache.keys(prompt(4, 3))
            assert cache.write(keys, pages(4, 3, rectangle), node=other).stored == 3
    assert_read(other, "shm", keys, pages(4, 3))


def test_a_node_is_also_named_by_what_the_index_says_of_it(nodes: tuple[str, str]) -> None:
    own, other = nodes
    probe = RemoteNode(other)
    info = probe.info
    probe.close()
    assert isinstance(info, NodeInfo)
    with kvstore.connect(own) as client:
        cache = client.bind(SPACE)
        keys, source = cache.keys(prompt(5, 2)), pages(5, 2)
        ticket = Ticket(b"t" * 16, SPACE.id, keys[0], keys[-1], 2, 64, (TicketRank(info.node_id, 1, LAYOUT.whole),))
        assert cache.write(keys, source, node=info, for_ticket=ticket).stored == 2
        assert client.stats()["writes_not_pinned"] == 1


def test_a_full_node_is_an_outcome(nodes: tuple[str, str], tmp_path: Path) -> None:
    with processes.node(tmp_path / "c", "2MiB", host_id="c") as small, kvstore.connect(nodes[0]) as client:
        cache = client.bind(SPACE)
        address = small["control_address"]
        keys, source = cache.keys(prompt(6, 3)), pages(6, 3)
        assert cache.write(keys, source, node=address).stored == 3
        holder = RemoteNode(address)
        holder.register_namespace(SPACE, None, (), 5.0)
        assert holder.acquire(keys, LAYOUT.whole, 60_000, b"", 0, 5.0).lease
        found = cache.write(cache.keys(prompt(7, 2)), pages(7, 2), node=address)
        assert found.outcomes == (Outcome.REFUSED_FULL, Outcome.REFUSED_PARENT_MISSING)
        holder.close()


def test_a_source_that_fails_is_heard_and_leaves_nothing_behind(nodes: tuple[str, str]) -> None:
    class Broken:
        def gather(self, index: int, slot: Bytes, layer_start: int, head_start: int) -> None:
            if index == 2:
                raise RuntimeError("the engine went away")
            slot[:] = index

    _, other = nodes
    with kvstore.connect(nodes[0]) as client:
        cache = client.bind(SPACE)
        keys = cache.keys(prompt(8, 4))
        with pytest.raises(RuntimeError, match="the engine went away"):
            cache.write(keys, Broken(), node=other)
        wait_until(lambda: figures(other)["reserved_slots"] == 0)


def test_nobody_there(nodes: tuple[str, str]) -> None:
    with kvstore.connect(nodes[0]) as client:
        cache = client.bind(SPACE)
        with pytest.raises(Unreachable):
            cache.write(cache.keys(prompt(9, 1)), pages(9, 1), node="127.0.0.1:1", deadline_s=2.0)


def test_a_node_that_restarted_is_found_again(tmp_path: Path) -> None:
    """Its address is known, its epoch is new: one call fails at most, the next one works."""
    with processes.node(tmp_path / "r", "16MiB") as first:
        address = first["control_address"]
        client = kvstore.connect(address, transport="tcp")
        cache = client.bind(SPACE)
        keys, source = cache.keys(prompt(10, 2)), pages(10, 2)
        assert cache.write(keys, source).stored == 2
    with client:
        places = ("--socket-dir", str(tmp_path / "r"), "--data-dir", str(tmp_path / "r"), "--metrics-address", "")
        with processes.server("node", "--control-address", address, *places, "--dram", "16MiB"):
            processes.wait_populated(address)
            failures = []

            def stored() -> bool:
                try:
                    return cache.write(keys, source).visible == 2
                except (Unreachable, StaleReference) as exc:
                    failures.append(exc)
                    return False

            wait_until(stored)
            into = cache.empty(2)
            wait_until(lambda: cache.read(keys, into).chunks == 2)
            assert (into == source).all()


# --- clients that go away ----


class Raw:
    """A session over a bare channel, so that a test can leave a stream where it likes."""

    def __init__(self, address: str) -> None:
        self.channel = grpc.insecure_channel(address)
        self.stub = node_pb2_grpc.NodeServiceStub(self.channel)
        self.session = self.stub.OpenSession(node_pb2.OpenSessionRequest(), timeout=5).session
        request = node_pb2.RegisterNamespaceRequest(
            session=self.session,
            namespace=SPACE.canonical,
            geometry=wire.geometry_to_messages(Geometry.whole(LAYOUT)),
        )
        self.stub.RegisterNamespace(request, timeout=5)

    def unfinished_put(self, keys: Keys) -> Any:
        """A Put that has sent its header and a piece, and goes on when `self.go_on` is set."""
        self.go_on = threading.Event()
        shard = Geometry.whole(LAYOUT).shard(0)
        header = node_pb2.PutHeader(session=self.session, chain=wire.chain_to_message(keys), shard=shard)

        def requests() -> Iterator[node_pb2.PutRequest]:
            yield node_pb2.PutRequest(header=header)
            yield node_pb2.PutRequest(data=bytes(1000))
            self.go_on.wait(WAIT_S)

        return self.stub.Put.future(requests(), timeout=WAIT_S)


@pytest.mark.parametrize("how", ["cancelled", "connection closed"])
def test_a_put_whose_client_goes_away_gives_its_slots_back(nodes: tuple[str, str], how: str) -> None:
    address = nodes[1]
    raw = Raw(address)
    keys = KeyChain(SPACE).keys(prompt(20, 3))
    call = raw.unfinished_put(keys)
    wait_until(lambda: figures(address)["reserved_slots"] == 3)
    if how == "cancelled":
        call.cancel()
    else:
        raw.channel.close()
    wait_until(lambda: figures(address)["reserved_slots"] == 0)
    assert figures(address)["quarantined_bytes"] == 0
    raw.go_on.set()
    raw.channel.close()


@pytest.mark.parametrize("how", ["cancelled", "connection closed"])
def test_a_get_whose_client_goes_away_gives_its_lease_back(nodes: tuple[str, str], how: str) -> None:
    address = nodes[1]
    with kvstore.connect(nodes[0]) as client:
        cache = client.bind(SPACE)
        keys = cache.keys(prompt(21, 40))
        cache.write(keys, pages(21, 40), node=address)
    raw = Raw(address)
    request = node_pb2.GetRequest(
        session=raw.session, chain=wire.chain_to_message(keys), rectangle=wire.rectangle_to_message(LAYOUT.whole)
    )
    stream = raw.stub.Get(request, timeout=WAIT_S)
    assert next(stream).WhichOneof("part") == "head"
    assert figures(address)["leases"] == 1, "20 MiB do not fit into the buffers on the way"
    if how == "cancelled":
        stream.cancel()
    else:
        raw.channel.close()
    wait_until(lambda: figures(address)["leases"] == 0)
    raw.channel.close()


# --- sessions that run out while a client is idle ----


class OwnNode:
    """A node on an event loop in a thread of this process, so that a test can end its sessions."""

    def __init__(self, folder: Path) -> None:
        settings = NodeSettings(
            control_address="127.0.0.1:0",
            metrics_address="",
            dram=16 << 20,
            host_id="idle",
            socket_dir=str(folder),
            data_dir=str(folder),
        )
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._daemon = NodeDaemon(settings, None)
        self.address = str(self.do(self._daemon.start())["control_address"])
        processes.wait_populated(self.address)

    def do(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(WAIT_S)

    def end_sessions(self) -> None:
        """What the node does with sessions that no call named for 120 s."""

        async def end() -> None:
            core = self._daemon.core
            for session in [one for one in core.sessions.values() if not one.shared]:
                core.process_gone(session.number)

        self.do(end())

    def stop(self) -> None:
        self.do(self._daemon.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(WAIT_S)
        self._loop.close()


@pytest.fixture
def idle(tmp_path: Path) -> Iterator[tuple[OwnNode, Client]]:
    own = OwnNode(tmp_path)
    try:
        with kvstore.connect(own.address, transport="tcp") as client:
            yield own, client
    finally:
        own.stop()


def test_after_a_long_pause_reads_hit_and_writes_store(idle: tuple[OwnNode, Client]) -> None:
    own, client = idle
    cache = client.bind(SPACE)
    keys, source = cache.keys(prompt(11, 2)), pages(11, 2)
    assert cache.write(keys.slice(0, 1), source[:1]).stored == 1
    into = cache.empty(2)
    for _ in range(2):
        own.end_sessions()
        assert cache.read(keys.slice(0, 1), into[:1]).chunks == 1, "no needless miss"
        assert (into[0] == source[0]).all()
    own.end_sessions()
    assert cache.write(keys, source).outcomes == (Outcome.PRESENT, Outcome.COMMITTED)


def test_without_a_second_try_the_pause_would_be_seen(
    idle: tuple[OwnNode, Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    own, client = idle
    cache = client.bind(SPACE)
    keys, source = cache.keys(prompt(12, 2)), pages(12, 2)
    cache.write(keys.slice(0, 1), source[:1])
    monkeypatch.setattr(client, "drop_peer", lambda *_: None)
    own.end_sessions()
    assert cache.read(keys.slice(0, 1), cache.empty(1)).chunks == 0
    with pytest.raises(SessionLost):
        cache.write(keys, source)
