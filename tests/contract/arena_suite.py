"""What every arena promises. A test module subclasses `ArenaSuite` and gives it one with room for `UNITS` units.

`start`: the first byte that the suite may use. Bytes of a unit follow from its number; destinations are poisoned.
"""

from __future__ import annotations

import mmap
import threading

import numpy as np
import numpy.typing as npt
import pytest

from kvstore.errors import KvStoreError
from kvstore.node.arena import Arena
from kvstore.node.memory import UNIT_BYTES

UNITS = 8
POISON = 0xA5

Bytes = npt.NDArray[np.uint8]


def pages(units: int) -> mmap.mmap:
    """Poisoned memory that begins at a page."""
    memory = mmap.mmap(-1, units * UNIT_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory[:] = bytes([POISON]) * len(memory)
    return memory


def contents(number: int, units: int = 1) -> mmap.mmap:
    """What the suite stores at unit `number`."""
    memory = pages(units)
    memory[:] = np.random.default_rng(number).bytes(len(memory))
    return memory


class ArenaSuite:
    start = 0

    @pytest.fixture
    def arena(self) -> Arena:
        raise NotImplementedError

    def at(self, unit: int) -> int:
        return self.start + unit * UNIT_BYTES

    def all_units(self, arena: Arena) -> bytes:
        into = pages(UNITS)
        arena.read(self.start, into)
        return into[:]

    def test_it_has_room_and_ends_with_a_whole_unit(self, arena: Arena) -> None:
        assert arena.size_bytes >= self.at(UNITS) and arena.size_bytes % UNIT_BYTES == 0

    def test_every_unit_keeps_its_own_bytes(self, arena: Arena) -> None:
        for unit in reversed(range(UNITS)):
            arena.write(self.at(unit), contents(unit))
        assert self.all_units(arena) == b"".join(contents(unit)[:] for unit in range(UNITS))
        for unit in range(UNITS):
            into = pages(1)
            arena.read(self.at(unit), into)
            assert into[:] == contents(unit)[:]

    def test_the_last_write_counts_and_neighbours_stay(self, arena: Arena) -> None:
        arena.write(self.at(0), contents(1, UNITS))
        arena.write(self.at(3), contents(2, 2))
        whole, middle = contents(1, UNITS)[:], contents(2, 2)[:]
        assert self.all_units(arena) == whole[: 3 * UNIT_BYTES] + middle + whole[5 * UNIT_BYTES :]

    def test_a_read_fills_what_it_was_given_and_no_more(self, arena: Arena) -> None:
        arena.write(self.at(0), contents(1, UNITS))
        into = pages(4)
        with memoryview(into) as view, view[UNIT_BYTES : 3 * UNIT_BYTES] as middle:
            arena.read(self.at(2), middle)
        poison = bytes([POISON]) * UNIT_BYTES
        assert into[:] == poison + contents(1, UNITS)[2 * UNIT_BYTES : 4 * UNIT_BYTES] + poison

    def test_the_last_unit_of_the_arena(self, arena: Arena) -> None:
        last = arena.size_bytes - UNIT_BYTES
        arena.write(last, contents(7))
        into = pages(1)
        arena.read(last, into)
        assert into[:] == contents(7)[:]

    def test_nothing_beyond_the_end_or_between_units(self, arena: Arena) -> None:
        for unit in range(UNITS):
            arena.write(self.at(unit), contents(unit))
        before = self.all_units(arena)
        wrong = [arena.size_bytes, arena.size_bytes - UNIT_BYTES, self.start + 512, -UNIT_BYTES]
        for offset in wrong:
            with pytest.raises((AssertionError, KvStoreError)):
                arena.write(offset, contents(9, 2))
            with pytest.raises((AssertionError, KvStoreError)):
                arena.read(offset, pages(2))
        with pytest.raises((AssertionError, KvStoreError)):
            arena.write(self.start, memoryview(contents(9))[:512])  # type: ignore[arg-type]
        assert self.all_units(arena) == before

    def test_threads_use_different_places_at_once(self, arena: Arena) -> None:
        failed: list[int] = []

        def work(unit: int) -> None:
            for version in range(20):
                into = pages(1)
                arena.write(self.at(unit), contents(100 * unit + version))
                arena.read(self.at(unit), into)
                if into[:] != contents(100 * unit + version)[:]:
                    failed.append(unit)

        threads = [threading.Thread(target=work, args=(unit,)) for unit in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failed
