"""SSDs that hold less than was asked for, and pools that hold less than is written (C05, C06, C08, C09, C10, B07)."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.client import Cache
from kvstore.model.layout import Dtype, PageLayout
from kvstore.model.prefix import Keys
from kvstore.model.values import MissReason, Outcome
from kvstore.node.tier import Tier
from tests.chaos.pool_processes import Processes, stats_of, until
from tests.chaos.test_ssd_limits import mounted
from tests.chaos.tier_node import SLOT_BYTES, TierNode
from tests.unit.client.pages import namespace, pages_of

PAGE = 4096
WIDE = PageLayout(layers=4, kv_heads=2, head_dim=40, dtype=Dtype.FP32, page_tokens=8, pages_per_chunk=2)
"""Slots of 44 KiB."""
LARGE = PageLayout(layers=4, kv_heads=4, head_dim=64, dtype=Dtype.FP32, page_tokens=8, pages_per_chunk=2)
"""Slots of 132 KiB."""


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TierNode]:
    node = TierNode(tmp_path, monkeypatch)
    yield node
    node.disk.work()
    node.close()


# --- C05: the limit ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_c05_the_file_stays_within_its_limit_over_runs_that_were_killed(processes: Processes) -> None:
    """Limit 2 MiB; three runs that write twice as much each, two of them killed while they write."""
    limit = 2 << 20
    folder = processes.folder / "ssd"
    folder.mkdir()
    path = folder / "pages.kvssd"

    def taken() -> int:
        assert [entry.name for entry in folder.iterdir()] == ["pages.kvssd"], "nothing is made beside it"
        status = path.stat()
        assert status.st_size <= limit
        return status.st_blocks * 512

    node = processes.node(dram=512 << 10, ssd=f"{path}:{limit}", slots=4096)
    client = processes.client(node)
    for run in range(3):
        if run:
            node = processes.node(dram=512 << 10, ssd=f"{path}:{limit}", slots=4096)
            assert stats_of(node)["recovered_ssd_chunks"] > 0
        for number in range(20):
            prompt = 100 * run + number
            until(lambda prompt=prompt: client.do("write", prompt=prompt, chunks=16).get("stored") == 16)
            assert taken() <= limit
        if run < 2:
            client.tell(step="write", prompt=999, chunks=16)
            node.kill()
            client.hear()
        assert taken() <= limit
    assert taken() > limit * 3 // 4, "the test has lost its point: the disk was not filled"
    assert client.do("read", prompt=219, chunks=16) | {"seconds": 0} == {
        "chunks": 16,
        "remote": 0,
        "reason": None,
        "wrong": 0,
        "seconds": 0,
    }
    assert node.terminate() == 0
    assert taken() <= limit


# --- C06: the disk is full before the limit ------------------------------------------------------------------


@pytest.fixture
def tmpfs(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "small").mkdir()
    with mounted(tmp_path / "small", "-t", "tmpfs", "-o", "size=1M", "none") as folder:
        yield folder


def test_c06_a_disk_smaller_than_the_limit_serves_what_it_holds(
    tmp_path: Path, tmpfs: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Limit 2 MiB on a tmpfs of 1 MiB: 4 MiB are written, and each prompt is on the SSD when that was promised."""
    node = TierNode(tmp_path, monkeypatch, dram_bytes=512 << 10, ssd_bytes=2 << 20, ssd_path=tmpfs / "ssd")
    for number in range(42):
        keys = node.saved(number, 8)
        node.check()
        assert node.read(keys).chunks == 8
    assert "less free than --ssd names" in caplog.text
    assert caplog.text.count("the node goes on with the slots that it has there") == 1
    assert node.stats()["ssd_disk_full"] >= 1 and "ssd_failures" not in node.stats()
    kept = [number for number in range(42) if node.places(node.keys(number, 8))[1] == 8]
    assert len(kept) * 8 * SLOT_BYTES > 600 << 10, "it serves about what the disk has"
    node.close()
    again = TierNode(tmp_path, monkeypatch, dram_bytes=512 << 10, ssd_bytes=2 << 20, ssd_path=tmpfs / "ssd")
    for number in kept:
        assert again.read(again.keys(number, 8)).chunks == 8
        again.check()
    again.close()


