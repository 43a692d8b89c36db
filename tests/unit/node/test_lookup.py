"""Finding chunks in a mapped catalog: runs, reasons, several geometries, the directory, the second look."""

from __future__ import annotations

import mmap
import threading
from dataclasses import replace

import numpy as np
import pytest

from kvstore.errors import InvalidRequest
from kvstore.model.layout import Geometry, Rectangle
from kvstore.model.namespace import Namespace
from kvstore.model.prefix import KeyChain, Keys
from kvstore.model.values import MissReason, Tier
from kvstore.node import lookup
from kvstore.node.catalog import CatalogShape, CatalogWriter, EntryValue, Header
from kvstore.node.lookup import CatalogReader
from tests.unit.node.small_node import SMALL, SmallNode, keys_of, namespace

SPACE = namespace()
WHOLE = SMALL.whole
TP2 = Geometry.parallel(SMALL, tp=2)


def stored(chunks: int, slots: int = 64) -> tuple[SmallNode, Keys]:
    """A node that holds `chunks` chunks of one prompt."""
    node = SmallNode(slots)
    keys = keys_of(SPACE, 1, chunks)
    node.store(node.open(SPACE), keys)
    return node, keys


def without_prints(keys: Keys) -> Keys:
    return replace(keys, fingerprints=None)


# --- runs and reasons -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_prints", [True, False])
def test_a_whole_prompt_is_found_with_its_slots_in_order(with_prints: bool) -> None:
    node, keys = stored(12)
    found = node.reader.find(keys if with_prints else without_prints(keys), WHOLE)
    assert (found.run, found.reason, found.numbers) == (12, None, (0,))
    assert [node.tag(int(offset) >> 12) for offset in found.offsets[:, 0]] == list(range(1, 13))
    assert (found.table_hashes == 7).all()
    assert node.reader.confirm(found) == 12


def test_nothing_is_found_of_no_keys_of_other_keys_and_of_an_unknown_namespace() -> None:
    node, keys = stored(3)
    none = node.reader.find(keys.slice(0, 0), WHOLE)
    assert none.run == 0 and node.reader.confirm(none) == 0
    for wanted in (keys_of(SPACE, 2, 3), keys_of(namespace(revision="r9"), 1, 3)):
        found = node.reader.find(wanted, WHOLE)
        assert (found.run, found.reason, len(found.entries)) == (0, MissReason.ABSENT, 0)


@pytest.mark.parametrize("gone", [0, 1, 5, 11])
def test_the_run_ends_before_the_first_chunk_that_is_not_there(gone: int) -> None:
    node, keys = stored(12)
    chunk = node.core.pool.forest.chunks[keys[gone]]
    copy = next(iter(chunk.copies.values()))
    node.writer.withdraw(copy.entry, copy.slot)  # the node itself would take the rest of the prompt along
    found = node.reader.find(keys, WHOLE)
    assert (found.run, found.reason) == (gone, MissReason.ABSENT)
    assert len(found.entries) == len(found.rows) == gone
    assert node.reader.confirm(found) == gone


def test_the_middle_of_a_prompt_is_found_by_itself() -> None:
    node, keys = stored(12)
    middle = keys.slice(4, 9)
    found = node.reader.find(middle, WHOLE)
    assert (found.run, found.reason) == (5, None)


@pytest.mark.parametrize(("own", "parent"), [(1, 0), (0, 1), (1 << 47, 0), (0, 1 << 63)])
def test_equal_keys_of_other_tokens_are_a_collision(own: int, parent: int) -> None:
    node, keys = stored(3)
    assert keys.fingerprints is not None
    prints = keys.fingerprints.copy()
    prints[2] ^= np.uint64(own)  # chunk 1's own, and chunk 2's parent
    prints[1] ^= np.uint64(parent)  # chunk 0's own, and chunk 1's parent
    found = node.reader.find(replace(keys, fingerprints=prints), WHOLE)
    # The entry has 48 bits of a chunk's own fingerprint, and all of its parent's.
    assert found.run == (0 if parent and parent < 1 << 48 else 1)
    assert found.reason is MissReason.COLLISION
    assert node.reader.find(without_prints(keys), WHOLE).run == 3


