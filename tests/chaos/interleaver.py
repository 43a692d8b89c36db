"""A writer and a reader of one catalog, stopped between any two of their memory accesses. No threads.

The writer (the real `CatalogWriter`) runs once, and every store it makes is noted; `Timeline` then shows the memory as
it was after any number of these stores. The reader (the real `CatalogReader`) runs as often as there are different
ways to be overtaken: before each of its loads the writer may move on. `every_schedule` goes through all of them,
depth first, but for two cuts that lose nothing:

* of several moments at which the next load sees one and the same value only the earliest is tried: whatever the
  reader can meet after a later one it can meet after the earliest too;
* once a row cannot be accepted any more, the rest of its words are not raced for, and when no row is left the read
  is not overtaken again: it is a miss either way.

Stores become visible in the order in which they were made and loads happen in the order in which the reader makes
them. That is the memory model of x86; there is nothing else to interleave.
"""

from __future__ import annotations

import enum
import mmap
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvstore.model.layout import Dtype, Geometry, PageLayout
from kvstore.model.namespace import Namespace
from kvstore.model.prefix import Keys
from kvstore.model.values import Tier
from kvstore.node.catalog import BUCKET_ENTRIES, ENTRY_WORDS, CatalogShape, CatalogWriter, EntryValue
from kvstore.node.lookup import CatalogReader, Found, Words

LAYOUT = PageLayout(layers=1, kv_heads=1, head_dim=2, dtype=Dtype.FP32, page_tokens=2, pages_per_chunk=1)
NAMESPACE = Namespace("raced", "r1", LAYOUT)
GEOMETRY = Geometry.whole(LAYOUT)
SHARD = GEOMETRY.shard(0)
UNITS = 16
PAYLOAD_WORDS = LAYOUT.chunk_bytes // 8
EPOCH = 7
ASCENDING = tuple(range(ENTRY_WORDS))
DESCENDING = ASCENDING[::-1]

Place = tuple[str, int]
"""One word of memory: `word` of the catalog, `tag` number, `payload` word of the arena."""


class Ending(enum.Enum):
    """What a read came to."""

    HIT = "hit"
    MISS = "miss"
    WRONG = "wrong"


@dataclass(frozen=True, slots=True)
class Prompt:
    """One chunk: its key, its fingerprints, and the bytes that belong to it."""

    name: str
    key: bytes
    fingerprint: int
    parent_fingerprint: int
    bytes_of: int

    @property
    def keys(self) -> Keys:
        prints = np.array([self.parent_fingerprint, self.fingerprint], dtype=np.uint64)
        return Keys(NAMESPACE.id, NAMESPACE.id, self.key, prints, 2, 2)

    @property
    def keys_without_prints(self) -> Keys:
        return Keys(NAMESPACE.id, NAMESPACE.id, self.key, None, 2, 2)

    @property
    def payload(self) -> list[int]:
        return [self.bytes_of << 8 | place for place in range(PAYLOAD_WORDS)]


def _key(first: int, second: int) -> bytes:
    return first.to_bytes(8, "little") + second.to_bytes(8, "little")


# All of the same two buckets, which differ, so that an entry that comes free is used by the next of them.
X = Prompt("x", _key(0x1111_0000_0000_0000, 0x5 << 60 | 3), 0xA1, 0x0F, 0xAAAA)
Y = Prompt("y", _key(0x1111_2222_0000_0000, 0x6 << 60 | 3), 0xB2, 0x0F, 0xBBBB)
Y_OTHER_TAG = Prompt("y, another tag", _key(0x9999_2222_0000_0000, 0x6 << 60 | 3), 0xB2, 0x0F, 0xBBBB)
X_OTHER_TOKENS = Prompt("x of other tokens", X.key, 0xC3, 0x0F, 0xCCCC)


