"""The SSD arena on a disk that gets slow, fails, fills up, stands still or is pulled out."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstore.errors import CapacityExhausted, KvStoreError, StorageFailed
from kvstore.node.arena.ssd import SsdArena
from kvstore.node.arena.ssd_file import Calls, pages
from kvstore.node.memory import UNIT_BYTES
from tests.chaos import fuse_disk
from tests.chaos.fuse_disk import FuseDisk
from tests.unit.node.ssd_setting import KEYS, SLOT_BYTES, STORED, cut, header_of, is_whole, open_arena, store

pytestmark = pytest.mark.skipif(bool(fuse_disk.missing()), reason=f"no FUSE disk: {fuse_disk.missing()}")
DEADLINE_S = 20.0


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[FuseDisk]:
    with FuseDisk(tmp_path) as disk:
        yield disk


@pytest.fixture
def arena(disk: FuseDisk) -> Iterator[SsdArena]:
    """Chunk 0 in the first slot of two extents of three."""
    with open_arena(disk.path, calls=Calls()) as arena:
        store(arena, 0, cut(arena, 2)[0].slot(0))
        yield arena


def keys(arena: SsdArena) -> set[bytes]:
    headers = list(arena.scan())
    assert all(is_whole(arena, header) for header in headers)
    return {header.key for header in headers}


Operation = tuple[str, Callable[[], object]]


def reads(arena: SsdArena) -> list[Operation]:
    slot = arena.superblock.extents[0].slot(0)
    return [
        ("read", lambda: arena.read(slot * UNIT_BYTES, pages(SLOT_BYTES))),
        ("read", lambda: list(arena.scan())),
    ]


def writes(arena: SsdArena) -> list[Operation]:
    extents = arena.superblock.extents
    slot = extents[0].slot(1)
    return [
        ("write", lambda: arena.write(slot * UNIT_BYTES, pages(SLOT_BYTES))),
        ("write", lambda: arena.write_headers([(slot, header_of(1, slot))])),
        ("write", lambda: arena.format_extent(extents[1])),
        ("fdatasync", lambda: arena.write_superblock([STORED], extents)),
        ("fdatasync", arena.sync),
    ]


def expect(error: type[KvStoreError], operations: list[Operation], path: Path, text: str) -> None:
    for name, operation in operations:
        with pytest.raises(error, match=f"{path}: {name} failed: {text}"):
            operation()


def test_the_stand_in_is_a_disk_like_any_other(disk: FuseDisk, arena: SsdArena) -> None:
    store(arena, 1, arena.superblock.extents[1].slot(2))
    arena.sync()
    arena.close()
    again = open_arena(disk.path, epoch=2)
    assert keys(again) == {KEYS[0], KEYS[1]} and again.superblock.epoch == 2
    again.close()


def test_a_disk_that_cannot_read_says_so_and_still_writes(disk: FuseDisk, arena: SsdArena) -> None:
    disk.tell("fail read")
    expect(StorageFailed, reads(arena), disk.path, "Input/output error.*kernel log")
    store(arena, 1, arena.superblock.extents[0].slot(1))
    disk.tell("ok")
    assert keys(arena) == {KEYS[0], KEYS[1]}


def test_a_disk_that_cannot_write_says_so_and_still_reads(disk: FuseDisk, arena: SsdArena) -> None:
    disk.tell("fail write")
    expect(StorageFailed, writes(arena), disk.path, "Input/output error.*kernel log")
    assert keys(arena) == {KEYS[0]}
    disk.tell("ok")
    for _, operation in writes(arena):
        operation()


def test_c06_a_full_disk_is_no_room_and_no_failure(disk: FuseDisk, arena: SsdArena) -> None:
    disk.tell("full")
    expect(CapacityExhausted, writes(arena)[:3], disk.path, "No space left on device.*free some")
    assert keys(arena) == {KEYS[0]}
    disk.tell("ok")
    store(arena, 1, arena.superblock.extents[0].slot(1))
    assert keys(arena) == {KEYS[0], KEYS[1]}


def test_a_slow_disk_gives_the_right_bytes(disk: FuseDisk, arena: SsdArena) -> None:
    disk.tell("slow 0.02")
    store(arena, 1, arena.superblock.extents[0].slot(1))
    assert keys(arena) == {KEYS[0], KEYS[1]}


def test_a_disk_that_was_pulled_out_says_so_at_every_operation(disk: FuseDisk, arena: SsdArena) -> None:
    disk.vanish()
    gone = "(Transport endpoint is not connected|Software caused connection abort).*"
    expect(StorageFailed, [*reads(arena), *writes(arena)], disk.path, gone)


def test_a_write_that_stands_still_holds_no_reader_and_ends_when_the_disk_goes(disk: FuseDisk, arena: SsdArena) -> None:
    errors: list[BaseException] = []

    def write() -> None:
        try:
            store(arena, 1, arena.superblock.extents[1].slot(0))
        except KvStoreError as exc:
            errors.append(exc)

    disk.tell("stop write")
    thread = threading.Thread(target=write)
    thread.start()
    disk.wait_stopped()
    assert keys(arena) == {KEYS[0]}, "while the other one stands still"
    disk.vanish()
    thread.join(DEADLINE_S)
    assert not thread.is_alive()
    assert [type(error) for error in errors] == [StorageFailed]


def test_a_write_that_stands_still_goes_on(disk: FuseDisk, arena: SsdArena) -> None:
    disk.tell("stop write")
    thread = threading.Thread(target=store, args=(arena, 1, arena.superblock.extents[1].slot(0)))
    thread.start()
    disk.wait_stopped()
    disk.tell("ok")
    thread.join(DEADLINE_S)
    assert keys(arena) == {KEYS[0], KEYS[1]}