# --- C08: free space but no room -----------------------------------------------------------------------------


def mixed(node: TierNode) -> list[Cache]:
    return [node.cache, *(node.client.bind(namespace(layout=layout)) for layout in (WIDE, LARGE))]


@pytest.mark.parametrize("tier", ["dram", "ssd"])
def test_c08_a_large_chunk_finds_room_among_freed_small_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tier: str
) -> None:
    rng = random.Random(8)
    node = TierNode(tmp_path, monkeypatch, dram_bytes=4 << 20, ssd_bytes=4 << 20 if tier == "ssd" else 16 << 20)
    caches = mixed(node)
    stored: list[tuple[Cache, Keys]] = []
    allocator = node.core.pool.dram.allocator if tier == "dram" else node.core.pool.ssd.allocator
    while node.call(lambda: allocator.used_bytes) < allocator.arena_bytes * 17 // 20:
        cache = rng.choice(caches)
        number = len(stored)
        stored.append((cache, node.write(number, 1, cache)))
        node.check()
        if tier == "ssd" and number % 4 == 0:
            node.settle()
    for cache, keys in stored[::2]:
        cache.remove(keys)
    node.settle()
    node.check()
    stats = node.stats()
    assert stats["free_bytes"] > stats["largest_free_bytes"] > 0
    assert (stats["pinned_bytes"], stats["reserved_bytes"], stats["leases"]) == (0, 0, 0)
    for number in range(1000, 1004):
        keys = node.saved(number, 4, caches[2])
        assert node.read(keys, cache=caches[2]).chunks == 4
        node.check()
    node.close()


def test_c08_the_figures_tell_held_room_from_holes(node: TierNode) -> None:
    """Everything is leased: nothing can be stored, and the figures say that it is for that and not for holes."""
    number = 0
    with node.connect() as other:
        cache = other.bind(namespace())
        while True:
            keys = node.keys(number, 8)
            outcomes = node.cache.write(keys, pages_of(keys)).outcomes
            if outcomes[-1] is Outcome.REFUSED_FULL:
                break
            host = other.host(1.0)
            assert host is not None
            assert host.api.acquire(keys, cache.rectangle, 60_000, b"", 0, 5.0).run == 8
            number += 1
        node.check()
        stats = node.stats()
        assert stats["leases"] == number and stats["reserve_refused_full"] > 0
        assert stats["largest_free_bytes"] < 8 * SLOT_BYTES
    until(lambda: node.stats()["leases"] == 0)
    node.write(3000, 8)


# --- C09: a burst --------------------------------------------------------------------------------------------


def test_c09_what_a_burst_lost_is_counted(node: TierNode) -> None:
    """DRAM has 80 chunks; three prompts of 60 come while the disk stands still. What is not there is in the figures."""
    with node.disk.held("pwritev") as hold:
        for number in range(3):
            node.write(number, 60)
            hold.wait()
            node.check()
        assert node.stats()["evicted_unsaved"] > 0
    node.settle()
    found = [node.read(node.keys(number, 60)).chunks for number in range(3)]
    node.check()
    assert sum(found) < 180, "the test has lost its point"
    assert 180 - sum(found) == node.stats()["evicted_unsaved"]
    assert found[2] == 60


def test_c09_a_burst_that_the_disk_keeps_up_with_is_lost_nowhere(node: TierNode) -> None:
    for number in range(3):
        node.write(number, 60)
        node.settle()
    assert [node.read(node.keys(number, 60)).chunks for number in range(3)] == [60, 60, 60]
    node.check()
    assert node.stats().get("evicted_unsaved", 0) == 0


# --- C10: new entries of the SSD -----------------------------------------------------------------------------