class Timeline:
    """The catalog and arena of one writer, after any number of its stores."""

    def __init__(self, writer_type: type[CatalogWriter] = CatalogWriter) -> None:
        self.shape = CatalogShape.make(UNITS * 4096, UNITS)
        self.memory = mmap.mmap(-1, self.shape.total_bytes)
        self.writer = writer_type(self.memory, self.shape, EPOCH)
        self.arena = np.zeros(UNITS * 512, dtype=np.uint64)
        self.now = 0
        self._cells: dict[str, memoryview] = {
            "word": memoryview(self.memory).cast("Q"),
            "tag": self.writer._tags,
            "payload": self.arena.data,
        }
        self._steps: list[tuple[Place, int, int]] = []
        self._changes: dict[Place, list[int]] = {}
        self._options: dict[tuple[int, tuple[Place, ...]], list[int]] = {}
        self._entries: dict[bytes, int] = {}
        self._slots: dict[bytes, int] = {}
        self.number = self.writer.add_namespace(NAMESPACE)
        self.writer.add_geometry(self.number, GEOMETRY)
        self.writer._store = lambda index, value: self._store(("word", index), value)
        self.writer._store_tag = lambda entry, value: self._store(("tag", entry), value)

    def __len__(self) -> int:
        return len(self._steps)

    def _store(self, place: Place, value: int) -> None:
        kind, index = place
        self._steps.append((place, self._cells[kind][index], value))
        self._cells[kind][index] = value
        self.now = len(self._steps)
        self._changes.setdefault(place, []).append(self.now)

    # --- what the writer does -----------------------------------------------------------------------------

    def reserve(self, prompt: Prompt, slot: int) -> None:
        entry = self.writer.claim(prompt.key, SHARD)
        assert entry is not None
        self._entries[prompt.key], self._slots[prompt.key] = entry, slot
        self.writer.raise_generation(slot)

    def fill(self, prompt: Prompt, words: slice = slice(None)) -> None:
        at = self._slots[prompt.key] * 512
        for place, value in list(enumerate(prompt.payload))[words]:
            self._store(("payload", at + place), value)

    def publish(self, prompt: Prompt) -> None:
        slot = self._slots[prompt.key]
        value = EntryValue(
            key=prompt.key,
            shard=SHARD,
            namespace_number=self.number,
            tier=Tier.DRAM,
            slot=slot,
            length=LAYOUT.chunk_bytes,
            generation=self.writer.generation(slot) & ~1,
            parent_fingerprint=prompt.parent_fingerprint,
            fingerprint=prompt.fingerprint,
            token_count=2,
            table_hash=prompt.bytes_of,
        )
        self.writer.publish(self._entries[prompt.key], value)

    def put(self, prompt: Prompt, slot: int) -> None:
        """All of a write, as a node does it."""
        self.reserve(prompt, slot)
        self.fill(prompt)
        self.publish(prompt)

    def withdraw(self, prompt: Prompt) -> None:
        self.writer.withdraw(self._entries.pop(prompt.key), self._slots[prompt.key])

    def begin(self) -> None:
        """What was stored so far is there from the start."""
        self._steps, self._changes, self.now = [], {}, 0

    # --- travelling ---------------------------------------------------------------------------------------

    def go_to(self, moment: int) -> None:
        """Show the memory as it was after `moment` stores."""
        while self.now < moment:
            (kind, index), _, new = self._steps[self.now]
            self._cells[kind][index] = new
            self.now += 1
        while self.now > moment:
            self.now -= 1
            (kind, index), old, _ = self._steps[self.now]
            self._cells[kind][index] = old

    def moments(self, places: tuple[Place, ...]) -> list[int]:
        """From now on: the earliest moment for each value that a load of these words can see."""
        known = self._options.get((self.now, places))
        if known is None:
            known = self._options[self.now, places] = self._find_moments(places)
        return known

    def _find_moments(self, places: tuple[Place, ...]) -> list[int]:
        now = self.now
        seen = {self._values(places)}
        moments = [now]
        for moment in sorted({m for place in places for m in self._changes.get(place, ()) if m > now}):
            self.go_to(moment)
            value = self._values(places)
            if value not in seen:
                seen.add(value)
                moments.append(moment)
        self.go_to(now)
        return moments

    def _values(self, places: tuple[Place, ...]) -> tuple[int, ...]:
        return tuple(self._cells[kind][index] for kind, index in places)


class Overtaking:
    """Decides before each load of one read how far the writer has come. Noted choices first, then the earliest."""

    def __init__(self, timeline: Timeline, path: list[list[int]]) -> None:
        self._timeline = timeline
        timeline.go_to(0)
        self._path = path
        self._depth = 0
        self._settled = False

    def settle(self) -> None:
        """The read is a miss whatever comes."""
        self._settled = True

    def before(self, *places: Place) -> None:
        if self._settled:
            return
        moments = self._timeline.moments(places)
        if len(moments) == 1:
            return
        if self._depth == len(self._path):
            self._path.append([0, len(moments)])
        self._timeline.go_to(moments[self._path[self._depth][0]])
        self._depth += 1


class OvertakenAtRandom(Overtaking):
    """From any moment on, and by any number of stores, whether a load sees a difference or not."""

    def __init__(self, timeline: Timeline, generator: random.Random) -> None:
        super().__init__(timeline, [])
        self._random = generator
        timeline.go_to(generator.choice((0, generator.randrange(len(timeline)))))

    def before(self, *places: Place) -> None:
        if self._random.random() < 0.06:
            self._timeline.go_to(min(self._timeline.now + self._random.randint(1, 12), len(self._timeline)))


class OvertakenTwice(Overtaking):
    """At `first` when the read begins, at `second` from its load number `at` on."""

    def __init__(self, timeline: Timeline, first: int, second: int, at: int) -> None:
        super().__init__(timeline, [])
        self._first, self._second, self._at, self.loads = first, second, at, 0

    def before(self, *places: Place) -> None:
        self._timeline.go_to(self._second if self.loads >= self._at else self._first)
        self.loads += 1


@dataclass(slots=True)
class _Watched:
    """Stands in for one array of the reader: `take` is one load a word."""

    array: npt.NDArray[np.uint64]
    kind: str
    first: int
    width: int
    before: Callable[..., None]

    def take(self, indices: npt.NDArray[np.int64], mode: str = "raise") -> npt.NDArray[np.uint64]:
        out = np.empty(indices.shape, dtype=np.uint64)
        for at, index in np.ndenumerate(indices):
            place = self.first + int(index) * self.width
            self.before(*((self.kind, place + part) for part in range(self.width)))
            out[at] = self.array[index]
        return out


