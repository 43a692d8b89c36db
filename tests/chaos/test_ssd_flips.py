"""A damaged byte anywhere in a node's SSD file: a miss or harmless, never wrong bytes; counted, dropped, repaired."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from node_thread import NodeThread
from typer.testing import CliRunner

import kvstore
from kvstore.cli import app
from kvstore.model.checksum import table_bytes
from kvstore.node.arena.ssd_format import HEADER_BYTES, ExtentPlace
from kvstore.node.arena.ssd_io import open_ssd_io
from kvstore.node.memory import UNIT_BYTES
from kvstore.node.tiers.check import check_ssd_file
from tests.unit.client import pages
from tests.unit.node.small_node import WIDE, keys_of, namespace
from tests.unit.node.tiered_node import IO_WAYS, OpenIo, TieredNode

SSD_BYTES = 512 << 10
REGION_BYTES = 64 << 10
SPACE = namespace(WIDE)
CHAINS = [keys_of(SPACE, 1, 3), keys_of(SPACE, 2, 2)]
PAYLOAD_BYTES = WIDE.payload_bytes(WIDE.whole)
TABLE_BYTES = table_bytes(WIDE.whole)


@dataclass(frozen=True)
class File:
    """A file with five chunks; `slots`: where each lies, and the place of its header."""

    image: bytes
    slots: dict[bytes, tuple[int, int]]
    extents: tuple[ExtentPlace, ...]

    @property
    def older_superblock(self) -> int:
        """Offset of the copy with the lower sequence number (of which one byte will do here)."""
        return min((0, REGION_BYTES), key=lambda offset: self.image[offset + 32])


async def made(path: Path) -> File:
    node = TieredNode(path, SSD_BYTES)
    for keys in CHAINS:
        node.store(SPACE, keys)
        assert await node.tiers.persist(keys, asyncio.get_running_loop().time() + 10) == (len(keys), "")
    slots = {}
    for key, chunk in node.core.pool.forest.chunks.items():
        (copy,) = chunk.ssd.values()
        (extent,) = (each for each in node.ssd.superblock.extents if each.index(copy.slot) is not None)
        index = extent.index(copy.slot)
        assert index is not None
        slots[key] = (copy.slot * UNIT_BYTES, extent.start + index * HEADER_BYTES)
    extents = node.ssd.superblock.extents
    await node.die()
    return File(path.read_bytes(), slots, extents)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> File:
    return asyncio.run(made(tmp_path_factory.mktemp("flips") / "ssd"))


def flipped(image: bytes, at: int) -> bytes:
    return image[:at] + bytes([image[at] ^ 0x40]) + image[at + 1 :]


def below(key: bytes) -> set[bytes]:
    """A chunk and what hangs on it."""
    (chain,) = (list(keys) for keys in CHAINS if key in list(keys))
    return set(chain[chain.index(key) :])


@pytest.fixture(params=IO_WAYS)
def open_io(request: pytest.FixtureRequest) -> OpenIo:
    return functools.partial(open_ssd_io, request.param)


async def after(path: Path, image: bytes, open_io: OpenIo | None = None) -> tuple[set[bytes], int]:
    """What a node delivers from this file, and how many failures of checksums it counts; then all is stored anew."""
    path.write_bytes(image)
    node = TieredNode(path, SSD_BYTES, epoch=2, slots=64, open_io=open_io)
    got = set()
    for keys in CHAINS:
        versions, _ = await node.read(SPACE, keys) if SPACE.id in node.core.pool.spaces else ([], None)
        got |= set(list(keys)[: len(versions)])
        node.core.check()
    failures = node.core.pool.counts["ssd_checksum_failures"]
    assert got >= node.on_ssd().keys(), "what is broken is dropped"
    for keys in CHAINS:
        node.store(SPACE, keys)
        assert await node.tiers.persist(keys, asyncio.get_running_loop().time() + 10) == (len(keys), "")
        assert await node.read(SPACE, keys) == ([0] * len(keys), None)
    node.core.check()
    await node.die()
    return got, failures


def test_a_flip_in_a_slot_is_a_counted_miss_of_that_chunk(file: File, tmp_path: Path, open_io: OpenIo) -> None:
    rng = random.Random(1)
    for key, (offset, _) in file.slots.items():
        ats = [0, PAYLOAD_BYTES - 1, PAYLOAD_BYTES, PAYLOAD_BYTES + TABLE_BYTES - 1, rng.randrange(PAYLOAD_BYTES)]
        for at in ats:
            got, failures = asyncio.run(after(tmp_path / "ssd", flipped(file.image, offset + at), open_io))
            assert (got, failures) == (file.slots.keys() - below(key), 1), at


def test_a_flip_in_a_header_is_a_miss_of_that_chunk(file: File, tmp_path: Path) -> None:
    rng = random.Random(2)
    for key, (_, header) in file.slots.items():
        for at in (0, HEADER_BYTES - 1, rng.randrange(HEADER_BYTES)):
            got, failures = asyncio.run(after(tmp_path / "ssd", flipped(file.image, header + at)))
            assert (got, failures) == (file.slots.keys() - below(key), 0), at


def test_a_flip_in_a_superblock_costs_at_most_what_the_older_copy_does_not_know(file: File, tmp_path: Path) -> None:
    older = file.older_superblock
    for offset in (0, REGION_BYTES):
        length = len(file.image[offset : offset + REGION_BYTES].rstrip(b"\0"))
        for at in random.Random(3).sample(range(length), 6):
            got, failures = asyncio.run(after(tmp_path / "ssd", flipped(file.image, offset + at)))
            assert failures == 0 and (offset != older or got == file.slots.keys()), at


def harmless(file: File) -> Iterator[int]:
    """Bytes without a meaning: unused ends of slots and headers, slots that are free, rooms of superblocks."""
    for offset, _ in file.slots.values():
        yield offset + PAYLOAD_BYTES + TABLE_BYTES
        yield offset + 3 * UNIT_BYTES - 1
    yield REGION_BYTES - 1
    yield 2 * REGION_BYTES - 1
    used = {offset for offset, _ in file.slots.values()}
    extent = file.extents[0]
    frees = (extent.slot(index) * UNIT_BYTES for index in range(extent.slot_count))
    yield next(offset for offset in frees if offset not in used)
    yield SSD_BYTES - 1


def test_a_flip_where_nothing_lies_changes_nothing(file: File, tmp_path: Path, open_io: OpenIo) -> None:
    for at in harmless(file):
        assert asyncio.run(after(tmp_path / "ssd", flipped(file.image, at), open_io)) == (file.slots.keys(), 0), at
        assert check_ssd_file(tmp_path / "ssd").findings == ()


@pytest.mark.slow
def test_a_flip_anywhere_is_never_wrong_bytes(file: File, tmp_path: Path, open_io: OpenIo) -> None:
    for at in random.Random(4).sample(range(SSD_BYTES), 60):
        got, failures = asyncio.run(after(tmp_path / "ssd", flipped(file.image, at), open_io))
        assert len(file.slots) - len(got) <= 3 and failures <= 1, at


def test_a_missing_checksum_is_noticed(file: File, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.model.checksum.differs", lambda *arguments: False)
    offset = next(iter(file.slots.values()))[0]
    with pytest.raises(AssertionError, match="wrong bytes"):
        asyncio.run(after(tmp_path / "ssd", flipped(file.image, offset)))


def check_by_cli(*arguments: str) -> tuple[int, dict[str, object]]:
    result = CliRunner().invoke(app, ["check", *arguments, "--json"])
    return result.exit_code, json.loads(result.stdout.splitlines()[-1])


def test_check_finds_and_repairs_a_flip_in_a_cold_file(file: File, tmp_path: Path) -> None:
    path = tmp_path / "ssd"
    offset, header = file.slots[CHAINS[0][0]]
    for at in (file.older_superblock + 20, offset, offset + PAYLOAD_BYTES, header + 9):
        path.write_bytes(flipped(file.image, at))
        assert check_by_cli("--ssd", str(path))[0] != 0, at
        assert path.read_bytes() == flipped(file.image, at), "without --repair it only looks"
        check_by_cli("--ssd", str(path), "--repair")
        assert check_by_cli("--ssd", str(path))[0] == 0, at
        got, failures = asyncio.run(after(path, path.read_bytes()))
        assert failures == 0 and len(got) >= 2, at


@pytest.mark.slow
def test_check_finds_and_repairs_a_flip_under_a_living_node(tmp_path: Path) -> None:
    path = tmp_path / "ssd"
    node = NodeThread(tmp_path, ssd=f"{path}:16MiB")
    try:
        with kvstore.connect(node.info.control_address) as client:
            cache = client.bind(pages.namespace())
            keys = cache.keys(pages.prompt(1, 4 * cache.layout.chunk_tokens))
            cache.write(keys, pages.pages_of(keys))
            assert cache.persist(keys) == (4, "")
            chunk = node.core.pool.forest.chunks[keys[1]]
            (copy,) = chunk.ssd.values()
            descriptor = os.open(path, os.O_RDWR)
            at = copy.slot * UNIT_BYTES + 100
            os.pwrite(descriptor, bytes([os.pread(descriptor, 1, at)[0] ^ 1]), at)
            os.fsync(descriptor)
            os.close(descriptor)
            address = node.info.control_address
            status, answer = check_by_cli("--node", address, "--sample", "100")
            assert status != 0 and "ssd_checksum" in json.dumps(answer)
            check_by_cli("--node", address, "--sample", "100", "--repair")
            node.call(node.core.check)
            assert cache.persist(keys) == (4, ""), "it is written again from DRAM"
            assert check_by_cli("--node", address, "--sample", "100")[0] == 0
            into = pages.poisoned(cache, 4)
            assert cache.read(keys, into).chunks == 4 and np.array_equal(into, pages.pages_of(keys))
    finally:
        node.stop()
