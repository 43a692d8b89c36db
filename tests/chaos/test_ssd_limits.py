"""The SSD arena where the file system gives less than was asked for."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvstore.errors import CapacityExhausted, ConfigurationError
from kvstore.node.arena.ssd import SsdArena
from kvstore.node.arena.ssd_file import Calls
from kvstore.node.arena.ssd_format import ExtentPlace
from kvstore.node.memory import UNIT_BYTES
from kvstore.node.tiers.check import Fault, check_ssd_file
from tests.unit.node.ssd_setting import KEYS, NUMBERS, SLOT_BYTES, STORED, cut, is_whole, open_arena, store

TMPFS_BYTES = 320 << 10
SIZE_BYTES = 512 << 10
NOBODY = 65534


@contextmanager
def mounted(folder: Path, *arguments: str) -> Iterator[Path]:
    """A mount at `folder`, or a skip where this process may not."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("mounting needs root")
    result = subprocess.run(["mount", *arguments, folder], capture_output=True, text=True, check=False, timeout=20)
    if result.returncode:
        pytest.skip(f"this process may not mount: {result.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True, capture_output=True, timeout=20)


@pytest.fixture
def tmpfs(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "small").mkdir()
    with mounted(tmp_path / "small", "-t", "tmpfs", "-o", f"size={TMPFS_BYTES}", "none") as folder:
        yield folder


def fill(arena: SsdArena, extent: ExtentPlace) -> list[int]:
    """Store chunks from the first slot on until there is no room; returns which are stored."""
    stored: list[int] = []
    with pytest.raises(CapacityExhausted, match=r"write failed: .*free some or use a smaller --ssd"):
        for number in range(extent.slot_count):
            store(arena, number, extent.slot(number))
            stored.append(number)
    return stored


def one_extent(arena: SsdArena) -> ExtentPlace:
    extent = ExtentPlace(arena.slots_start, arena.size_bytes, SLOT_BYTES)
    arena.format_extent(extent)
    arena.write_superblock([STORED], [extent])
    return extent


def found(arena: SsdArena) -> list[int]:
    headers = list(arena.scan())
    assert all(is_whole(arena, header) for header in headers)
    return [NUMBERS[header.key] for header in headers]


def serves_on(path: Path, arena: SsdArena, extent: ExtentPlace, stored: list[int]) -> None:
    """Everything stored is readable, its slots can be used again, and so after another start."""
    assert stored and found(arena) == stored
    last = extent.slot(stored[-1])
    arena.write_headers([(last, None)])
    arena.sync()
    store(arena, 30, last)
    arena.write_superblock([STORED], [extent])
    assert found(arena) == [*stored[:-1], 30]
    arena.close()
    with open_arena(path, epoch=2, size_bytes=SIZE_BYTES) as again:
        assert found(again) == [*stored[:-1], 30]


def test_c06_a_file_system_smaller_than_the_limit_serves_what_it_holds(
    tmpfs: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmpfs / "ssd"
    with open_arena(path, size_bytes=SIZE_BYTES) as arena:
        assert "less free than --ssd names" in caplog.text
        extent = one_extent(arena)
        stored = fill(arena, extent)
        assert len(stored) * SLOT_BYTES > TMPFS_BYTES * 3 // 4
        serves_on(path, arena, extent, stored)
    report = check_ssd_file(path)
    assert [finding.kind for finding in report.findings] == [Fault.ORPHAN], "chunk 30, whose parent is not there"
    assert report.slots == len(stored) - 1


def test_a_file_system_without_any_room_refuses_the_start(tmpfs: Path) -> None:
    (tmpfs / "other").write_bytes(bytes(TMPFS_BYTES))
    with pytest.raises(CapacityExhausted, match=r"No space left on device.*free some"):
        open_arena(tmpfs / "ssd", size_bytes=SIZE_BYTES)
    (tmpfs / "other").unlink()
    open_arena(tmpfs / "ssd", size_bytes=SIZE_BYTES).close()


@contextmanager
def file_size_limit(limit_bytes: int) -> Iterator[None]:
    """As `ulimit -f` would set it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_limit_of_file_sizes_is_no_room(tmp_path: Path) -> None:
    path = tmp_path / "ssd"
    with file_size_limit(TMPFS_BYTES):
        with pytest.raises(CapacityExhausted, match=r"ftruncate failed: File too large.*limit of file sizes"):
            open_arena(path, size_bytes=SIZE_BYTES)
    with open_arena(path, size_bytes=SIZE_BYTES) as arena:
        extent = one_extent(arena)
        with file_size_limit(TMPFS_BYTES):
            stored = fill(arena, extent)
            assert len(stored) == (TMPFS_BYTES - extent.slots_start) // SLOT_BYTES
            serves_on(path, arena, extent, stored)


def test_a_read_only_file_system_refuses_the_start_and_allows_a_check(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    with open_arena(folder / "ssd") as arena:
        store(arena, 0, cut(arena, 1)[0].slot(0))
    before = (folder / "ssd").read_bytes()
    with mounted(folder, "--bind", "-o", "ro", str(folder)):
        if os.access(folder, os.W_OK):
            pytest.skip("this mount does not make read-only binds in one step")
        for name in ("ssd", "new"):
            with pytest.raises(ConfigurationError, match=r"cannot be opened for writing: Read-only file system; give"):
                open_arena(folder / name)
        report = check_ssd_file(folder / "ssd")
        assert (report.slots, report.findings) == (1, ())
        with pytest.raises(ConfigurationError, match="cannot be opened for writing"):
            check_ssd_file(folder / "ssd", repair=True)
    assert (folder / "ssd").read_bytes() == before


@contextmanager
def as_an_ordinary_user(folder: Path) -> Iterator[None]:
    """Run the block as the owner of `folder` and of what lies in it, without root's leave to write everywhere."""
    if os.geteuid() != 0:
        yield
        return
    for path in (folder, *folder.rglob("*")):
        os.chown(path, NOBODY, NOBODY)
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


def test_a_folder_or_file_without_permission_refuses_the_start() -> None:
    with tempfile.TemporaryDirectory() as name:  # each folder above it may be entered by all, unlike tmp_path
        folder = Path(name)
        path = folder / "ssd"
        open_arena(path).close()
        with as_an_ordinary_user(folder):
            path.chmod(0o400)
            with pytest.raises(ConfigurationError, match=r"Permission denied; give this user access"):
                open_arena(path)
            folder.chmod(0o500)
            with pytest.raises(ConfigurationError, match=r"Permission denied; give this user access"):
                open_arena(folder / "new")
            folder.chmod(0o700)


def test_c05_what_an_earlier_run_left_counts_and_nothing_is_added(tmp_path: Path) -> None:
    path = tmp_path / "ssd"
    for epoch in range(1, 5):
        with open_arena(path, epoch=epoch, size_bytes=SIZE_BYTES, calls=Calls()) as arena:
            extent = arena.superblock.extents[0] if epoch > 1 else one_extent(arena)
            for index in range(extent.slot_count):
                arena.write_headers([(extent.slot(index), None)])
                store(arena, index, extent.slot(index), generation=epoch)
            assert path.stat().st_blocks * 512 <= SIZE_BYTES + UNIT_BYTES
            assert [entry.name for entry in tmp_path.iterdir()] == ["ssd"]
    with open_arena(path, size_bytes=SIZE_BYTES) as arena:
        assert {header.generation for header in arena.scan()} == {4}
        assert [header.key for header in arena.scan()] == [KEYS[i] for i in range(extent.slot_count)]
