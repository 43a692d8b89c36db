"""The SSD arena on a real file: what it keeps, what it opens and what it refuses."""

from __future__ import annotations

import logging
import os
import stat
import time
from hashlib import sha256
from pathlib import Path

import pytest

from kvstore.errors import ConfigurationError, LayoutMismatch, LimitExceeded
from kvstore.node.arena import ssd_format
from kvstore.node.arena.ssd import SsdArena
from kvstore.node.arena.ssd_file import pages
from kvstore.node.arena.ssd_format import ExtentPlace, StoredNamespace
from kvstore.node.memory import UNIT_BYTES
from tests.unit.node.small_node import namespace
from tests.unit.node.ssd_setting import (
    KEYS,
    SIZE_BYTES,
    SLOT_BYTES,
    STORED,
    Recorder,
    cut,
    filled,
    found,
    header_of,
    open_arena,
    store,
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ssd"


# --- what it keeps ---


def test_what_was_stored_is_there_after_it_was_opened_again(path: Path) -> None:
    extents = filled(path)
    with open_arena(path, epoch=2) as arena:
        assert found(arena) == {KEYS[0], KEYS[1]}
        assert (arena.superblock.epoch, arena.superblock.extents) == (2, tuple(extents))
        assert arena.superblock.namespaces == (STORED,)


def test_a_new_file_is_private_sparse_and_exactly_as_long_as_its_limit(path: Path) -> None:
    with open_arena(path, size_bytes=SIZE_BYTES + 4095) as arena:
        status = path.stat()
        assert stat.S_IMODE(status.st_mode) == 0o600
        assert status.st_size == arena.size_bytes == SIZE_BYTES
        assert status.st_blocks * 512 < SIZE_BYTES
        assert list(arena.scan()) == []


def test_c05_the_file_never_gets_longer_than_its_limit(path: Path) -> None:
    with open_arena(path) as arena:
        length = SIZE_BYTES - arena.slots_start
        extent = ExtentPlace(arena.slots_start, SIZE_BYTES, UNIT_BYTES)
        arena.format_extent(extent)
        arena.write_superblock([STORED], [extent])
        for index in range(extent.slot_count):
            arena.write(extent.slot(index) * UNIT_BYTES, pages(UNIT_BYTES))
        with pytest.raises(AssertionError):
            arena.write(SIZE_BYTES, pages(UNIT_BYTES))
        assert path.stat().st_size == SIZE_BYTES and extent.slot_count * UNIT_BYTES < length
    assert [each.name for each in path.parent.iterdir()] == [path.name], "and leaves no other file"


def test_headers_in_one_page_are_written_once(path: Path) -> None:
    recorder = Recorder()
    with open_arena(path, calls=recorder.calls) as arena:
        one, other = cut(arena, 2)
        before = len(recorder.events)
        slots = [other.slot(2), one.slot(0), one.slot(2), other.slot(0)]
        arena.write_headers([(slot, header_of(i, slot)) for i, slot in enumerate(slots)])
        assert [event.offset for event in recorder.events[before:]] == [one.start, other.start]
        assert {header.slot for header in arena.scan()} == set(slots)


def test_header_writes_do_not_lose_what_an_earlier_run_left_on_their_page(path: Path) -> None:
    (extent, _) = filled(path)
    with open_arena(path) as arena:  # no scan
        store(arena, 2, extent.slot(1))
    with open_arena(path) as arena:
        assert found(arena) == {KEYS[0], KEYS[1], KEYS[2]}


def test_a_header_block_of_several_pages(path: Path) -> None:
    size_bytes = 2 << 20
    with open_arena(path, size_bytes=size_bytes) as arena:
        extent = ExtentPlace(arena.slots_start, size_bytes, UNIT_BYTES)
        arena.format_extent(extent)
        arena.write_superblock([STORED], [extent])
        last = extent.slot_count - 1
        assert last > 400
        for number, index in enumerate((0, 31, 32, last)):
            slot = extent.slot(index)
            arena.write_headers([(slot, header_of(number, slot, payload_bytes=UNIT_BYTES))])
    with open_arena(path, size_bytes=size_bytes) as arena:
        assert [extent.index(header.slot) for header in arena.scan()] == [0, 31, 32, last]


@pytest.mark.parametrize(
    "wrong",
    [
        lambda slot: header_of(0, slot + 3),
        lambda slot: header_of(0, slot, namespace_number=2),
        lambda slot: header_of(0, slot, namespace_number=0),
        lambda slot: header_of(0, slot, payload_bytes=SLOT_BYTES + 1),
        lambda slot: header_of(0, slot, payload_bytes=0),
    ],
    ids=["of another place", "unknown namespace", "no namespace", "longer than its slot", "empty"],
)
def test_a_header_that_cannot_be_is_not_believed_and_goes_with_the_next_write(path: Path, wrong: object) -> None:
    extents = filled(path)
    with open_arena(path) as arena:
        file_id = arena.superblock.file_id
    at, slot = extents[0].start, extents[0].slot(0)
    data = bytearray(path.read_bytes())
    data[at : at + 128] = wrong(slot).pack(file_id)  # type: ignore[operator]
    path.write_bytes(data)
    with open_arena(path) as arena:
        assert found(arena) == {KEYS[1]}
        store(arena, 3, extents[0].slot(1))
    assert not any(path.read_bytes()[at : at + 128])


def test_an_extent_that_is_no_longer_listed_is_forgotten(path: Path) -> None:
    one, other = filled(path)
    with open_arena(path) as arena:
        arena.write_superblock([STORED], [other])
        assert found(arena) == {KEYS[1]}
        with pytest.raises((AssertionError, KeyError)):
            arena.write_headers([(one.slot(0), None)])
        longer = ExtentPlace(one.start, one.stop, one.slot_bytes + UNIT_BYTES)
        arena.format_extent(longer)
        arena.write_superblock([STORED], [longer, other])
        store(arena, 5, longer.slot(0))
    with open_arena(path) as arena:
        assert found(arena) == {KEYS[1], KEYS[5]}


def test_an_extent_over_others_takes_their_place_at_once(path: Path) -> None:
    one, other = filled(path)
    with open_arena(path) as arena:
        merged = ExtentPlace(one.start, other.stop, SLOT_BYTES)
        arena.format_extent(merged)
        store(arena, 5, merged.slot(merged.slot_count - 1))
        arena.write_superblock([STORED], [merged])
        assert found(arena) == {KEYS[5]}


def test_a_superblock_comes_durably_after_what_it_names(path: Path) -> None:
    recorder = Recorder()
    with open_arena(path, calls=recorder.calls) as arena:
        one, _ = cut(arena, 2)
        before = len(recorder.events)
        arena.write_superblock([STORED], [one])
        made = recorder.events[before:]
        assert [(event.offset, event.data is None) for event in made] == [
            (-1, True),
            (arena.superblock.offset, False),
            (-1, True),
        ]


# --- what it opens and refuses ---


def test_the_superblock_that_does_not_fit_changes_nothing(path: Path) -> None:
    filled(path)
    with open_arena(path) as arena:
        before = path.read_bytes()
        many = [StoredNamespace(namespace(revision=sha256(b"%d" % i).hexdigest()).canonical) for i in range(4000)]
        with pytest.raises(LimitExceeded, match="65536"):
            arena.write_superblock(many, arena.superblock.extents)
        assert path.read_bytes() == before and found(arena) == {KEYS[0], KEYS[1]}


def test_a_second_node_is_refused(path: Path) -> None:
    with open_arena(path):
        with pytest.raises(ConfigurationError, match=r"cannot be locked: another process uses it.*stop"):
            open_arena(path)
    open_arena(path).close()


def test_the_file_of_another_node_is_refused_naming_both(path: Path) -> None:
    filled(path)
    before = path.read_bytes()
    with pytest.raises(ConfigurationError, match=r"belongs to node node-a, and this is node node-b.*delete"):
        SsdArena.open(path, SIZE_BYTES, "node-b", 1)
    assert path.read_bytes() == before
    open_arena(path).close()


@pytest.mark.parametrize("contents", [b"x", b"x" * 8192, b"\0" * 4096 + b"x" * 4096, b"KVSTSSD1" + bytes(5000) + b"x"])
def test_a_file_that_is_not_ours_is_refused_and_left_alone(path: Path, contents: bytes) -> None:
    path.write_bytes(contents)
    with pytest.raises(ConfigurationError, match=r"no SSD file of a node, or both copies.*delete this one"):
        open_arena(path)
    assert path.read_bytes() == contents


@pytest.mark.parametrize("length", [0, 4096, SIZE_BYTES, SIZE_BYTES * 2])
def test_an_empty_or_zeroed_file_is_taken(path: Path, length: int) -> None:
    path.touch()
    os.truncate(path, length)
    filled(path)
    assert path.stat().st_size == SIZE_BYTES


def test_both_superblocks_damaged_is_refused(path: Path) -> None:
    filled(path)
    data = bytearray(path.read_bytes())
    data[50] ^= 1
    data[(64 << 10) + 50] ^= 1
    path.write_bytes(data)
    with pytest.raises(ConfigurationError, match="both copies"):
        open_arena(path)
    assert path.read_bytes() == data


def test_the_second_superblock_is_found_where_the_first_is_damaged_and_the_size_is_new(path: Path) -> None:
    filled(path)
    data = bytearray(path.read_bytes())
    data[50] ^= 1
    path.write_bytes(data)
    with open_arena(path, size_bytes=64 << 20) as arena:  # a new file of this size would have longer superblocks
        assert arena.superblock.region_bytes == 64 << 10 and arena.size_bytes == 64 << 20
        assert found(arena) <= {KEYS[0], KEYS[1]}


def test_another_format_version_is_refused_with_what_to_do(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(path)
    monkeypatch.setattr(ssd_format, "FORMAT_VERSION", 9)
    with pytest.raises(LayoutMismatch, match=r"format version 1, this kvstore reads 9.*delete"):
        open_arena(path)


def test_a_smaller_limit_drops_the_extents_beyond_it_and_cuts_the_file(path: Path) -> None:
    one, other = filled(path)
    with open_arena(path, size_bytes=other.stop - UNIT_BYTES) as arena:
        assert arena.superblock.extents == (one,) and found(arena) == {KEYS[0]}
        assert path.stat().st_size == other.stop - UNIT_BYTES
    with open_arena(path, size_bytes=SIZE_BYTES * 3) as arena:
        assert found(arena) == {KEYS[0]} and path.stat().st_size == SIZE_BYTES * 3
        assert arena.slots_start == one.start, "the superblocks stay where they are"


def test_a_limit_below_the_superblocks_is_refused(path: Path) -> None:
    with open_arena(path, size_bytes=64 << 20):
        pass
    with pytest.raises(ConfigurationError, match=r"was made for 67108864 bytes and cannot shrink to 262144.*delete"):
        open_arena(path)
    with pytest.raises(ConfigurationError, match=r"139264 to 17592186044416 bytes, not 131072"):
        open_arena(path.with_name("other"), size_bytes=128 << 10)
    assert not path.with_name("other").exists()


def test_a_file_that_somebody_cut_loses_what_was_cut(path: Path) -> None:
    _, other = filled(path)
    os.truncate(path, other.start + 100)
    with open_arena(path) as arena:
        assert found(arena) == {KEYS[0]}


def test_a_missing_folder_and_a_folder_as_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"the folder .*/missing does not exist; make it"):
        open_arena(tmp_path / "missing" / "ssd")
    with pytest.raises(ConfigurationError, match="Is a directory"):
        open_arena(tmp_path)
    with pytest.raises(ConfigurationError, match="no regular file"):
        open_arena(Path("/dev/zero"))


def test_too_little_free_space_is_a_warning(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with open_arena(path, size_bytes=8 << 40):
        pass
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and "less free than --ssd names" in record.getMessage()
    assert path.stat().st_blocks * 512 < 1 << 20


@pytest.mark.slow
def test_the_headers_of_100_gib_are_found(path: Path) -> None:
    size_bytes, slot_bytes, length = 100 << 30, (2 << 20) - UNIT_BYTES, 64 << 20
    with open_arena(path, size_bytes=size_bytes) as arena:
        starts = range(arena.slots_start, size_bytes - length + 1, length)
        extents = [ExtentPlace(start, start + length, slot_bytes) for start in starts]
        for extent in extents:
            arena.format_extent(extent)
        arena.write_superblock([STORED], extents)
        slots = 0
        for extent in extents:
            numbers = range(extent.slot_count)
            arena.write_headers([(extent.slot(i), header_of(i, extent.slot(i))) for i in numbers])
            slots += len(numbers)
    began = time.perf_counter()
    with open_arena(path, size_bytes=size_bytes) as arena:
        count = sum(1 for _ in arena.scan())
    took = time.perf_counter() - began
    print(f"{count} headers of {len(extents)} extents in {took:.2f} s")
    assert count == slots > 51_000
