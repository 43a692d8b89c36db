"""After a known workload every figure of a node has its known value, in Stats and on /metrics."""

from __future__ import annotations

import errno
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from small_node import SmallNode, keys_of
from small_node import namespace as small_namespace

from kvstore import metrics
from kvstore.client import Cache, Client, Durability, connect
from kvstore.metadata import Index
from kvstore.metadata.embedded import EmbeddedIndex
from kvstore.model.namespace import Namespace
from kvstore.model.prefix import Keys
from kvstore.model.values import MissReason
from kvstore.node.exporter import Exporter
from kvstore.rpc import wire
from kvstore.rpc.v1 import node_pb2, node_pb2_grpc
from kvstore.tally import Tally
from tests.chaos.node_thread import NodeThread
from tests.unit.client.pages import LAYOUT, namespace, pages_of, poisoned, prompt
from tests.unit.samples import Samples, sample

SLOT = 12 << 10
"""Bytes of a chunk's slot; a chunk has 16 tokens."""
CHUNK = LAYOUT.chunk_bytes


@pytest.fixture
def node(tmp_path: Path) -> Iterator[NodeThread]:
    node = NodeThread(tmp_path, dram_bytes=1 << 20, slots=1024, ssd=f"{tmp_path / 'file'}:2MiB")
    yield node
    node.stop()


@pytest.fixture
def client(node: NodeThread) -> Iterator[Client]:
    with connect(node.info.socket_path) as client:
        yield client


def stored(cache: Cache, number: int, chunks: int) -> Keys:
    """Stored in DRAM and on the SSD."""
    keys = cache.keys(prompt(number, 16 * chunks))
    assert cache.write(keys, pages_of(keys), durability=Durability.SSD).durable == chunks
    return keys


def keep_in_dram(node: NodeThread, chunks: int) -> None:
    """Everything else leaves DRAM, as if it were that small."""

    def trim() -> None:
        dram = node.core.pool.dram
        dram._room_chunks = chunks
        dram.trim()
        dram._room_chunks = 0

    node.call(trim)


def figures(node: NodeThread) -> dict[str, Any]:
    """Of Stats, as everybody gets them; and /metrics is brought up to date."""
    node.call(node.daemon.export)
    with grpc.insecure_channel(node.info.control_address) as channel:
        answer = node_pb2_grpc.NodeServiceStub(channel).Stats(node_pb2.StatsRequest(), timeout=5)
    return dict(json.loads(answer.json))


def test_a_fresh_node_with_an_ssd(node: NodeThread) -> None:
    found = figures(node)
    assert (found["dram_limit_bytes"], found["ssd_limit_bytes"]) == (1 << 20, 2 << 20)
    assert found["dram_used_bytes"] == found["ssd_used_bytes"] == found["cleaner_waiting_chunks"] == 0
    assert (found["ssd_state"], sample("ssd_state")) == (0, 0)
    assert sample("tier_limit_bytes", tier="ssd") == 2 << 20


def test_moves_between_the_tiers(node: NodeThread, client: Client) -> None:
    before = Samples()
    cache = client.bind(namespace())
    keys = stored(cache, 1, 6)
    found = figures(node)
    assert (found["dram_chunks"], found["ssd_chunks"], found["saves"]) == (6, 6, 6)
    assert found["dram_used_bytes"] == found["ssd_used_bytes"] == found["ssd_write_bytes"] == 6 * SLOT
    assert found["dram_committed_slots"] == found["ssd_committed_slots"] == 6
    assert (found["cleaner_unsaved_bytes"], found["ssd_other_slots"], found["quarantined_slots"]) == (0, 0, 0)
    keep_in_dram(node, 2)
    assert cache.read(keys, poisoned(cache, 6)).ssd_tokens == 4 * 16
    found = figures(node)
    assert (found["demotions"], found["promotions"], found["dram_evictions"], found["evictions"]) == (4, 4, 4, 0)
    assert found["ssd_read_bytes"] == 4 * SLOT
    assert before.gained("demoted_chunks_total") == 4
    assert before.gained("promoted_shards_total") == 4 and before.gained("saved_shards_total") == 6
    assert before.by("path_bytes_total", "path") == {"ssd_read": 4 * SLOT, "ssd_write": 6 * SLOT}
    assert before.gained("transfer_seconds_count", path="ssd_read") == 4
    assert 1 <= before.gained("transfer_seconds_count", path="ssd_write") <= 6
    assert before.by("evicted_chunks_total", "tier") == {"dram": 4}
    assert before.gained("eviction_age_seconds_count", tier="dram") == 4
    assert sample("slots", tier="dram", state="committed") == 6 == sample("tier_chunks", tier="ssd")
    assert sample("slots", tier="dram", state="free") == found["dram_free_slots"] > 0
    assert sample("cleaner_unsaved_bytes") == 0 == sample("cleaner_waiting_chunks")


