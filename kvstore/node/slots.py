"""Cutting an arena into slots. Pure bookkeeping, no bytes are touched.

An arena is divided into *extents*, each cut into slots of one class (one exact size). An extent is 64 MiB long (in an
arena below 1 GiB a 16th of it, at least 1 MiB), but never shorter than 16 slots; the last one is cut to what is left.
An empty extent goes back to the free space and may serve another class. Slots are named by their offset in units of
4096 bytes. On an SSD each extent begins with a block of headers, one a slot.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise

from kvstore.errors import LayoutMismatch, LimitExceeded
from kvstore.model.layout import CHUNK_BYTES_LIMIT, PageLayout, Rectangle
from kvstore.node.arena.ssd_format import HEADER_BYTES, REGION_LEAST_BYTES, region_bytes_of
from kvstore.node.catalog import UNIT_BYTES

EXTENT_BYTES = 64 << 20
EXTENT_SLOTS = 16
EXTENTS = 16
"""An arena too small for so many extents of full size is cut into so many,"""
SMALL_EXTENT_BYTES = 1 << 20
"""but not into smaller ones than this."""
CHECKSUM_BYTES = 8
"""One xxh3-64 a (layer, KV head), behind the payload."""


def slot_bytes(layout: PageLayout, rectangle: Rectangle) -> int:
    """Class of a shard: payload and checksum table, rounded up to 4096 bytes.

    Raises LimitExceeded for a payload over 256 MiB.
    """
    payload = layout.payload_bytes(rectangle)
    if payload > CHUNK_BYTES_LIMIT:
        raise LimitExceeded(
            f"a shard of {payload} bytes is over the limit of {CHUNK_BYTES_LIMIT} bytes; use fewer pages a chunk"
        )
    return -(-(payload + rectangle.area * CHECKSUM_BYTES) // UNIT_BYTES) * UNIT_BYTES


@dataclass(slots=True)
class Extent:
    """A run of the arena cut into slots of `slot_bytes`, behind a block of `header_bytes` a slot. `fresh` = slots that
    were handed out once; those behind them never were."""

    start: int
    stop: int
    slot_bytes: int
    header_bytes: int = 0
    free: list[int] = field(default_factory=list)
    fresh: int = 0
    used: set[int] = field(default_factory=set)

    @property
    def slot_count(self) -> int:
        """Slots that fit with their headers."""
        return _slots_in(self.stop - self.start, self.slot_bytes, self.header_bytes)

    @property
    def has_room(self) -> bool:
        """True if a slot is free or was never handed out."""
        return bool(self.free) or self.fresh < self.slot_count

    @property
    def first(self) -> int:
        """Offset of its first slot."""
        return self.start + _round_up(self.slot_count * self.header_bytes)


class SlotAllocator:
    """Which slots of an arena are free. `open_until` bytes of it are ready for use (the rest is being populated).

    The slots lie in [start_bytes, arena_bytes). `header_bytes`: what each slot needs in the head of its extent.
    """

    def __init__(self, arena_bytes: int, open_until: int = 0, *, start_bytes: int = 0, header_bytes: int = 0) -> None:
        self.arena_bytes = arena_bytes
        self.open_until = open_until
        self.only_used_before = False
        """True: hand out only slots that were handed out before (the disk has no room for others)."""
        self.cuts = 0
        """Counts how often extents were made or given up."""
        self._start_bytes = start_bytes
        self._header_bytes = header_bytes
        self._regions: list[tuple[int, int]] = [(start_bytes, arena_bytes)]
        self._extents: dict[int, Extent] = {}
        self._starts: list[int] = []
        self._by_class: dict[int, list[Extent]] = {}
        self._with_room: dict[int, dict[int, Extent]] = {}
        """Class -> start -> extents that have a slot left: looking for one must not cost a walk through full ones."""
        self._free_slots: Counter[int] = Counter()
        """Class -> free slots of its extents: figures must not cost a walk through them."""
        self.used_bytes = self.used_count = 0

    def adopt(self, slots: Iterable[tuple[int, int]]) -> None:
        """Take up slots (unit, class in bytes) that are in use in an arena which another allocator cut.

        Extents are drawn anew around runs of one class. Raises LayoutMismatch where slots overlap.
        """
        assert not self._extents
        end = 0
        runs: list[Extent] = []
        for slot, size in sorted(slots):
            offset = slot * UNIT_BYTES
            if offset < end or offset + size > self.arena_bytes:
                raise LayoutMismatch(f"slot {slot} of {size} bytes overlaps another one or the end of the arena")
            end = offset + size
            last = runs[-1] if runs else None
            limit = self._extent_bytes(size)
            if last is None or last.slot_bytes != size or (offset - last.start) % size or end > last.start + limit:
                last = Extent(offset, end, size)
                runs.append(last)
            last.used.add(offset)
            last.stop, last.fresh = end, (end - last.start) // size
        for place, extent in enumerate(runs):
            self._adopt_extent(extent, runs[place + 1].start if place + 1 < len(runs) else self.arena_bytes)

    def _adopt_extent(self, extent: Extent, after: int) -> None:
        """Let an extent grow to its full size or to `after`, where the next one begins."""
        size = extent.slot_bytes
        room = min(after - extent.start, self._extent_bytes(size))
        start, stop = self._regions.pop()
        extent.stop = max(extent.stop, extent.start + room // size * size)
        parts = [(start, extent.start), (extent.stop, stop)]
        self._regions += [(first, last) for first, last in parts if first < last]
        handed_out = range(extent.start, extent.start + extent.fresh * size, size)
        extent.free = [offset for offset in handed_out if offset not in extent.used]
        self._extents[extent.start] = extent
        bisect.insort(self._starts, extent.start)
        self._by_class.setdefault(size, []).append(extent)
        self.used_bytes += len(extent.used) * size
        self.used_count += len(extent.used)
        self._free_slots[size] += extent.slot_count - len(extent.used)
        self._note_room(extent)

    def restore(self, extents: Iterable[tuple[int, int, int]], slots: Iterable[int]) -> list[int]:
        """Take up extents (start, stop, class in bytes) as they were cut before, with the slots that are in use.

        Returns the slots that lie in no extent or not at the place of a slot. Raises LayoutMismatch where extents
        overlap or leave the arena.
        """
        assert not self._extents
        end = self._start_bytes
        for start, stop, size in sorted(extents):
            if start < end or stop > self.arena_bytes or size <= 0 or start + size > stop:
                raise LayoutMismatch(f"an extent at {start} overlaps another one or the end of the arena")
            end = stop
            extent = Extent(start, stop, size, self._header_bytes)
            extent.fresh = extent.slot_count  # whatever lies there was written once
            self._free_slots[size] += extent.slot_count
            self._extents[start] = extent
            self._starts.append(start)
            self._by_class.setdefault(size, []).append(extent)
        misplaced = [slot for slot in slots if not self._use(slot)]
        edges = [self._start_bytes, *(edge for each in self._extents.values() for edge in (each.start, each.stop))]
        edges.append(self.arena_bytes)
        self._regions = [(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b]
        for extent in list(self._extents.values()):
            offsets = range(extent.first, extent.first + extent.fresh * extent.slot_bytes, extent.slot_bytes)
            extent.free = [offset for offset in reversed(offsets) if offset not in extent.used]
            if not extent.used:
                self._drop_extent(extent)
            else:
                self._note_room(extent)
        return misplaced

    def _note_room(self, extent: Extent) -> None:
        if extent.has_room:
            self._with_room.setdefault(extent.slot_bytes, {})[extent.start] = extent

    def _use(self, slot: int) -> bool:
        offset = slot * UNIT_BYTES
        place = bisect.bisect_right(self._starts, offset) - 1
        if place < 0:
            return False
        extent = self._extents[self._starts[place]]
        index, rest = divmod(offset - extent.first, extent.slot_bytes)
        if rest or not 0 <= index < extent.slot_count or offset in extent.used:
            return False
        self._count_used(extent, offset)
        return True

    def _count_used(self, extent: Extent, offset: int) -> None:
        extent.used.add(offset)
        self.used_bytes += extent.slot_bytes
        self.used_count += 1
        self._free_slots[extent.slot_bytes] -= 1

    def extents(self) -> list[tuple[int, int, int]]:
        """(start, stop, class in bytes) of each extent."""
        return [(e.start, e.stop, e.slot_bytes) for _, e in sorted(self._extents.items())]

    def allocate(self, size: int, count: int) -> list[int]:
        """Up to `count` slots of class `size` (bytes), as many as are free now."""
        taken: list[int] = []
        full = []
        for extent in self._with_room.get(size, {}).values():
            self._take(extent, count - len(taken), taken)
            if not extent.has_room:
                full.append(extent.start)
            if len(taken) == count:
                break
        for start in full:
            del self._with_room[size][start]
        while len(taken) < count:
            fresh = self._new_extent(size)
            if fresh is None:
                break
            before = len(taken)
            self._take(fresh, count - before, taken)
            if len(taken) == before:
                self._drop_extent(fresh)  # that part of the arena is not open yet
                break
            self._note_room(fresh)
        return taken

    def _take(self, extent: Extent, count: int, taken: list[int]) -> None:
        for _ in range(count):
            if extent.free:
                offset = extent.free.pop()
            else:
                offset = extent.first + extent.fresh * extent.slot_bytes
                if extent.fresh >= extent.slot_count or offset + extent.slot_bytes > self.open_until:
                    return
                if self.only_used_before:
                    return
                extent.fresh += 1
            self._count_used(extent, offset)
            taken.append(offset // UNIT_BYTES)

    def release(self, slot: int) -> None:
        """Give a slot back. An extent without used slots returns to the free space."""
        extent = self.extent_of(slot)
        offset = slot * UNIT_BYTES
        extent.used.remove(offset)
        self.used_bytes -= extent.slot_bytes
        self.used_count -= 1
        self._free_slots[extent.slot_bytes] += 1
        extent.free.append(offset)
        if not extent.used:
            self._drop_extent(extent)
        else:
            self._note_room(extent)

    def extent_of(self, slot: int) -> Extent:
        """The extent that holds a slot."""
        place = bisect.bisect_right(self._starts, slot * UNIT_BYTES) - 1
        return self._extents[self._starts[place]]

    def has_class(self, size: int) -> bool:
        """True if some extent serves this class."""
        return bool(self._by_class.get(size))

    @property
    def free_bytes(self) -> int:
        """Bytes that no slot in use takes, wherever they lie."""
        return self.arena_bytes - self.used_bytes

    @property
    def largest_free_bytes(self) -> int:
        """The largest slot that could be had now without evicting: a run outside of extents, or a free slot of one."""
        runs = [min(stop, self.open_until) - start for start, stop in self._regions]
        return max([0, *runs, *(size for size, count in self._free_slots.items() if count)])

    @property
    def free_slot_count(self) -> int:
        """Slots of extents that are cut and not in use; the rest of the arena is not cut into slots yet."""
        return sum(self._free_slots.values())

    def _extent_bytes(self, size: int) -> int:
        # A small arena has small extents: else the first class would own all of it, and a second one could only get
        # room by evicting everything of the first.
        longest = min(EXTENT_BYTES, max(SMALL_EXTENT_BYTES, self.arena_bytes // EXTENTS))
        count = max(longest // size, EXTENT_SLOTS)
        return count * size + _round_up(count * self._header_bytes)

    def _least_bytes(self, size: int) -> int:
        """Shortest extent: one slot with its header."""
        return size + _round_up(self._header_bytes)

    @staticmethod
    def _cut(room: int, wanted: int, least: int) -> int:
        """Length of the next extent in `room` bytes: what is too short for another one goes to it."""
        cut = min(room, wanted)
        return room if room - cut < least else cut

    def capacity(self, size: int) -> int:
        """How many slots of class `size` there are where all of the arena is cut for it."""
        wanted, least, room = self._extent_bytes(size), self._least_bytes(size), self.arena_bytes - self._start_bytes
        full = max(0, (room - wanted - least) // wanted)  # the rest may go to the last of them
        slots, room = full * _slots_in(wanted, size, self._header_bytes), room - full * wanted
        while room >= least:
            cut = self._cut(room, wanted, least)
            slots, room = slots + _slots_in(cut, size, self._header_bytes), room - cut
        return slots

    def _new_extent(self, size: int) -> Extent | None:
        wanted, least = self._extent_bytes(size), self._least_bytes(size)
        fits = [region for region in self._regions if region[1] - region[0] >= least]
        if not fits or self.only_used_before:
            return None
        start, stop = min(fits)
        cut = start + self._cut(stop - start, wanted, least)
        place = self._regions.index((start, stop))
        self._regions[place : place + 1] = [(cut, stop)] if cut < stop else []
        extent = Extent(start, cut, size, self._header_bytes)
        self.cuts += 1
        self._free_slots[size] += extent.slot_count
        self._extents[start] = extent
        bisect.insort(self._starts, start)
        self._by_class.setdefault(size, []).append(extent)
        return extent

    def _drop_extent(self, extent: Extent) -> None:
        self._by_class[extent.slot_bytes].remove(extent)
        self._with_room.get(extent.slot_bytes, {}).pop(extent.start, None)
        self._free_slots[extent.slot_bytes] -= extent.slot_count
        del self._extents[extent.start]
        self.cuts += 1
        self._starts.remove(extent.start)
        regions = sorted([*self._regions, (extent.start, extent.stop)])
        merged = [regions[0]]
        for start, stop in regions[1:]:
            if merged[-1][1] == start:
                merged[-1] = (merged[-1][0], stop)
            else:
                merged.append((start, stop))
        self._regions = merged

    def used_slots(self) -> set[int]:
        """All slots that are handed out, in units of 4096 bytes."""
        return {offset // UNIT_BYTES for extent in self._extents.values() for offset in extent.used}

    def check(self) -> None:
        """Extents and free regions tile the arena; slots lie inside their extent, each free or used once."""
        runs = sorted([*self._regions, *((e.start, e.stop) for e in self._extents.values())])
        assert runs[0][0] == self._start_bytes and runs[-1][1] == self.arena_bytes
        assert all(one[1] == other[0] for one, other in pairwise(runs))
        for extent in self._extents.values():
            handed = sorted([*extent.free, *extent.used])
            assert handed == [extent.first + i * extent.slot_bytes for i in range(extent.fresh)]
            assert extent.first + extent.slot_count * extent.slot_bytes <= extent.stop
            assert extent.used and extent.fresh <= extent.slot_count
        assert self.used_bytes == sum(len(e.used) * e.slot_bytes for e in self._extents.values())
        assert self.used_count == sum(len(e.used) for e in self._extents.values())
        roomy = {start for start, extent in self._extents.items() if extent.has_room}
        assert roomy == {start for extents in self._with_room.values() for start in extents}, "extents with room"
        free: Counter[int] = Counter()
        for extent in self._extents.values():
            free[extent.slot_bytes] += extent.slot_count - len(extent.used)
        assert +free == +self._free_slots and not -self._free_slots, "free slots"


def _slots_in(length: int, size: int, header_bytes: int) -> int:
    """Slots of class `size` in a run of `length` bytes, each with a header in the block at its beginning.

    Both are whole pages, so what is left beside these slots is, too: it holds the headers, rounded up to pages.
    """
    return length // (size + header_bytes)


def _round_up(size: int) -> int:
    return -(-size // UNIT_BYTES) * UNIT_BYTES


def ssd_file_bytes(count: int, size: int) -> int:
    """Length of the shortest SSD file in which exactly `count` slots of class `size` (bytes) fit, all of one class.

    Superblocks, header blocks and the cut into extents are counted. Raises LimitExceeded where no length has exactly
    so many, because a further page makes room for several.
    """
    length = 2 * REGION_LEAST_BYTES + count * size
    while True:
        start = 2 * region_bytes_of(length)
        found = SlotAllocator(length, start_bytes=start, header_bytes=HEADER_BYTES).capacity(size)
        if found == count:
            return length
        if found > count + EXTENT_SLOTS:
            raise LimitExceeded(f"no SSD file has exactly {count} slots of {size} bytes; ask for one more or one less")
        length += UNIT_BYTES
