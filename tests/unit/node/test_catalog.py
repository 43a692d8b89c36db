"""The node's side of the catalog: sizes, places, order of stores, limits, the directory, the seal."""

from __future__ import annotations

import mmap
import os

import numpy as np
import numpy.typing as npt
import pytest

from kvstore.errors import CapacityExhausted, LayoutMismatch, LimitExceeded
from kvstore.model.layout import Dtype, Geometry, PageLayout, Rectangle
from kvstore.model.namespace import Namespace
from kvstore.node import catalog
from kvstore.node.catalog import (
    BUCKET_ENTRIES,
    ENTRY_WORDS,
    UNIT_BYTES,
    CatalogShape,
    CatalogWriter,
    EntryValue,
    Header,
    create_catalog,
    hash_words,
    tag_of,
)

LAYOUT = PageLayout(4, 2, 4, Dtype.FP32, 4, 1)
SPACE = Namespace("model", "r1", LAYOUT)
EPOCH = 0x12345
SHARD = Geometry.whole(LAYOUT).shard(0)


def make(slots: int = 32, arena_bytes: int = 1 << 20) -> CatalogWriter:
    shape = CatalogShape.make(arena_bytes, slots)
    return CatalogWriter(mmap.mmap(-1, shape.total_bytes), shape, EPOCH)


def value(key: bytes = bytes(range(16)), **changes: int) -> EntryValue:
    fields = {
        "shard": SHARD,
        "namespace_number": 3,
        "tier": 1,
        "slot": 5,
        "length": 512,
        "generation": 8,
        "parent_fingerprint": 2**64 - 1,
        "fingerprint": 2**64 - 2,
        "token_count": 7,
        "table_hash": 9,
    }
    return EntryValue(key=key, **{**fields, **changes})


def crowded_keys(writer: CatalogWriter, count: int) -> list[bytes]:
    """Keys that all have the same two buckets."""
    mask = writer.shape.buckets - 1
    keys = [(i << 16).to_bytes(8, "little") + (i << 16 | 1).to_bytes(8, "little") for i in range(count)]
    assert len({tuple(word & mask for word in hash_words(key, SHARD)) for key in keys}) == 1
    return keys


# --- sizes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("slots", "buckets"), [(0, 16), (1, 16), (32, 16), (33, 32), (1000, 512), (1 << 20, 1 << 19)])
def test_twice_as_many_entries_as_slots(slots: int, buckets: int) -> None:
    shape = CatalogShape.make(64 << 20, slots)
    assert shape.buckets == buckets
    assert shape.buckets * BUCKET_ENTRIES >= 2 * slots
    offsets = [getattr(shape, name) for name in CatalogShape.__slots__ if name.endswith("_offset")]
    assert offsets == sorted(offsets) and all(offset % UNIT_BYTES == 0 for offset in [*offsets, shape.total_bytes])
    assert shape.records_offset - shape.generations_offset >= shape.units * 8
    assert shape.total_bytes - shape.records_offset >= shape.units * 64


def test_an_arena_that_is_no_multiple_of_a_unit_has_a_unit_for_its_rest() -> None:
    assert CatalogShape.make(UNIT_BYTES * 3 + 1, 4).units == 4


def test_a_shape_is_read_back_from_the_header_and_another_version_is_refused() -> None:
    writer = make()
    assert CatalogShape.read(_words(writer)) == writer.shape
    writer._words[Header.VERSION] = 2
    with pytest.raises(LayoutMismatch, match="version 2"):
        CatalogShape.read(_words(writer))
    writer._words[Header.MAGIC] = 0
    with pytest.raises(LayoutMismatch, match="not a kvstore catalog"):
        CatalogShape.read(_words(writer))


def _words(writer: CatalogWriter) -> npt.NDArray[np.uint64]:
    return np.frombuffer(writer._memory, dtype="<u8")


def test_nobody_else_can_map_or_write_the_sealed_catalog() -> None:
    shape = CatalogShape.make(1 << 20, 32)
    fd, memory = create_catalog(shape)
    memory[:4] = b"mine"
    assert mmap.mmap(fd, shape.total_bytes, prot=mmap.PROT_READ)[:4] == b"mine"
    with pytest.raises(PermissionError):
        mmap.mmap(fd, shape.total_bytes)
    for change in (lambda: os.pwrite(fd, b"x", 0), lambda: os.ftruncate(fd, 0), lambda: os.ftruncate(fd, 1 << 24)):
        with pytest.raises(PermissionError):
            change()
    os.close(fd)


