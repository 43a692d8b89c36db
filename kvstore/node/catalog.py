"""The catalog: one node's table in shared memory, (key, shard) -> where the bytes are. Node side.

The byte layout is fixed and written down in `docs/shared-memory.md`; readers in other processes map it
read-only (`kvstore.node.lookup`). One writer: every store goes through `CatalogWriter`, in an order that keeps
the law *publish after commit, withdraw before reuse*:

    publish    slot generation even -> entry: generation odd, other words, generation even -> tag
    withdraw   slot generation raised (odd) -> tag cleared -> entry generation odd, other words cleared

A generation is `epoch (20 bits) | counter (43 bits) | busy (1 bit)`; the counter lives in the header and never
repeats, also across a restart of the worker. Odd = the slot is free or being written.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from kvstore.errors import CapacityExhausted, InvalidRequest, LayoutMismatch, LimitExceeded
from kvstore.model.layout import Geometry, Rectangle
from kvstore.model.namespace import Namespace
from kvstore.model.values import Tier
from kvstore.node.memory import (
    BUCKET_ENTRIES,
    DESCRIPTION_BYTES,
    ENTRY_WORDS,
    GEOMETRY_LIMIT,
    GEOMETRY_WORDS,
    LAYOUT_VERSION,
    MAGIC,
    NAMESPACE_LIMIT,
    RECORD_WORDS,
    UNIT_BYTES,
    WRITTEN_HERE_BYTES,
    CatalogShape,
    Header,
    create_catalog,
)

__all__ = [
    "BUCKET_ENTRIES",
    "ENTRY_WORDS",
    "GEOMETRY_LIMIT",
    "GEOMETRY_WORDS",
    "LAYOUT_VERSION",
    "MAGIC",
    "NAMESPACE_LIMIT",
    "RECORD_WORDS",
    "SHARD_MIX_0",
    "SHARD_MIX_1",
    "UNIT_BYTES",
    "CatalogShape",
    "CatalogWriter",
    "EntryValue",
    "Header",
    "ListedGeometry",
    "age_of",
    "create_catalog",
    "hash_words",
    "tag_of",
]

SHARD_MIX_0: Final = 0x9E3779B97F4A7C15
SHARD_MIX_1: Final = 0xC2B2AE3D27D4EB4F
"""Odd constants that spread the shard id over the two hash words of a key."""

_WORD = 1 << 64
_DRAM = int(Tier.DRAM)
_RECORD_REST = struct.Struct("<QIIQ16s16s")
_LENGTH_BYTES = 4
_RECTANGLE_WORDS = GEOMETRY_WORDS - 2


@dataclass(frozen=True, slots=True)
class ListedGeometry:
    """One record of the directory: `written_here` are the rectangles that this node's writers store here."""

    namespace_number: int
    geometry: Geometry
    written_here: tuple[int, ...]


@dataclass(slots=True)  # not frozen: one is made for every commit, and freezing costs four times the rest
class EntryValue:
    """What an entry says of one committed shard."""

    key: bytes
    shard: int
    namespace_number: int
    tier: int
    slot: int
    length: int
    generation: int
    parent_fingerprint: int
    fingerprint: int
    token_count: int
    table_hash: int

    def words(self) -> tuple[int, ...]:
        """The eight u64 words of the entry."""
        return (
            int.from_bytes(self.key[:8], "little"),
            int.from_bytes(self.key[8:], "little"),
            self.parent_fingerprint,
            self.generation,
            self.table_hash,
            self.slot | self.length << 32,
            self.shard | self.namespace_number << 32 | self.tier << 56,
            (self.fingerprint & ((1 << 48) - 1)) | self.token_count << 48,
        )


