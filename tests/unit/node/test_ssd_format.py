"""The bytes of an SSD file: headers, superblocks, extents."""

from __future__ import annotations

import random
import struct
from dataclasses import replace
from hashlib import sha256

import pytest
import xxhash

from kvstore.errors import LayoutMismatch, LimitExceeded
from kvstore.model.layout import Geometry
from kvstore.node.arena import ssd_format
from kvstore.node.arena.ssd_format import (
    HEADER_BYTES,
    ExtentPlace,
    SlotHeader,
    StoredNamespace,
    Superblock,
    bytes_to_read,
    header_block_bytes,
    region_bytes_of,
)
from tests.unit.node.small_node import WIDE, namespace
from tests.unit.node.ssd_setting import header_of

MIB = 1 << 20
GIB = 1 << 30


def superblock(**other: object) -> Superblock:
    fields: dict[str, object] = {
        "file_id": 0xFEDCBA9876543210,
        "node_id": "node-ä",
        "epoch": 1 << 63,
        "size_bytes": MIB,
        "region_bytes": 64 << 10,
        "sequence": 7,
        "extents": (ExtentPlace(128 << 10, 256 << 10, 4096), ExtentPlace(512 << 10, MIB, 12288)),
        "namespaces": (
            StoredNamespace(namespace().canonical),
            StoredNamespace(
                namespace(WIDE).canonical, ((Geometry.parallel(WIDE, tp=2), (1,)), (Geometry.whole(WIDE), ()))
            ),
        ),
    }
    return Superblock(**(fields | other))  # type: ignore[arg-type]


def test_a_header_comes_back_from_its_128_bytes() -> None:
    header = replace(
        header_of(3, 77),
        shard=0xFFFFFFFF,
        slot=0xFFFFFFFF,
        token_count=65535,
        fingerprint=(1 << 48) - 1,
        parent_fingerprint=(1 << 64) - 1,
        generation=(1 << 64) - 1,
        epoch=(1 << 64) - 1,
    )
    data = header.pack(5)
    assert len(data) == HEADER_BYTES
    assert SlotHeader.unpack(data, 5) == header
    assert SlotHeader.unpack(memoryview(data), 5) == header


def test_a_header_keeps_48_bits_of_the_fingerprint() -> None:
    header = replace(header_of(3, 77), fingerprint=(5 << 48) + 9)
    back = SlotHeader.unpack(header.pack(5), 5)
    assert back is not None and (back.fingerprint, back.token_count) == (9, header.token_count)


