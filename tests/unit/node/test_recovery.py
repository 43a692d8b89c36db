"""What a restarted worker finds in the catalog, wherever the one before it died."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import pytest
from crash_node import BROAD, NARROW, SMALL, UNIT_BYTES, WIDE, Crash, CrashNode, keys_of

import kvstore.node.catalog as catalog_module
from kvstore.errors import LayoutMismatch, LimitExceeded
from kvstore.model.layout import Dtype, Geometry, PageLayout, SideComponent
from kvstore.model.namespace import Namespace
from kvstore.model.prefix import Keys
from kvstore.model.values import MissReason, NodeInfo, Outcome
from kvstore.node import slots as slots_module
from kvstore.node.catalog import BUCKET_ENTRIES, Header
from kvstore.node.handover import KeptWriter, Owner, Seat, receive
from kvstore.node.pool import SlotState
from kvstore.node.recovery import FormerWriters, Recovered, _Recovery, has_ended, is_running
from kvstore.node.slots import SlotAllocator
from kvstore.rpc.handshake import process_start_time

WHOLE = Geometry.whole(SMALL)
HALVES = Geometry.parallel(SMALL, tp=2)
GONE = (os.getpid(), 1)
"""A process that has ended: this pid began at another time."""
ITSELF = (0, 0)
"""The worker, when it writes for a stream."""


@pytest.fixture(autouse=True)
def _small_extents(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several slot classes have room in a small arena."""
    monkeypatch.setattr(slots_module, "EXTENT_BYTES", 4 * UNIT_BYTES)
    monkeypatch.setattr(slots_module, "EXTENT_SLOTS", 1)


@pytest.fixture
def node() -> Iterator[CrashNode]:
    node = CrashNode()
    yield node
    node.close()


@pytest.fixture
def writer_process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def owner_of(process: subprocess.Popen[bytes]) -> tuple[int, int]:
    return process.pid, process_start_time(process.pid)


def test_what_was_committed_is_there_again_and_works_on(node: CrashNode) -> None:
    keys = keys_of(NARROW, 1, 5)
    assert node.store(node.session(NARROW), keys, WHOLE.shard(0)) == [Outcome.COMMITTED] * 5
    recovered = node.restart()
    assert (recovered.chunks, recovered.shards, recovered.dropped_shards, recovered.quarantined_slots) == (5, 5, 0, 0)
    assert node.resident(keys, NARROW) == node.check_bytes() == 5
    session = node.session(NARROW)
    longer = keys_of(NARROW, 1, 8)
    assert node.store(session, longer, WHOLE.shard(0)) == [Outcome.PRESENT] * 5 + [Outcome.COMMITTED] * 3
    node.core.check()
    assert node.resident(longer, NARROW) == node.check_bytes() == 8
    assert node.core.remove(session.number, NARROW.id, [longer[2]]) == 6
    node.core.check()
    assert node.restart().chunks == node.resident(longer, NARROW) == 2


def test_an_empty_node_restarts(node: CrashNode) -> None:
    assert node.restart() == Recovered(0, 0, 0, 0, {})


def test_slot_classes_and_shards_are_kept_apart() -> None:
    node = CrashNode(slots=24)
    halves, wide = Geometry.parallel(WIDE, tp=2), Geometry.whole(WIDE)
    narrow, broad, split = keys_of(NARROW, 1, 3), keys_of(BROAD, 1, 2), keys_of(BROAD, 2, 2)
    node.store(node.session(NARROW), narrow, WHOLE.shard(0))
    node.store(node.session(BROAD, wide), broad, wide.shard(0))
    node.store(node.session(BROAD, halves), split, halves.shard(0))
    node.store(node.session(BROAD, halves), split, halves.shard(1))
    used = node.core.pool.allocator.used_bytes
    recovered = node.restart()
    assert (recovered.chunks, recovered.shards) == (7, 9)
    assert node.core.pool.allocator.used_bytes == used
    assert [node.resident(*each) for each in ((narrow, NARROW), (broad, BROAD), (split, BROAD))] == [3, 2, 2]


