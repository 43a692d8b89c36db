"""The allocator alone: extents, classes, an arena that opens bit by bit."""

from __future__ import annotations

import random

import pytest

from kvstore.errors import LimitExceeded
from kvstore.model.layout import Dtype, PageLayout
from kvstore.node import slots
from kvstore.node.arena.ssd_format import HEADER_BYTES, ExtentPlace, region_bytes_of
from kvstore.node.slots import SlotAllocator, slot_bytes, ssd_file_bytes
from tests.unit.node.small_node import SMALL, WIDE

UNIT = 4096


@pytest.fixture
def small_extents(monkeypatch: pytest.MonkeyPatch) -> None:
    """Extents of four slots, so that a small arena has several."""
    monkeypatch.setattr(slots, "EXTENT_BYTES", 1)
    monkeypatch.setattr(slots, "EXTENT_SLOTS", 4)


def test_a_slot_holds_payload_and_checksums_in_whole_units() -> None:
    assert slot_bytes(SMALL, SMALL.whole) == UNIT
    assert slot_bytes(WIDE, WIDE.whole) == 3 * UNIT
    exact = PageLayout(1, 1, 1024, Dtype.FP8_E4M3, 2, 1)
    assert exact.payload_bytes(exact.whole) == UNIT
    assert slot_bytes(exact, exact.whole) == 2 * UNIT, "the table lies behind the payload"


def test_a_shard_over_the_limit_is_refused_with_the_limit_named() -> None:
    big = PageLayout(32, 8, 1024, Dtype.BF16, 1024, 1)
    with pytest.raises(LimitExceeded, match="268435456"):
        slot_bytes(big, big.whole)


@pytest.mark.usefixtures("small_extents")
def test_an_extent_that_empties_may_serve_another_class() -> None:
    allocator = SlotAllocator(8 * UNIT, 8 * UNIT)
    taken = allocator.allocate(UNIT, 99)
    assert taken == list(range(8))
    assert allocator.allocate(2 * UNIT, 1) == []
    for slot in taken[4:]:
        allocator.release(slot)
    allocator.check()
    assert allocator.allocate(2 * UNIT, 99) == [4, 6]
    allocator.check()
    assert allocator.used_slots() == {0, 1, 2, 3, 4, 6}


def test_an_arena_that_is_not_open_yet_keeps_its_extents_for_every_class() -> None:
    """A request beyond what is populated once left an empty extent behind, until none was left for others."""
    allocator = SlotAllocator(64 << 20, 0)
    for _ in range(50):
        assert allocator.allocate(UNIT, 3) == []
        allocator.check()
    allocator.open_until = 64 << 20
    assert len(allocator.allocate(4 * UNIT, 3)) == 3
    allocator.check()


@pytest.mark.usefixtures("small_extents")
def test_only_the_open_part_is_handed_out() -> None:
    allocator = SlotAllocator(16 * UNIT, 6 * UNIT)
    assert allocator.allocate(UNIT, 99) == [0, 1, 2, 3, 4, 5]
    allocator.check()
    allocator.open_until = 16 * UNIT
    assert allocator.allocate(UNIT, 99) == list(range(6, 16))
    allocator.check()


@pytest.mark.usefixtures("small_extents")
def test_random_use_of_three_classes_keeps_the_books() -> None:
    rng = random.Random(5)
    allocator = SlotAllocator(64 * UNIT, 64 * UNIT)
    held: dict[int, int] = {}
    for _ in range(2000):
        if held and rng.random() < 0.5:
            slot = rng.choice(sorted(held))
            del held[slot]
            allocator.release(slot)
        else:
            size = UNIT * rng.choice((1, 2, 5))
            for slot in allocator.allocate(size, rng.randrange(1, 4)):
                assert not any(slot < other + held[other] // UNIT and other < slot + size // UNIT for other in held)
                held[slot] = size
        allocator.check()
        assert allocator.used_slots() == set(held)
        assert allocator.used_bytes == sum(held.values())
    for slot in list(held):
        allocator.release(slot)
    allocator.check()
    assert len(allocator.allocate(UNIT, 99)) == 64, "everything came back"


def test_the_check_notices_a_slot_that_two_have() -> None:
    allocator = SlotAllocator(16 * UNIT, 16 * UNIT)
    slot = allocator.allocate(UNIT, 1)[0]
    extent = allocator.extent_of(slot)
    extent.free.append(slot * UNIT)
    with pytest.raises(AssertionError):
        allocator.check()


def test_a_second_class_finds_room_in_a_small_arena_that_is_nearly_empty() -> None:
    """One extent once took a whole arena of up to 64 MiB, and the next class could only evict all that was in it."""
    allocator = SlotAllocator(40 << 20, 40 << 20)
    assert len(allocator.allocate(3 * UNIT, 120)) == 120
    assert len(allocator.allocate(1 << 20, 12)) == 12
    allocator.check()


def ssd_allocator(length: int) -> SlotAllocator:
    """As a node makes it for an SSD file of this length."""
    return SlotAllocator(length, length, start_bytes=2 * region_bytes_of(length), header_bytes=HEADER_BYTES)


@pytest.mark.parametrize("size", [UNIT, 2 * UNIT, 3 * UNIT, 1 << 20])
@pytest.mark.parametrize("count", [1, 2, 15, 31, 32, 33, 100, 1000, 2345])
def test_an_ssd_file_has_room_for_exactly_so_many(count: int, size: int) -> None:
    length = ssd_file_bytes(count, size)
    allocator = ssd_allocator(length)
    assert allocator.capacity(size) == count
    assert len(allocator.allocate(size, count + 100)) == count
    assert ssd_allocator(length - UNIT).capacity(size) != count or count == 1
    allocator.check()


def test_every_slot_of_an_ssd_extent_has_a_header() -> None:
    """An extent whose headers ended at a page's edge once gave out one slot more than it had headers."""
    length = 2 * region_bytes_of(0) + 34 * UNIT
    allocator = ssd_allocator(length)
    taken = allocator.allocate(UNIT, 99)
    (extent,) = (ExtentPlace(*each) for each in allocator.extents())
    assert len(taken) == extent.slot_count == 32
    assert [extent.index(slot) for slot in taken] == list(range(32))


def test_a_count_that_no_length_has_is_refused_with_its_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SlotAllocator, "capacity", lambda self, size: self.arena_bytes // (1 << 20) * 1000)
    with pytest.raises(LimitExceeded, match="exactly 7 slots"):
        ssd_file_bytes(7, UNIT)
