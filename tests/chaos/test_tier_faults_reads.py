"""Chunks on the SSD in use: read slowly, shared, cut off, leased, while written (A17, A22, A24, D04, D05, D07, D11)."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from kvstore.client import Cache
from kvstore.client.peers import Peer
from kvstore.client.reading import Reading
from kvstore.model.layout import Geometry, Rectangle
from kvstore.model.prefix import Keys
from kvstore.model.values import MissReason
from kvstore.node.server import HINTS_LIMIT
from kvstore.node.tiers import disk
from kvstore.rpc import wire
from kvstore.rpc.v1 import node_pb2
from kvstore.rpc.v1.node_pb2_grpc import NodeServiceStub
from tests.chaos.pool_processes import Processes, stats_of, until
from tests.chaos.tier_node import SLOT_BYTES, WAIT_S, TierNode
from tests.unit.client.pages import LAYOUT, namespace, pages_of, poisoned
from tests.unit.client.test_remote_read import reader_of


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TierNode]:
    node = TierNode(tmp_path, monkeypatch)
    yield node
    node.disk.work()
    node.close()


# --- D05, D07: slow and shared -------------------------------------------------------------------------------


def test_d05_a_read_of_a_slow_ssd_ends_at_its_deadline_with_what_came(
    node: TierNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of four jobs of the disk do not end in time; a job is a chunk here."""
    monkeypatch.setattr(disk, "JOB_BYTES", SLOT_BYTES)
    monkeypatch.setattr(disk, "LARGE_JOB_BYTES", SLOT_BYTES)
    keys = node.on_ssd(1, 4)
    with node.disk.held("preadv", at=node.offsets(keys.slice(2, 4))):
        result = node.read(keys, deadline_s=0.5)
        assert (result.chunks, result.ssd_tokens, result.reason) == (2, 32, MissReason.DEADLINE)
        stats = node.stats()
        assert (stats["acquire_miss_deadline"], stats["acquire_miss_tokens_deadline"]) == (1, 32)
        node.check()
    node.settle()
    result = node.read(keys)
    assert (result.chunks, result.ssd_tokens) == (4, 0), "what came late is not read twice"


def test_a_deadline_shorter_than_any_read_of_the_ssd_is_a_miss_and_leaves_nothing(node: TierNode) -> None:
    keys = node.on_ssd(1, 4)
    with node.disk.held("preadv"):
        for _ in range(20):
            assert node.read(keys, deadline_s=0.02).chunks == 0
            node.check()
    node.settle()
    until(lambda: node.stats()["leases"] == 0)
    assert node.read(keys).chunks == 4


@pytest.mark.slow
def test_d07_fifty_readers_of_one_prefix_are_one_load(node: TierNode) -> None:
    keys = node.on_ssd(1, 5)
    node.settle()
    before = len(node.disk.reads)
    with node.connect() as client, ThreadPoolExecutor(50) as pool, node.disk.held("preadv") as hold:
        cache = client.bind(namespace())
        reading = [pool.submit(node.read, keys, cache=cache) for _ in range(50)]
        until(lambda: node.call(lambda: sum(node.core.holds.moving.values())) >= 50 * 5)
        hold.go_on()
        assert [each.result(WAIT_S).chunks for each in reading] == [5] * 50
    read = [offset for each in node.disk.reads[before:] for offset in each]
    assert len(read) == len(set(read)) == 5 * SLOT_BYTES, "each byte once"
    assert node.stats()["ssd_read_bytes"] == 5 * SLOT_BYTES
    node.check()


def test_d04_neighbouring_slots_share_the_turns_of_the_writers(node: TierNode) -> None:
    """Eight chunks of 12 KiB are one turn of a thread; the headers of all of them are one write."""
    node.saved(1, 1)  # superblock and extent
    before = node.disk.done["pwritev"]
    with node.disk.held("pwritev") as hold:
        node.write(2, 1)
        hold.wait()
        node.write(3, 8)
    node.settle()
    first = 1 + 1 + 1  # header to zero, payload, header
    assert node.disk.done["pwritev"] - before <= first + 2 * (1 + 8 + 1)