def test_a_torn_arena_serves_other_classes_again_when_it_is_empty() -> None:
    node = CrashNode(slots=12)
    session = node.session(NARROW)
    for prompt in range(12):
        node.store(session, keys_of(NARROW, prompt, 1), WHOLE.shard(0))
    for prompt in (0, 1, 2, 4, 5, 7, 8, 9, 10):
        node.core.remove(session.number, NARROW.id, list(keys_of(NARROW, prompt, 1)))
    node.restart()
    session = node.session(NARROW)
    for prompt in (3, 6, 11):
        node.core.remove(session.number, NARROW.id, list(keys_of(NARROW, prompt, 1)))
    wide = Geometry.whole(WIDE)
    assert node.store(node.session(BROAD, wide), keys_of(BROAD, 1, 4), wide.shard(0)) == [Outcome.COMMITTED] * 4
    node.core.check()


def test_the_order_of_eviction_is_that_of_the_commits() -> None:
    node = CrashNode(slots=6)
    session = node.session(NARROW)
    old, young = keys_of(NARROW, 1, 3), keys_of(NARROW, 2, 3)
    node.store(session, old, WHOLE.shard(0))
    node.store(session, young, WHOLE.shard(0))
    node.restart()
    node.store(node.session(NARROW), keys_of(NARROW, 3, 2), WHOLE.shard(0))
    node.core.check()
    assert (node.resident(old, NARROW), node.resident(young, NARROW)) == (1, 3)


def test_a_chunk_counts_as_covered_by_what_is_written_here(node: CrashNode) -> None:
    session = node.core.open_session("test", shared=True)
    node.core.register_namespace(session.number, NARROW, HALVES, [1])
    keys = keys_of(NARROW, 1, 2)
    node.store(session, keys, HALVES.shard(1))
    node.restart()
    assert not node.core.pool.forest.uncovered
    assert all(chunk.published for chunk in node.core.pool.forest.chunks.values())


def test_fingerprints_still_tell_other_tokens_apart(node: CrashNode) -> None:
    keys = keys_of(NARROW, 1, 2)
    node.store(node.session(NARROW), keys, WHOLE.shard(0))
    node.restart()
    assert keys.fingerprints is not None
    session = node.session(NARROW)
    assert node.core.acquire(session.number, keys, SMALL.whole, 0).run == 2
    for place in (0, 1):
        prints = keys.fingerprints.copy()
        prints[place] ^= 1
        other = replace(keys, fingerprints=prints)
        assert node.core.acquire(session.number, other, SMALL.whole, 0).reason is MissReason.COLLISION
        outcomes = node.core.reserve(session.number, other, WHOLE.shard(0), b"").outcomes
        assert outcomes[0] is Outcome.REFUSED_COLLISION


def test_the_index_gets_a_snapshot_of_the_new_epoch_first(node: CrashNode) -> None:
    keys = keys_of(NARROW, 1, 3)
    node.store(node.session(NARROW), keys, WHOLE.shard(0))
    node.restart()
    first, *rest = node.core.news.take_batch(0, 100, resync=False, lease_ms=1000)
    assert (
        not rest and first.snapshot_begin and first.node == NodeInfo("node-a", 2, "host", "127.0.0.1:1", "127.0.0.1:2")
    )
    assert [event.key for event in first.events] == list(keys)
    assert list(first.geometries) == [(NARROW.id, WHOLE)]
    after = node.core.news.take_batch(first.first_sequence + len(first.events) - 1, 100, resync=False, lease_ms=1000)
    assert [batch.events for batch in after] == [[]]


def test_readers_of_before_drop_their_mappings_and_generations_go_on(node: CrashNode) -> None:
    before = node.reader()
    node.store(node.session(NARROW), keys_of(NARROW, 1, 1), WHOLE.shard(0))
    counter = node.memory[Header.COUNTER * 8]
    assert before.alive()
    node.restart()
    assert not before.alive() and node.reader().alive()
    assert node.memory[Header.COUNTER * 8] == counter


# --- a worker that dies in the middle --------------------------------------------------------------------------


@dataclass
class Told:
    """What the clients of a worker were told before it died."""

    stored: list[Keys] = field(default_factory=list)
    removed: list[Keys] = field(default_factory=list)
    in_doubt: list[Keys] = field(default_factory=list)
    """Being removed, or allowed to be evicted."""


