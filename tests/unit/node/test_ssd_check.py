"""The check of a cold SSD file: each fault is found, named and repaired, and nothing else is touched."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvstore.errors import ConfigurationError
from kvstore.node.arena.ssd import SsdArena
from kvstore.node.arena.ssd_file import Buffer, Calls
from kvstore.node.arena.ssd_format import ExtentPlace, StoredNamespace
from kvstore.node.memory import UNIT_BYTES
from kvstore.node.tiers.check import Fault, SsdReport, check_ssd_file
from tests.unit.node.ssd_setting import (
    KEYS,
    NUMBERS,
    SIZE_BYTES,
    STORED,
    cut,
    header_of,
    open_arena,
    store,
    write_chunk,
)

REGION_BYTES = 64 << 10


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Chunks 0 to 5 in two extents."""
    path = tmp_path / "ssd"
    with open_arena(path) as arena:
        extents = cut(arena, 2)
        for number in range(6):
            store(arena, number, extents[number // 3].slot(number % 3), generation=10 + number)
    return path


def extents_of(path: Path) -> tuple[ExtentPlace, ...]:
    with open_arena(path) as arena:
        return arena.superblock.extents


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 4]))


def kinds(report: SsdReport) -> list[tuple[Fault, int | None]]:
    return [(each.kind, None if each.key is None else NUMBERS[each.key]) for each in report.findings]


def repaired(path: Path) -> set[int]:
    """Repair, look again, and return the chunks that are left."""
    report = check_ssd_file(path, repair=True)
    assert report.findings and all(each.repaired for each in report.findings)
    again = check_ssd_file(path)
    assert again.findings == () and (again.slots, again.chunks) == (report.slots, report.chunks)
    with open_arena(path) as arena:
        return {NUMBERS[header.key] for header in arena.scan()}


def test_a_file_in_order_has_no_findings_and_is_not_written(path: Path) -> None:
    before = path.read_bytes()
    steps: list[tuple[int, int]] = []
    report = check_ssd_file(path, progress=lambda done, total: steps.append((done, total)))
    assert report == SsdReport(path, "node-a", 6, 6, 6 * 8192, 0, ())
    assert steps == [(done, 6) for done in range(7)]
    check_ssd_file(path, repair=True)
    assert path.read_bytes() == before


def test_an_empty_file_has_no_findings(tmp_path: Path) -> None:
    open_arena(tmp_path / "ssd").close()
    assert check_ssd_file(tmp_path / "ssd").findings == ()


@pytest.mark.parametrize("copy", [0, 1])
def test_a_damaged_superblock_is_written_anew(path: Path, copy: int) -> None:
    with open_arena(path) as arena:  # both copies know the same
        arena.write_superblock([STORED], arena.superblock.extents)
    flip(path, copy * REGION_BYTES + 50)
    report = check_ssd_file(path)
    assert kinds(report) == [(Fault.SUPERBLOCK, None)] and not report.findings[0].repaired
    assert repaired(path) == {0, 1, 2, 3, 4, 5}
    flip(path, (1 - copy) * REGION_BYTES + 50)
    assert repaired(path) == {0, 1, 2, 3, 4, 5}, "the copy that was written anew is good alone"


def test_two_damaged_superblocks_cannot_be_repaired(path: Path) -> None:
    flip(path, 50)
    flip(path, REGION_BYTES + 50)
    before = path.read_bytes()
    (finding,) = check_ssd_file(path, repair=True).findings
    assert finding.kind is Fault.SUPERBLOCK and not finding.repaired and "delete it" in finding.text
    assert path.read_bytes() == before


def test_a_damaged_header_is_emptied_and_its_children_are_orphans(path: Path) -> None:
    one, _ = extents_of(path)
    flip(path, one.start + 2 * 128 + 9)
    assert kinds(check_ssd_file(path)) == [(Fault.HEADER, None), *((Fault.ORPHAN, number) for number in (3, 4, 5))]
    assert repaired(path) == {0, 1}


@pytest.mark.parametrize("at", [0, 8191, 8192, 8192 + 31])
def test_a_damaged_payload_or_table_is_found(path: Path, at: int) -> None:
    _, other = extents_of(path)
    flip(path, other.slot(1) * UNIT_BYTES + at)
    assert kinds(check_ssd_file(path)) == [(Fault.CHECKSUM, 4), (Fault.ORPHAN, 5)]
    assert repaired(path) == {0, 1, 2, 3}


def test_a_slot_that_holds_another_chunk_in_order_is_found(path: Path) -> None:
    _, other = extents_of(path)
    with open_arena(path) as arena:  # as after a loss of power: the slot was used again, its header was not
        write_chunk(arena, 9, other.slot(2))
    assert kinds(check_ssd_file(path)) == [(Fault.CHECKSUM, 5)]
    assert repaired(path) == {0, 1, 2, 3, 4}


def test_the_rest_of_a_slot_does_not_count(path: Path) -> None:
    _, other = extents_of(path)
    flip(path, other.slot(1) * UNIT_BYTES + 8192 + 32)
    assert check_ssd_file(path).findings == ()