# --- A17: leases ---------------------------------------------------------------------------------------------


def refill(node: TierNode, seconds: float) -> None:
    """So much later, others have filled the DRAM."""
    clock = node.core._clock
    node.core._clock = lambda: clock() + seconds
    node.call(node.core.tick)
    first = 500 + node.stats()["commits"]  # other prompts each time
    for number in range(first, first + 12):
        node.write(number, 8)
    node.check()


def meanwhile(monkeypatch: pytest.MonkeyPatch, node: TierNode, path: str, *, seconds: float, lease_ms: int) -> None:
    """Between what Acquire brought into DRAM and its first byte so much time passes, and the space is refilled."""
    lease = node.core.lease
    monkeypatch.setattr(node.core, "lease", lambda s, k, a, ms, *more: lease(s, k, a, min(ms, lease_ms), *more))
    if path == "remote":
        take = Peer.take

        def late(peer: Peer, deadline_s: float) -> Any:
            refill(node, seconds)
            return take(peer, deadline_s)

        monkeypatch.setattr(Peer, "take", late)
        return
    read_host = Reading._read_host

    def late_copy(reading: Reading, host: Any, *, told: int | None = None) -> None:
        if told:  # the look before it was asked for found it on the SSD
            refill(node, seconds)
        read_host(reading, host, told=told)

    monkeypatch.setattr(Reading, "_read_host", late_copy)


def read_by(path: str, node: TierNode, keys: Keys) -> tuple[int, bool]:
    """(chunks, no byte beyond them is another's)."""
    clients = {"host": node.connect, "remote": lambda: reader_of(node.node.info)}
    with clients[path]() as client:
        cache: Cache = client.bind(namespace())
        target = poisoned(cache, len(keys))
        result = cache.read(keys, target)
        right = np.array_equal(target[: result.chunks], pages_of(keys)[: result.chunks])
        return result.chunks, right and bool((target[result.chunks :] == 0xA5).all())