def story(node: CrashNode, told: Told) -> None:
    """Stores, a chunk of two shards, a removal, a reservation left open, a lost session, evictions."""
    session = node.session(NARROW)
    first, second, split = keys_of(NARROW, 1, 3), keys_of(NARROW, 2, 2), keys_of(NARROW, 3, 2)
    node.store(session, first, WHOLE.shard(0))
    told.stored.append(first)
    halves = node.session(NARROW, HALVES)
    node.store(halves, split, HALVES.shard(0))
    node.store(halves, split, HALVES.shard(1))
    told.stored.append(split)
    node.store(session, second, WHOLE.shard(0))
    told.in_doubt.append(second)
    node.core.remove(session.number, NARROW.id, list(second))
    told.removed.append(second)
    node.core.reserve(session.number, keys_of(NARROW, 4, 2), WHOLE.shard(0), b"")
    left = node.core.reserve(halves.number, keys_of(NARROW, 5, 2), HALVES.shard(1), b"")
    node.core.abort(halves.number, left.attempt)
    node.core.session_lost(session.number)
    told.in_doubt += [first, split]
    wide = Geometry.whole(WIDE)
    node.store(node.session(BROAD, wide), keys_of(BROAD, 1, 3), wide.shard(0))


def dies_and_recovers(limit: int, owner: Owner, limit_of_recovery: int | None = None) -> tuple[bool, bool]:
    """The story up to a store, then recoveries: one that may die as well, and one that does not.

    Returns whether the worker and the first recovery died. Raises AssertionError where a law is broken.
    """
    node, told = CrashNode(12, owner=owner), Told()
    node.stores, node.limit = 0, limit
    died = recovery_died = False
    try:
        story(node, told)
    except Crash:
        died = True
    node.check_bytes()
    if limit_of_recovery is not None:
        try:
            node.restart(limit_of_recovery)
        except Crash:
            recovery_died = True
        node.check_bytes()
    recovered = node.restart()
    for keys in told.stored:
        assert keys in told.in_doubt or node.resident(keys, NARROW) == len(keys), "a committed chunk is gone"
    assert all(node.resident(keys, NARROW) == 0 for keys in told.removed), "a removed chunk is back"
    check_contents(node, recovered)
    node.store(node.session(NARROW), keys_of(NARROW, 9, 4), WHOLE.shard(0))
    node.core.check()
    node.check_bytes()
    node.close()
    return died, recovery_died


def check_contents(node: CrashNode, recovered: Recovered) -> None:
    """Nothing wrong is visible, and nothing is out of use once the writers of before have ended."""
    tags = memoryview(node.memory)[node.shape.tags_offset :][: node.shape.buckets * 2 * BUCKET_ENTRIES].cast("H")
    assert node.check_bytes() == recovered.shards == sum(map(bool, tags))
    node.release_former(recovered)
    node.core.check()
    pool = node.core.pool
    copies = {copy.slot for chunk in pool.forest.chunks.values() for copy in chunk.copies.values()}
    assert pool.allocator.used_slots() == copies, "a slot is lost"
    for slot in range(node.slots):
        generation = node.writer.generation(slot)
        assert slot in copies or generation == 0 or generation & 1, "a free slot looks valid"
        assert node.state(slot) == (SlotState.COMMITTED if slot in copies else SlotState.FREE)


@pytest.mark.slow
@pytest.mark.parametrize("owner", [GONE, ITSELF])
def test_a_worker_may_die_at_any_store(owner: Owner) -> None:
    limit = 0
    while dies_and_recovers(limit, owner)[0]:
        limit += 1
    assert limit > 300, "the story has too few stores to tell anything"


@pytest.mark.slow
def test_a_recovery_may_die_at_any_store() -> None:
    points = 0
    for limit in range(3, 400, 23):
        limit_of_recovery = 0
        while dies_and_recovers(limit, (GONE, ITSELF)[limit % 2], limit_of_recovery)[1]:
            limit_of_recovery += 1
        points += limit_of_recovery
    assert points > 200


def _believes_any_entry(recovery: Any) -> list[int]:
    return [int(entry) for entry in (recovery._entries[:, 3] != 0).nonzero()[0]]


MUTANTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "entries are believed without their slot": lambda patch: patch.setattr(
        _Recovery, "_valid_entries", _believes_any_entry
    ),
    "what is dropped stays in the catalog": lambda patch: patch.setattr(_Recovery, "_clear_entries", lambda _: 0),
    "free slots keep their generation": lambda patch: patch.setattr(_Recovery, "_free_slots", lambda _: None),
    "tags are not stored": lambda patch: patch.setattr(catalog_module, "tag_of", lambda key, shard: 0),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_check_finds_what_a_recovery_leaves_out(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AssertionError):
        for limit, owner in product(range(400), (GONE, ITSELF)):
            with monkeypatch.context() as patch:
                patch.setattr(CrashNode, "before_recovery", lambda _, patch=patch: MUTANTS[mutant](patch))
                dies_and_recovers(limit, owner)