def test_a_header_with_any_bit_changed_is_none() -> None:
    data = header_of(3, 77).pack(5)
    for bit in range(HEADER_BYTES * 8):
        broken = bytearray(data)
        broken[bit // 8] ^= 1 << bit % 8
        assert SlotHeader.unpack(bytes(broken), 5) is None


def test_a_header_of_another_file_and_an_empty_one_are_none() -> None:
    assert SlotHeader.unpack(header_of(3, 77).pack(5), 6) is None
    assert SlotHeader.unpack(bytes(HEADER_BYTES), 5) is None


def test_a_superblock_comes_back() -> None:
    block = superblock()
    data = block.pack()
    assert Superblock.unpack(data) == block
    assert Superblock.unpack(data + bytes(4096)) == block, "the region behind it does not count"
    assert bytes_to_read(data[:4096]) == len(data)


def test_a_superblock_that_is_short_or_has_any_byte_changed_is_none() -> None:
    data = superblock().pack()
    for at in range(len(data)):
        broken = data[:at] + bytes([data[at] ^ 0x41]) + data[at + 1 :]
        assert Superblock.unpack(broken) is None
        assert Superblock.unpack(data[:at]) is None


def test_another_format_version_is_told_from_damage(monkeypatch: pytest.MonkeyPatch) -> None:
    newer = superblock(format_version=2).pack()
    with pytest.raises(LayoutMismatch, match=r"format version 2.*reads 1.*delete"):
        Superblock.unpack(newer)
    assert Superblock.unpack(newer[:-1] + b"?") is None, "damaged, whatever its version says"


@pytest.mark.parametrize(
    "extents",
    [
        (ExtentPlace(0, 256 << 10, 4096),),
        (ExtentPlace(128 << 10, 2 * MIB, 4096),),
        (ExtentPlace((128 << 10) + 1, 256 << 10, 4096),),
        (ExtentPlace(128 << 10, 256 << 10, 5000),),
        (ExtentPlace(128 << 10, 256 << 10, 0),),
        (ExtentPlace(128 << 10, (128 << 10) + 4096, 4096),),
        (ExtentPlace(128 << 10, 256 << 10, 4096), ExtentPlace(252 << 10, 512 << 10, 4096)),
    ],
    ids=["in the superblock", "past the end", "unaligned", "odd slots", "no size", "no slot", "overlap"],
)
def test_a_superblock_with_extents_that_cannot_be_is_none(extents: tuple[ExtentPlace, ...]) -> None:
    assert Superblock.unpack(superblock(extents=extents).pack()) is None


def test_a_body_that_is_no_superblock_is_none() -> None:
    for body in (b"", b"\x00" * 20, ssd_format.zlib.compress(b"[]"), ssd_format.zlib.compress(b'{"node_id":"a"}')):
        frame = struct.pack("<8sIIIIQQ", b"KVSTSSD1", 1, 64 << 10, len(body), 0, 1, 1)
        checksum = struct.pack("<Q", xxhash.xxh3_64_intdigest(frame + body))
        assert Superblock.unpack(frame + checksum + body) is None


def test_a_superblock_over_its_region_is_refused_with_the_limit_named() -> None:
    many = tuple(StoredNamespace(namespace(revision=sha256(b"%d" % i).hexdigest()).canonical) for i in range(4000))
    with pytest.raises(LimitExceeded, match=r"4000 namespaces.*65536 bytes"):
        superblock(namespaces=many).pack()
    assert superblock(namespaces=many, region_bytes=MIB).pack()


def test_a_smaller_file_keeps_the_extents_that_fit() -> None:
    block = superblock()
    assert block.within(512 << 10).extents == block.extents[:1]
    assert block.within(2 * MIB).extents == block.extents


def test_copies_take_turns() -> None:
    assert [superblock(sequence=number).offset for number in (1, 2, 3)] == [0, 64 << 10, 0]


@pytest.mark.parametrize(
    ("size_bytes", "expected"),
    [
        (0, 64 << 10),
        (4 * MIB, 64 << 10),
        (64 * MIB, MIB),
        (64 * MIB + 64, MIB + 4096),
        (GIB, 16 * MIB),
        (1 << 44, 16 * MIB),
    ],
)
def test_the_superblock_takes_a_64th_within_bounds(size_bytes: int, expected: int) -> None:
    assert region_bytes_of(size_bytes) == expected


@pytest.mark.parametrize("slot_bytes", [4096, 8192, 12288, 2 * MIB + 4096, 256 * MIB])
@pytest.mark.parametrize("length", [8192, 12288, 64 * MIB, 64 * MIB + 4096, 16 * (256 * MIB)])
def test_an_extent_has_as_many_slots_as_fit_behind_their_headers(slot_bytes: int, length: int) -> None:
    extent = ExtentPlace(40960, 40960 + length, slot_bytes)
    count = extent.slot_count
    assert header_block_bytes(count) + count * slot_bytes <= length
    assert header_block_bytes(count + 1) + (count + 1) * slot_bytes > length
    if count:
        assert extent.slot(0) * 4096 == 40960 + header_block_bytes(count) == extent.slots_start
        assert extent.index(extent.slot(count - 1)) == count - 1
        assert extent.index(extent.slot(count - 1) + slot_bytes // 4096) is None
        assert extent.index(extent.start // 4096) is None


def test_extents_of_random_lengths_have_as_many_slots_as_fit() -> None:
    rng = random.Random(3)
    for _ in range(5000):
        extent = ExtentPlace(0, rng.randrange(2, 1 << 14) * 4096, rng.randrange(1, 8) * 4096)
        count = extent.slot_count
        assert header_block_bytes(count) + count * extent.slot_bytes <= extent.stop
        assert header_block_bytes(count + 1) + (count + 1) * extent.slot_bytes > extent.stop


def test_only_the_first_page_of_a_slot_names_it() -> None:
    extent = ExtentPlace(0, MIB, 12288)
    assert extent.index(extent.slot(4) + 1) is None