@dataclass(slots=True)
class RacedReader:
    """Reads one prompt word by word, in the given orders of the first and the second gather of its row.

    `compared`: words that the confirm compares; a difference in one of them settles the read.
    """

    timeline: Timeline
    wanted: Prompt
    orders: tuple[Sequence[int], Sequence[int]] = (ASCENDING, ASCENDING)
    reader_type: type[CatalogReader] = CatalogReader
    with_prints: bool = True
    compared: Sequence[int] = ASCENDING
    copy_late: bool = False
    """The last payload word is loaded after the confirm: what a weakly ordered CPU may do."""
    verify: bool = False
    """Compare the bytes with the checksum of the entry, as such a CPU's reader must."""
    reader: CatalogReader = field(init=False)
    _overtaking: Overtaking = field(init=False)
    _gathers: int = field(init=False, default=0)
    _found: Found | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.reader = reader = self.reader_type(self.timeline.memory, self._gather)
        shape = self.timeline.shape
        reader._tags = _Watched(reader._tags, "tag", 0, BUCKET_ENTRIES, self._before)  # type: ignore[assignment]
        generations = _Watched(reader._generations, "word", shape.generations_offset // 8, 1, self._before)
        reader._generations = generations  # type: ignore[assignment]

    def _before(self, *places: Place) -> None:
        self._overtaking.before(*places)

    def read(self, overtaking: Overtaking) -> Ending:
        """One read, from the present moment on."""
        self._overtaking, self._gathers, self._found = overtaking, 0, None
        found = self.reader.find(
            self.wanted.keys if self.with_prints else self.wanted.keys_without_prints, LAYOUT.whole
        )
        if not found.run:
            return Ending.MISS
        self._found = found
        at = int(found.offsets[0, 0]) // 8
        if not 0 <= at <= len(self.timeline.arena) - PAYLOAD_WORDS:
            return Ending.MISS
        copied = [self._load(at + place) for place in range(PAYLOAD_WORDS - self.copy_late)]
        confirmed = self.reader.confirm(found)
        if self.copy_late:
            copied.append(self._load(at + PAYLOAD_WORDS - 1))
        if not confirmed or (self.verify and self._checksum_differs(found, copied)):
            return Ending.MISS
        return Ending.HIT if copied == self.wanted.payload else Ending.WRONG

    def _load(self, index: int) -> int:
        self._before(("payload", index))
        return int(self.timeline.arena[index])

    @staticmethod
    def _checksum_differs(found: Found, copied: list[int]) -> bool:
        return any(word >> 8 != int(found.table_hashes[0, 0]) for word in copied)

    def _gather(self, rows: Words, indices: npt.NDArray[np.int64]) -> Words:
        order = self.orders[min(self._gathers, 1)]
        self._gathers += 1
        out = np.zeros((len(indices), ENTRY_WORDS), dtype=np.uint64)
        base = self.timeline.shape.entries_offset // 8
        hopeless = 0
        for row, index in enumerate(indices.tolist()):
            refused = False
            for word in order:
                if not refused:
                    self._before(("word", base + index * ENTRY_WORDS + word))
                out[row, word] = rows[index, word]
                refused = refused or self._is_hopeless(word, int(out[row, word]))
            hopeless += refused
            if hopeless == len(indices):
                self._overtaking.settle()
        return out

    def _is_hopeless(self, word: int, value: int) -> bool:
        """True if a row with this word is refused, whatever its other words are."""
        if self._found is not None:
            return word in self.compared and value != int(self._found.rows[0, word])
        prompt = self.wanted
        if word in (0, 1):
            return value != int.from_bytes(prompt.key[word * 8 : word * 8 + 8], "little")
        if word == 6:
            return value != SHARD | self.timeline.number << 32 | Tier.DRAM << 56
        if word == 3:
            return value % 2 == 1
        if self.with_prints and word == 7:
            return value & (1 << 48) - 1 != prompt.fingerprint
        return self.with_prints and word == 2 and value != prompt.parent_fingerprint


def every_schedule(reader: RacedReader, limit: int = 1_000_000) -> Iterator[Ending]:
    """The ending of one read under each schedule. Raises if there are more than `limit`."""
    path: list[list[int]] = []
    for _ in range(limit):
        yield reader.read(Overtaking(reader.timeline, path))
        while path and path[-1][0] + 1 == path[-1][1]:
            path.pop()
        if not path:
            return
        path[-1][0] += 1
    raise AssertionError(f"more than {limit} schedules")


def count_endings(reader: RacedReader) -> Counter[Ending]:
    """How often each ending comes, over all schedules."""
    return Counter(every_schedule(reader))


def ever_wrong(reader: RacedReader) -> bool:
    """True as soon as one schedule gives wrong bytes."""
    return Ending.WRONG in every_schedule(reader)