def test_writers_send_fingerprints_and_readers_may_leave_them_out() -> None:
    node = SmallNode()
    keys = keys_of(SPACE, 1, 2)
    with pytest.raises(InvalidRequest, match="fingerprints"):
        node.store(node.open(SPACE), without_prints(keys))
    node.store(node.open(SPACE), keys)
    assert node.reader.find(keys, WHOLE).run == 2
    assert node.reader.find(without_prints(keys), WHOLE).run == 2


def test_an_entry_that_is_being_written_and_one_of_another_tier_are_not_there() -> None:
    node, keys = stored(2)
    chunk = node.core.pool.forest.chunks[keys[1]]
    at = node.writer._entries_word + next(iter(chunk.copies.values())).entry * 8
    generation = node.writer._words[at + 3]
    node.writer._words[at + 3] = generation | 1
    assert node.reader.find(keys, WHOLE).run == 1
    node.writer._words[at + 3] = generation
    node.writer._words[at + 6] ^= (Tier.DRAM ^ Tier.SSD) << 56
    assert node.reader.find(keys, WHOLE).run == 1
    node.writer._words[at + 6] ^= (Tier.DRAM ^ Tier.SSD) << 56
    assert node.reader.find(keys, WHOLE).run == 2


def test_keys_with_one_tag_in_one_bucket_are_told_apart() -> None:
    """Eight entries in the two buckets of one hash, all with one tag: each key finds its own."""
    shape = CatalogShape.make(1 << 20, 64)
    memory = mmap.mmap(-1, shape.total_bytes)
    writer = CatalogWriter(memory, shape, 1)
    number = writer.add_namespace(SPACE)
    whole = Geometry.whole(SMALL)
    writer.add_geometry(number, whole)
    blob = b"".join((i << 16).to_bytes(8, "little") + (i << 16 | 1).to_bytes(8, "little") for i in range(8))
    keys = Keys(SPACE.id, SPACE.id, blob, None, 4, 4)
    for slot, key in enumerate(keys):
        entry = writer.claim(key, whole.shard(0))
        assert entry is not None
        generation = writer.raise_generation(slot) & ~1
        value = EntryValue(key, whole.shard(0), number, Tier.DRAM, slot, 256, generation, 0, 0, 4, 0)
        writer.publish(entry, value)
    reader = CatalogReader(memory)
    found = reader.find(keys, WHOLE)
    assert found.run == 8 and (found.offsets[:, 0] == np.arange(8) * 4096).all()
    for index in range(8):
        one = reader.find(keys.slice(index, index + 1), WHOLE)
        assert (one.run, int(one.offsets[0, 0])) == (1, index * 4096)


def test_random_contents_are_found_like_in_a_dictionary() -> None:
    generator = np.random.default_rng(5)
    node = SmallNode(slots=512)
    session = node.open(SPACE)
    prompts = [keys_of(SPACE, prompt, int(generator.integers(1, 9))) for prompt in range(60)]
    there: dict[int, int] = {}
    for step in range(200):
        prompt = int(generator.integers(60))
        if prompt in there:
            node.core.remove(session.number, SPACE.id, [prompts[prompt][0]])
            del there[prompt]
        else:
            there[prompt] = step * 100
            node.store(session, prompts[prompt], tag=step * 100)
        other = int(generator.integers(60))
        expected = [there[other] + i for i in range(len(prompts[other]))] if other in there else []
        assert node.tags(prompts[other]) == expected


# --- several geometries -----------------------------------------------------------------------------------------