# --- writers that outlive the worker ---------------------------------------------------------------------------


def reserve_and_die(node: CrashNode) -> list[int]:
    """Two slots are granted, half of one is written, the worker dies. Returns the slots."""
    node.store(node.session(NARROW), keys_of(NARROW, 1, 1), WHOLE.shard(0))
    answer = node.core.reserve(node.session(NARROW).number, keys_of(NARROW, 2, 2), WHOLE.shard(0), b"")
    assert answer.outcomes == [Outcome.GRANTED] * 2
    return answer.slots


def test_slots_of_a_living_writer_stay_out_of_use(node: CrashNode, writer_process: subprocess.Popen[bytes]) -> None:
    node.owner = owner_of(writer_process)
    slots = reserve_and_die(node)
    recovered = node.restart()
    former = FormerWriters(node.core, recovered.holders, None)
    assert recovered.quarantined_slots == 2 and recovered.chunks == 1
    former.poll()
    assert len(former) == 1 and node.core.stats()["quarantined_bytes"] == 2 * UNIT_BYTES
    fresh = keys_of(NARROW, 3, node.slots - 3)
    node.owner = (0, 0)
    answer = node.core.reserve(node.session(NARROW).number, fresh, WHOLE.shard(0), b"")
    assert not set(answer.slots) & set(slots) and set(answer.outcomes) == {Outcome.GRANTED}
    recovered = node.restart()
    again = FormerWriters(node.core, recovered.holders, None)
    again.poll()
    assert len(again) == 1, "the next crash forgot it"
    writer_process.kill()
    writer_process.wait()
    again.poll()
    assert len(again) == 0 and node.core.stats()["quarantined_bytes"] == 0
    node.core.check()


def test_without_quarantine_a_slot_would_be_handed_out_while_it_is_written(
    node: CrashNode, writer_process: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    node.owner = owner_of(writer_process)
    slots = reserve_and_die(node)
    monkeypatch.setattr(_Recovery, "_held_slots", lambda _: {})
    node.restart()
    answer = node.core.reserve(node.session(NARROW).number, keys_of(NARROW, 3, 15), WHOLE.shard(0), b"")
    assert set(slots) < set(answer.slots)


def test_slots_of_a_dead_writer_are_free(node: CrashNode) -> None:
    node.owner = GONE
    reserve_and_die(node)
    recovered = node.restart()
    assert recovered.quarantined_slots == 2
    node.release_former(recovered)
    assert node.core.pool.allocator.used_bytes == UNIT_BYTES
    node.core.check()


def test_a_slot_that_was_in_quarantine_stays_in_it(node: CrashNode, writer_process: subprocess.Popen[bytes]) -> None:
    node.owner = owner_of(writer_process)
    session = node.session(NARROW)
    node.core.reserve(session.number, keys_of(NARROW, 2, 2), WHOLE.shard(0), b"")
    node.core.session_lost(session.number)
    recovered = node.restart()
    node.release_former(recovered)
    assert (recovered.quarantined_slots, len(recovered.holders)) == (2, 1)
    assert node.core.pool.allocator.used_bytes == 2 * UNIT_BYTES


def test_a_slot_whose_commit_was_not_answered_is_visible_or_stays_with_its_writer(
    writer_process: subprocess.Popen[bytes],
) -> None:
    keys, shard, seen = keys_of(NARROW, 1, 1), WHOLE.shard(0), set()
    for limit in range(100):
        node = CrashNode(owner=owner_of(writer_process))
        session = node.session(NARROW)
        answer = node.core.reserve(session.number, keys, shard, b"")
        node.fill(answer.slots[0], keys[0], shard)
        node.stores, node.limit = 0, limit
        try:
            node.core.commit(session.number, answer.attempt, [0], [7], True)
        except Crash:
            quarantined = node.restart().quarantined_slots
            assert quarantined + node.resident(keys, NARROW) == 1
            assert node.core.pool.allocator.used_slots() == set(answer.slots)
            seen.add(quarantined)
        else:
            break
        finally:
            node.close()
    assert seen == {0, 1} and limit > 10


def test_what_the_worker_itself_was_writing_is_free_at_once(node: CrashNode) -> None:
    reserve_and_die(node)
    assert node.restart().quarantined_slots == 0
    assert node.core.pool.allocator.used_bytes == UNIT_BYTES


def test_a_pidfd_decides_where_the_supervisor_kept_one(
    node: CrashNode, writer_process: subprocess.Popen[bytes]
) -> None:
    """The pid that a process in a container states names nobody here, but its slots are its own all the same."""
    node.owner = GONE
    reserve_and_die(node)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    unused = KeptWriter(1, (7, 7), os.pidfd_open(os.getpid()))
    kept = KeptWriter(2, GONE, os.pidfd_open(writer_process.pid))
    recovered = node.restart()
    seat = Seat(0, 0, 0, node.memory, 2, True, {}, (unused, kept), theirs)
    former = FormerWriters(node.core, recovered.holders, seat)
    assert receive(ours) == ({"drop": 1}, []) and receive(ours) is None
    former.poll()
    assert len(former) == 1
    writer_process.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, writer_process.pid, os.WEXITED | os.WNOWAIT)
    assert is_running(*GONE) is is_running(*owner_of(writer_process)) is False, "a zombie writes nothing"
    former.poll()
    assert len(former) == 0 and receive(ours) == ({"drop": 2}, [])
    ours.close()
    theirs.close()