# --- generations ------------------------------------------------------------------------------------------------


def test_generations_never_repeat_and_name_the_epoch() -> None:
    writer = make()
    seen = [writer.raise_generation(slot) for slot in (0, 1, 0, 255, 0)]
    assert len(set(seen)) == 5 and seen == sorted(seen)
    assert all(generation % 2 == 1 and generation >> 44 == EPOCH & 0xFFFFF for generation in seen)
    assert (writer.generation(0), writer.generation(1), writer.generation(255)) == (seen[4], seen[1], seen[3])
    assert writer.generation(2) == 0


def test_generations_go_on_where_another_writer_of_the_same_memory_stopped() -> None:
    first = make()
    before = first.raise_generation(0)
    second = CatalogWriter(first._memory, first.shape, EPOCH)
    assert second.raise_generation(0) > before


# --- the order of stores ----------------------------------------------------------------------------------------


def recorded(writer: CatalogWriter) -> list[tuple[str, int, int]]:
    """What the writer stores from now on: (`slot` number, `word` of entry 0 or `tag` of an entry, value)."""
    log: list[tuple[str, int, int]] = []
    store, store_tag = writer._store, writer._store_tag

    def keep(index: int, stored: int) -> None:
        store(index, stored)
        if index >= writer._generations_word:
            log.append(("slot", index - writer._generations_word, stored))
        else:
            log.append(("word", (index - writer._entries_word) % ENTRY_WORDS, stored))

    def keep_tag(entry: int, stored: int) -> None:
        store_tag(entry, stored)
        log.append(("tag", entry, stored))

    writer._store, writer._store_tag = keep, keep_tag
    return log


def test_publish_stores_the_valid_generation_last_but_the_tag() -> None:
    writer = make()
    item = value(generation=writer.raise_generation(5) & ~1)
    entry = writer.claim(item.key, item.shard)
    assert entry is not None
    log = recorded(writer)
    writer.publish(entry, item)
    assert log[0] == ("slot", 5, item.generation)
    assert log[1] == ("word", 3, item.generation | 1)
    assert sorted(log[2:9]) == [("word", word, item.words()[word]) for word in (0, 1, 2, 4, 5, 6, 7)]
    assert log[9] == ("word", 3, item.generation)
    assert log[10] == ("tag", entry, tag_of(item.key, item.shard))
    assert len(log) == 11


def test_withdraw_ends_the_slots_generation_first_and_clears_the_entry_under_an_odd_one() -> None:
    writer = make()
    item = value(generation=writer.raise_generation(5) & ~1)
    entry = writer.claim(item.key, item.shard)
    assert entry is not None
    writer.publish(entry, item)
    log = recorded(writer)
    generation = writer.withdraw(entry, 5)
    assert log[0] == ("slot", 5, generation) and generation % 2 == 1 and generation > item.generation
    assert log[1] == ("tag", entry, 0)
    assert log[2] == ("word", 3, generation)
    assert sorted(log[3:]) == [("word", word, 0) for word in (0, 1, 2, 4, 5, 6, 7)]
    assert writer.claimed_count == 0
    writer.check()


def test_entry_words_hold_every_field_at_its_bits() -> None:
    words = value().words()
    assert words[0:2] == (0x0706050403020100, 0x0F0E0D0C0B0A0908)
    assert (words[2], words[3], words[4]) == (2**64 - 1, 8, 9)
    assert words[5] == 512 << 32 | 5
    assert words[6] == 1 << 56 | 3 << 32 | SHARD
    assert words[7] == 7 << 48 | (2**48 - 2)
    largest = value(shard=2**32 - 1, namespace_number=4096, length=256 << 20, slot=2**32 - 1, token_count=2**16 - 1)
    assert all(0 <= word < 2**64 for word in largest.words())


# --- claims -----------------------------------------------------------------------------------------------------