def test_a_rectangle_is_covered_by_all_its_shards_or_not_at_all() -> None:
    node = SmallNode()
    keys = keys_of(SPACE, 1, 4)
    session = node.open(SPACE, TP2)
    node.store(session, keys, shard=TP2.shard(0))
    node.store(session, keys.slice(0, 2), shard=TP2.shard(1))
    found = node.reader.find(keys, WHOLE)
    assert (found.run, found.reason, found.numbers) == (2, MissReason.NOT_COVERED, (0, 1))
    assert found.offsets.shape == (2, 2) and node.reader.confirm(found) == 2
    assert node.reader.find(keys, TP2.rectangles[0]).run == 4
    assert node.reader.find(keys, TP2.rectangles[1]).run == 2
    assert node.reader.find(keys, Rectangle(0, 1, 1, 2)).run == 2


def test_the_geometry_of_chunk_0_is_probed_and_the_reason_does_not_depend_on_the_number_of_keys() -> None:
    node = SmallNode()
    keys = keys_of(SPACE, 1, 4)
    session = node.open(SPACE)
    node.open(SPACE, TP2)
    node.store(session, keys, shard=TP2.shard(0))
    for count in (1, 4):
        found = node.reader.find(keys.slice(0, count), WHOLE)
        assert (found.run, found.reason) == (0, MissReason.NOT_COVERED)
    node.store(session, keys, shard=TP2.shard(1))
    for _ in range(2):  # the second time the geometry that served goes first
        found = node.reader.find(keys, WHOLE)
        assert (found.run, found.geometry) == (4, TP2)


def test_a_rectangle_that_no_geometry_covers_is_absent() -> None:
    node, keys = stored(1)
    assert node.reader.find(keys, Rectangle(0, SMALL.layers, 0, SMALL.kv_heads + 1)).reason is MissReason.ABSENT


# --- the second look --------------------------------------------------------------------------------------------


def test_confirm_gives_the_chunks_before_the_first_that_left() -> None:
    node, keys = stored(12)
    for gone in (11, 6, 0):
        found = node.reader.find(keys, WHOLE)
        node.core.remove(next(iter(node.core.sessions)), SPACE.id, [keys[gone]])
        assert node.reader.confirm(found) == gone
        assert node.reader.confirm(found.part(0, gone)) == gone
        if found.run > gone + 1:
            assert node.reader.confirm(found.part(gone, found.run)) == 0


def test_a_chunk_of_two_shards_holds_only_with_both() -> None:
    node = SmallNode()
    keys = keys_of(SPACE, 1, 4)
    session = node.open(SPACE, TP2)
    for number in (0, 1):
        node.store(session, keys, shard=TP2.shard(number))
    found = node.reader.find(keys, WHOLE)
    copy = node.core.pool.forest.chunks[keys[2]].copies[TP2.shard(1)]
    node.writer.withdraw(copy.entry, copy.slot)
    assert node.reader.confirm(found) == 2


@pytest.mark.parametrize("word", range(8))
def test_any_word_that_changed_fails_the_second_look(word: int) -> None:
    node, keys = stored(1)
    found = node.reader.find(keys, WHOLE)
    at = node.writer._entries_word + int(found.entries[0]) * 8 + word
    node.writer._words[at] ^= 1 << 63
    assert node.reader.confirm(found) == 0
    node.writer._words[at] ^= 1 << 63
    assert node.reader.confirm(found) == 1
    node.writer.raise_generation(int(found.rows[0, 5]) & 0xFFFFFFFF)
    assert node.reader.confirm(found) == 0


def test_a_torn_row_may_name_any_slot() -> None:
    node, keys = stored(1)
    found = node.reader.find(keys, WHOLE)
    found.rows[0, 5] |= np.uint64(0xFFFFFFFF)
    assert node.reader.confirm(found) == 0


# --- directory --------------------------------------------------------------------------------------------------


def test_a_namespace_that_comes_later_is_found_at_the_next_look() -> None:
    node, _ = stored(1)
    other = namespace(revision="r2")
    keys = keys_of(other, 1, 2)
    assert node.reader.find(keys, WHOLE).run == 0
    assert node.reader.geometries(other.id) == []
    session = node.open(other)
    assert node.reader.geometries(other.id) == [Geometry.whole(SMALL)]
    node.store(session, keys)
    assert node.reader.find(keys, WHOLE).run == 2