def test_c10_the_newest_chunk_on_the_ssd_survives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten slots: nine old chunks that were read once, then a new one that never was, then one more."""
    ten = (128 << 10) + PAGE + 10 * SLOT_BYTES
    node = TierNode(tmp_path, monkeypatch, ssd_bytes=ten)
    for number in range(9):
        assert node.read(node.on_ssd(number, 1)).ssd_tokens == 16
    new = node.saved(100, 1)
    last = node.saved(101, 1)
    assert (node.places(new)[1], node.places(last)[1]) == (1, 1)
    assert node.places(node.keys(0, 1))[1] == 0, "the oldest went"
    assert node.call(lambda: node.core.pool.ssd.chunk_count) == 10
    node.check()
    node.close()


def test_a_dram_that_holds_more_than_the_ssd_wears_no_disk_for_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the SSD gave up for want of room was saved again at once, which pushed out the next one, for ever."""
    node = TierNode(tmp_path, monkeypatch, ssd_bytes=(128 << 10) + PAGE + 10 * SLOT_BYTES)
    for number in range(30):
        node.write(number, 1)
    node.settle()
    node.check()
    stats = node.stats()
    assert (stats["ssd_write_bytes"], stats["ssd_copies_dropped"]) == (30 * SLOT_BYTES, 20)
    assert sum(node.read(node.keys(number, 1)).chunks for number in range(30)) == 30
    node.close()


# --- B07: nothing can be evicted -----------------------------------------------------------------------------


def lease_all(node: TierNode, keys: Keys) -> int:
    session = node.call(lambda: node.core.open_session("holder", shared=False).number)
    assert node.call(lambda: node.core.acquire(session, keys, node.cache.layout.whole, 60_000)).run == len(keys)
    return session


def fill_dram(node: TierNode) -> list[int]:
    """Lease all that writers can fill; the sessions."""
    sessions = []
    for number in range(1000, 2000):
        keys = node.keys(number, 1)
        if node.cache.write(keys, pages_of(keys)).visible == 0:
            return sessions
        sessions.append(lease_all(node, keys))
    raise AssertionError("it took everything")


def test_b07_there_is_room_for_what_comes_back_when_writers_hold_all_they_can_have(node: TierNode) -> None:
    wanted = node.on_ssd(1, 4)
    node.settle()
    fill_dram(node)
    result = node.read(wanted)
    assert (result.chunks, result.ssd_tokens) == (4, 64)
    node.check()