def test_a_slot_without_checksums_is_counted_and_kept(path: Path) -> None:
    one, _ = extents_of(path)
    with open_arena(path) as arena:
        header = next(iter(arena.scan()))
        arena.write_headers([(one.slot(0), header_of(0, header.slot, table_hash=0))])
    flip(path, one.slot(0) * UNIT_BYTES)
    report = check_ssd_file(path)
    assert (report.unverified_slots, report.slots, report.findings) == (1, 6, ())


def test_of_two_copies_the_older_is_dropped(path: Path) -> None:
    with open_arena(path) as arena:
        extents = arena.superblock.extents
        extra = ExtentPlace(extents[-1].stop, SIZE_BYTES, extents[0].slot_bytes)
        arena.format_extent(extra)
        arena.write_superblock([STORED], [*extents, extra])
        store(arena, 0, extra.slot(0), generation=9)
        store(arena, 1, extra.slot(1), generation=99)
    report = check_ssd_file(path)
    assert kinds(report) == [(Fault.DUPLICATE, 0), (Fault.DUPLICATE, 1)] and report.slots == 6
    assert repaired(path) == {0, 1, 2, 3, 4, 5}
    with open_arena(path) as arena:
        generations = {NUMBERS[header.key]: header.generation for header in arena.scan()}
    assert (generations[0], generations[1]) == (10, 99)


@pytest.mark.parametrize("other", [{"shard": 0x123400}, {"payload_bytes": 512}])
def test_a_header_that_does_not_fit_its_namespace_is_found(path: Path, other: dict[str, int]) -> None:
    _, last = extents_of(path)
    with open_arena(path) as arena:
        arena.write_headers([(last.slot(2), header_of(5, last.slot(2), **other))])
    assert kinds(check_ssd_file(path)) == [(Fault.SHARD, 5)]
    assert repaired(path) == {0, 1, 2, 3, 4}


def test_a_namespace_that_is_not_understood_loses_its_chunks(path: Path) -> None:
    with open_arena(path) as arena:
        extents = arena.superblock.extents
        arena.write_superblock([STORED, StoredNamespace(b'{"model":"from another time"}')], extents)
        arena.write_headers([(extents[1].slot(2), header_of(5, extents[1].slot(2), namespace_number=2))])
    report = check_ssd_file(path, repair=True)
    assert kinds(report) == [(Fault.NAMESPACE, None), (Fault.SHARD, 5)]
    assert [each.repaired for each in report.findings] == [False, True]
    assert kinds(check_ssd_file(path)) == [(Fault.NAMESPACE, None)]


@pytest.mark.parametrize("length", [SIZE_BYTES + 4096, SIZE_BYTES - 4096])
def test_a_file_of_another_length_is_brought_to_its_own(path: Path, length: int) -> None:
    os.truncate(path, length)
    assert kinds(check_ssd_file(path)) == [(Fault.LENGTH, None)]
    assert repaired(path) == {0, 1, 2, 3, 4, 5}
    assert path.stat().st_size == SIZE_BYTES


def test_a_file_that_was_cut_within_an_extent_loses_that_extent(path: Path) -> None:
    _, other = extents_of(path)
    os.truncate(path, other.stop - UNIT_BYTES)
    assert kinds(check_ssd_file(path)) == [(Fault.LENGTH, None), (Fault.UNREADABLE, 5)]
    assert repaired(path) == {0, 1, 2, 3, 4}


def test_a_slot_that_the_disk_does_not_give_back(path: Path) -> None:
    one, _ = extents_of(path)
    bad = one.slot(1) * UNIT_BYTES

    def preadv(fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        if offset == bad:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return os.preadv(fd, buffers, offset)

    report = check_ssd_file(path, calls=Calls(preadv=preadv))
    assert kinds(report) == [(Fault.UNREADABLE, 1), *((Fault.ORPHAN, number) for number in (2, 3, 4, 5))]


def test_a_header_block_that_the_disk_does_not_give_back_is_written_anew(path: Path) -> None:
    one, _ = extents_of(path)
    bad = {one.start}

    def preadv(fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        if offset in bad:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return os.preadv(fd, buffers, offset)

    def pwritev(fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        bad.discard(offset)  # as disks do
        return os.pwritev(fd, buffers, offset)

    calls = Calls(preadv=preadv, pwritev=pwritev)
    lost = [(Fault.UNREADABLE, None), *((Fault.ORPHAN, number) for number in (3, 4, 5))]
    assert kinds(check_ssd_file(path, calls=calls)) == lost and bad
    assert kinds(check_ssd_file(path, calls=calls, repair=True)) == lost
    assert check_ssd_file(path, calls=calls) == SsdReport(path, "node-a", 0, 0, 0, 0, ())


def test_a_file_in_use_or_missing_is_refused(path: Path) -> None:
    with open_arena(path):
        with pytest.raises(ConfigurationError, match="another process uses it"):
            check_ssd_file(path)
    with pytest.raises(ConfigurationError, match="missing does not exist"):
        check_ssd_file(path.with_name("missing"))
    assert not path.with_name("missing").exists()


def test_a_checked_file_starts_as_before(path: Path) -> None:
    check_ssd_file(path, repair=True)
    with SsdArena.open(path, SIZE_BYTES, "node-a", 3) as arena:
        assert [header.key for header in arena.scan()] == [KEYS[number] for number in range(6)]
