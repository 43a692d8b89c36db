"""Finding chunks in a mapped catalog: the same-host read path, without RPC, lock or pin. Client side.

A read is: `find` (gather the entries), copy, `confirm` (gather the whole entries again). A chunk counts iff
both gathers are identical, the entry's generation is even, key, namespace, shard and fingerprints match, and
the slot's generation word equals the entry's. Why the second gather must take the whole entry: the first one
may have seen a new, even generation together with the old slot.

Loads of x86 are not reordered with older loads, so `confirm` after the copy is enough there; on weakly ordered
CPUs readers verify checksums as well (`kvstore.client` decides).
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore.model.layout import Geometry, Rectangle
from kvstore.model.prefix import Keys
from kvstore.model.values import MissReason, Tier
from kvstore.node.catalog import (
    BUCKET_ENTRIES,
    ENTRY_WORDS,
    GEOMETRY_WORDS,
    SHARD_MIX_0,
    SHARD_MIX_1,
    CatalogShape,
    Header,
)

Words = npt.NDArray[np.uint64]
Gather = Callable[[Words, npt.NDArray[np.int64]], Words]

_LOW_32 = np.uint64(0xFFFFFFFF)
_LOW_56 = np.uint64((1 << 56) - 1)
_ALL, _LOW_48 = (1 << 64) - 1, (1 << 48) - 1
_COMPARED = np.array([_ALL, _ALL, _ALL, 1, 0, 0, _ALL, _LOW_48], dtype=np.uint64)
"""Bits of an entry's words that must be as expected: key, parent's fingerprint, generation even, kind, fingerprint."""
_COMPARED_BLIND = np.array([_ALL, _ALL, 0, 1, 0, 0, _ALL, 0], dtype=np.uint64)
"""The same where the keys came without fingerprints."""
_ODD_TAG = np.uint16(1)
_IN_DRAM = Tier.DRAM << 56


def _take_rows(rows: Words, indices: npt.NDArray[np.int64]) -> Words:
    return rows.take(indices, axis=0)


@dataclass(slots=True)
class Found:
    """Entries of the first `run` chunks, all in DRAM and from one geometry; shard-major inside a chunk.

    `present`: leading chunks that are on the node at all; those after the run begin on a slower tier. `rows`: u64
    (run * shards, 8), the entries as first gathered. `entries`: their numbers. `reason` says why the chunk after the
    run is a miss (None when all were found).
    """

    run: int
    numbers: tuple[int, ...]
    geometry: Geometry | None
    entries: npt.NDArray[np.int64]
    rows: Words
    reason: MissReason | None
    present: int = 0

    def part(self, start: int, stop: int) -> Found:
        """Chunks [start, stop) of the run."""
        if start == 0 and stop == self.run:
            return self
        width = len(self.numbers)
        cut = slice(start * width, stop * width)
        return Found(stop - start, self.numbers, self.geometry, self.entries[cut], self.rows[cut], None)

    @property
    def offsets(self) -> npt.NDArray[np.int64]:
        """Arena offset in bytes of each shard, shape (run, shards)."""
        return ((self.rows[:, 5] & _LOW_32).astype(np.int64) << 12).reshape(self.run, -1)

    @property
    def table_hashes(self) -> Words:
        """xxh3-64 of each shard's checksum table, shape (run, shards); 0 = stored without checksums."""
        return self.rows[:, 4].reshape(self.run, -1)


@dataclass(frozen=True, slots=True)
class _Plan:
    """How one geometry serves one rectangle: the shards needed and their constants.

    `mixes`: hash constants a shard, shape (shards, 2). `kinds`: word 6 of their entries, tier DRAM (copies on other
    tiers are no business of this path).
    """

    geometry: Geometry
    numbers: tuple[int, ...]
    mixes: Words
    kinds: Words

    @classmethod
    def make(cls, geometry: Geometry, rectangle: Rectangle, namespace_number: int) -> _Plan | None:
        """None where the geometry does not cover the rectangle."""
        touched = list(geometry.overlapping(rectangle))
        if sum(common.area for _, _, common in touched) != rectangle.area:
            return None
        numbers = tuple(number for number, _, _ in touched)
        shards = [geometry.shard(number) for number in numbers]
        mixes = [[(s * SHARD_MIX_0) % (1 << 64), (s * SHARD_MIX_1) % (1 << 64)] for s in shards]
        kinds = [s | namespace_number << 32 | _IN_DRAM for s in shards]
        return cls(geometry, numbers, np.array(mixes, dtype=np.uint64), np.array(kinds, dtype=np.uint64))