def test_both_buckets_full_is_refused_and_a_place_that_comes_free_is_found_again() -> None:
    writer = make(slots=1 << 10)
    keys = crowded_keys(writer, 9)
    entries = [writer.claim(key, SHARD) for key in keys]
    assert None not in entries[:8] and entries[8] is None
    assert len(set(entries[:8])) == 8 and writer.claimed_count == 8
    used = [entry // BUCKET_ENTRIES for entry in entries[:8] if entry is not None]
    assert {used.count(bucket) for bucket in used} == {4}
    assert entries[3] is not None
    writer.unclaim(entries[3])
    assert writer.claim(keys[8], SHARD) == entries[3]
    writer.check()


def test_a_claim_is_invisible_until_it_is_published() -> None:
    writer = make()
    entry = writer.claim(bytes(16), SHARD)
    assert entry is not None and writer._tags[entry] == 0
    writer.check()


def test_check_finds_a_visible_entry_that_nobody_claimed() -> None:
    writer = make()
    writer._store_tag(0, 1)
    with pytest.raises(AssertionError):
        writer.check()


def test_a_tag_is_never_zero() -> None:
    assert tag_of(bytes(16), 0) == 1
    assert tag_of(b"\xff" * 16, 0) == 0xFFFF


# --- slot records -----------------------------------------------------------------------------------------------


def test_a_record_holds_what_a_restarted_worker_needs() -> None:
    writer = make()
    writer.record(5, 1, 3, 2**63, (2**32 - 1, 2**62), SHARD, bytes(range(16)), bytes(range(16, 32)))
    at = writer.shape.records_offset + 5 * 64
    words = [int.from_bytes(writer._memory[at + 8 * i : at + 8 * i + 8], "little") for i in range(8)]
    assert words[0] == 3 << 32 | 1
    assert words[1:4] == [2**63, SHARD << 32 | (2**32 - 1), 2**62]
    assert writer._memory[at + 32 : at + 64] == bytes(range(32))
    writer.set_state(5, 3)
    assert int.from_bytes(writer._memory[at : at + 8], "little") == 3 << 32 | 3
    assert writer._memory[at + 8 : at + 64] == b"".join(word.to_bytes(8, "little") for word in words[1:])


# --- directory --------------------------------------------------------------------------------------------------


def test_namespaces_keep_their_number_and_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "NAMESPACE_LIMIT", 2)
    writer = make()
    other = Namespace("model", "r2", LAYOUT)
    assert [writer.add_namespace(each) for each in (SPACE, other, SPACE)] == [1, 2, 1]
    with pytest.raises(LimitExceeded, match="2 namespaces already; restart the node"):
        writer.add_namespace(Namespace("model", "r3", LAYOUT))
    assert writer._words[Header.NAMESPACES] == 2


def test_a_geometry_is_listed_once_and_one_with_the_same_digest_is_refused_by_name() -> None:
    writer = make()
    one, other = Geometry.parallel(LAYOUT, tp=2), Geometry.parallel(LAYOUT, pp=2)
    writer.add_geometry(1, one)
    version = writer._words[Header.DIRECTORY_VERSION]
    writer.add_geometry(1, one)
    assert (writer._words[Header.GEOMETRIES], writer._words[Header.DIRECTORY_VERSION]) == (1, version)
    writer.add_geometry(2, one)
    object.__setattr__(other, "digest", one.digest)
    with pytest.raises(LayoutMismatch, match="0-4x0-1,0-4x1-2 and 0-2x0-2,2-4x0-2"):
        writer.add_geometry(1, other)
    assert writer._words[Header.GEOMETRIES] == 2


def test_geometries_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "GEOMETRY_LIMIT", 1)
    writer = make()
    writer.add_geometry(1, Geometry.whole(LAYOUT))
    with pytest.raises(CapacityExhausted, match="1 geometries already; restart the node"):
        writer.add_geometry(1, Geometry.parallel(LAYOUT, tp=2))


def test_the_largest_geometry_fits_into_its_record() -> None:
    layout = PageLayout(256, 1, 4, Dtype.FP32, 4, 1)
    writer = make()
    geometry = Geometry(tuple(Rectangle(layer, layer + 1, 0, 1) for layer in range(256)))
    geometry.check_fits(layout)
    writer.add_geometry(1, geometry)
    writer.add_geometry(2, geometry)
    at = writer.shape.geometries_offset // 8
    assert writer._words[at + 1] == 256
    assert writer._words[at + 257] == 255 | 256 << 16 | 0 << 32 | 1 << 48
    assert writer._words[at + 258] == 2 | geometry.digest << 32