def test_tokens_by_tier_and_namespace_and_what_same_host_readers_tell(node: NodeThread, client: Client) -> None:
    before, spaces = Samples(), [namespace(), namespace("r2")]
    for number, space in enumerate(spaces):
        cache = client.bind(space)
        keys = stored(cache, number, 4)
        keep_in_dram(node, 1)
        assert cache.read(keys, poisoned(cache, 4)).chunks == 4  # one from shared memory, three from the SSD
    client.flush_touches()
    figures(node)
    by_tier = [
        [before.gained("hit_tokens_total", tier=tier, namespace=space.title) for tier in ("dram", "ssd")]
        for space in spaces
    ]
    # The first namespace's trim left one chunk of it, the second's one chunk of all: the later reader finds none.
    assert [ssd for _, ssd in by_tier] == [48, 48] and by_tier[0][0] == 0
    for space in spaces:
        assert before.gained("touched_tokens_total", namespace=space.title) == 16, "what it read without asking"
    assert before.by("miss_tokens_total", "reason") == {}


def test_reads_from_shared_memory_alone_show_as_touches(node: NodeThread, client: Client) -> None:
    before = Samples()
    cache = client.bind(namespace())
    keys = stored(cache, 1, 4)
    assert cache.read(keys, poisoned(cache, 4)).local_chunks == 4
    client.flush_touches()
    assert figures(node)["touched_tokens"] == 64
    assert before.by("touched_tokens_total", "namespace") == {namespace().title: 64}
    assert before.by("hit_tokens_total", "tier") == {}


def test_misses_by_reason_count_reads_and_tokens(node: NodeThread, client: Client) -> None:
    """`tokens_absent` was once a reason, and what the SSD did not deliver had none."""
    before = Samples()
    cache = client.bind(namespace())
    keys, longer = stored(cache, 1, 3), cache.keys(prompt(1, 16 * 5))
    with connect(node.info.control_address, transport="tcp") as far:
        other = far.bind(namespace())
        assert other.read(longer, poisoned(cache, 5)).chunks == 3
        figures(node)
        assert before.by("misses_total", "reason") == {"absent": 1}
        assert before.by("miss_tokens_total", "reason") == {"absent": 32}
        assert before.gained("hit_tokens_total", tier="dram", namespace=namespace().title) == 48
        assert before.gained("path_bytes_total", path="tcp") >= 3 * CHUNK
        assert before.gained("transfer_seconds_count", path="tcp") >= 1
        keep_in_dram(node, 1)
        break_ssd(node, "preadv")
        assert other.read(keys, poisoned(cache, 3)).reason is MissReason.TIER_FAILED
    figures(node)
    assert before.by("misses_total", "reason") == {"absent": 1, "tier_failed": 1}
    assert before.by("miss_tokens_total", "reason") == {"absent": 32, "tier_failed": 32}


def break_ssd(node: NodeThread, call: str) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.EIO, "broken")

    tiers: Any = node.daemon.tiers
    setattr(tiers._disk.arena._file._calls, call, fail)


@pytest.mark.parametrize(("call", "kind"), [("pwritev", "write"), ("fdatasync", "write")])
def test_a_failing_ssd_shows(node: NodeThread, client: Client, call: str, kind: str) -> None:
    before = Samples()
    cache = client.bind(namespace())
    stored(cache, 1, 2)
    break_ssd(node, call)
    keys = cache.keys(prompt(2, 32))
    result = cache.write(keys, pages_of(keys), durability=Durability.SSD)
    assert (result.visible, result.durable, result.not_durable) == (2, 0, "ssd_error")
    found = figures(node)
    assert (found["ssd_state"], found["ssd_failures"]) == (2, 1)
    assert sample("ssd_state") == 2 and before.by("ssd_errors_total", "kind").keys() == {kind}


def test_a_failed_sync_is_not_forgotten(node: NodeThread, client: Client) -> None:
    """Only the first fdatasync after a lost write tells of it. Persist passed its error on, and the next one promised
    durability that was not there."""
    cache = client.bind(namespace())
    keys = cache.keys(prompt(1, 32))
    cache.write(keys, pages_of(keys), durability=Durability.SSD)
    tiers: Any = node.daemon.tiers
    works = tiers._disk.arena._file._calls.fdatasync
    break_ssd(node, "fdatasync")
    assert cache.persist(keys) == (0, "ssd_error")
    tiers._disk.arena._file._calls.fdatasync = works
    assert cache.persist(keys) == (0, "ssd_error")
    assert figures(node)["ssd_errors_write"] == 1


