"""What operators do with a node: lists, pins, removal, checks. `check()` of the core after every step."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from small_node import SMALL, SmallNode, keys_of, namespace

from kvstore.errors import InvalidRequest, LimitExceeded, NotFound
from kvstore.model import checksum
from kvstore.model.prefix import Keys
from kvstore.model.values import Outcome
from kvstore.node import holds
from kvstore.node.chunks import Chunk
from kvstore.node.core import Session
from kvstore.node.operators import operations
from kvstore.node.operators.operations import Operations
from kvstore.node.operators.pins import KeptPin
from kvstore.node.steps import Steps, finish

SPACE, OTHER = namespace(), namespace(revision="r2")


class Setting:
    """64 slots: pins may take 16."""

    def __init__(self, slots: int = 64) -> None:
        self.node = SmallNode(slots)
        self.core = self.node.core
        self.operations = Operations(self.core, self.node.clock)
        self.session: Session = self.node.open(SPACE)
        self.other: Session = self.node.open(OTHER)

    def store(self, prompt: int, chunks: int) -> Keys:
        keys = keys_of(SPACE, prompt, chunks)
        outcomes = self.node.store(self.session, keys)
        assert set(outcomes) <= {Outcome.COMMITTED, Outcome.PRESENT}
        return keys

    def pin(self, name: str, keys: Keys, lifetime_s: float = 60.0) -> tuple[int, int]:
        pinned = finish(self.operations.pin(name, SPACE.id, keys[-1], lifetime_s))
        self.core.check()
        return pinned.chunks, pinned.refused_chunks

    def flood(self) -> None:
        """Others fill the whole node, twice over."""
        for prompt in range(1000, 1000 + 2 * self.node.slots // 4):
            self.node.store(self.session, keys_of(SPACE, prompt, 4))


@pytest.fixture
def setting() -> Setting:
    return Setting()


def stepwise(steps: Steps[object], between: Callable[[], None]) -> int:
    """Run a verb, with something else between all its steps; returns how many steps it had."""
    count = 1
    while True:
        try:
            next(steps)
        except StopIteration:
            return count
        count += 1
        between()


# --- looking -------------------------------------------------------------------------------------------------


def test_namespaces_with_what_they_hold(setting: Setting) -> None:
    setting.store(1, 3)
    setting.node.store(setting.other, keys_of(OTHER, 1, 2))
    listed = finish(setting.operations.namespaces())
    assert [(one.space.id, one.chunks, one.dram_bytes) for one in listed] == [
        (SPACE.id, 3, 3 * 4096),
        (OTHER.id, 2, 2 * 4096),
    ]


def test_evictions_and_hits_are_counted_by_namespace(setting: Setting) -> None:
    keys = keys_of(OTHER, 1, 2)
    setting.node.store(setting.other, keys)
    setting.core.acquire(setting.other.number, keys, SMALL.whole, 1000)
    setting.core.acquire(setting.other.number, keys, SMALL.whole, 0)  # a probe does not count
    setting.node.clock.now += 3600
    setting.core.tick()
    setting.flood()
    space = setting.core.pool.spaces[OTHER.id]
    setting.core.remove(setting.session.number, SPACE.id, [keys_of(SPACE, 1031, 1)[0]])  # not an eviction
    assert setting.core.pool.counts["removed_removed"] == 4
    assert (space.evicted_chunks, space.dram_hit_tokens, space.ssd_hit_tokens) == (2, 2 * SMALL.chunk_tokens, 0)
    total = sum(each.evicted_chunks for each in setting.core.pool.spaces.values())
    assert total == setting.core.stats()["evictions"] > 2


def test_chunks_are_listed_parents_first_whatever_the_order_of_the_table(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operations, "STEP_CHUNKS", 3)
    long, short = setting.store(1, 7), setting.store(2, 2)
    chunks = setting.core.pool.forest.chunks
    for key in [*long][:6]:  # as after a recovery: heads stand last in the table
        chunks[key] = chunks.pop(key)
    setting.core.check()
    parts = list(setting.operations.chunks(setting.core.pool.spaces[SPACE.id]))
    listed = [chunk.key for part in parts for chunk in part]
    assert sorted(listed) == sorted([*long, *short])
    assert [key for key in listed if key in set(long)] == list(long)
    assert [key for key in listed if key in set(short)] == list(short)
    assert len(parts) > 2


def test_only_committed_chunks_of_the_namespace_are_listed(setting: Setting) -> None:
    setting.node.reserve(setting.session, keys_of(SPACE, 1, 2))
    setting.node.store(setting.other, keys_of(OTHER, 1, 2))
    assert not any(setting.operations.chunks(setting.core.pool.spaces[SPACE.id]))


def test_a_prefix_from_first_to_last(setting: Setting) -> None:
    keys = setting.store(1, 4)
    space = setting.core.pool.spaces[SPACE.id]
    assert [chunk.key for chunk in setting.operations.prefix(space, keys[2])] == list(keys)[:3]
    for wrong in (b"x" * 16, keys_of(OTHER, 1, 1)[0]):
        with pytest.raises(NotFound, match="serve the prompt once"):
            setting.operations.prefix(space, wrong)


# --- pins ----------------------------------------------------------------------------------------------------


def test_pinned_prefixes_survive_a_flood_and_others_do_not(setting: Setting) -> None:
    pinned, other = setting.store(1, 4), setting.store(2, 4)
    assert setting.pin("system prompt", pinned) == (4, 0)
    setting.flood()
    assert (setting.node.resident(pinned), setting.node.resident(other)) == (4, 0)
    assert setting.operations.unpin("system prompt") and not setting.operations.unpin("system prompt")
    setting.core.check()
    setting.flood()
    assert setting.node.resident(pinned) == 0 and setting.core.holds.pinned_bytes == 0


def test_a_pin_takes_a_quarter_with_all_others_and_says_what_it_left_out(setting: Setting) -> None:
    assert setting.pin("a", setting.store(1, 10)) == (10, 0)
    long = setting.store(2, 10)
    assert setting.pin("b", long) == (6, 4)
    assert [chunk.key for chunk in setting.core.holds.named["b"].chunks] == list(long)[:6]
    assert setting.core.holds.pinned_bytes == 16 * 4096 == setting.core.stats()["pinned_bytes"]
    ticket = b"t" * 16
    setting.core.reserve(
        setting.session.number, setting.store(3, 2), next(iter(setting.core.pool.spaces[SPACE.id].kinds)), ticket
    )
    setting.core.check()
    assert setting.core.pool.counts["unpinned_for_room"] == 2


def test_the_same_name_again_replaces(setting: Setting) -> None:
    first, second = setting.store(1, 12), setting.store(2, 12)
    assert setting.pin("a", first) == (12, 0)
    assert setting.pin("a", second) == (12, 0), "the room of the old one is free"
    assert {chunk.key for chunk in setting.core.holds.named["a"].chunks} == set(second)
    with pytest.raises(NotFound):
        setting.pin("a", keys_of(SPACE, 3, 1))
    assert len(setting.core.holds.named["a"].chunks) == 12, "a refused pin leaves the old one"


def test_pins_end_by_time(setting: Setting) -> None:
    setting.pin("short", setting.store(1, 2), 10.0)
    setting.pin("long", setting.store(2, 2), 20.0)
    setting.node.clock.now += 10.0
    assert [(pin.name, left) for pin, left in setting.operations.pins()] == [("long", 10.0)]
    setting.core.tick()
    setting.core.check()
    assert list(setting.core.holds.named) == ["long"] and setting.core.holds.pinned_bytes == 2 * 4096


@pytest.mark.parametrize(
    ("name", "lifetime_s", "error"),
    [
        ("", 1.0, InvalidRequest),
        ("n" * 129, 1.0, LimitExceeded),
        ("a", 0.0, LimitExceeded),
        ("a", holds.PIN_LIFETIME_LIMIT_S + 1, LimitExceeded),
    ],
)
def test_what_a_pin_needs(setting: Setting, name: str, lifetime_s: float, error: type[Exception]) -> None:
    keys = setting.store(1, 1)
    with pytest.raises(error):
        setting.pin(name, keys, lifetime_s)
    assert not setting.core.holds.named
    assert setting.pin("n" * 128, keys, holds.PIN_LIFETIME_LIMIT_S) == (1, 0)


def test_pins_are_bounded(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holds, "NAMED_PINS", 2)
    keys = setting.store(1, 1)
    for name in "aba":
        setting.pin(name, keys)
    with pytest.raises(LimitExceeded, match="unpin"):
        setting.pin("c", keys)


def test_a_removed_chunk_is_not_counted_and_pinned_again_when_it_comes_back(setting: Setting) -> None:
    keys = setting.store(1, 4)
    setting.pin("a", keys)
    setting.core.remove(setting.session.number, SPACE.id, [keys[2]])
    setting.core.check()
    assert setting.core.holds.pinned_bytes == 2 * 4096
    setting.operations.tick()
    assert len(setting.core.holds.named["a"].chunks) == 2
    setting.store(1, 4)
    setting.operations.tick()
    setting.core.check()
    assert len(setting.core.holds.named["a"].chunks) == 4
    setting.flood()
    assert setting.node.resident(keys) == 4


def test_pins_are_taken_up_after_a_restart(setting: Setting) -> None:
    keys = setting.store(1, 4)
    setting.pin("a", keys, 100.0)
    setting.node.clock.now += 40.0
    kept = setting.operations.kept_pins()
    assert kept == [KeptPin("a", SPACE.id, keys[-1], 60.0)]
    again = Setting()
    again.store(1, 4)
    late = KeptPin("late", SPACE.id, keys_of(SPACE, 2, 3)[-1], 60.0)
    unknown = KeptPin("unknown", b"n" * 16, b"k" * 16, 60.0)
    again.operations.restore([*kept, late, unknown])
    again.core.check()
    assert [(p.name, len(p.chunks), left) for p, left in again.operations.pins()] == [
        ("a", 4, 60.0),
        ("late", 0, 60.0),
        ("unknown", 0, 60.0),
    ]
    again.store(2, 3)
    for _ in range(2):  # one waiting pin a tick
        again.operations.tick()
    again.core.check()
    again.flood()
    assert again.node.resident(keys) == 4 and again.node.resident(keys_of(SPACE, 2, 3)) == 3


def test_a_pin_in_steps_ends_with_what_leaves_meanwhile(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "STEP_CHUNKS", 2)
    keys = setting.store(1, 6)

    def remove_the_tail() -> None:
        setting.core.check()
        setting.core.remove(setting.session.number, SPACE.id, [keys[3]])

    stepwise(setting.operations.pin("a", SPACE.id, keys[-1], 10.0), remove_the_tail)
    setting.core.check()
    pin = setting.core.holds.named["a"]
    assert len(pin.chunks) == 2 and pin.waits


# --- removal -------------------------------------------------------------------------------------------------


def test_a_namespace_goes_whole_with_its_pins_and_others_stay(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operations, "STEP_CHUNKS", 3)
    mine, others = setting.store(1, 9), keys_of(OTHER, 1, 3)
    setting.node.store(setting.other, others)
    pending = setting.node.reserve(setting.session, keys_of(SPACE, 2, 2))
    setting.pin("a", mine)
    steps = stepwise(setting.operations.remove_namespace(SPACE.id), setting.core.check)
    assert steps >= 4
    setting.core.check()
    assert (setting.node.resident(mine), setting.node.resident(others)) == (0, 3)
    assert not setting.core.holds.named and setting.core.holds.pinned_bytes == 0
    assert setting.node.commit(setting.session, pending.attempt, [0, 1]) == [Outcome.REFUSED_STALE] * 2
    assert finish(setting.operations.remove_namespace(SPACE.id)) == 0
    with pytest.raises(NotFound, match="kvstore namespaces"):
        finish(setting.operations.remove_namespace(b"n" * 16))


def test_writers_that_go_on_during_a_removal_leave_lawful_contents(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operations, "STEP_CHUNKS", 2)
    keys = setting.store(1, 8)
    longer = keys_of(SPACE, 1, 12)

    def write_more() -> None:
        setting.node.store(setting.session, longer)  # checks after each step

    stepwise(setting.operations.remove_namespace(SPACE.id), write_more)
    setting.core.check()
    assert setting.node.resident(keys) <= 8


# --- checks --------------------------------------------------------------------------------------------------


def write_checked(setting: Setting, keys: Keys) -> None:
    """Store chunks whose bytes have checksums behind them."""
    answer = setting.node.reserve(setting.session, keys)
    size, hashes = SMALL.payload_bytes(SMALL.whole), []
    for number, slot in enumerate(answer.slots):
        payload = setting.node.arena[slot * 4096 :][:size]
        payload[:] = np.random.default_rng(number).integers(0, 256, size, dtype=np.uint8)
        table = checksum.table_of(payload, SMALL, SMALL.whole)
        setting.node.arena[slot * 4096 + size :][: table.nbytes] = table.view(np.uint8).ravel()
        hashes.append(checksum.table_hash(table))
    setting.core.commit(setting.session.number, answer.attempt, range(len(keys)), hashes, True)
    setting.core.check()


def test_a_sample_finds_exactly_the_flipped_byte(setting: Setting) -> None:
    keys = keys_of(SPACE, 1, 6)
    write_checked(setting, keys)
    chunks, shards = setting.operations.sample(100)
    assert len(chunks) == len(shards) == 6
    assert not any(shard.is_broken(setting.node.arena) for shard in shards)
    setting.node.arena[next(s for s in shards if s.key == keys[3]).slot * 4096 + 5] ^= 1
    broken = [shard for shard in setting.operations.sample(6)[1] if shard.is_broken(setting.node.arena)]
    assert [shard.key for shard in broken] == [keys[3]]
    assert setting.operations.still_holds(broken[0])
    assert finish(setting.operations.remove([keys[3]], "broken")) == 3
    setting.core.check()
    assert setting.node.resident(keys) == 3 and not setting.operations.still_holds(broken[0])


def test_a_sample_is_bounded_and_random(setting: Setting) -> None:
    setting.store(1, 30)
    drawn = {frozenset(shard.key for shard in setting.operations.sample(3)[1]) for _ in range(20)}
    assert all(len(keys) == 3 for keys in drawn) and len(drawn) > 1
    assert setting.operations.sample(0) == ([], [])
    assert not any(s.is_broken(setting.node.arena ^ 0) for s in setting.operations.sample(3)[1] if not s.table_hash)


def test_a_broken_law_is_named(setting: Setting) -> None:
    keys = setting.store(1, 2)
    assert setting.operations.broken_law() == ""
    chunk: Chunk = setting.core.pool.forest.chunks[keys[0]]
    chunk.holds += 1
    assert setting.operations.broken_law().startswith("holds (check in holds.py)")


# --- draining, free space ------------------------------------------------------------------------------------


def test_a_draining_node_takes_nothing_new(setting: Setting) -> None:
    keys = setting.store(1, 2)
    setting.core.draining = True
    answer = setting.node.reserve(setting.session, keys_of(SPACE, 1, 4))
    assert answer.outcomes == [Outcome.PRESENT] * 2 + [Outcome.REFUSED_DRAINING] * 2
    assert answer.attempt == 0 and setting.node.resident(keys) == 2
    setting.core.draining = False
    assert setting.store(1, 4)


def test_a_key_that_comes_free_while_the_node_drains_is_not_granted(setting: Setting) -> None:
    keys = keys_of(SPACE, 1, 1)
    first = setting.node.reserve(setting.session, keys)
    second = setting.node.reserve(setting.node.open(SPACE), keys)
    assert second.outcomes == [Outcome.IN_PROGRESS]
    setting.core.draining = True
    setting.core.abort(setting.session.number, first.attempt)
    waiter = setting.core.reservations.attempts[second.attempt].writer.session
    answer = setting.core.commit(waiter, second.attempt, [], [], True)
    setting.core.check()
    assert [outcome for _, outcome, _ in answer.waiting] == [Outcome.REFUSED_DRAINING]


def test_c08_free_and_largest_free_are_told_apart() -> None:
    """An arena full of small slots, half of them freed: much is free, and yet a large slot has no room."""
    setting = Setting(slots=256)
    allocator = setting.core.pool.allocator
    assert (allocator.free_bytes, allocator.largest_free_bytes) == (1 << 20, 1 << 20)
    slots = allocator.allocate(4096, 256)
    assert (allocator.free_bytes, allocator.largest_free_bytes) == (0, 0)
    for slot in slots[::2]:
        allocator.release(slot)
    assert (allocator.free_bytes, allocator.largest_free_bytes) == (512 << 10, 4096)
    assert allocator.allocate(8192, 1) == []
    for slot in slots[1::2]:
        allocator.release(slot)
    assert allocator.largest_free_bytes == 1 << 20
    stats = setting.core.stats()
    assert {"free_bytes", "largest_free_bytes", "pinned_bytes", "reserved_bytes", "quarantined_bytes"} <= set(stats)
