"""What every way to the SSD file promises. A test module subclasses `SsdIoSuite` and says how one is opened.

Memory is poisoned, and what is moved is random from a fixed seed, so that a byte too many or too few is seen.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from kvstore.errors import CapacityExhausted, StorageFailed
from kvstore.node.arena import Run, SsdIo
from kvstore.node.arena.ssd import SsdArena
from kvstore.node.memory import UNIT_BYTES
from tests.chaos.test_ssd_limits import mounted

Bytes = npt.NDArray[np.uint8]
FILE_BYTES = 4 << 20
MEMORY_BYTES = 1 << 20
POISON = 0xA5
OpenIo = Callable[[SsdArena, Bytes], SsdIo]


def some(number: int, size: int) -> Bytes:
    return np.random.default_rng(number).integers(0, 256, size, dtype=np.uint8)


@dataclass
class Disk:
    """An open arena with memory and what moves bytes between them."""

    arena: SsdArena
    memory: Bytes
    io: SsdIo

    def piece(self, page: int, pages: int) -> memoryview:
        """A part of the memory."""
        return self.memory[page * UNIT_BYTES : (page + pages) * UNIT_BYTES].data

    def offset(self, page: int) -> int:
        """A place in the file, behind the superblocks."""
        return self.arena.slots_start + page * UNIT_BYTES

    def in_file(self, page: int, pages: int) -> Bytes:
        """What another process would find there."""
        with self.arena.path.open("rb") as file:
            file.seek(self.offset(page))
            return np.frombuffer(file.read(pages * UNIT_BYTES), dtype=np.uint8)


def opened(path: Path, open_io: OpenIo) -> Iterator[Disk]:
    """A disk, which is closed in the right order."""
    memory = np.frombuffer(mmap.mmap(-1, MEMORY_BYTES), dtype=np.uint8)
    memory[:] = POISON
    with SsdArena.open(path, FILE_BYTES, "node", 1) as arena:
        io = open_io(arena, memory)
        yield Disk(arena, memory, io)
        io.close()


class SsdIoSuite:
    """The promises of `kvstore.node.arena.SsdIo`."""

    way = "nixl"
    """What `name` is."""

    @pytest.fixture
    def open_io(self) -> OpenIo:
        raise NotImplementedError

    @pytest.fixture
    def disk(self, tmp_path: Path, open_io: OpenIo) -> Iterator[Disk]:
        yield from opened(tmp_path / "ssd", open_io)

    def test_it_has_a_name(self, disk: Disk) -> None:
        assert disk.io.name == self.way and disk.io.detail.startswith(self.way)

    def test_what_was_written_is_in_the_file_when_the_call_returns(self, disk: Disk) -> None:
        data = some(1, 6 * UNIT_BYTES)
        disk.memory[: 2 * UNIT_BYTES] = data[: 2 * UNIT_BYTES]
        disk.memory[64 * UNIT_BYTES :][:UNIT_BYTES] = data[2 * UNIT_BYTES : 3 * UNIT_BYTES]
        disk.memory[9 * UNIT_BYTES :][: 3 * UNIT_BYTES] = data[3 * UNIT_BYTES :]
        side_by_side = Run(disk.offset(4), [disk.piece(0, 2), disk.piece(64, 1)])
        assert disk.io.write([Run(disk.offset(100), [disk.piece(9, 3)]), side_by_side]) == [None, None]
        assert np.array_equal(disk.in_file(4, 3), data[: 3 * UNIT_BYTES])
        assert np.array_equal(disk.in_file(100, 3), data[3 * UNIT_BYTES :])
        assert not disk.in_file(3, 1).any() and not disk.in_file(7, 1).any() and not disk.in_file(103, 1).any()

    def test_a_read_fills_its_memory_and_nothing_else(self, disk: Disk) -> None:
        data = some(2, 8 * UNIT_BYTES)
        with disk.arena.path.open("r+b") as file:
            file.seek(disk.offset(10))
            file.write(data.tobytes())
        expected = disk.memory.copy()
        runs = [Run(disk.offset(10), [disk.piece(7, 1), disk.piece(3, 2)]), Run(disk.offset(15), [disk.piece(200, 3)])]
        for page, pages, start in ((7, 1, 0), (3, 2, 1), (200, 3, 5)):
            part = data[start * UNIT_BYTES :][: pages * UNIT_BYTES]
            expected[page * UNIT_BYTES :][: pages * UNIT_BYTES] = part
        assert disk.io.read(runs) == [None, None]
        assert np.array_equal(disk.memory, expected)

    def test_no_runs_are_nothing(self, disk: Disk) -> None:
        assert disk.io.read([]) == disk.io.write([]) == []

    def test_memory_of_its_own_goes_too(self, disk: Disk) -> None:
        own = np.frombuffer(mmap.mmap(-1, 2 * UNIT_BYTES), dtype=np.uint8)
        own[:] = some(3, len(own))
        assert disk.io.write([Run(disk.offset(0), [own.data, disk.piece(0, 1)])]) == [None]
        back = np.frombuffer(mmap.mmap(-1, 2 * UNIT_BYTES), dtype=np.uint8)
        assert disk.io.read([Run(disk.offset(0), [back.data])]) == [None]
        assert np.array_equal(back, own)
        assert disk.io.name == self.way

    def test_a_slot_is_read_whole_or_not(self, disk: Disk) -> None:
        """A file that somebody cut: the run beyond it fails, the others come."""
        disk.memory[: 2 * UNIT_BYTES] = data = some(4, 2 * UNIT_BYTES)
        assert disk.io.write([Run(disk.offset(0), [disk.piece(0, 2)])]) == [None]
        os.truncate(disk.arena.path, disk.offset(3))
        beyond = Run(disk.offset(2), [disk.piece(20, 2)])
        error, other = disk.io.read([beyond, Run(disk.offset(0), [disk.piece(10, 2)])])
        assert isinstance(error, StorageFailed) and "read failed: it ended after" in str(error)
        assert other is None and np.array_equal(disk.memory[10 * UNIT_BYTES :][: 2 * UNIT_BYTES], data)
        assert disk.io.read([Run(disk.offset(0), [disk.piece(30, 1)])]) == [None], "and it goes on"
        assert disk.io.name == self.way

    def test_c06_no_room_is_no_failure_of_the_disk(self, tmp_path: Path, open_io: OpenIo) -> None:
        (tmp_path / "small").mkdir()
        with mounted(tmp_path / "small", "-t", "tmpfs", "-o", "size=320k", "none") as folder:
            for disk in opened(folder / "ssd", open_io):
                errors = [disk.io.write([Run(disk.offset(page), [disk.piece(page, 8)])])[0] for page in range(0, 96, 8)]
                assert errors[0] is None and isinstance(errors[-1], CapacityExhausted)
                assert "write failed: No space left on device" in str(errors[-1])
                assert disk.io.write([Run(disk.offset(0), [disk.piece(8, 8)])]) == [None], "what has room is used on"
                assert disk.io.name == self.way

    def test_many_threads_get_their_own_bytes(self, disk: Disk) -> None:
        """Also when each waits for the others' transfers: one that is never looked at again would wait for ever."""
        threads, rounds, pages = 8, 60, 4

        def work(number: int) -> None:
            mine = disk.memory[number * 2 * pages * UNIT_BYTES :][: 2 * pages * UNIT_BYTES]
            there, back = mine[: pages * UNIT_BYTES], mine[pages * UNIT_BYTES :]
            for turn in range(rounds):
                there[:] = some(number * rounds + turn, len(there))
                place = disk.offset((number * rounds + turn) * pages % 800)
                with locks[place]:
                    assert disk.io.write([Run(place, [there.data])]) == [None]
                    assert disk.io.read([Run(place, [back.data])]) == [None]
                assert np.array_equal(there, back)

        locks = {disk.offset(page): threading.Lock() for page in range(0, 800, pages)}
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(work, range(threads)))

    def test_it_leaves_nothing_behind(self, tmp_path: Path, open_io: OpenIo) -> None:
        def held() -> tuple[int, int]:
            return len(list(Path("/proc/self/fd").iterdir())), threading.active_count()

        def use(name: str) -> None:
            for disk in opened(tmp_path / name, open_io):
                assert disk.io.write([Run(disk.offset(0), [disk.piece(0, 1)])]) == [None]

        use("first")  # a library that is loaded now may keep something
        before = held()
        use("second")
        use("third")
        assert held() == before