def test_a_full_disk_shows(node: NodeThread, client: Client) -> None:
    before = Samples()
    cache = client.bind(namespace())
    stored(cache, 1, 2)
    calls: Any = node.daemon.tiers._disk.arena._file._calls  # type: ignore[union-attr]
    works = calls.pwritev

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "full")

    calls.pwritev = full
    keys = cache.keys(prompt(2, 32))
    assert cache.write(keys, pages_of(keys), durability=Durability.SSD).not_durable == "ssd_full"
    calls.pwritev = works
    assert figures(node)["ssd_state"] == 1 == sample("ssd_state")
    assert before.gained("ssd_errors_total", kind="disk_full") >= 1
    assert before.gained("ssd_errors_total", kind="write") == 0


def test_a_flipped_bit_on_the_ssd_shows(node: NodeThread, client: Client, tmp_path: Path) -> None:
    before = Samples()
    cache = client.bind(namespace())
    keys = stored(cache, 1, 2)
    keep_in_dram(node, 1)
    slot = node.call(lambda: next(iter(node.core.pool.forest.chunks[keys[1]].ssd.values())).slot)
    with (tmp_path / "file").open("r+b") as file:
        file.seek(slot * 4096 + 100)
        byte = file.read(1)[0]
        file.seek(slot * 4096 + 100)
        file.write(bytes([byte ^ 1]))
    result = cache.read(keys, poisoned(cache, 2))
    assert (result.chunks, result.reason) == (1, MissReason.CHECKSUM)
    assert figures(node)["ssd_checksum_failures"] == 1
    assert before.by("checksum_failures_total", "tier") == {"ssd": 1}
    assert before.gained("misses_total", reason="checksum") == 1


def test_payloads_of_put_and_get(node: NodeThread, client: Client) -> None:
    before = Samples()
    space = namespace()
    cache = client.bind(space)
    keys = cache.keys(prompt(1, 16 * 140))  # more than one window of a Get
    with connect(node.info.control_address, transport="tcp") as far:
        head = keys.slice(0, 3)
        assert far.bind(space).write(head, pages_of(head), node=node.info).visible == 3
    with grpc.insecure_channel(node.info.control_address) as channel:
        stub = node_pb2_grpc.NodeServiceStub(channel)
        session = stub.OpenSession(node_pb2.OpenSessionRequest(client_name="foreign"), timeout=5).session
        registered = node_pb2.RegisterNamespaceRequest(session=session, namespace=space.canonical)
        stub.RegisterNamespace(registered, timeout=5)
        request = node_pb2.GetRequest(
            session=session, chain=wire.chain_to_message(keys), rectangle=wire.rectangle_to_message(LAYOUT.whole)
        )
        parts = list(stub.Get(request, timeout=5))
    assert parts[-1].end_reason == "absent"
    figures(node)
    assert before.gained("path_bytes_total", path="grpc_put") == 3 * CHUNK
    assert before.gained("path_bytes_total", path="grpc_get") == 3 * CHUNK
    assert before.gained("transfer_seconds_count", path="grpc_put") == 3
    assert before.gained("transfer_seconds_count", path="grpc_get") == 3
    hit = before.gained("hit_tokens_total", tier="dram", namespace=space.title)
    missed = before.by("miss_tokens_total", "reason")
    assert (hit, missed) == (48, {"absent": 137 * 16}), "what was asked for is hit or missed"


def test_reserved_and_quarantined_slots(node: NodeThread, client: Client) -> None:
    cache = client.bind(namespace())
    pending = cache.begin_write(cache.keys(prompt(1, 16 * 3)))
    found = figures(node)
    assert (found["reserved_slots"], found["reserved_bytes"]) == (3, 3 * SLOT)
    assert sample("slots", tier="dram", state="reserved") == 3
    node.call(lambda: [node.core.reservations.quarantine(each) for each in [*node.core.reservations.attempts.values()]])
    found = figures(node)
    assert (found["reserved_slots"], found["reserved_bytes"]) == (0, 0)
    assert (found["quarantined_slots"], found["quarantined_bytes"]) == (3, 3 * SLOT)
    assert sample("slots", tier="dram", state="quarantined") == 3
    pending.abort()