def test_b07_read_back_waits_to_its_deadline_without_spinning(node: TierNode, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the room for read-back is held: the read ends at its deadline as a miss, after a bounded number of looks."""
    room = node.on_ssd(1, 4), node.on_ssd(2, 4)
    wanted = node.on_ssd(3, 4)
    node.settle()
    sessions = fill_dram(node)
    held = 0
    for keys in room:
        held += node.read(keys, deadline_s=0.3).chunks
        for place in range(len(keys)):  # the last ones may have come for the first ones
            if node.places(keys.slice(place, place + 1))[0]:
                sessions.append(lease_all(node, keys.slice(place, place + 1)))
    assert held >= 5 and node.call(lambda: node.core.pool.allocator.largest_free_bytes) < SLOT_BYTES
    looks = [0]
    take = Tier.take

    def counting(tier: Tier, *arguments: int) -> list[int]:
        looks[0] += 1
        return take(tier, *arguments)

    monkeypatch.setattr(Tier, "take", counting)
    result = node.read(wanted, deadline_s=0.5)
    assert (result.chunks, result.reason) == (0, MissReason.STAGING_FULL)
    assert node.stats()["acquire_miss_staging_full"] >= 1
    assert looks[0] <= 60, "it spins"
    node.check()
    node.call(lambda: [node.core.process_gone(session) for session in sessions])
    assert node.read(wanted).chunks == 4


# --- a chain that does not fit -------------------------------------------------------------------------------


def test_a_prompt_longer_than_the_ssd_keeps_no_other_prompt_off_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cleaner tried the first chunk that did not fit again and again, and saved nothing else any more."""
    ten = (128 << 10) + PAGE + 10 * SLOT_BYTES
    node = TierNode(tmp_path, monkeypatch, ssd_bytes=ten)
    long = node.write(1, 40)
    until(lambda: node.stats().get("ssd_no_room", 0) > 0)
    assert node.places(long)[1] <= 10
    node.check()
    short = node.write(2, 4)
    until(lambda: node.places(short)[1] == 4)
    node.check()
    assert node.cache.persist(long, deadline_s=2.0)[1] == "ssd_full"
    assert node.read(long).chunks == 40 and node.read(short).chunks == 4
    node.check()
    node.close()


def test_a_prompt_longer_than_the_dram_is_read_in_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DRAM has 21 slots, the prompt 60 chunks: part after part is brought in, each within the bound of one call."""
    node = TierNode(tmp_path, monkeypatch, dram_bytes=256 << 10)
    keys = node.keys(1, 60)
    for stop in range(10, 61, 10):
        part = keys.slice(0, stop)
        assert node.cache.write(part, pages_of(part)).visible == stop, "what is on the SSD makes room for the rest"
        node.settle()
        node.check()
    assert node.places(keys)[1] == 60
    result = node.read(keys)
    assert (result.chunks, result.reason) == (60, None)
    assert result.ssd_tokens >= 39 * 16
    node.check()
    assert node.read(keys).chunks == 60
    node.check()
    assert node.stats()["leases"] == 0
    node.close()


def test_a_call_brings_in_no_more_than_its_bound(node: TierNode) -> None:
    """64 KiB of 1 MiB are for read-back: five slots. A bound that came out even was started anew."""
    keys = node.on_ssd(1, 30)
    host = node.client.host(1.0)
    assert host is not None
    bound = node.call(lambda: node.core.pool.read_back_bytes(SLOT_BYTES)) // SLOT_BYTES
    answer = host.api.acquire(keys, node.cache.rectangle, 5000, b"", 0, 5.0)
    assert (answer.run, answer.more, answer.reason) == (bound, True, None)
    until(lambda: node.places(keys)[0] == 2 * bound)  # the next part comes ahead of its reader, and no other
    until(lambda: node.call(lambda: not node.core.on_commit.__self__._hints))
    node.settle()
    assert node.places(keys)[0] == 2 * bound


@pytest.mark.parametrize("dram_bytes", [192 << 10, 128 << 10])
def test_the_bound_of_a_call_holds_where_it_is_a_multiple_of_the_slot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dram_bytes: int
) -> None:
    """4 slots of 12 KiB are a quarter of 192 KiB exactly."""
    node = TierNode(tmp_path, monkeypatch, dram_bytes=dram_bytes)
    node.part_chunks = 4
    keys = node.on_ssd(1, 8)
    host = node.client.host(1.0)
    assert host is not None
    answer = host.api.acquire(keys, node.cache.rectangle, 5000, b"", 0, 5.0)
    assert answer.run == max(1, min(4, dram_bytes // 4 // SLOT_BYTES)) and answer.more
    host.api.release([answer.lease], [], 1.0)
    assert node.read(keys).chunks == 8
    node.check()
    node.close()


def test_a_chunk_longer_than_the_room_for_read_back_still_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slots of 44 KiB in 160 KiB of DRAM, of which 40 KiB are kept for read-back."""
    node = TierNode(tmp_path, monkeypatch, dram_bytes=160 << 10, space=namespace(layout=WIDE))
    node.part_chunks = 1
    for number in range(6):
        node.saved(number, 2)
    for number in range(6):
        assert node.read(node.keys(number, 2)).chunks == 2
        node.check()
    node.close()


def test_what_left_both_tiers_is_a_miss_and_can_be_stored_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = TierNode(tmp_path, monkeypatch, dram_bytes=256 << 10, ssd_bytes=512 << 10)
    first = node.saved(0, 8)
    for number in range(1, 12):
        node.saved(number, 8)
        node.check()
    assert node.places(first) == (0, 0)
    result = node.read(first)
    assert (result.chunks, result.reason) == (0, MissReason.ABSENT)
    node.saved(0, 8)
    node.demote(first)
    result = node.read(first)
    assert (result.chunks, result.ssd_tokens) == (8, 128)
    node.check()
    node.close()