@pytest.mark.parametrize("path", ["host", "remote"])
def test_a17_ssd_reads_after_the_lease_deliver_nothing_of_others(
    node: TierNode, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    keys = node.on_ssd(1, 4)
    meanwhile(monkeypatch, node, path, seconds=0.6, lease_ms=500)
    assert read_by(path, node, keys) == (0, True)
    assert node.stats()["acquired_ssd_tokens"] >= 64, "it was there, and left when the lease was over"


@pytest.mark.parametrize("path", ["host", "remote"])
def test_a17_a_slow_ssd_read_within_its_lease_succeeds(
    node: TierNode, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    keys = node.on_ssd(1, 4)
    meanwhile(monkeypatch, node, path, seconds=2.0, lease_ms=60_000)
    assert read_by(path, node, keys) == (4, True)


def test_a17_staging_that_takes_long_takes_nothing_from_the_lease(node: TierNode) -> None:
    keys = node.on_ssd(1, 4)
    host = node.client.host(1.0)
    assert host is not None
    clock, late = node.core._clock, [0.0]
    node.core._clock = lambda: clock() + late[0]
    with ThreadPoolExecutor(1) as pool, node.disk.held("preadv") as hold:
        asking = pool.submit(host.api.acquire, keys, node.cache.rectangle, 500, b"", 0, WAIT_S)
        hold.wait()
        late[0] = 2.0
        node.call(node.core.tick)
        hold.go_on()
        answer = asking.result(WAIT_S)
    assert (answer.run, answer.lease_ms) == (4, 500)
    node.call(node.core.tick)
    assert node.stats()["leases"] == 1
    host.api.release([answer.lease], [], 1.0)


# --- A22, A24, D11: writing ----------------------------------------------------------------------------------


def test_a22_a_chunk_is_read_while_it_is_written_to_a_slow_ssd(node: TierNode) -> None:
    with node.disk.held("pwritev") as hold:
        keys = node.write(1, 8)
        hold.wait()
        for _ in range(20):
            assert node.read(keys).chunks == 8
        assert node.places(keys) == (8, 0), "a tier is named when its bytes are there"
        node.check()
    node.settle()
    node.demote(keys)
    assert node.read(keys).ssd_tokens > 0


@pytest.mark.parametrize("again", [False, True])
def test_a22_a_chunk_that_is_removed_while_it_is_written_does_not_come_back(
    node: TierNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    """Also where the same key is stored anew before the old write has ended."""
    with ThreadPoolExecutor(1) as pool, node.disk.held("pwritev", after=1) as hold:
        keys = node.write(1, 8)
        hold.wait()
        removing = pool.submit(node.cache.remove, keys, deadline_s=WAIT_S)
        until(lambda: not node.chunks(keys))
        node.check()
        if again:
            node.write(1, 8)
        hold.go_on()
        assert removing.result(WAIT_S) == 8
    node.settle()
    node.check()
    assert node.read(keys).chunks == (8 if again else 0)
    node.close()
    restarted = TierNode(tmp_path, monkeypatch)
    assert restarted.read(keys).chunks == (8 if again else 0)
    restarted.close()


def test_a24_two_demotions_of_overlapping_sets_are_no_error(node: TierNode, caplog: pytest.LogCaptureFixture) -> None:
    """Eight chunks, one of them on the SSD already; two calls at once save the first six and all eight."""
    node.saved(1, 1)
    with ThreadPoolExecutor(2) as pool, node.disk.held("pwritev") as hold:
        keys = node.write(1, 8)
        hold.wait()
        saving = [pool.submit(node.cache.persist, part, deadline_s=WAIT_S) for part in (keys.slice(0, 6), keys)]
        hold.go_on()
        assert [each.result(WAIT_S) for each in saving] == [(6, ""), (8, "")]
    node.settle()
    node.check()
    assert node.stats()["saves"] == 8 and node.stats()["ssd_write_bytes"] == 8 * SLOT_BYTES
    node.demote(keys)
    assert node.read(keys).chunks == 8
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.mark.slow
def test_d11_many_writers_of_one_prompt_are_one_copy_on_the_ssd(
    node: TierNode, caplog: pytest.LogCaptureFixture
) -> None:
    with node.connect() as client, ThreadPoolExecutor(16) as pool:
        cache = client.bind(namespace())
        keys = node.keys(1, 8)

        def store() -> tuple[int, tuple[int, str]]:
            visible = cache.write(keys, pages_of(keys)).visible
            return visible, cache.persist(keys, deadline_s=WAIT_S)

        storing = [pool.submit(store) for _ in range(16)]
        assert [each.result(WAIT_S)[1] for each in storing][-1:] != []
        assert cache.persist(keys, deadline_s=WAIT_S) == (8, "")
    node.settle()
    assert node.stats()["ssd_write_bytes"] == 8 * SLOT_BYTES
    assert len(caplog.records) <= 1
    node.check()


# --- who reads -----------------------------------------------------------------------------------------------


def test_a_remote_reader_gets_ssd_hits_in_windows(node: TierNode) -> None:
    keys = node.on_ssd(1, 40)
    with reader_of(node.node.info) as client:
        cache = client.bind(namespace())
        result = node.read(keys, cache=cache)
        assert (result.chunks, result.remote_chunks, result.ssd_tokens) == (40, 40, 640)
        node.check()
        assert node.stats()["leases"] == 0
        node.demote(keys)
        window = node.call(lambda: node.core.pool.read_back_bytes(SLOT_BYTES)) // SLOT_BYTES
        assert max(map(len, node.disk.reads)) == window * SLOT_BYTES
        with node.disk.held("preadv", at=node.offsets(keys.slice(2 * window, 40))):
            result = node.read(keys, cache=cache, deadline_s=0.6)
        assert (result.reason, result.chunks) == (MissReason.DEADLINE, 2 * window)
    node.settle()


def get(node: TierNode, keys: Keys) -> tuple[list[bytes], str]:
    """All payloads of a Get stream, and why it ended."""
    with grpc.insecure_channel(node.node.info.control_address) as channel:
        make: Any = NodeServiceStub
        stub = make(channel)
        session = stub.OpenSession(node_pb2.OpenSessionRequest(client_name="get"), timeout=WAIT_S).session
        stub.RegisterNamespace(
            node_pb2.RegisterNamespaceRequest(session=session, namespace=namespace().canonical), timeout=WAIT_S
        )
        chain = wire.chain_to_message(keys)
        whole = node_pb2.Rectangle(layer_start=0, layer_stop=LAYOUT.layers, head_start=0, head_stop=LAYOUT.kv_heads)
        payloads: list[bytes] = []
        reason = "?"
        for message in stub.Get(node_pb2.GetRequest(session=session, chain=chain, rectangle=whole), timeout=WAIT_S):
            part = message.WhichOneof("part")
            if part == "head":
                payloads.append(b"")
            elif part == "data":
                payloads[-1] += message.data
            else:
                reason = message.end_reason
        return payloads, reason


def test_a_get_stream_brings_ssd_hits(node: TierNode) -> None:
    keys = node.on_ssd(1, 20)
    payloads, reason = get(node, keys)
    assert (len(payloads), reason) == (20, "")
    assert [np.frombuffer(each, np.uint8).tolist() for each in payloads] == pages_of(keys).reshape(20, -1).tolist()
    node.check()
    node.settle()
    node.demote(keys)
    node.disk.fail("preadv")
    assert get(node, keys) == ([], "tier_failed")


def test_a_session_that_ends_while_it_stages_leaves_nothing(node: TierNode) -> None:
    keys = node.on_ssd(1, 4)
    client = node.connect()
    host = client.host(1.0)
    assert host is not None
    with ThreadPoolExecutor(1) as pool, node.disk.held("preadv") as hold:
        asking = pool.submit(host.api.acquire, keys, node.cache.rectangle, 5000, b"", 0, WAIT_S)
        hold.wait()
        sessions = node.call(lambda: list(node.core.sessions))
        node.call(lambda: node.core.process_gone(sessions[-1]))
        hold.go_on()
        assert asking.exception(WAIT_S) is not None
    client.close()
    node.settle()
    node.check()
    assert node.stats()["leases"] == 0
    assert node.call(lambda: sum(chunk.holds for chunk in node.core.pool.forest.chunks.values())) == 0
    assert node.read(keys).chunks == 4


def test_a_flood_of_prefetches_is_bounded_and_leaves_nothing(node: TierNode) -> None:
    prompts = [node.on_ssd(number, 2) for number in range(30)]
    node.settle()
    host = node.client.host(1.0)
    assert host is not None
    with node.disk.held("preadv") as hold:
        for _ in range(10):
            for keys in prompts:
                assert host.api.prefetch(keys, node.cache.rectangle, WAIT_S)[0] == 2
        hold.wait()
        servicer_hints = until(lambda: [len(each) for each in hints(node)])
        assert servicer_hints == [HINTS_LIMIT]
        hot = node.write(900, 4)
        assert node.read(hot).chunks == 4
        node.check()
    until(lambda: node.call(lambda: not any(hints(node))))
    node.settle()
    node.check()
    assert all(node.read(keys).chunks == 2 for keys in prompts)


def hints(node: TierNode) -> list[Any]:
    """The tables of prefetches under way."""
    wake = node.core.on_commit
    return [wake.__self__._hints]


@pytest.mark.slow
def test_a_node_that_is_killed_under_readers_of_its_ssd_is_a_miss_and_then_a_hit(processes: Processes) -> None:
    node = processes.node(dram=256 << 10, ssd=f"{processes.folder / 'pages.kvssd'}:4MiB", slots=4096)
    client = processes.client(node)
    for prompt in range(8):
        assert client.do("write", prompt=prompt, chunks=8)["stored"] == 8
        until(lambda wanted=8 * prompt + 8: stats_of(node).get("saves", 0) >= wanted)
    client.tell(step="read", prompt=0, chunks=8, deadline_s=2.0)
    node.kill()
    answer = client.hear()
    assert answer["wrong"] == 0 and answer["chunks"] in range(9)
    again = processes.node(dram=256 << 10, ssd=f"{processes.folder / 'pages.kvssd'}:4MiB", slots=4096)
    assert stats_of(again)["recovered_ssd_chunks"] == 64
    until(lambda: client.do("read", prompt=7, chunks=8)["chunks"] == 8)
    for prompt in range(8):
        answer = client.do("read", prompt=prompt, chunks=8)
        assert (answer["chunks"], answer["wrong"]) == (8, 0)


# --- shards --------------------------------------------------------------------------------------------------

HALVES = Geometry((Rectangle(0, 4, 0, 1), Rectangle(0, 4, 1, 2)))


def test_a_chunk_with_one_shard_in_dram_and_one_on_the_ssd_is_read_whole(node: TierNode) -> None:
    with node.connect() as client:
        ranks = [client.bind(namespace(), geometry=HALVES, rank=rank) for rank in (0, 1)]
        keys = ranks[0].keys(list(range(64)))
        pages = pages_of(keys)
        for rank, cache in enumerate(ranks):
            assert cache.write(keys, pages[:, :, :, rank : rank + 1].copy()).visible == 4
        assert ranks[0].persist(keys, deadline_s=WAIT_S) == (4, "")
        node.demote(keys)
        half = poisoned(ranks[1], 4)
        assert ranks[1].read(keys, half).ssd_tokens == 64
        assert np.array_equal(half, pages[:, :, :, 1:2])
        node.check()
        chunk = node.chunks(keys)[0]
        assert (len(chunk.copies), len(chunk.ssd)) == (1, 2)
        whole = poisoned(node.cache, 4, LAYOUT.whole)
        result = node.cache.read(keys, whole)
        assert (result.chunks, result.ssd_tokens) == (4, 64)
        assert np.array_equal(whole, pages)
        node.check()


def test_a_shard_that_is_only_on_the_ssd_does_not_leave_before_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One half of each chunk is in DRAM too: its other half was taken for a spare copy."""
    slots = 24
    node = TierNode(tmp_path, monkeypatch, ssd_bytes=(128 << 10) + 4096 + slots * 8192)
    with node.connect() as client:
        ranks = [client.bind(namespace(), geometry=HALVES, rank=rank) for rank in (0, 1)]
        keys = ranks[0].keys(list(range(64)))
        pages = pages_of(keys)
        for rank, cache in enumerate(ranks):
            cache.write(keys, pages[:, :, :, rank : rank + 1].copy())
        assert ranks[0].persist(keys, deadline_s=WAIT_S) == (4, "")
        node.demote(keys)
        ranks[1].read(keys.slice(0, 2), poisoned(ranks[1], 2))
        for number in range(2, 12):
            other = ranks[0].keys([number * 1000 + place for place in range(16)])
            ranks[0].write(other, pages_of(other)[:, :, :, 0:1].copy())
            ranks[1].write(other, pages_of(other)[:, :, :, 1:2].copy())
            node.settle()
            node.check()
        whole = poisoned(node.cache, 4, LAYOUT.whole)
        run = node.cache.read(keys, whole).chunks
        assert np.array_equal(whole[:run], pages[:run])
        left = [
            number for number, key in enumerate(keys) if node.call(lambda key=key: key in node.core.pool.forest.chunks)
        ]
        assert len(left) == run, f"chunks {left} are of no use: only {run} are covered"
    node.close()
