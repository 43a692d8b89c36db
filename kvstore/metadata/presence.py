"""What one node holds of one namespace: a tree of chunks, and how far a chain is covered by it.

Lean, because there may be a million chunks: a chunk points to its parent, and all chunks that hold the same
shards on the same tiers share one `_Holding`. Coverage is judged per holding and rectangle, not per chunk.

A chunk whose parent is not here is an *orphan*; its missing parent stands in the tree as a ghost (no holding)
until the last orphan below it left. As long as there is no orphan, presence of a chain is a prefix and its end
is found by galloping; with orphans, or where some holding does not cover the rectangle, the run is walked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final

from kvstore.errors import KvStoreError
from kvstore.model.layout import Geometry, Rectangle
from kvstore.model.prefix import KEY_BYTES
from kvstore.model.values import Tier

Shards = tuple[tuple[int, Tier], ...]
"""(shard id, tier) pairs, sorted by shard id, at most one a shard."""

_SLOWNESS: Final = {Tier.ENGINE_HBM: 0, Tier.GPU: 1, Tier.DRAM: 2, Tier.SSD: 3}
_VERDICTS_LIMIT: Final = 256
"""Rectangles remembered per holding; above it they are judged anew."""
_GALLOP_HOLDINGS_LIMIT: Final = 32
"""With more kinds of holdings it costs more to judge all of them than to walk the run."""


class _Holding:
    """Shards of a chunk; one object for all chunks that hold the same."""

    __slots__ = ("chunk_count", "shards", "verdicts")

    def __init__(self, shards: Shards) -> None:
        self.shards = shards
        self.chunk_count = 0
        self.verdicts: dict[Rectangle | None, Tier | None] = {}


class _Chunk:
    """A place in the tree. `children` counts present chunks only; `holding` None makes it a ghost."""

    __slots__ = ("children", "holding", "key", "parent")

    def __init__(self, key: bytes) -> None:
        self.key = key
        self.parent: _Chunk | None = None
        self.holding: _Holding | None = None
        self.children = 0


class Presence:
    """The chunks of one namespace on one node. Keys and shards arrive in any order."""

    def __init__(self, namespace_id: bytes) -> None:
        self.shard_count = 0
        self.geometries: dict[int, Geometry] = {}
        self._root = _Chunk(namespace_id)
        self._root.holding = _Holding(())
        self._chunks: dict[bytes, _Chunk] = {}
        self._holdings: dict[Shards, _Holding] = {}
        self._orphan_count = 0

    def add_geometry(self, geometry: Geometry) -> None:
        """Learn how writers cut chunks; shards of unknown geometries cover nothing."""
        if geometry.digest not in self.geometries:
            self.geometries[geometry.digest] = geometry
            for holding in self._holdings.values():
                holding.verdicts.clear()

    def publish(self, key: bytes, parent_key: bytes, shard: int, tier: Tier) -> None:
        """A shard is readable on `tier`; it replaces the tier that was known of this shard."""
        chunk = self._chunks.get(key)
        if chunk is None or chunk.holding is None:
            chunk = self._appear(key, parent_key)
            self._hold(chunk, ((shard, tier),))
        else:
            self._hold(chunk, tuple(sorted({**dict(chunk.holding.shards), shard: tier}.items())))

    def withdraw(self, key: bytes, shard: int, tier: Tier) -> None:
        """A shard left `tier`. Changes nothing unless it is held on that tier."""
        chunk = self._chunks.get(key)
        if chunk is None or chunk.holding is None or (shard, tier) not in chunk.holding.shards:
            return
        rest = tuple(pair for pair in chunk.holding.shards if pair[0] != shard)
        self._hold(chunk, rest)
        if not rest:
            self._vanish(chunk)

    def run(self, key_blob: bytes, rectangle: Rectangle | None) -> tuple[int, Tier] | None:
        """(chunks covered from the first of `key_blob`, slowest tier among them), None when not even the first."""

        def tier_at(index: int) -> Tier | None:
            chunk = self._chunks.get(key_blob[index * KEY_BYTES : (index + 1) * KEY_BYTES])
            return None if chunk is None or chunk.holding is None else self._verdict(chunk.holding, rectangle)

        count = len(key_blob) // KEY_BYTES
        slowest = tier_at(0) if count else None
        if slowest is None:
            return None
        tiers = self._tiers_where_all_cover(rectangle)
        if not tiers:
            run = 1
            while run < count and (tier := tier_at(run)) is not None:
                slowest, run = _slower(slowest, tier), run + 1
            return run, slowest
        run = _gallop(lambda index: tier_at(index) is not None, count)
        if len(tiers) > 1:
            for index in range(run):
                slowest = _slower(slowest, tier_at(index) or slowest)
        return run, slowest

    def frozen(self) -> Iterator[tuple[bytes, bytes, Shards]]:
        """(key, parent key, shards) of every chunk as of this call, parents first; later changes do not show."""
        chunks = [chunk for chunk in self._chunks.values() if chunk.holding is not None]
        shards = {chunk: chunk.holding.shards for chunk in chunks if chunk.holding is not None}
        return _parents_first(chunks, shards)

    def check(self) -> None:
        """Raise KvStoreError unless every counter agrees with a recount from the chunks alone."""
        children: dict[bytes, int] = {}
        chunk_count: dict[Shards, int] = {}
        orphan_count = shard_count = 0
        for key, chunk in self._chunks.items():
            _require(chunk.key == key, "a chunk lies under another key")
            if chunk.holding is None:
                _require(chunk.children > 0, "a ghost without orphans")
                continue
            _require(chunk.holding is self._holdings.get(chunk.holding.shards), "a holding that is not shared")
            _require(chunk.parent is not None and bool(chunk.holding.shards), "a chunk without parent or shards")
            assert chunk.parent is not None
            at_root = chunk.parent is self._root
            _require(at_root or self._chunks.get(chunk.parent.key) is chunk.parent, "a parent outside the tree")
            children[chunk.parent.key] = children.get(chunk.parent.key, 0) + 1
            chunk_count[chunk.holding.shards] = chunk_count.get(chunk.holding.shards, 0) + 1
            orphan_count += chunk.parent.holding is None
            shard_count += len(chunk.holding.shards)
        for chunk in (self._root, *self._chunks.values()):
            _require(chunk.children == children.get(chunk.key, 0), "children")
        _require({s: h.chunk_count for s, h in self._holdings.items()} == chunk_count, "chunks per holding")
        _require(orphan_count == self._orphan_count, "orphans")
        _require(shard_count == self.shard_count, "shards")

    def _appear(self, key: bytes, parent_key: bytes) -> _Chunk:
        """The chunk of `key`, new or a ghost until now, under its parent; the caller gives it a holding."""
        parent = self._root if parent_key == self._root.key else self._chunks.get(parent_key)
        if parent is None:
            parent = self._chunks[parent_key] = _Chunk(parent_key)
        chunk = self._chunks.get(key)
        if chunk is None:
            chunk = self._chunks[key] = _Chunk(key)
        chunk.parent = parent
        parent.children += 1
        self._orphan_count += (parent.holding is None) - chunk.children
        return chunk

    def _vanish(self, chunk: _Chunk) -> None:
        """The chunk has no shard any more: it leaves the tree, or stays as the ghost above its orphans."""
        parent = chunk.parent
        assert parent is not None
        parent.children -= 1
        self._orphan_count += chunk.children - (parent.holding is None)
        if not chunk.children:
            del self._chunks[chunk.key]
        if parent.holding is None and not parent.children:
            del self._chunks[parent.key]

    def _hold(self, chunk: _Chunk, shards: Shards) -> None:
        """Change what a chunk holds, and the counters with it."""
        old = chunk.holding
        if old is not None:
            self.shard_count -= len(old.shards)
            old.chunk_count -= 1
            if not old.chunk_count:
                del self._holdings[old.shards]
        chunk.holding = None
        if shards:
            chunk.holding = self._holdings.get(shards)
            if chunk.holding is None:
                chunk.holding = self._holdings[shards] = _Holding(shards)
            chunk.holding.chunk_count += 1
            self.shard_count += len(shards)

    def _tiers_where_all_cover(self, rectangle: Rectangle | None) -> set[Tier]:
        """Tiers of all holdings if presence is a prefix and means coverage, so that galloping is right; else empty."""
        if self._orphan_count or len(self._holdings) > _GALLOP_HOLDINGS_LIMIT:
            return set()
        verdicts = {self._verdict(holding, rectangle) for holding in self._holdings.values()}
        return set() if None in verdicts else {tier for tier in verdicts if tier is not None}

    def _verdict(self, holding: _Holding, rectangle: Rectangle | None) -> Tier | None:
        """Slowest tier that a read of `rectangle` needs, None where the shards do not cover it."""
        if rectangle not in holding.verdicts:
            if len(holding.verdicts) >= _VERDICTS_LIMIT:
                holding.verdicts.clear()
            holding.verdicts[rectangle] = self._judge(dict(holding.shards), rectangle)
        return holding.verdicts[rectangle]

    def _judge(self, tier_of: dict[int, Tier], rectangle: Rectangle | None) -> Tier | None:
        if rectangle is None:
            return _slowest(tier_of.values())
        choices = []
        for digest in {shard >> 8 for shard in tier_of} & self.geometries.keys():
            geometry = self.geometries[digest]
            needed = [(geometry.shard(n), common.area) for n, _, common in geometry.overlapping(rectangle)]
            # Rectangles of a geometry do not overlap, so equal areas mean that nothing is missing.
            if sum(area for shard, area in needed if shard in tier_of) == rectangle.area:
                choices.append(_slowest(tier_of[shard] for shard, _ in needed))
        return min(choices, key=_SLOWNESS.__getitem__, default=None)


def _gallop(present: Callable[[int], bool], count: int) -> int:
    """Length of the prefix of 0..count-1 where `present` holds; it holds at 0 and nowhere after its first False."""
    low, step = 0, 1
    while low + step < count and present(low + step):
        low, step = low + step, step * 2
    high = min(low + step, count)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if present(middle) else (low, middle)
    return low + 1


def _parents_first(chunks: list[_Chunk], shards: dict[_Chunk, Shards]) -> Iterator[tuple[bytes, bytes, Shards]]:
    # `shards` loses each chunk when it is on its way out; that also ends the walk on a (forged) cycle of parents.
    for start in chunks:
        path: list[tuple[bytes, bytes, Shards]] = []
        chunk = start
        while chunk.parent is not None and (held := shards.pop(chunk, None)) is not None:
            path.append((chunk.key, chunk.parent.key, held))
            chunk = chunk.parent
        yield from reversed(path)


def _slower(one: Tier, other: Tier) -> Tier:
    return one if _SLOWNESS[one] >= _SLOWNESS[other] else other


def _slowest(tiers: Iterable[Tier]) -> Tier:
    return max(tiers, key=_SLOWNESS.__getitem__)


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise KvStoreError(f"index invariant broken: {what}")