def test_a_node_that_stands_still_inside_a_change_of_the_directory_does_not_hold_up_its_readers() -> None:
    node, keys = stored(2)
    CatalogReader.find(node.reader, keys, WHOLE)
    node.writer._words[Header.DIRECTORY_VERSION] += 1
    fresh = CatalogReader(mmap.mmap(node.catalog_fd, node.writer.shape.total_bytes, prot=mmap.PROT_READ))
    assert node.reader.find(keys, WHOLE).run == fresh.find(keys, WHOLE).run == 2
    other = namespace(revision="r2")
    session = node.open(other)
    node.writer._words[Header.DIRECTORY_VERSION] += 1
    node.store(session, keys_of(other, 1, 1))
    assert node.reader.find(keys_of(other, 1, 1), WHOLE).run == fresh.find(keys_of(other, 1, 1), WHOLE).run == 1


def test_plans_of_an_older_directory_never_serve_a_newer_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread makes its plans; before it keeps them a namespace comes, and another thread meets it first."""
    node, keys = stored(1)
    other = namespace(revision="r2")
    wanted = keys_of(other, 1, 1)
    make_plans = lookup._Directory.make_plans
    interrupted: list[bool] = []

    def make_slowly(directory: lookup._Directory, namespace_id: bytes, rectangle: Rectangle) -> list[lookup._Plan]:
        plans = make_plans(directory, namespace_id, rectangle)
        if not interrupted:
            interrupted.append(True)
            node.store(node.open(other), wanted)
            thread = threading.Thread(target=node.reader.find, args=(keys, WHOLE))
            thread.start()
            thread.join(10)
        return plans

    monkeypatch.setattr(lookup._Directory, "make_plans", make_slowly)
    assert node.reader.find(wanted, WHOLE).run == 0
    assert node.reader.find(wanted, WHOLE).run == 1


def test_a_dead_table_says_so() -> None:
    node, _ = stored(1)
    assert node.reader.alive()
    node.writer.stop_serving()
    assert not node.reader.alive()
    CatalogWriter(node.writer._memory, node.writer.shape, node.info.epoch + 1)
    assert not node.reader.alive()


def test_one_reader_serves_many_threads() -> None:
    node, keys = stored(32)
    session = next(iter(node.core.sessions))
    node.core.register_namespace(session, SPACE, TP2, ())
    failures: list[int] = []

    def look() -> None:
        for count in range(1, 200):
            wanted = keys.slice(0, count % 32 + 1)
            if node.reader.find(wanted, WHOLE).run != len(wanted):
                failures.append(count)

    threads = [threading.Thread(target=look) for _ in range(4)]
    for thread in threads:
        thread.start()
    for revision in range(30):
        node.writer.add_namespace(Namespace("model", f"more {revision}", SMALL))
    for thread in threads:
        thread.join(20)
    assert failures == []


def test_truncated_keys_meet_in_one_entry_and_only_fingerprints_tell() -> None:
    """Eight-bit keys: many prompts share one; the first is stored, the others are collisions and not its pages."""
    node = SmallNode(slots=512)
    session = node.open(SPACE)
    chain = KeyChain(SPACE)
    chain.truncate_digests_for_tests(8)
    held: dict[bytes, int] = {}
    for prompt in range(400):
        keys = chain.keys([prompt] * SMALL.chunk_tokens)
        if keys[0] not in held:
            node.store(session, keys, tag=prompt)
            held[keys[0]] = prompt
        found = node.reader.find(keys, WHOLE)
        if held[keys[0]] == prompt:
            assert node.tags(keys) == [prompt]
        else:
            assert (found.run, found.reason) == (0, MissReason.COLLISION)
    assert len(held) < 256