def test_the_loops_lag_is_a_gauge_and_a_histogram() -> None:
    before = Samples()
    exporter = Exporter(SmallNode(4).core.pool)
    exporter.export({}, 0.02, Tally())
    exporter.export({}, 0.0001, Tally())
    assert sample("loop_lag_seconds") == 0.0001
    assert before.gained("loop_delay_seconds_bucket", le="0.01") == 1
    assert before.gained("loop_delay_seconds_count") == 2


def test_hits_of_more_than_64_namespaces_have_a_bounded_number_of_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "_labels", set())
    before, small = Samples(), SmallNode(256)
    for number in range(70):
        space = small.core.know(Namespace("many", f"r{number}", LAYOUT), None, ())
        space.dram_hit_tokens = 10
        small.core.pool.used_spaces.add(space)
    exporter = Exporter(small.core.pool)
    for _ in range(2):
        exporter.export({}, 0.0, Tally())
    gained = {
        labels: value
        for labels, value in before.by("hit_tokens_total", "namespace").items()
        if labels.startswith("many@") or labels == "other"
    }
    assert len(gained) == 65 and gained.pop("other") == 60 and set(gained.values()) == {10}


def lines_run(work: Callable[[], object]) -> int:
    """How many lines of code it takes: its cost, without a clock."""
    count = 0

    def trace(frame: Any, event: str, argument: object) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def test_a_tick_costs_the_same_whatever_the_node_holds() -> None:
    costs = []
    for stored_chunks, reserved_chunks in ((5, 1), (600, 300)):
        small, space = SmallNode(1024), small_namespace()
        core, session = small.core, small.open(space)
        small.store(session, keys_of(space, 1, stored_chunks))
        small.reserve(session, keys_of(space, 2, reserved_chunks))
        assert core.stats()["reserved_bytes"] == reserved_chunks * 4096
        exporter = Exporter(core.pool)
        exporter.export(core.stats(), 0.0, Tally())
        costs.append(lines_run(lambda: exporter.export(core.stats(), 0.0, Tally())))  # noqa: B023
    assert abs(costs[0] - costs[1]) < 10, costs


# --- a reader with three sources -----------------------------------------------------------------------------


def index_of(*nodes: NodeThread) -> Index:
    index = EmbeddedIndex()
    for node in nodes:
        for batch in node.call(lambda: node.core.news.take_batch(0, 4096, resync=True, lease_ms=60_000)):  # noqa: B023
            index.publish(batch)
    return index


def test_law_12_hits_by_tier_and_misses_add_up_to_what_was_asked(
    node: NodeThread, client: Client, tmp_path: Path
) -> None:
    """Four chunks in the own node's DRAM, four on its SSD, four on another node's SSD, one nowhere."""
    (tmp_path / "far").mkdir()
    far = NodeThread(tmp_path / "far", node_id="far", dram_bytes=1 << 20, slots=1024, ssd=f"{tmp_path / 'file2'}:2MiB")
    try:
        stored(client.bind(namespace()), 1, 8)
        keep_in_dram(node, 4)
        with connect(far.info.socket_path) as writer:
            stored(writer.bind(namespace()), 1, 12)
        keep_in_dram(far, 4)
        with connect(node.info.socket_path) as near:
            reader = Client(near._host_path, node.info, index_of(node, far))
            cache = reader.bind(namespace())
            keys, target = cache.keys(prompt(1, 16 * 13)), poisoned(cache, 13)
            result = cache.read(keys, target)
            reader.flush_touches()
            counts = reader.stats()
            reader.close()
        assert (result.chunks, result.local_chunks, result.ssd_tokens) == (12, 8, 8 * 16)
        assert np.array_equal(target[:12], pages_of(keys)[:12])
        assert counts["asked_tokens"] == 13 * 16
        hits = {name.removeprefix("hit_tokens_"): count for name, count in counts.items() if "hit_tokens" in name}
        misses = {name: count for name, count in counts.items() if name.startswith("miss_tokens_")}
        assert hits == {"dram": 4 * 16, "ssd": 8 * 16, "local": 8 * 16, "remote": 4 * 16}
        assert misses == {"miss_tokens_absent": 16}
        assert hits["dram"] + hits["ssd"] + sum(misses.values()) == counts["asked_tokens"]
        assert hits["local"] + hits["remote"] + sum(misses.values()) == counts["asked_tokens"]
        both = [figures(each) for each in (node, far)]
        assert [each["acquired_ssd_tokens"] for each in both] == [4 * 16, 4 * 16]
        assert [each.get("acquire_miss_tokens_absent", 0) for each in both] == [5 * 16, 16]
    finally:
        far.stop()