@dataclass(frozen=True, slots=True)
class _Directory:
    """The node's directory as it was at one version, and the plans made from it.

    Replaced as a whole: a thread that still works with an older one cannot leave its plans in the newer.
    """

    version: int
    numbers: dict[bytes, int]
    geometries: dict[int, list[Geometry]]
    plans: dict[tuple[bytes, Rectangle], list[_Plan]]

    def make_plans(self, namespace_id: bytes, rectangle: Rectangle) -> list[_Plan]:
        number = self.numbers.get(namespace_id, 0)
        made = [_Plan.make(geometry, rectangle, number) for geometry in self.geometries.get(number, [])]
        return [plan for plan in made if plan is not None]


_NOTHING = np.empty((0, ENTRY_WORDS), dtype=np.uint64), np.empty(0, dtype=np.int64)


class CatalogReader:
    """One mapped catalog. Thread-safe for reads; cheap to share.

    `gather` is the row gather used for both looks at the entries; tests replace it.
    """

    def __init__(self, memory: mmap.mmap, gather: Gather = _take_rows) -> None:
        words = np.frombuffer(memory, dtype="<u8")
        self._shape = shape = CatalogShape.read(words)
        self._header = words[:512]
        self.epoch = int(words[Header.EPOCH])
        self._tags = words[shape.tags_offset // 8 :][: shape.buckets]
        entry_words = shape.buckets * BUCKET_ENTRIES * ENTRY_WORDS
        self._entries = words[shape.entries_offset // 8 :][:entry_words].reshape(-1, ENTRY_WORDS)
        self._generations = words[shape.generations_offset // 8 :][: shape.units]
        self._namespaces_at = shape.namespaces_offset // 8
        self._geometries_at = shape.geometries_offset // 8
        self._words = words
        self._mask = np.uint64(shape.buckets - 1)
        self._gather = gather
        self._directory = _Directory(-1, {}, {}, {})

    @property
    def entry_rows(self) -> Words:
        """All entries, u64 (entries, 8); for benches and tests."""
        return self._entries

    def alive(self) -> bool:
        """False once the node has declared this table dead or another start has taken it over."""
        return bool(self._header[Header.SERVING] == 1 and self._header[Header.EPOCH] == self.epoch)

    def geometries(self, namespace_id: bytes) -> list[Geometry]:
        """Known geometries of a namespace."""
        directory = self._present_directory()
        return list(directory.geometries.get(directory.numbers.get(namespace_id, 0), []))

    def find(self, keys: Keys, rectangle: Rectangle) -> Found:
        """The longest run from the first key whose chunks are wholly covered by one geometry."""
        directory = self._present_directory()
        place = (keys.namespace_id, rectangle)
        plans = directory.plans.get(place)
        if plans is None:
            plans = directory.plans[place] = directory.make_plans(*place)
        several = len(plans) > 1 and len(keys) > 1
        best = Found(0, (), None, _NOTHING[1], _NOTHING[0], MissReason.ABSENT)
        present = 0
        for order, plan in enumerate(plans):
            # A namespace has one geometry nearly always; with several, chunk 0 tells which one to probe.
            found = self._probe(keys.slice(0, 1) if several else keys, plan)
            if several and found.present:
                found = self._probe(keys, plan)
            present = max(present, found.present)
            if found.run > best.run:
                best = found
                if order:  # a new list: other threads may be going through this one
                    directory.plans[place] = [plan, *(other for other in plans if other is not plan)]
            elif found.run == best.run == 0 and found.reason is not MissReason.ABSENT:
                best = found
            if best.run == len(keys):
                break
        best.present = present
        return best

    def confirm(self, found: Found) -> int:
        """How many chunks of the run still hold, after the copy: a prefix of the run."""
        if found.run == 0:
            return 0
        again = self._gather(self._entries, found.entries)
        rows = found.rows
        slots = (rows[:, 5] & _LOW_32).astype(np.int64)
        same = self._generations.take(slots, mode="clip") == rows[:, 3]
        if (again == rows).all() and same.all():
            return found.run
        good = same & (again == rows).all(axis=1)
        first_bad = int(np.argmin(good))
        return first_bad // len(found.numbers)

    def _probe(self, keys: Keys, plan: _Plan) -> Found:
        width, words, mixes, kinds = len(plan.numbers), keys.words, plan.mixes, plan.kinds
        if width > 1:
            words = words.repeat(width, axis=0)
            mixes = np.tile(mixes, (len(keys), 1))
            kinds = np.tile(kinds, len(keys))
        hashed = words ^ mixes
        buckets = (hashed & self._mask).view(np.int64)
        tags = hashed.view(np.uint16)[:, 3:4] | _ODD_TAG  # the high bits of the first word
        matches = self._tags.take(buckets).view(np.uint16) == tags
        expected = np.zeros((len(words), ENTRY_WORDS), dtype=np.uint64)
        expected[:, :2], expected[:, 6] = words, kinds
        compared = _COMPARED_BLIND
        if keys.fingerprints is not None:
            prints = keys.fingerprints if width == 1 else keys.fingerprints.repeat(width)
            expected[:, 2], expected[:, 7] = prints[:-width], prints[width:]
            compared = _COMPARED
        # Nearly always the first entry with the right tag is the right one, and there is none behind the last hit.
        places = matches.argmax(axis=1)
        entries = (buckets.take(_range(2 * len(words))[::2] + (places >> 2)) << 2) | (places & 3)
        rows = self._gather(self._entries, entries)
        differs = (rows ^ expected) & compared
        if not np.count_nonzero(differs):
            return Found(len(keys), plan.numbers, plan.geometry, entries, rows, None, len(keys))
        first_bad = int(differs.any(axis=1).argmax())
        if width == 1 and not matches[first_bad].any():
            held = entries[:first_bad], rows[:first_bad]
            return Found(first_bad, plan.numbers, plan.geometry, *held, MissReason.ABSENT, first_bad)
        candidates = matches.ravel().nonzero()[0]
        owners = candidates >> 3
        entries = (buckets.take(candidates >> 2) << 2) | (candidates & 3)
        rows = self._gather(self._entries, entries) if len(entries) else rows[:0]
        differs = (rows ^ expected.take(owners, axis=0)) & compared
        kind, slower = differs[:, 6], differs[:, 6] & _LOW_56
        same_key = differs[:, 0] | differs[:, 1] | differs[:, 3] | slower == 0
        same_but_tier = differs[:, 2] | differs[:, 7] | slower == 0
        same_but_tier &= same_key
        found = _partial(len(keys), plan, owners, entries, rows, same_but_tier & (kind == 0), same_key)
        if found.run < len(keys) and (slower != kind).any():
            # What differs in nothing but the tier is here, on a slower one.
            found.present = _partial(len(keys), plan, owners, entries, rows, same_but_tier, same_key).run
        return found

    def _present_directory(self) -> _Directory:
        directory = self._directory
        if int(self._header[Header.DIRECTORY_VERSION]) != directory.version:
            directory = self._directory = self._read_directory()
        return directory

    def _read_directory(self) -> _Directory:
        """Needs no second look and never waits: records are only added, and counted when they are complete."""
        version, words = int(self._header[Header.DIRECTORY_VERSION]), self._words
        names = words[self._namespaces_at :][: 2 * int(self._header[Header.NAMESPACES])].tobytes()
        numbers = {names[at : at + 16]: at // 16 + 1 for at in range(0, len(names), 16)}
        geometries: dict[int, list[Geometry]] = {}
        for place in range(int(self._header[Header.GEOMETRIES])):
            record = words[self._geometries_at + place * GEOMETRY_WORDS :][:GEOMETRY_WORDS]
            corners = record[2 : 2 + min(int(record[1]), 256)].astype("<u8").view("<u2").reshape(-1, 4).tolist()
            geometry = Geometry(tuple(Rectangle(*four) for four in corners))
            geometries.setdefault(int(record[0]) & 0xFFFFFFFF, []).append(geometry)
        return _Directory(version, numbers, geometries, {})


def _partial(
    count: int,
    plan: _Plan,
    owners: npt.NDArray[np.int64],
    entries: npt.NDArray[np.int64],
    rows: Words,
    good: npt.NDArray[np.bool_],
    same_key: npt.NDArray[np.bool_],
) -> Found:
    """Some probes found nothing, or several entries share a tag: keep the first good one of each."""
    width = len(plan.numbers)
    good_at = np.flatnonzero(good)
    probes, first = np.unique(owners[good_at], return_index=True)
    chosen = good_at[first]
    missing = np.flatnonzero(probes != np.arange(len(probes)))
    found = int(missing[0]) if len(missing) else len(probes)
    run = found // width
    reason = None
    if run < count:
        stopped = owners == found
        if bool((same_key & stopped & ~good).any()):
            reason = MissReason.COLLISION
        elif found % width or bool(((probes >= run * width) & (probes < (run + 1) * width)).any()):
            reason = MissReason.NOT_COVERED
        else:
            reason = MissReason.ABSENT
    chosen = chosen[: run * width]
    return Found(run, plan.numbers, plan.geometry, entries[chosen], rows[chosen], reason, run)


_ranges: dict[int, npt.NDArray[np.int64]] = {}


def _range(count: int) -> npt.NDArray[np.int64]:
    """arange(count), kept for small counts: it is needed in every look-up."""
    known = _ranges.get(count)
    if known is None:
        known = np.arange(count, dtype=np.int64)
        if count <= 4096 and len(_ranges) < 4096:
            _ranges[count] = known
    return known