def test_running_means_this_very_process() -> None:
    own = os.getpid(), process_start_time(os.getpid())
    assert is_running(*own) and not is_running(own[0], own[1] + 1) and not is_running(0, 0)
    pidfd = os.pidfd_open(os.getpid())
    assert not has_ended(pidfd)
    os.close(pidfd)


# --- memory that does not fit ----------------------------------------------------------------------------------


def test_a_directory_that_was_being_changed_is_even_again(node: CrashNode) -> None:
    node.store(node.session(NARROW), keys_of(NARROW, 1, 1), WHOLE.shard(0))
    words = memoryview(node.memory).cast("Q")
    version = words[Header.DIRECTORY_VERSION] = words[Header.DIRECTORY_VERSION] + 1
    node.restart()
    assert words[Header.DIRECTORY_VERSION] == version + 1
    assert node.resident(keys_of(NARROW, 1, 1), NARROW) == 1


@pytest.mark.parametrize("region", ["descriptions_offset", "namespaces_offset", "geometries_offset"])
def test_a_broken_directory_asks_for_new_memory(node: CrashNode, region: str) -> None:
    node.store(node.session(NARROW), keys_of(NARROW, 1, 1), WHOLE.shard(0))
    at = getattr(node.shape, region)
    node.memory[at : at + 16] = b"\xff" * 16
    with pytest.raises(LayoutMismatch):
        node.restart()


def test_slots_that_overlap_ask_for_new_memory() -> None:
    with pytest.raises(LayoutMismatch):
        SlotAllocator(1 << 20).adopt([(1, 8192), (2, 4096)])
    with pytest.raises(LayoutMismatch):
        SlotAllocator(1 << 20).adopt([(255, 8192)])


def test_a_description_that_cannot_be_kept_is_refused(node: CrashNode) -> None:
    parts = tuple(SideComponent(f"component {i}", 4) for i in range(200))
    space = Namespace("model", "r1", PageLayout(2, 2, 4, Dtype.FP32, 4, 1, side_components=parts))
    with pytest.raises(LimitExceeded, match="4092"):
        node.session(space)


@pytest.mark.parametrize("seed", range(20))
def test_an_allocator_goes_on_where_another_one_stopped(seed: int) -> None:
    choose = random.Random(seed)
    first, used = SlotAllocator(1 << 20, 1 << 20), []
    for _ in range(200):
        size = choose.choice((4096, 8192, 12288))
        if used and choose.random() < 0.45:
            slot, _ = used.pop(choose.randrange(len(used)))
            first.release(slot)
        else:
            used += [(slot, size) for slot in first.allocate(size, 1)]
    second = SlotAllocator(1 << 20, 1 << 20)
    second.adopt(used)
    second.check()
    assert second.used_bytes == first.used_bytes and second.used_slots() == first.used_slots()
    more = second.allocate(4096, 50) + second.allocate(12288, 5)
    second.check()
    assert len(set(more)) == len(more) and not set(more) & {slot for slot, _ in used}
    for slot in [slot for slot, _ in used] + more:
        second.release(slot)
    second.check()
    assert len(second.allocate(8192, 128)) == 128
