"""The SSD arena on a disk whose calls fail, give other bytes back, stop half-way, block or meet each other."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvstore.errors import CapacityExhausted, StorageFailed
from kvstore.node.arena import ssd_file
from kvstore.node.arena.ssd_file import Buffer, Calls, pages
from kvstore.node.arena.ssd_format import ExtentPlace
from kvstore.node.memory import UNIT_BYTES
from tests.unit.node.ssd_setting import (
    KEYS,
    STORED,
    cut,
    filled,
    found,
    header_of,
    no_sync,
    open_arena,
    store,
)

DEADLINE_S = 20.0


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ssd"


# --- O_DIRECT ---


def test_g06_without_o_direct_there_is_one_warning_and_the_page_cache(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        if os.O_DIRECT & ssd_file.fcntl.fcntl(fd, ssd_file.fcntl.F_GETFL):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return os.pwritev(fd, buffers, offset)

    with open_arena(path, calls=Calls(pwritev=refused, fdatasync=no_sync)) as arena:
        assert not arena.direct
        store(arena, 0, cut(arena, 1)[0].slot(0))
        assert found(arena) == {KEYS[0]}
    (record,) = caplog.records
    assert "no O_DIRECT here (Invalid argument)" in record.getMessage() and "ext4 or xfs" in record.getMessage()


def test_g06_a_direct_path_that_gives_other_bytes_back_is_not_used(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def wrong(fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        count = os.preadv(fd, buffers, offset)
        if os.O_DIRECT & ssd_file.fcntl.fcntl(fd, ssd_file.fcntl.F_GETFL):
            memoryview(buffers[0])[7] ^= 1
        return count

    with open_arena(path, calls=Calls(preadv=wrong, fdatasync=no_sync)) as arena:
        assert not arena.direct
    assert "other bytes came back" in caplog.text


def test_g06_a_disk_that_gives_other_bytes_back_in_any_way_is_refused(path: Path) -> None:
    def wrong(fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        count = os.preadv(fd, buffers, offset)
        if count:
            memoryview(buffers[0])[7] ^= 1
        return count

    with pytest.raises(StorageFailed, match="use another disk"):
        open_arena(path, calls=Calls(preadv=wrong, fdatasync=no_sync))
    open_arena(path.with_name("other")).close()


# --- errors and locks ---


def failing(code: int, fails: threading.Event) -> Calls:
    """Every call fails while `fails` is set."""

    def fail(*_: object) -> None:
        if fails.is_set():
            raise OSError(code, os.strerror(code))

    def preadv(fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        fail()
        return os.preadv(fd, buffers, offset)

    def pwritev(fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        fail()
        return os.pwritev(fd, buffers, offset)

    return Calls(preadv, pwritev, fail)


@pytest.mark.parametrize(
    ("code", "expected", "remedy"),
    [
        (errno.ENOSPC, CapacityExhausted, "free some"),
        (errno.EDQUOT, CapacityExhausted, "free some"),
        (errno.EFBIG, CapacityExhausted, "free some"),
        (errno.EIO, StorageFailed, "kernel log"),
        (errno.EROFS, StorageFailed, "mount it writable"),
        (errno.ENOTCONN, StorageFailed, "mount it again"),
    ],
)
def test_every_operation_maps_the_errors_of_the_disk(
    path: Path, code: int, expected: type[Exception], remedy: str
) -> None:
    fails = threading.Event()
    extents = filled(path)
    with open_arena(path, calls=failing(code, fails)) as arena:
        slot = extents[0].slot(0)
        fails.set()
        for operation, name in (
            (lambda: arena.write(slot * UNIT_BYTES, pages(UNIT_BYTES)), "write"),
            (lambda: arena.write_headers([(slot, None)]), "read"),
            (lambda: arena.format_extent(extents[0]), "write"),
            (lambda: arena.write_superblock([STORED], extents), "fdatasync"),
            (arena.sync, "fdatasync"),
            (lambda: list(arena.scan()), "read"),
            (lambda: arena.read(slot * UNIT_BYTES, pages(UNIT_BYTES)), "read"),
        ):
            with pytest.raises(expected, match=f"{path}: {name} failed: {os.strerror(code)}.*{remedy}") as caught:
                operation()
            assert isinstance(caught.value.__cause__, OSError)


def test_short_transfers_go_on_and_one_that_stands_still_is_an_error(path: Path) -> None:
    step = UNIT_BYTES

    def pwritev(fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        return os.pwritev(fd, [memoryview(buffers[0])[:step]], offset)

    def preadv(fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        return os.preadv(fd, [memoryview(buffers[0])[:step]], offset)

    with open_arena(path, calls=Calls(preadv, pwritev, no_sync)) as arena:
        extent = cut(arena, 1)[0]
        store(arena, 0, extent.slot(0))
        assert found(arena) == {KEYS[0]}
        step = 0
        with pytest.raises(StorageFailed, match="ended after 0 of"):
            arena.read(extent.start, pages(UNIT_BYTES))


def test_a_superblock_that_failed_is_written_over_and_the_good_one_is_not(path: Path) -> None:
    fails = threading.Event()
    extents = filled(path)
    with open_arena(path, calls=failing(errno.EIO, fails)) as arena:
        before = arena.superblock
        for _ in range(3):
            fails.set()
            with pytest.raises(StorageFailed):
                arena.write_superblock([STORED], extents[:1])
            assert arena.superblock == before
        fails.clear()
        arena.write_superblock([STORED], extents[:1])
        assert arena.superblock.sequence == before.sequence + 1


def test_a_header_whose_write_failed_counts_as_empty(path: Path) -> None:
    fails = threading.Event()
    with open_arena(path, calls=failing(errno.EIO, fails)) as arena:
        extent = cut(arena, 1)[0]
        store(arena, 0, extent.slot(0))
        store(arena, 1, extent.slot(1))
        fails.set()
        for slot, header in ((extent.slot(0), None), (extent.slot(2), header_of(2, extent.slot(2)))):
            with pytest.raises(StorageFailed):
                arena.write_headers([(slot, header)])
        fails.clear()
        arena.write_headers([(extent.slot(1), header_of(1, extent.slot(1)))])
        assert found(arena) == {KEYS[1]}


def test_a_stuck_call_holds_nobody_else(path: Path) -> None:
    stuck, go_on = threading.Event(), threading.Event()

    def pwritev(fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        if threading.current_thread().name == "stuck":
            stuck.set()
            assert go_on.wait(DEADLINE_S)
        return os.pwritev(fd, buffers, offset)

    with open_arena(path, calls=Calls(pwritev=pwritev, fdatasync=no_sync)) as arena:
        one, other = cut(arena, 2)
        thread = threading.Thread(target=store, args=(arena, 0, one.slot(0)), name="stuck")
        thread.start()
        assert stuck.wait(DEADLINE_S)
        store(arena, 1, other.slot(0))
        arena.write_superblock([STORED], [one, other])
        assert found(arena) == {KEYS[1]}
        go_on.set()
        thread.join(DEADLINE_S)
        assert found(arena) == {KEYS[0], KEYS[1]}


def test_two_header_writes_are_never_under_way_together(path: Path) -> None:
    """Else the older state of a page could reach the disk last."""
    first, second, arrived = threading.Event(), threading.Event(), []

    def pwritev(fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        if threading.current_thread().name == "second":
            second.set()
        elif first.is_set():
            thread.start()
            arrived.append(second.wait(0.2))
        return os.pwritev(fd, buffers, offset)

    with open_arena(path, calls=Calls(pwritev=pwritev, fdatasync=no_sync)) as arena:
        extent = cut(arena, 1)[0]
        slots = [extent.slot(index) for index in range(2)]
        headers = [[(slot, header_of(number, slot))] for number, slot in enumerate(slots)]
        thread = threading.Thread(target=arena.write_headers, args=(headers[1],), name="second")
        first.set()
        arena.write_headers(headers[0])
        thread.join(DEADLINE_S)
        assert arrived == [False] and second.is_set()
        assert [header.slot for header in arena.scan()] == slots


def test_many_threads_write_headers_of_the_same_page(path: Path) -> None:
    with open_arena(path) as arena:
        extent = ExtentPlace(arena.slots_start, arena.size_bytes, UNIT_BYTES)
        arena.format_extent(extent)
        arena.write_superblock([STORED], [extent])

        def write(first: int) -> None:
            for index in range(first, 24, 4):
                slot = extent.slot(index)
                arena.write_headers([(slot, header_of(index, slot, payload_bytes=UNIT_BYTES))])

        threads = [threading.Thread(target=write, args=(first,)) for first in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE_S)
    with open_arena(path) as arena:
        assert [extent.index(header.slot) for header in arena.scan()] == list(range(24))