class CatalogWriter:
    """The only writer of a catalog. Synchronous, one owner. Entries never move."""

    def __init__(self, memory: mmap.mmap, shape: CatalogShape, epoch: int) -> None:
        self.shape = shape
        self._memory = memory
        self._words = memoryview(memory).cast("Q")
        self._tags = memoryview(memory)[shape.tags_offset : shape.tags_offset + shape.buckets * 8].cast("H")
        self._entries_word = shape.entries_offset // 8
        self._generations_word = shape.generations_offset // 8
        self._records_word = shape.records_offset // 8
        self._claimed = bytearray(shape.buckets * BUCKET_ENTRIES)
        self._loads = bytearray(shape.buckets)
        self.claimed_count = 0
        self.namespaces: list[bytes] = []
        self.geometries: list[tuple[int, Geometry]] = []
        self._store: Callable[[int, int], None] = self._words.__setitem__
        self._store_tag: Callable[[int, int], None] = self._tags.__setitem__
        self._write_header(epoch)

    def _write_header(self, epoch: int) -> None:
        shape, words = self.shape, self._words
        words[Header.SERVING] = 0
        for number, value in (
            (Header.VERSION, LAYOUT_VERSION),
            (Header.EPOCH, epoch),
            (Header.ARENA_BYTES, shape.arena_bytes),
            (Header.BUCKETS, shape.buckets),
            (Header.UNITS, shape.units),
            (Header.TAGS_OFFSET, shape.tags_offset),
            (Header.ENTRIES_OFFSET, shape.entries_offset),
            (Header.GENERATIONS_OFFSET, shape.generations_offset),
            (Header.RECORDS_OFFSET, shape.records_offset),
            (Header.NAMESPACES_OFFSET, shape.namespaces_offset),
            (Header.GEOMETRIES_OFFSET, shape.geometries_offset),
            (Header.DESCRIPTIONS_OFFSET, shape.descriptions_offset),
            (Header.WRITTEN_HERE_OFFSET, shape.written_here_offset),
            (Header.TOTAL_BYTES, shape.total_bytes),
            (Header.MAGIC, MAGIC),
        ):
            words[number] = value
        self.epoch = epoch
        words[Header.SERVING] = 1

    # --- generations -------------------------------------------------------------------------------------

    def raise_generation(self, slot: int) -> int:
        """Give the slot a new odd generation, so that every older reference to it fails. Returns it."""
        generation = self.next_generation() | 1
        self._store(self._generations_word + slot, generation)
        return generation

    def next_generation(self) -> int:
        """An even generation that no slot had before."""
        counter = self._words[16] + 1  # Header.COUNTER
        self._words[16] = counter
        return (self.epoch & 0xFFFFF) << 44 | (counter & ((1 << 43) - 1)) << 1

    def skip_generations(self, age: int) -> None:
        """Generations from now on are younger than this age: the SSD has some from before the memory was made."""
        self._words[16] = max(self._words[16], age)

    def generation(self, slot: int) -> int:
        """The slot's generation word."""
        return int(self._words[self._generations_word + slot])

    # --- entries -----------------------------------------------------------------------------------------

    def claim(self, key: bytes, shard: int) -> int | None:
        """Keep an entry for (key, shard), still invisible. None if both buckets are full."""
        first, second = _buckets(key, shard, self.shape.buckets - 1)
        loads = self._loads
        bucket = first if loads[first] <= loads[second] else second
        if loads[bucket] == BUCKET_ENTRIES:
            return None
        entry = self._claimed.index(0, bucket * BUCKET_ENTRIES)
        self._claimed[entry] = 1
        loads[bucket] += 1
        self.claimed_count += 1
        return entry

    def neighbours(self, key: bytes, shard: int) -> list[bytes]:
        """Keys of the visible entries in the two buckets of (key, shard): one of them must go to make room."""
        keys = []
        for bucket in set(_buckets(key, shard, self.shape.buckets - 1)):
            for entry in range(bucket * BUCKET_ENTRIES, (bucket + 1) * BUCKET_ENTRIES):
                if self._tags[entry]:
                    at = self._entries_word + entry * ENTRY_WORDS
                    keys.append(self._words[at : at + 2].tobytes())
        return keys

    def claim_again(self, entry: int, key: bytes, shard: int) -> bool:
        """Keep the entry in which an earlier worker left (key, shard). False if a look-up would not find it there."""
        if entry // BUCKET_ENTRIES not in _buckets(key, shard, self.shape.buckets - 1) or self._claimed[entry]:
            return False
        self._claimed[entry] = 1
        self._loads[entry // BUCKET_ENTRIES] += 1
        self.claimed_count += 1
        self._store_tag(entry, tag_of(key, shard))  # the worker may have died before this store
        return True

    def unclaim(self, entry: int) -> None:
        """Give an invisible entry back."""
        self._claimed[entry] = 0
        self._loads[entry // BUCKET_ENTRIES] -= 1
        self.claimed_count -= 1

    def publish(self, entry: int, value: EntryValue) -> None:
        """Make a committed shard visible. `value.generation` is even and, in DRAM, becomes the slot's generation."""
        store, at, words = self._store, self._entries_word + entry * ENTRY_WORDS, value.words()
        if value.tier == _DRAM:
            store(self._generations_word + value.slot, value.generation)
        store(at + 3, value.generation | 1)
        for word in (0, 1, 2, 4, 5, 6, 7):
            store(at + word, words[word])
        store(at + 3, value.generation)
        self._store_tag(entry, _tag(words[0], value.shard))

    def withdraw(self, entry: int, slot: int) -> int:
        """Make a shard in DRAM invisible before its slot is reused; gives the entry back. Returns the generation."""
        generation = self.raise_generation(slot)
        self.clear(entry, generation)
        self.unclaim(entry)
        return generation

    def clear(self, entry: int, generation: int) -> None:
        """Empty an entry; `generation` is odd. The slot that it names has a newer generation already."""
        store, at = self._store, self._entries_word + entry * ENTRY_WORDS
        self._store_tag(entry, 0)
        store(at + 3, generation)
        for word in (0, 1, 2, 4, 5, 6, 7):
            store(at + word, 0)

    # --- slot records ------------------------------------------------------------------------------------

    def record(self, slot: int, state: int, namespace_number: int, attempt: int, owner: tuple[int, int], shard: int,
               key: bytes, parent: bytes) -> None:  # fmt: skip
        """Note what a slot is used for, so that a restarted worker knows what is being written."""
        at, words = self._records_word + slot * RECORD_WORDS, self._words
        words[at] = 0  # state first: a half-written record reads as free
        rest = _RECORD_REST.pack(attempt, owner[0], shard, owner[1], key, parent)
        self._memory[at * 8 + 8 : at * 8 + 64] = rest
        words[at] = state | namespace_number << 32

    def set_state(self, slot: int, state: int) -> None:
        """Change only the state (u32, low half) of a slot's record."""
        at = self._records_word + slot * RECORD_WORDS
        self._words[at] = self._words[at] >> 32 << 32 | state

    # --- directory ---------------------------------------------------------------------------------------

    def add_namespace(self, namespace: Namespace) -> int:
        """Number (1..4096) of the namespace; the same again for a known one."""
        if namespace.id in self.namespaces:
            return self.namespaces.index(namespace.id) + 1
        if len(self.namespaces) >= NAMESPACE_LIMIT:
            raise LimitExceeded(
                f"this node knows {NAMESPACE_LIMIT} namespaces already; restart the node "
                "(with a new SSD file, if it has one) to forget unused ones"
            )
        text = namespace.canonical
        if len(text) > DESCRIPTION_BYTES - _LENGTH_BYTES:
            raise LimitExceeded(
                f"the description of {namespace.title} has {len(text)} bytes; a node keeps at most "
                f"{DESCRIPTION_BYTES - _LENGTH_BYTES}: use shorter names or fewer side components"
            )
        described = self.shape.descriptions_offset + len(self.namespaces) * DESCRIPTION_BYTES
        record = len(text).to_bytes(_LENGTH_BYTES, "little") + text
        at = self.shape.namespaces_offset + len(self.namespaces) * 16
        with self._directory():
            self._memory[described : described + len(record)] = record
            self._memory[at : at + 16] = namespace.id
            self.namespaces.append(namespace.id)
            self._words[Header.NAMESPACES] = len(self.namespaces)
        return len(self.namespaces)

    def add_geometry(self, namespace_number: int, geometry: Geometry) -> None:
        """List a geometry; raises LayoutMismatch if another one has the same 24-bit digest."""
        for number, known in self.geometries:
            if number == namespace_number and known.digest == geometry.digest:
                if known != geometry:
                    raise LayoutMismatch(
                        f"geometries {known.canonical.decode()} and {geometry.canonical.decode()} have one digest; "
                        "change one of them (for example the number of pipeline stages)"
                    )
                return
        if len(self.geometries) >= GEOMETRY_LIMIT:
            raise CapacityExhausted(
                f"this node knows {GEOMETRY_LIMIT} geometries already; restart the node "
                "(with a new SSD file, if it has one) to forget unused ones"
            )
        at = self.shape.geometries_offset // 8 + len(self.geometries) * GEOMETRY_WORDS
        with self._directory():
            self._words[at] = namespace_number | geometry.digest << 32
            self._words[at + 1] = len(geometry.rectangles)
            for place, r in enumerate(geometry.rectangles):
                corners = r.layer_start | r.layer_stop << 16 | r.head_start << 32 | r.head_stop << 48
                self._words[at + 2 + place] = corners
            self.geometries.append((namespace_number, geometry))
            self._words[Header.GEOMETRIES] = len(self.geometries)

    def set_written_here(self, namespace_number: int, geometry: Geometry, rectangles: Iterable[int]) -> None:
        """Note, beside those noted before, rectangles of a listed geometry that writers store on this node."""
        at = self._written_here_word(self.geometries.index((namespace_number, geometry)))
        for number in rectangles:
            self._words[at + number // 64] |= 1 << number % 64

    def _written_here_word(self, place: int) -> int:
        return (self.shape.written_here_offset + place * WRITTEN_HERE_BYTES) // 8

    def load_directory(self) -> tuple[dict[int, Namespace], list[ListedGeometry]]:
        """What an earlier worker listed: namespaces by number, and their geometries.

        Raises LayoutMismatch if it cannot be what this library wrote.
        """
        words = self._words
        words[Header.DIRECTORY_VERSION] = (words[Header.DIRECTORY_VERSION] | 1) + 1  # a worker may have died inside
        try:
            namespaces = {place + 1: self._described(place) for place in range(words[Header.NAMESPACES])}
            listed = [self._listed(place) for place in range(words[Header.GEOMETRIES])]
        except InvalidRequest as exc:
            raise LayoutMismatch(f"the directory of namespaces cannot be read: {exc}") from exc
        self.namespaces = [namespace.id for namespace in namespaces.values()]
        self.geometries = [(each.namespace_number, each.geometry) for each in listed]
        return namespaces, listed

    def _described(self, place: int) -> Namespace:
        at = self.shape.descriptions_offset + place * DESCRIPTION_BYTES
        length = int.from_bytes(self._memory[at : at + _LENGTH_BYTES], "little")
        namespace = Namespace.from_canonical(self._memory[at + _LENGTH_BYTES : at + _LENGTH_BYTES + length])
        at = self.shape.namespaces_offset + place * 16
        if self._memory[at : at + 16] != namespace.id:
            raise LayoutMismatch(f"namespace {place + 1} is not the one that is described")
        return namespace

    def _listed(self, place: int) -> ListedGeometry:
        at = self.shape.geometries_offset // 8 + place * GEOMETRY_WORDS
        first, count, *corners = self._words[at : at + GEOMETRY_WORDS].tolist()
        if count > _RECTANGLE_WORDS:
            raise LayoutMismatch(f"geometry {place + 1} has {count} rectangles")
        geometry = Geometry(
            tuple(Rectangle(*(word >> shift & 0xFFFF for shift in (0, 16, 32, 48))) for word in corners[:count])
        )
        at = self._written_here_word(place)
        bits = int.from_bytes(self._words[at : at + WRITTEN_HERE_BYTES // 8].tobytes(), "little")
        written_here = tuple(number for number in range(count) if bits >> number & 1)
        return ListedGeometry(first & 0xFFFFFFFF, geometry, written_here)

    def _directory(self) -> _DirectoryChange:
        return _DirectoryChange(self._words)

    def stop_serving(self) -> None:
        """Tell readers that this table is dead; they drop their mappings."""
        self._words[Header.SERVING] = 0

    def close(self) -> None:
        """Release the views, so that the mapping can be closed."""
        self._tags.release()
        self._words.release()

    def check(self) -> None:
        """Invariants: claimed entries are counted; every visible tag belongs to a claimed entry."""
        assert sum(self._claimed) == sum(self._loads) == self.claimed_count
        visible = [entry for entry in range(len(self._claimed)) if self._tags[entry]]
        assert all(self._claimed[entry] for entry in visible)


class _DirectoryChange:
    """Odd directory version while the directory changes; another version than before makes readers look again."""

    def __init__(self, words: memoryview) -> None:
        self._words = words

    def __enter__(self) -> None:
        self._words[Header.DIRECTORY_VERSION] += 1

    def __exit__(self, *_: object) -> None:
        self._words[Header.DIRECTORY_VERSION] += 1


_mixes: dict[int, tuple[int, int]] = {}


def _mix(shard: int) -> tuple[int, int]:
    """The shard id spread over two words."""
    mixes = _mixes.get(shard)
    if mixes is None:
        mixes = _mixes[shard] = (shard * SHARD_MIX_0) % _WORD, (shard * SHARD_MIX_1) % _WORD
    return mixes


def hash_words(key: bytes, shard: int) -> tuple[int, int]:
    """The two hash words of (key, shard): key words, each xored with the shard spread over 64 bits."""
    first, second = _mix(shard)
    return int.from_bytes(key[:8], "little") ^ first, int.from_bytes(key[8:], "little") ^ second


def age_of(generation: int) -> int:
    """Counter of a generation: which came later, also across restarts."""
    return generation >> 1 & (1 << 43) - 1


def tag_of(key: bytes, shard: int) -> int:
    """16-bit tag, never 0: high bits of the first hash word."""
    return _tag(int.from_bytes(key[:8], "little"), shard)


def _tag(first_word: int, shard: int) -> int:
    return (first_word ^ _mix(shard)[0]) >> 48 | 1


def _buckets(key: bytes, shard: int, mask: int) -> tuple[int, int]:
    first, second = hash_words(key, shard)
    return first & mask, second & mask
